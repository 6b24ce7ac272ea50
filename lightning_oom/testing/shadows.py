"""Shadow a method on one instance, and take the shadow off again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Shadow"]

_MISSING = object()


class Shadow:
    """A method of one object that stands in front of the one it had.

    Args:
        owner: The object.
        name: The method.
        make: Takes the method as it is and returns what stands in front of it.
    """

    def __init__(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._owner = owner
        self._name = name
        self._before = vars(owner).get(name, _MISSING)
        self._behind = getattr(owner, name)
        self._front = make(self._behind)
        self._removed = False
        setattr(owner, name, self._call)
        self._set = vars(owner)[name]

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        function = self._behind if self._removed else self._front
        return function(*args, **kwargs)

    def remove(self) -> None:
        """Take the shadow off; if another stands in front of it by now, it only lets calls pass."""
        self._removed = True
        if vars(self._owner).get(self._name) is not self._set:
            return
        if self._before is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)

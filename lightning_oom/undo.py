"""Changes to objects that are not ours, each with the way back.

Every function of the package that changes something it does not own returns an :class:`Undo`;
teardown and exceptions call it. Undoing twice is harmless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Undo", "UndoStack", "shadow"]

_MISSING = object()

_IN_PLACE: set[int] = set()
"""Shadows that have not been undone, by id."""

_BURIED: dict[int, tuple[Any, Any]] = {}
"""Shadows undone while another lay on top: by id, the value itself and what it had hidden."""


class Undo:
    """The way back from one change; calling it a second time does nothing.

    Args:
        action: Puts back what was there before. It must not raise when the object has meanwhile
            been changed by somebody else.

    Example:
        >>> seen = []
        >>> undo = Undo(lambda: seen.append("undone"))
        >>> undo(); undo()
        >>> seen
        ['undone']
    """

    __slots__ = ("_action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self) -> None:
        """Put back what was there before; nothing when that has been done."""
        action, self._action = self._action, None
        if action is not None:
            action()


class UndoStack:
    """Several changes, taken back in reverse order, all of them even if one fails.

    Example:
        >>> order = []
        >>> stack = UndoStack()
        >>> stack.push(Undo(lambda: order.append(1)))
        >>> stack.push(Undo(lambda: order.append(2)))
        >>> stack()
        >>> order
        [2, 1]
    """

    __slots__ = ("_undos",)

    def __init__(self) -> None:
        self._undos: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """Return how many changes are outstanding."""
        return len(self._undos)

    def push(self, undo: Callable[[], None]) -> None:
        """Remember one more change."""
        self._undos.append(undo)

    def __call__(self) -> None:
        """Take back everything, last change first.

        Raises:
            Exception: The first error of an undo, after all others have run.
        """
        first: Exception | None = None
        while self._undos:
            try:
                self._undos.pop()()
            except Exception as error:  # noqa: PERF203 - every undo gets its turn
                first = first or error
        if first is not None:
            raise first


def shadow(owner: Any, name: str, value: Any) -> Undo:
    """Put an attribute in the instance's own ``__dict__``, hiding what its class gives.

    Args:
        owner: Any object with a ``__dict__``.
        name: The attribute, usually a method.
        value: What stands there until the undo.

    Returns:
        An undo that brings back the very object that was there (or removes the entry). When
        somebody else has replaced ``value`` in the meantime, that stays; if it was another shadow,
        its undo brings back what ``value`` had hidden, so that shadows may be undone in any order.

    Example:
        >>> class Loop:
        ...     def run(self):
        ...         return "real"
        >>> loop = Loop()
        >>> undo = shadow(loop, "run", lambda: "shadowed")
        >>> loop.run()
        'shadowed'
        >>> undo(); loop.run(), vars(loop)
        ('real', {})
    """
    before = owner.__dict__.get(name, _MISSING)
    owner.__dict__[name] = value
    _IN_PLACE.add(id(value))

    def action() -> None:
        _IN_PLACE.discard(id(value))
        now = owner.__dict__.get(name, _MISSING)
        if now is not value:
            if id(now) in _IN_PLACE:
                _BURIED[id(value)] = value, before
            return
        below = before
        while id(below) in _BURIED:
            _, below = _BURIED.pop(id(below))
        if below is _MISSING:
            del owner.__dict__[name]
        else:
            owner.__dict__[name] = below

    return Undo(action)

"""One value at one moment, by kind; each knows how to put itself back in place."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_oom.recovery.snapshot.copies import tensor_version, write_back

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

__all__ = [
    "GONE",
    "Array",
    "Attributes",
    "Bytes",
    "Container",
    "Entries",
    "LargeTensor",
    "Object",
    "RandomGenerator",
    "Remembered",
    "SetEntries",
    "SmallTensor",
    "Tuple",
]

GONE: Any = object()
"""Returned for a value that does not exist any more."""


class Remembered:
    """One value at one moment."""

    weak = False
    """Whether a strong reference would keep memory alive that a step frees."""

    def recall(self, path: str, lost: list[str], current: Any) -> Any:
        """Put the value's contents back.

        Args:
            path: How a user would write the value; added to ``lost`` when it cannot be had.
            lost: Names of what could not be put back.
            current: What is bound in its place now; reused where the value itself was not held.

        Returns:
            The object to bind, or :data:`GONE`.
        """
        raise NotImplementedError


class SmallTensor(Remembered):
    """A tensor that is copied; ``copies[index]`` is filled in once the walk is over."""

    def __init__(
        self, tensor: torch.Tensor, copies: list[torch.Tensor], index: int, *, weak: bool
    ) -> None:
        self.weak = weak
        self._refer = weakref.ref(tensor) if weak else _strongly(tensor)
        self._copies, self._index = copies, index

    @override
    def recall(self, path: str, lost: list[str], current: Any) -> Any:
        tensor, copy = self._refer(), self._copies[self._index]
        if tensor is None:
            return copy.clone()
        write_back(tensor, copy)
        return tensor


class LargeTensor(Remembered):
    """A tensor that is neither copied nor kept alive, only watched."""

    weak = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._refer, self._version = weakref.ref(tensor), tensor_version(tensor)

    @override
    def recall(self, path: str, lost: list[str], current: Any) -> Any:
        tensor = self._refer()
        if tensor is None:
            lost.append(path)
            return GONE
        if tensor_version(tensor) != self._version:
            lost.append(path)
        return tensor


class Array(Remembered):
    """A numpy array that is copied."""

    def __init__(self, array: Any) -> None:
        self._array, self._copy = array, array.copy()

    @override
    def recall(self, path: str, lost: list[str], current: Any) -> Any:
        if (self._array != self._copy).any():
            self._array[...] = self._copy
        return self._array


class Bytes(Remembered):
    """A ``bytearray``."""

    def __init__(self, value: bytearray) -> None:
        self._value, self._copy = value, bytes(value)

    @override
    def recall(self, path: str, lost: list[str], current: Any) -> Any:
        self._value[:] = self._copy
        return self._value


class RandomGenerator(Remembered):
    """A generator and its state."""

    def __init__(self, generator: Any, state: Any, write: Callable[[Any], None]) -> None:
        self._generator, self._state, self._write = generator, state, write

    @override
    def recall(self, path: str, lost: list[str], current: Any) -> Any:
        self._write(self._state)
        return self._generator


class Entries:
    """Entries of a container: a copy, and what is remembered of those that can change."""

    __slots__ = ("children", "plain", "weak")

    def __init__(self, plain: Any, children: list[tuple[Any, Remembered]]) -> None:
        self.plain, self.children = plain, children
        self.weak = False
        for key, child in children:
            if child.weak:
                plain[key] = None
                self.weak = True

    def recall(self, path: str, lost: list[str], current: Any) -> Any:
        """Return a new list or dictionary of the entries as they were."""
        if not self.children:
            return self.plain
        entries = self.plain.copy()
        for key, child in self.children:
            found = child.recall(f"{path}[{key!r}]", lost, _entry(current, key))
            entries[key] = None if found is GONE else found
        return entries


class Container(Remembered):
    """A list, deque or dict."""

    def __init__(self, value: Any, entries: Entries) -> None:
        self.weak = entries.weak
        self._refer = _weakly(value) if self.weak else _strongly(value)
        self._make = _maker(value) if self.weak else None
        self._type = type(value)
        self.entries = entries

    @override
    def recall(self, path: str, lost: list[str], current: Any) -> Any:
        target = self._refer()
        if target is None and type(current) is self._type:
            target = current
        if target is None and self._make is not None:
            target = self._make()
        if target is None:
            lost.append(path)
            return GONE
        entries = self.entries.recall(path, lost, target)
        if not _same_entries(target, entries):
            _refill(target, entries)
        return target


class SetEntries(Remembered):
    """A set; its entries are hashable, so they cannot change."""

    def __init__(self, value: set[Any]) -> None:
        self._value, self._copy = value, set(value)

    @override
    def recall(self, path: str, lost: list[str], current: Any) -> Any:
        if self._value != self._copy:
            set.clear(self._value)
            set.update(self._value, self._copy)
        return self._value


class Tuple(Remembered):
    """A tuple or named tuple that holds something that can change."""

    def __init__(self, value: tuple[Any, ...], entries: Entries) -> None:
        self.weak = entries.weak
        self._type: Any = type(value)
        self._value = None if self.weak else value
        self.entries = entries

    @override
    def recall(self, path: str, lost: list[str], current: Any) -> Any:
        entries = self.entries.recall(path, lost, current)
        if self._value is not None:
            return self._value
        return self._type._make(entries) if hasattr(self._type, "_make") else tuple(entries)


class Attributes:
    """The ``__dict__`` of a module or an object, which itself is not referred to."""

    def __init__(self, entries: Entries, skip: Collection[str] = ()) -> None:
        self.entries, self._skip = entries, skip

    def restore(self, namespace: dict[str, Any], prefix: str, lost: list[str]) -> None:
        """Bind every name to the object it had, and drop the names that are new."""
        plain = self.entries.plain
        for name in namespace.keys() - plain.keys():
            if name not in self._skip:
                del namespace[name]
        children = dict(self.entries.children)
        for name, value in plain.items():
            child = children.get(name)
            if child is None:
                namespace[name] = value
                continue
            found = child.recall(f"{prefix}{name}", lost, namespace.get(name))
            if found is not GONE:
                namespace[name] = found


class Object(Remembered):
    """An object of a user's class, and its attributes."""

    def __init__(self, value: Any, attributes: Attributes) -> None:
        self.weak = attributes.entries.weak
        self._refer = _weakly(value) if self.weak else _strongly(value)
        self._attributes = attributes

    @override
    def recall(self, path: str, lost: list[str], current: Any) -> Any:
        value = self._refer()
        if value is None:
            lost.append(path)
            return GONE
        self._attributes.restore(vars(value), f"{path}.", lost)
        return value


def _strongly(value: Any) -> Callable[[], Any]:
    return lambda: value


def _weakly(value: Any) -> Callable[[], Any]:
    with contextlib.suppress(TypeError):  # built-in lists and dicts take no weak reference
        return weakref.ref(value)
    return lambda: None


def _maker(value: Any) -> Callable[[], Any] | None:
    """Return what builds an empty container of the same kind, ``None`` for a user's own class."""
    if isinstance(value, defaultdict):
        return functools.partial(defaultdict, value.default_factory)
    if isinstance(value, deque):
        return functools.partial(deque, maxlen=value.maxlen)
    return type(value) if type(value) in (list, dict, OrderedDict) else None


def _entry(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (LookupError, TypeError):
        return None


def _same_entries(target: Any, entries: Any) -> bool:
    if len(target) != len(entries):
        return False
    if isinstance(entries, dict):
        base: Any = OrderedDict if isinstance(target, OrderedDict) else dict
        pairs = zip(base.items(target), entries.items(), strict=True)
        return all(k is j and a is b for (k, a), (j, b) in pairs)
    return all(a is b for a, b in zip(target, entries, strict=True))


def _refill(target: Any, entries: Any) -> None:
    """Replace the contents by the base class's own methods: a user's class may forbid its own."""
    if isinstance(target, dict):
        base: Any = OrderedDict if isinstance(target, OrderedDict) else dict
        base.clear(target)
        for key, value in entries.items():
            base.__setitem__(target, key, value)
    elif isinstance(target, deque):
        deque.clear(target)
        deque.extend(target, entries)
    else:
        list.__setitem__(target, slice(None), entries)

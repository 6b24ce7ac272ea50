"""Tensors that outlive a step: in its output, and in attributes of modules."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import (
    MODULE_INTERNALS,
    module_buffers,
    tree_leaves,
    tree_map_only,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["KeptTensors", "carries_graph", "cleaned", "is_inference"]

_RECENT = 8  # entries at the end of a container, looked at after each step
_ALL = 1024  # entries looked at when a stage is over


def carries_graph(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds the graph that made it."""
    return tensor.requires_grad and not tensor.is_leaf


def is_inference(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made in inference mode, and cannot take part in training."""
    return tensor.is_inference()


def cleaned(value: Any) -> Any:
    """Return a value with graphs cut off and inference tensors copied; containers are made anew.

    Args:
        value: Tensors in dictionaries, lists and tuples.
    """

    def clean(tensor: torch.Tensor) -> torch.Tensor:
        if is_inference(tensor):
            return tensor.clone()
        return tensor.detach() if carries_graph(tensor) else tensor

    return tree_map_only(torch.Tensor, clean, value)


class KeptTensors:
    """Looks for tensors of one kind in the attributes of a module and of its children.

    Args:
        root: The module.
        is_bad: The kind.
        only_new: Pass over attributes that hold such tensors now: they are the business of an
            earlier stage.

    Note:
        Cost of :meth:`recent`: 5 us, and 1 us for every child that has lists or dictionaries of its
        own. It looks at the root's attributes and at the last 8 entries of containers; :meth:`everything`
        at the attributes and buffers of all children, and at 1,024 entries.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight, self.outs = torch.nn.Parameter(torch.ones(2)), []
        >>> model = Model()
        >>> kept = KeptTensors(model, carries_graph)
        >>> model.outs.append(model.weight.exp())
        >>> for path, num_bytes, clean in kept.recent():
        ...     print(path, num_bytes)
        ...     clean()
        outs 8
        >>> model.outs[0].requires_grad
        False
    """

    def __init__(
        self,
        root: torch.nn.Module,
        is_bad: Callable[[torch.Tensor], bool],
        *,
        only_new: bool = True,
    ) -> None:
        self.root = root
        self.is_bad = is_bad
        self._passed: set[str] = set()
        self._named = list(root.named_modules())
        if only_new:
            self._passed = {path for path, _, _ in self.everything()}
        self._with_containers = [
            (name, module)
            for name, module in self._named
            if module is root or any(_is_container(value) for _, value in _attributes(module))
        ]

    def recent(self) -> Iterator[tuple[str, int, Callable[[], None]]]:
        """Give path, bytes and a way to clean it of each new find, as far as a quick look goes."""
        for name, module in self._with_containers:
            yield from self._in(name, module, _RECENT)

    def everything(self) -> Iterator[tuple[str, int, Callable[[], None]]]:
        """Give the same after a thorough look."""
        for name, module in self._named:
            yield from self._in(name, module, _ALL)
            for key, buffer in module_buffers(module).items():
                path = f"{name}.{key}" if name else key
                if buffer is not None and self.is_bad(buffer) and path not in self._passed:
                    yield path, buffer.nbytes, _setter(module_buffers(module), key, buffer)

    def _in(
        self, name: str, module: torch.nn.Module, limit: int
    ) -> Iterator[tuple[str, int, Callable[[], None]]]:
        for key, value in list(_attributes(module)):
            path = f"{name}.{key}" if name else key
            if path in self._passed:
                continue
            if _is_container(value):
                places = [
                    (value, index, entry)
                    for index, entry in _last_entries(value, limit)
                    if self._num_bytes(entry)
                ]
            else:
                places = [(vars(module), key, value)] if self._num_bytes(value) else []
            if places:
                held = sum(self._num_bytes(entry) for _, _, entry in places)
                yield path, held, _setters(places)

    def _num_bytes(self, value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return max(1, value.nbytes) if self.is_bad(value) else 0
        if isinstance(value, (list, tuple, dict)) and len(value) <= _ALL:
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            return sum(max(1, leaf.nbytes) for leaf in leaves if self.is_bad(leaf))
        return 0


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        kind: Any = type(value)
        if _may_hold_tensors(kind) and key not in MODULE_INTERNALS:
            yield key, value


@lru_cache(maxsize=1024)
def _may_hold_tensors(kind: type) -> bool:
    return issubclass(kind, (torch.Tensor, list, dict, tuple, deque))


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, dict, deque))


def _last_entries(container: Any, limit: int) -> list[tuple[Any, Any]]:
    if isinstance(container, dict):
        return list(islice(reversed(container.items()), limit))
    first = len(container)
    return [
        (first - 1 - back, entry) for back, entry in enumerate(islice(reversed(container), limit))
    ]


def _setter(holder: Any, key: Any, value: Any) -> Callable[[], None]:
    return _setters([(holder, key, value)])


def _setters(places: list[tuple[Any, Any, Any]]) -> Callable[[], None]:
    def clean() -> None:
        for holder, key, value in places:
            holder[key] = cleaned(value)

    return clean

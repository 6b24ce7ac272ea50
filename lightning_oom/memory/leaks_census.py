"""Which attributes of modules, trainers and callbacks hold tensors, and how much."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from lightning_oom._torch import MODULE_INTERNALS, module_buffers
from lightning_oom.memory.leaks_graph import GraphExtent, add_storages, measure_graph

__all__ = ["Holding", "take_census"]

_MAX_DEPTH = 4
_MAX_ENTRIES = 256
"""Containers with more entries are estimated from as many, evenly spaced."""

_MAX_TENSORS = 4096
_MAX_VISITS = 20_000
"""Bounds for one attribute, however it is nested."""

_MAX_NAMED_KEYS = 16
"""Dictionaries with at most so many text keys are looked at key by key."""

_LIBRARIES = frozenset(
    {"builtins", "lightning", "lightning_fabric", "lightning_oom", "lightning_utilities", "logging"}
    | {"matplotlib", "numpy", "pandas", "pytorch_lightning", "tensorboard", "torch"}
    | {"torchmetrics", "torchvision", "transformers", "wandb"}
)
"""Objects of these are looked into only as roots, modules or metrics."""

_PLAIN = frozenset({bool, int, float, str, type(None)})
_OPAQUE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The tensors that one attribute holds at one moment.

    Attributes:
        kind: ``"list"``, ``"mapping"``, ``"tensor"``, ``"bounded"`` (a deque with a largest length)
            or ``"metric_state"``.
        owner: Class of the object whose attribute it is.
        num_tensors: Tensors in it; estimated above 256 entries.
        num_bytes: Bytes of their storages, each counted once; estimated likewise.
        num_with_graph: How many of them have a ``grad_fn``.
        graph: Extent of the graph of a single tensor, ``None`` without one.
        saved_bytes: Bytes that the graphs keep for a backward; ``None`` where not asked for.
    """

    kind: str
    owner: str
    num_tensors: int
    num_bytes: int
    num_with_graph: int
    graph: GraphExtent | None = None
    saved_bytes: int | None = None


def take_census(
    roots: Mapping[str, object], *, measure: AbstractSet[str] = frozenset()
) -> dict[str, Holding]:
    """Find the attributes that hold tensors, parameters left out.

    Args:
        roots: Name -> module, trainer, callback or any object. An object that two roots reach
            counts for the first.
        measure: Paths whose graphs are walked for the bytes that they keep.

    Returns:
        What each attribute holds, by path (``"model.hist"``, ``"model.outputs['val']"``); those that
        hold nothing are not there.

    Note:
        Cost: 2 to 4 us per module, 1 us per tensor found, 1 us per node of the graph that a single
        tensor has. Only ``__dict__`` is read: no property runs. Nothing is kept.

    Example:
        >>> import torch
        >>> module = torch.nn.Linear(2, 2)
        >>> module.outputs = [torch.zeros(4), torch.zeros(4)]
        >>> take_census({"model": module})["model.outputs"].num_bytes
        32
    """
    census = _Census(measure, {id(root) for root in roots.values()})
    for name, root in roots.items():
        census.visit(name, root, depth=0, is_root=True)
    return census.found


class _Census:
    def __init__(self, measure: AbstractSet[str], roots: set[int]) -> None:
        self.found: dict[str, Holding] = {}
        self._measure = measure
        self._roots = roots
        self._seen: set[int] = set()

    def visit(self, path: str, owner: Any, *, depth: int, is_root: bool = False) -> None:
        """Look at the attributes of an object, and of its children if it is a module."""
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        if isinstance(owner, torch.nn.Module):
            self._visit_module(path, owner, depth=depth)
        elif is_root or _is_users(owner):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                self._attribute(f"{path}.{name}", value, owner=owner, depth=depth)

    def _visit_module(self, path: str, module: torch.nn.Module, *, depth: int) -> None:
        cls: Any = type(module)
        states = _list_states(module) if _is_metric_class(cls) else ()
        for name, value in list(vars(module).items()):
            if type(value) not in _PLAIN and name not in MODULE_INTERNALS:
                self._attribute(
                    f"{path}.{name}",
                    value,
                    owner=module,
                    depth=depth,
                    kind="metric_state" if name in states else None,
                )
        if cls.__module__.partition(".")[0] != "torch":  # torch's own keep their size
            for name, buffer in module_buffers(module).items():
                self._attribute(f"{path}.{name}", buffer, owner=module, depth=depth)
        for name, child in module.named_children():
            self.visit(f"{path}.{name}", child, depth=depth)

    def _attribute(
        self, path: str, value: Any, *, owner: Any, depth: int, kind: str | None = None
    ) -> None:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                self._hold(path, value, owner=owner, kind="tensor")
        elif isinstance(value, (list, tuple, deque, AbstractSet, Mapping)):
            if not value or id(value) in self._seen:
                return
            self._seen.add(id(value))
            named = _named_containers(value)
            for key, entry in named:
                self._attribute(f"{path}[{key!r}]", entry, owner=owner, depth=depth, kind=kind)
            objects = [] if named else _objects_in(value)
            for index, entry in enumerate(objects):
                self.visit(f"{path}[{index}]", entry, depth=depth + 1)
            if not named and not objects:
                self._hold(path, value, owner=owner, kind=kind or _kind_of(value))
        elif depth < _MAX_DEPTH and not isinstance(value, _OPAQUE) and _may_be_looked_into(value):
            self.visit(path, value, depth=depth + 1)

    def _hold(self, path: str, value: Any, *, owner: Any, kind: str) -> None:
        tensors = list(islice(self._tensors_in(value), _MAX_TENSORS))
        if not tensors:
            return
        scale = 1.0 if isinstance(value, torch.Tensor) else _thinning(len(value))
        with_graph = [tensor for tensor in tensors if tensor.grad_fn is not None]
        graph = measure_graph(with_graph) if kind == "tensor" and with_graph else None
        saved_bytes = None
        if path in self._measure:
            saved_bytes = measure_graph(with_graph, saved=True).saved_bytes
        self.found[path] = Holding(
            kind=kind,
            owner=type(owner).__name__,
            num_tensors=round(len(tensors) * scale),
            num_bytes=round(_bytes_of(tensors) * scale),
            num_with_graph=round(len(with_graph) * scale),
            graph=graph,
            saved_bytes=saved_bytes,
        )

    def _tensors_in(self, value: Any) -> Iterator[torch.Tensor]:
        """Give the tensors in a container, also those in the attributes of records in it."""
        waiting = [(value, 0)]
        left = _MAX_VISITS
        while waiting and left:
            left -= 1
            entry, depth = waiting.pop()
            if isinstance(entry, torch.Tensor):
                if not isinstance(entry, torch.nn.Parameter):
                    yield entry
            elif depth < _MAX_DEPTH and id(entry) not in self._roots:
                waiting += [(inner, depth + 1) for inner in _entries(entry)]


def _kind_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return "mapping"
    return "bounded" if isinstance(value, deque) and value.maxlen is not None else "list"


def _named_containers(value: Any) -> list[tuple[str, Any]]:
    """Return the entries of a small dictionary of containers by text, else nothing."""
    if not isinstance(value, Mapping) or len(value) > _MAX_NAMED_KEYS:
        return []
    entries = list(value.items())
    if all(isinstance(k, str) and isinstance(v, (list, deque, dict)) for k, v in entries):
        return entries
    return []


def _objects_in(value: Any) -> list[Any]:
    """Return the entries of a list of modules and callbacks, else nothing."""
    if not isinstance(value, (list, tuple)):
        return []
    stateful = all(hasattr(type(entry), "state_dict") for entry in value[:_MAX_NAMED_KEYS])
    return list(value) if stateful else []


def _entries(value: Any) -> list[Any]:
    """Return the entries of a container, evenly thinned, or the attributes of a user's object."""
    if isinstance(value, (list, tuple)):
        return list(value[:: _step_of(len(value))])
    if isinstance(value, Mapping):
        return list(islice(value.values(), 0, None, _step_of(len(value))))
    if isinstance(value, (deque, AbstractSet)):
        return list(islice(value, 0, None, _step_of(len(value))))
    if isinstance(value, torch.nn.Module) or not _may_be_looked_into(value):
        return []
    return list(vars(value).values())


def _step_of(length: int) -> int:
    return max(-(-length // _MAX_ENTRIES), 1)


def _thinning(length: int) -> float:
    """Say how many entries each of those stands for that :func:`_entries` returns."""
    return length / max(len(range(0, length, _step_of(length))), 1)


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    storages: dict[int, int] = {}
    add_storages(storages, tensors)
    return sum(storages.values())


def _is_users(owner: Any) -> bool:
    return type(owner).__module__.partition(".")[0] not in _LIBRARIES


def _may_be_looked_into(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, _OPAQUE) and _is_users(value)


@functools.cache
def _is_metric_class(cls: Any) -> bool:
    return any(base.__module__ == "torchmetrics.metric" for base in cls.__mro__)


def _list_states(metric: torch.nn.Module) -> frozenset[str]:
    """Return the names of the states of a metric that are lists."""
    states = getattr(metric, "metric_state", {})
    return frozenset(name for name, value in states.items() if isinstance(value, list))

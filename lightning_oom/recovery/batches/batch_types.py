"""What a batch is made of: one entry per type, in an open registry.

Every node of a batch is one of four things:

* *fields*: parts side by side, each with all the rows (mapping, named tuple, dataclass);
* *items*: a sequence, either of fields or with one item per row - which of the two, the
  :mod:`~lightning_oom.recovery.batches.row_plan` finds out;
* *rows*: a leaf that can be cut (tensor, array, packed sequence, graph batch);
* *shared*: a leaf that every micro-batch gets whole (number, string, ``None``, 0-d tensor).

:func:`register_splitter` adds types. Those of optional packages are added when first met.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass
from functools import singledispatch
from importlib import import_module
from types import ModuleType
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor

__all__ = [
    "PLAIN_CLASSES",
    "BatchType",
    "attribute_tensors",
    "batch_type",
    "register_batch_type",
    "register_splitter",
]

Role = Literal["fields", "items", "rows", "shared"]

_OPTIONAL = {
    "tensordict": "lightning_oom.recovery.batches.optional_types",
    "torch_geometric": "lightning_oom.recovery.batches.optional_types",
}


def _no_children(_node: Any) -> list[tuple[str, Any]]:
    return []


def _itself(node: Any, _children: list[Any]) -> Any:
    return node


def _as_it_is(node: Any) -> Any:
    return node


def _no_rows(_node: Any) -> int | None:
    return None


def _whole(node: Any, _start: int, _stop: int) -> Any:
    return node


def _no_tensors(_node: Any) -> list[Tensor]:
    return []


def _type_name(node: Any) -> str:
    return type(node).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchType:
    """How one type of node is read, cut and built again.

    Attributes:
        role: What the node is; see the module.
        children: ``(path suffix, child)`` of each part, in order. For fields and items.
        rebuild: A copy of the node with other children, as many for fields. For fields and items.
        rows: Number of rows, ``None`` if it has none. For leaves.
        take: The rows ``[start, stop)`` of a leaf with rows, a view if the type allows it.
        tensors: Every tensor inside a leaf.
        copied: A leaf that is a container itself, copied without its tensors.
        shape: What an error message says of the leaf's shape.
        opaque: The type is unknown: shared, unless it turns out to hold rows.
    """

    role: Role
    children: Callable[[Any], list[tuple[str, Any]]] = _no_children
    rebuild: Callable[[Any, list[Any]], Any] = _itself
    rows: Callable[[Any], int | None] = _no_rows
    take: Callable[[Any, int, int], Any] = _whole
    tensors: Callable[[Any], list[Tensor]] = _no_tensors
    copied: Callable[[Any], Any] = _as_it_is
    shape: Callable[[Any], str] = _type_name
    opaque: bool = False


SHARED = BatchType(role="shared")
OPAQUE = BatchType(role="shared", opaque=True)

PLAIN_CLASSES = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Leaves without rows that need no look-up."""

_KNOWN: dict[type, BatchType] = dict.fromkeys(PLAIN_CLASSES, SHARED)  # a shortcut, not the registry
_seen_types: WeakSet[type] = WeakSet()


def batch_type(node: Any) -> BatchType:
    """Look up what ``node`` is.

    Example:
        >>> batch_type({"x": 1}).role, batch_type([1, 2]).role, batch_type("a caption").role
        ('fields', 'items', 'shared')
    """
    cls = type(node)
    known = _KNOWN.get(cls)
    if known is not None:
        return known
    if cls not in _seen_types:
        _seen_types.add(cls)
        for base in cls.__mro__:
            module = _OPTIONAL.get(base.__module__.partition(".")[0])
            if module is not None:
                import_module(module).register()
    return _batch_type(node)


def register_splitter(
    cls: type,
    *,
    rows: Callable[[Any], int],
    take: Callable[[Any, int, int], Any],
    tensors: Callable[[Any], list[Tensor]] | None = None,
) -> None:
    """Teach the package to cut batches of a type of your own.

    Args:
        cls: The type; its subclasses are included.
        rows: Number of rows of an object.
        take: ``take(node, start, stop)`` returns an object of the same type with the rows
            ``[start, stop)``; views rather than copies, so that a split costs no device memory.
        tensors: The tensors of an object, by which batches are told apart and their versions
            checked. ``None``: the tensors among its attributes.

    Example:
        >>> import torch
        >>> class Pairs:
        ...     def __init__(self, left, right):
        ...         self.left, self.right = left, right
        >>> register_splitter(
        ...     Pairs,
        ...     rows=lambda pairs: len(pairs.left),
        ...     take=lambda pairs, start, stop: Pairs(pairs.left[start:stop], pairs.right[start:stop]),
        ... )
        >>> from lightning_oom.recovery.batches import split_batch
        >>> [len(part.left) for part in split_batch(Pairs(torch.zeros(5), torch.zeros(5)), 2)]
        [2, 2, 1]
    """
    handler = BatchType(role="rows", rows=rows, take=take, tensors=tensors or attribute_tensors)
    register_batch_type(cls, handler)


def register_batch_type(cls: type, handler: BatchType | Callable[[Any], BatchType]) -> None:
    """Enter a full :class:`BatchType` for ``cls`` and its subclasses.

    :func:`register_splitter` is the short form for leaves with rows.

    Args:
        cls: The type.
        handler: Its entry, or a function from an object to its entry.
    """
    _batch_type.register(
        cls, (lambda _node: handler) if isinstance(handler, BatchType) else handler
    )


def attribute_tensors(node: Any, *, depth: int = 3) -> list[Tensor]:
    """Tensors among the attributes of an object of unknown type, ``depth`` objects deep."""
    if isinstance(node, Tensor):
        return [node]
    if depth == 0 or isinstance(node, (str, bytes, type, ModuleType, torch.nn.Module)):
        return []
    if isinstance(node, Mapping):
        parts = list(node.values())
    elif isinstance(node, (Sequence, AbstractSet)):
        parts = list(node)
    else:
        slots = [name for base in type(node).__mro__ for name in getattr(base, "__slots__", ())]
        parts = [getattr(node, name, None) for name in slots if isinstance(name, str)]
        parts += list(getattr(node, "__dict__", {}).values())
    return [t for part in parts for t in attribute_tensors(part, depth=depth - 1)]


@singledispatch
def _batch_type(node: Any) -> BatchType:
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None and tensordict.is_tensor_collection(node):  # a tensorclass
        return _batch_type.dispatch(tensordict.TensorDictBase)(node)
    if is_dataclass(node) and not isinstance(node, type):
        return _DATACLASS
    if hasattr(type(node), "__attrs_attrs__"):
        return _ATTRS
    return OPAQUE


for _shared_class in (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    AbstractSet,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.Generator,
    torch.nn.Module,
    type,
    ModuleType,
):
    _batch_type.register(_shared_class, lambda _node: SHARED)


def _attribute_children(
    names: Callable[[Any], list[str]],
) -> Callable[[Any], list[tuple[str, Any]]]:
    def children(node: Any) -> list[tuple[str, Any]]:
        return [(f".{name}", getattr(node, name)) for name in names(node) if hasattr(node, name)]

    return children


def _attribute_rebuild(names: Callable[[Any], list[str]]) -> Callable[[Any, list[Any]], Any]:
    def rebuild(node: Any, values: list[Any]) -> Any:
        copied = copy.copy(node)
        present = [name for name in names(node) if hasattr(node, name)]
        for name, value in zip(present, values, strict=True):
            object.__setattr__(copied, name, value)  # also where the class is frozen
        return copied

    return rebuild


def _dataclass_names(node: Any) -> list[str]:
    return [field.name for field in fields(node)]


def _attrs_names(node: Any) -> list[str]:
    return [attribute.name for attribute in type(node).__attrs_attrs__]


_DATACLASS = BatchType(
    role="fields",
    children=_attribute_children(_dataclass_names),
    rebuild=_attribute_rebuild(_dataclass_names),
)
_ATTRS = BatchType(
    role="fields",
    children=_attribute_children(_attrs_names),
    rebuild=_attribute_rebuild(_attrs_names),
)


def _mapping_children(node: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    return [(f"[{key!r}]", node[key]) for key in node]


def _mapping_rebuild(node: Mapping[Any, Any], values: list[Any]) -> Any:
    pairs = dict(zip(node, values, strict=True))
    if type(node) is dict:
        return pairs
    if not hasattr(node, "__setitem__"):
        return type(node)(pairs)  # type: ignore[call-arg]  # a read-only mapping takes a mapping
    copied: Any = copy.copy(node)  # keeps default factories and attributes
    for key, value in pairs.items():
        copied[key] = value
    return copied


_MAPPING = BatchType(role="fields", children=_mapping_children, rebuild=_mapping_rebuild)
_batch_type.register(Mapping, lambda _node: _MAPPING)


def _sequence_children(node: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"[{index}]", item) for index, item in enumerate(node)]


def _sequence_rebuild(node: Sequence[Any], items: list[Any]) -> Any:
    if type(node) is list:
        return items
    if isinstance(node, tuple):
        return type(node)(items)
    if hasattr(node, "__setitem__"):
        try:
            copied: Any = copy.copy(node)
            copied[:] = items
        except TypeError:  # a deque has no slices
            return type(node)(items)  # type: ignore[call-arg]  # it takes an iterable
        return copied
    return items


def _named_tuple_children(node: Any) -> list[tuple[str, Any]]:
    return [(f".{name}", getattr(node, name)) for name in node._fields]


def _named_tuple_rebuild(node: Any, values: list[Any]) -> Any:
    return type(node)(*values)


_SEQUENCE = BatchType(role="items", children=_sequence_children, rebuild=_sequence_rebuild)
_NAMED_TUPLE = BatchType(
    role="fields", children=_named_tuple_children, rebuild=_named_tuple_rebuild
)
_batch_type.register(Sequence, lambda _node: _SEQUENCE)
_batch_type.register(tuple, lambda node: _NAMED_TUPLE if hasattr(node, "_fields") else _SEQUENCE)
_KNOWN |= {dict: _MAPPING, list: _SEQUENCE, tuple: _SEQUENCE}

"""Find tensors that pile up where no attribute of a module or callback leads."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from types import CellType, FrameType, GeneratorType, ModuleType
from typing import Any, NamedTuple

import torch

__all__ = ["ObjectScan", "Pile"]

_MIN_MORE = 8

_MAX_LINKS = 6
_MANY_OBJECTS = 100_000
"""A list as long is that of all objects."""


class _Form(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Pile:
    """Tensors of one form that became more from one scan to the next.

    Attributes:
        place: Who refers to one of them, as far as it can be told.
        num_tensors: How many there are.
        num_more: How many more than before.
        tensor_bytes: Bytes of each.
        holds_graph: Whether the one that was looked at has a ``grad_fn``.
    """

    place: str
    num_tensors: int
    num_more: int
    tensor_bytes: int
    holds_graph: bool


class ObjectScan:
    """Compares all tensors of the process with those of an earlier call.

    Note:
        Cost: 0.2 to 0.5 s for a call, in a process with 400,000 objects. To be called rarely.
    """

    def __init__(self) -> None:
        self._before: Counter[_Form] | None = None

    def compare(self) -> list[Pile]:
        """Return what has piled up since the call before, most bytes first; the first returns none."""
        forms: Counter[_Form] = Counter()
        newest: dict[_Form, Any] = {}
        for found in gc.get_objects():
            if issubclass(type(found), torch.Tensor) and not isinstance(found, torch.nn.Parameter):
                form = _Form(tuple(found.shape), found.dtype, found.device)
                forms[form] += 1
                newest[form] = found
        before, self._before = self._before, forms
        if before is None:
            return []
        more = [form for form in forms if forms[form] - before[form] >= _MIN_MORE]
        piles = [
            Pile(
                place=_place_of(newest[form]),
                num_tensors=forms[form],
                num_more=forms[form] - before[form],
                tensor_bytes=newest[form].nbytes,
                holds_graph=newest[form].grad_fn is not None,
            )
            for form in more
        ]
        return sorted(piles, key=lambda pile: -pile.num_more * pile.tensor_bytes)


def _place_of(held: Any) -> str:
    """Follow referrers up to a name: a global, an attribute, or the kinds of container between."""
    steps: list[str] = []
    for _ in range(_MAX_LINKS):
        owner = _owner_of(held)
        if owner is None:
            break
        name = _global_name(owner, held) or _attribute_name(owner, held)
        steps.append(name or type(owner).__name__)
        if name is not None:
            break
        held = owner
    return " in ".join(steps) if steps else "unknown"


def _owner_of(held: Any) -> Any:
    for found in gc.get_referrers(held):  # a loop: a closure would refer to it as well
        if _may_be_owner(found, held):
            return found
    return None


def _may_be_owner(found: Any, held: Any) -> bool:
    """Whether a referrer is a container of the program and not a variable of this scan."""
    if found is held or isinstance(found, (FrameType, CellType, GeneratorType)):
        return False
    if isinstance(found, list) and len(found) > _MANY_OBJECTS:
        return False
    return not (isinstance(found, dict) and any(type(key) is _Form for key in islice(found, 1)))


def _global_name(owner: Any, held: Any) -> str | None:
    if not isinstance(owner, dict):
        return None
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and vars(module) is owner:
            key = next((key for key, value in owner.items() if value is held), "?")
            return f"{name}.{key}"
    return None


def _attribute_name(owner: Any, held: Any) -> str | None:
    """Name the attribute of an object, reached through its ``__dict__`` or directly."""
    if isinstance(owner, (list, tuple, set, frozenset)):
        return None
    if isinstance(owner, dict):
        for found in gc.get_referrers(owner):
            if getattr(found, "__dict__", None) is owner:
                return _attribute_name(found, held)
        return None
    for key, value in getattr(owner, "__dict__", {}).items():
        if value is held:
            return f"{type(owner).__name__}.{key}"
    return None

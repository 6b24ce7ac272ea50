"""What an operator's schema says, read once when its kernel is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_oom._torch import schema_of

__all__ = ["OperatorPlan", "is_view", "read_plan"]

# Host tensors beside device tensors: what CUDA accepts too, or what is documented to be on the host.
_ACCEPT_HOST_TENSORS = frozenset(
    {
        "aten::_ctc_loss",
        "aten::_ctc_loss_backward",
        "aten::_foreach_copy_",
        "aten::_index_put_impl_",
        "aten::_sparse_coo_tensor_with_dims_and_tensors",
        "aten::_unsafe_index",
        "aten::index",
        "aten::index_put",
        "aten::index_put_",
        "aten::tensor_split",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPlan:
    """How the tensors of an operator travel between host and device."""

    returned: tuple[int | str | None, ...]
    """For each return: position or name of the argument that it is; ``None`` if it is new."""
    outputs: tuple[str, ...]
    """Names of the arguments of an ``out=`` overload that receive results."""
    takes_device: bool
    """The operator says itself where its result is to be."""
    strict: bool
    """A host tensor with dimensions beside device tensors is an error."""
    number_place: int
    """Where a number may stand in a tensor's place (``tensor * 2``); 0 for nowhere."""
    written_lists: tuple[int, ...]
    """Positions of the lists whose tensors are written to."""
    draws: bool
    """The operator makes new tensors out of random numbers."""


def read_plan(operator: Any) -> OperatorPlan:
    """Return the plan for an overload such as ``torch.ops.aten.add.Tensor``."""
    schema = schema_of(operator)
    arguments = schema.arguments
    takes_device = any(a.name == "device" for a in arguments)
    returned = _find_returned(schema)
    return OperatorPlan(
        returned=returned,
        outputs=tuple(a.name for a in arguments if a.is_out),
        takes_device=takes_device,
        strict=not takes_device and schema.name not in _ACCEPT_HOST_TENSORS,
        number_place=next((i for i, a in enumerate(arguments) if i and str(a.type) == "Tensor"), 0),
        written_lists=tuple(
            i
            for i, a in enumerate(arguments)
            if a.alias_info is not None and a.alias_info.is_write and str(a.type) == "List[Tensor]"
        ),
        draws=torch.Tag.nondeterministic_seeded in operator.tags and None in returned,
    )


def is_view(operator: Any) -> bool:
    """Say whether the operator returns a view, or changes the form of a tensor in place."""
    if torch.Tag.inplace_view in operator.tags:
        return True
    return any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in schema_of(operator).returns
    )


def _find_returned(schema: Any) -> tuple[int | str | None, ...]:
    places: dict[str, int | str] = {}
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            for name in alias.before_set:
                places[name] = argument.name if argument.kwarg_only else position
    found: list[int | str | None] = []
    for value in schema.returns:
        alias = value.alias_info
        names = alias.before_set if alias is not None and alias.is_write else ()
        found.append(next((places[name] for name in names if name in places), None))
    return tuple(found)

"""What an operator does to memory, read off its schema and remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_oom._torch import schema_of

__all__ = ["PLAIN", "ROLES", "OperatorRole", "desugars", "role_of"]

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_WRAPPERS_OF_TORCH = ("torch.", "torchao.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRole:
    """What has to be looked at when an operator runs.

    Attributes:
        allocates: It returns storage that may be new.
        adopts: It returns storage that was allocated elsewhere (``set_``): counted, not refused.
        writes: Positions and names of the arguments that it may resize.
        bumps_versions: It changes a list of tensors in place, and below a dispatch mode torch
            forgets to say so to autograd.
    """

    allocates: bool = False
    adopts: bool = False
    writes: tuple[tuple[int, str], ...] = ()
    bumps_versions: bool = False


PLAIN = OperatorRole()
"""The role of views, of in-place changes and of everything else that allocates nothing."""

ROLES: dict[Any, OperatorRole] = {}
"""The roles of the operators that were met so far."""

_desugars: dict[Any, bool] = {}


def role_of(operator: Any) -> OperatorRole:
    """Return what ``operator`` does to memory; one dictionary look-up after the first call."""
    role = ROLES.get(operator)
    if role is None:
        role = ROLES[operator] = _find_role(operator)
    return role


def desugars(types: tuple[type, ...]) -> bool:
    """Say whether tensors of these types are made of others that should be watched instead.

    Distributed, nested and quantized tensors run their own operators on the tensors they hold.
    """
    known = _desugars.get(types)
    if known is None:
        known = _desugars[types] = any(
            hasattr(cls, "__tensor_flatten__") and cls.__module__.startswith(_WRAPPERS_OF_TORCH)
            for cls in types
        )
    return known


def _find_role(operator: Any) -> OperatorRole:
    schema = schema_of(operator)
    if schema is None:  # a higher-order operator: it returns what its body computed
        return OperatorRole(allocates=True)
    namespace, _, name = schema.name.partition("::")
    if namespace in _COLLECTIVES:
        return PLAIN
    if name.startswith("_foreach_") and name.endswith("_"):
        return OperatorRole(bumps_versions=True)
    if name == "set_":
        return OperatorRole(adopts=True)
    if (
        name == "lift_fresh"
    ):  # a view by its schema, and the first that is seen of torch.tensor(...)
        return OperatorRole(allocates=True)
    writes = _resizable_arguments(schema, name)
    allocates = any(
        result.alias_info is None and "Tensor" in str(result.type) for result in schema.returns
    )
    return OperatorRole(allocates=allocates, writes=writes) if allocates or writes else PLAIN


def _resizable_arguments(schema: Any, name: str) -> tuple[tuple[int, str], ...]:
    """Arguments that the operator may give more storage: ``out=``, and those of ``resize_``."""
    resizes = "resize" in name
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and (argument.is_out or resizes)
    )

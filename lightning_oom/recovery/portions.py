"""The update of an optimizer, a few parameters at a time.

An update with lists holds temporaries for all parameters at once. The same update of a part of the
parameters is the same arithmetic, element by element, and holds temporaries for that part alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.recovery.update_kinds import num_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.recovery.update_kinds import UpdateKind

__all__ = ["Portion", "only", "portions_of", "reserve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Parameters of one group that are updated together."""

    group: dict[str, Any]
    parameters: list[torch.Tensor]


def portions_of(optimizer: torch.optim.Optimizer) -> list[Portion]:
    """Divide what is to be updated, in order: no portion is larger than the largest parameter.

    Example:
        >>> weights = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 1, 8, 4, 4, 1)]
        >>> for weight in weights:
        ...     weight.grad = torch.zeros_like(weight)
        >>> [len(each.parameters) for each in portions_of(torch.optim.SGD(weights))]
        [2, 1, 2, 1]
    """
    trained = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    largest = max((num_bytes(parameter) for _, parameter in trained), default=0)
    portions: list[Portion] = []
    room = 0
    for group, parameter in trained:
        size = num_bytes(parameter)
        if not portions or portions[-1].group is not group or size > room:
            portions.append(Portion(group=group, parameters=[]))
            room = largest
        portions[-1].parameters.append(parameter)
        room -= size
    return portions


@contextmanager
def only(optimizer: torch.optim.Optimizer, portion: Portion) -> Iterator[None]:
    """Let the optimizer see the parameters of one portion inside the block."""
    saved = [(group, group["params"]) for group in optimizer.param_groups]
    for group, _ in saved:
        group["params"] = portion.parameters if group is portion.group else []
    try:
        yield
    finally:
        for group, parameters in saved:
            group["params"] = parameters


def reserve(
    optimizer: torch.optim.Optimizer,
    kind: UpdateKind,
    portions: list[Portion],
    device: torch.device,
) -> None:
    """Allocate what the portions need, one after the other, and free it.

    Raises:
        Exception: The device's out-of-memory error: there is not enough.
    """
    sizes = [
        kind.state_bytes(parameter, portion.group)
        for portion in portions
        for parameter in portion.parameters
        if parameter not in optimizer.state
    ]
    sizes.append(
        max((kind.temporary_bytes(p.parameters, p.group, device) for p in portions), default=0)
    )
    held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes if size]
    held.clear()

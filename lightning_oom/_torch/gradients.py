"""Private names of torch that look at gradients and at who unscales them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["largest_magnitudes", "unscales_gradients_itself"]


def largest_magnitudes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the largest magnitude in each tensor, NaN where it has one; one call per device.

    Args:
        tensors: Strided, with at least one element each, all on one device.
    """
    return tuple(torch._foreach_norm(list(tensors), float("inf")))


def unscales_gradients_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer divides by the loss scale in its own step, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))

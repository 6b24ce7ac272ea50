"""The precisions of a training step, by the names that the Trainer gives them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["StepPrecision", "parse_precision"]

_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
_HALF, _BRAIN = torch.float16, torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrecision:
    """What a precision does to a step.

    Attributes:
        name: As the Trainer calls it.
        autocast_dtype: What matrix products are computed in; ``None`` without autocast.
        weights_dtype: What parameters, buffers and the batch are cast to; ``None`` leaves them.
        scales_loss: Whether a gradient scaler is used.
    """

    name: str
    autocast_dtype: torch.dtype | None = None
    weights_dtype: torch.dtype | None = None
    scales_loss: bool = False

    def around_forward(
        self, device_type: str, autocast: Callable[[], AbstractContextManager[Any]] | None
    ) -> AbstractContextManager[Any]:
        """Return the context of the forward pass.

        Args:
            device_type: Where the tensors are.
            autocast: Stands for ``torch.autocast`` where another device's policy is wanted.
        """
        if self.autocast_dtype is None:
            return nullcontext()
        if autocast is not None:
            return autocast()
        return torch.autocast(device_type, dtype=self.autocast_dtype)


_PRECISIONS = {
    precision.name: precision
    for precision in (
        StepPrecision(name="32-true"),
        StepPrecision(name="64-true", weights_dtype=torch.float64),
        StepPrecision(name="16-mixed", autocast_dtype=_HALF, scales_loss=True),
        StepPrecision(name="bf16-mixed", autocast_dtype=_BRAIN),
        StepPrecision(name="16-true", weights_dtype=_HALF),
        StepPrecision(name="bf16-true", weights_dtype=_BRAIN),
    )
}


def parse_precision(precision: str | int | None) -> StepPrecision:
    """Return what a precision means.

    Args:
        precision: As in ``Trainer(precision=...)``; ``None`` is ``"32-true"``, which leaves every
            type as it is.

    Raises:
        ValueError: It is none of those.

    Example:
        >>> parse_precision("bf16-mixed").autocast_dtype
        torch.bfloat16
    """
    name = "32-true" if precision is None else str(precision)
    name = _ALIASES.get(name, name)
    if name not in _PRECISIONS:
        known = ", ".join(sorted(_PRECISIONS))
        raise ValueError(f"precision is one of {known}, got {precision!r}")
    return _PRECISIONS[name]

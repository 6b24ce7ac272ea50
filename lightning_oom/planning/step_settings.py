"""How the steps of a dry run are run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from lightning_oom.planning.precision import StepPrecision

__all__ = ["StepSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How the steps of a dry run are run; :meth:`FakeStep.run` says what each means.

    Raises:
        ValueError: A number is below 1, or ``zero_grad`` is no order that is known.
    """

    precision: StepPrecision
    accumulate: int = 1
    num_steps: int = 2
    zero_grad: Literal["lightning", "early"] = "lightning"
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    transform: Callable[[Any], object] | None = None
    prepare_optimizers: Callable[[list[torch.optim.Optimizer]], object] | None = None
    context: Callable[[Any], AbstractContextManager[Any]] | None = None
    forward_context: Callable[[Any], AbstractContextManager[Any]] | None = None
    autocast: Callable[[], AbstractContextManager[Any]] | None = None

    def __post_init__(self) -> None:
        for name in ("accumulate", "num_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.zero_grad not in ("lightning", "early"):
            raise ValueError(f"zero_grad is 'lightning' or 'early', got {self.zero_grad!r}")

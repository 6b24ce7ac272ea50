"""How a dry run is told to run what a target device would run."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_oom.planning.kernels import (
    cuda_autocast,
    cuda_autocast_rules,
    cuda_choices,
    use_foreach,
)
from lightning_oom.planning.precision import parse_precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.planning.target import TargetDevice

__all__ = ["settings_on"]


def settings_on(target: TargetDevice, precision: str | int | None) -> dict[str, Any]:
    """Return what :meth:`FakeStep.run <lightning_oom.planning.fake_step.FakeStep.run>` takes for it.

    Args:
        target: The device.
        precision: As in ``Trainer(precision=...)``.

    Example:
        >>> from lightning_oom.planning.target import parse_target
        >>> settings_on(parse_target("cpu"), "bf16-mixed")
        {'precision': 'bf16-mixed'}
        >>> sorted(settings_on(parse_target("cuda"), "bf16-mixed"))
        ['autocast', 'context', 'precision', 'prepare_optimizers']
    """
    how: dict[str, Any] = {"precision": precision}
    if target.kernels != "host":
        is_cuda = target.kernels == "cuda"
        dtype = parse_precision(precision).autocast_dtype if is_cuda else None
        how["context"] = partial(_choices, attention=is_cuda, autocast=dtype is not None)
        how["prepare_optimizers"] = use_foreach
        if dtype is not None:
            how["autocast"] = partial(cuda_autocast, dtype)
    return how


@contextmanager
def _choices(_: Any, *, attention: bool, autocast: bool) -> Iterator[None]:
    """Take what CUDA would take in the whole step; the backward recomputes checkpointed blocks."""
    rules = cuda_autocast_rules() if autocast else nullcontext()
    with cuda_choices(attention=attention), rules:
        yield

"""What would a split leave in buffers? Found out on a few rows, before the first split.

A moving average that ``training_step`` updates itself, or a count of steps, moves once for every
micro-batch. Gradients do not show that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._lightning.results import LogRecorder
from lightning_oom._torch import read_version
from lightning_oom.recovery.batches import count_rows, take_rows
from lightning_oom.recovery.batchnorm import merged_batchnorm
from lightning_oom.recovery.randomness import fixed_randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lightning.pytorch import Trainer
    from torch import Tensor

__all__ = ["differing_buffers"]

_SLICE_ROWS = 4
_TOLERANCE = 1e-4
_COARSE_TOLERANCE = 2e-2


def differing_buffers(
    trainer: Trainer, step: Callable[[Any], object], batch: Any, *, restore: Callable[[], object]
) -> tuple[str, ...]:
    """Run a step on up to four rows, whole and in two parts, and compare the buffers it changes.

    They start from twice their values, so that an average also moves where it has arrived already,
    as that of a teacher does that begins as a copy.

    Args:
        trainer: The trainer whose module is compared.
        step: Runs the step on a batch; called up to four times without gradients.
        batch: The rows are taken from its beginning.
        restore: Puts back what a run of the step changes.

    Returns:
        Names of buffers that end differently, sorted. Those of batch normalisation are merged in a
        split and do not count; neither does what no version counter shows, nor, in half precision,
        an average that moves by less than 2 %.
    """
    rows = count_rows(batch)
    if rows is None or rows < 2:  # noqa: PLR2004 - two rows have two parts
        return ()
    whole, *parts = (
        take_rows(batch, start, end)
        for stop in [min(rows, _SLICE_ROWS)]
        for start, end in [(0, stop), (0, 1), (1, stop)]
    )
    run = _BufferRuns(trainer, step)
    restore()  # other checks may have run on the state before
    try:
        changed = run.on([whole]).keys()
        restore()
        if not changed:
            return ()
        run.start_elsewhere(changed)
        expected = run.on([whole])
        restore()
        run.start_elsewhere(changed)
        actual = run.on(parts)
    finally:
        restore()
    names = expected.keys() | actual.keys()
    return tuple(sorted(n for n in names if not run.close(expected.get(n), actual.get(n))))


class _BufferRuns:
    """Runs a step and says what is then in the buffers that it has changed."""

    def __init__(self, trainer: Trainer, step: Callable[[Any], object]) -> None:
        self._trainer, self._step = trainer, step
        self._module = trainer.lightning_module
        self._is_coarse = False

    def on(self, parts: Sequence[Any]) -> dict[str, Tensor]:
        """Run the step on each part, as a split would."""
        before = self._versions()
        recorder = LogRecorder(self._trainer, rows=[count_rows(part) or 0 for part in parts])
        with torch.no_grad(), merged_batchnorm(self._module) as norms, recorder:
            for index, part in enumerate(parts):
                norms.begin_micro_batch()
                with fixed_randomness() as mode, recorder.micro_batch(index, part):
                    self._step(part)
                self._is_coarse |= mode.lowest_precision is not None
        now = self._versions()
        return {
            name: buffer.detach().to("cpu", copy=True)
            for name, buffer in self._module.named_buffers()
            if before.get(name) != now[name]
        }

    def start_elsewhere(self, names: Iterable[str]) -> None:
        """Double these buffers, where they are no counters or positions."""
        with torch.no_grad():
            for name in names:
                buffer = self._module.get_buffer(name)
                if buffer.is_floating_point():
                    buffer.mul_(2)

    def close(self, one: Tensor | None, other: Tensor | None) -> bool:
        """Tell whether two ends are the same up to rounding."""
        if one is None or other is None or one.shape != other.shape:
            return False
        a, b = one.double(), other.double()
        scale = float(a.abs().max()) if a.numel() else 0.0
        tolerance = _COARSE_TOLERANCE if self._is_coarse else _TOLERANCE
        return torch.allclose(a, b, rtol=0.0, atol=tolerance * scale + 1e-12, equal_nan=True)

    def _versions(self) -> dict[str, tuple[int, int]]:
        buffers = self._module.named_buffers()
        return {name: (id(buffer), read_version(buffer)) for name, buffer in buffers}

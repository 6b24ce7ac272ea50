"""Which logged values would a split change? Found out on a few rows, before the first split.

A value that is a mean over rows, a sum, an extremum or a metric comes out of micro-batches as it
comes out of the whole batch. A number that the user computes in another way (an F1 score by hand,
a count logged as a mean) does not, and nothing in a call of ``self.log`` tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._lightning.results import LogRecorder
from lightning_oom.recovery.batches import count_rows, take_rows
from lightning_oom.recovery.randomness import fixed_randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning.pytorch import Trainer

__all__ = ["differing_logs", "explain_differing_logs"]

_SLICE_ROWS = 4
_TOLERANCE = 1e-2  # a value that is no mean is off by far more, also in half precision


def differing_logs(
    trainer: Trainer,
    step: Callable[[Any], object],
    batch: Any,
    *,
    log_merge: Mapping[str, str],
    weight_fn: Callable[[Any], Any] | None = None,
    restore: Callable[[], object],
) -> tuple[str, ...]:
    """Run a step on up to four rows, whole and in two parts, and compare what it logs.

    Args:
        trainer: The trainer whose module logs.
        step: Runs the step on a batch; called three times without gradients.
        batch: The rows are taken from its beginning.
        log_merge: The user's rules; names in it are taken to be right.
        weight_fn: Weight of a part, ``None`` for its rows.
        restore: Puts back what a run of the step changes.

    Returns:
        Names that differ by more than 1 %, sorted; empty where there is nothing to compare.
    """
    rows = count_rows(batch)
    if rows is None or rows < 2 or trainer._results is None:  # noqa: PLR2004 - two rows have two parts
        return ()
    stop = min(rows, _SLICE_ROWS)
    cuts = [(0, stop)], [(0, 1), (1, stop)]
    values = []
    restore()  # other checks may have run on the state before
    for edges in cuts:
        parts = [take_rows(batch, start, end) for start, end in edges]
        try:
            values.append(_logged(trainer, step, parts, log_merge, weight_fn))
        finally:
            restore()
    whole, merged = values
    return tuple(
        sorted(
            name
            for name in whole.keys() & merged.keys()
            if name not in log_merge and not _close(whole[name], merged[name])
        )
    )


def _logged(
    trainer: Trainer,
    step: Callable[[Any], object],
    parts: Sequence[Any],
    log_merge: Mapping[str, str],
    weight_fn: Callable[[Any], Any] | None,
) -> dict[str, torch.Tensor]:
    weights = None if weight_fn is None else [float(weight_fn(part)) for part in parts]
    rows = [count_rows(part) or 0 for part in parts]
    recorder = LogRecorder(trainer, rows=rows, weights=weights, log_merge=log_merge)
    with torch.no_grad(), recorder:
        for index, part in enumerate(parts):
            with fixed_randomness(), recorder.micro_batch(index, part):
                step(part)
    return recorder.merged_values()


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    a, b = one.double().cpu(), other.double().cpu()
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=1e-6, equal_nan=True)


def explain_differing_logs(names: Sequence[str]) -> str:
    """Return the sentence of the warning."""
    return (
        f"logged values {', '.join(map(repr, names))} are no means over rows: in a split step they "
        "are put together from micro-batches and differ from those of the whole batch. Log a "
        "torchmetrics object, set reduce_fx, or say how to merge them with log_merge"
    )

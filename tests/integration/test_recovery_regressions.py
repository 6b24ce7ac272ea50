"""What a recovery once got wrong, each as the user met it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import TinyRegressor, batches_of
from fits import fit, notes_of, recovery
from torch.utils.data import DataLoader

from lightning_oom._torch import OutOfMemoryError

if TYPE_CHECKING:
    from torch import Tensor

HALF = 5


class WantsWholeBatches(TinyRegressor):
    """Fits half of a batch, and refuses halves from a chosen batch on."""

    def __init__(self, *, strict_from: int) -> None:
        super().__init__(fits_rows=HALF)
        self.strict_from = strict_from

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a whole batch."""
        loss = super().training_step(batch, batch_idx)
        if batch_idx >= self.strict_from and len(batch[0]) == HALF:
            raise ValueError("this loss wants 10 rows")
        return loss


@pytest.mark.parametrize("strict_from", [0, 1])
def test_another_error_in_micro_batches_says_that_they_are_micro_batches(strict_from):
    """An error that only a part of the batch raises tells of the split, and of the OOM before it."""
    with pytest.raises(ValueError, match="wants 10 rows") as caught:
        fit(
            lambda: WantsWholeBatches(strict_from=strict_from),
            batches_of([2 * HALF] * 2),
            recovery(ladder=["split"]),
        )

    notes = notes_of(caught.value)
    assert "split into micro-batches of" in notes
    assert ("ran out of memory" in notes) is (strict_from == 0)


class Streams(TinyRegressor):
    """Takes its batches out of generators, and runs out of memory at the second one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of rows that can be read once."""
        self.limit.rows = 4 if batch_idx == 1 else None
        return self.loss(tuple(map(torch.stack, zip(*batch, strict=True))))


def test_a_batch_that_can_be_read_once_ends_with_the_original_error():
    """A spent generator is not run again: that would raise an error about the empty batch."""
    batches = [(row for row in zip(x, y, strict=True)) for x, y in batches_of([8, 8])]

    with pytest.raises(OutOfMemoryError) as caught:
        fit(Streams, DataLoader(batches, batch_size=None), recovery())

    assert "batch generator, which can be gone through only once" in notes_of(caught.value)

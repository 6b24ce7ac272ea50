"""What a recovery once got wrong, each as the user met it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import Tally, TinyRegressor, batches_of, cuda_oom
from fits import end_state, fit, notes_of, quiet, recovery
from lightning.pytorch import Callback
from states import compare
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.errors import NotSeparableError, RecoveryDisabledWarning

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


class FailsInBackward(nn.Module):
    """An identity layer whose backward runs out of memory at one call.

    Args:
        call: Which backward, from 0; ``None`` for none.
    """

    def __init__(self, call: int | None) -> None:
        super().__init__()
        self.call = call
        self.calls = Tally()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with a hook on its gradient."""
        x = x * 1
        if x.requires_grad:
            x.register_hook(self._count)
        return x

    def _count(self, grad: Tensor) -> None:
        self.calls.add(0)
        if len(self.calls.numbers) - 1 == self.call:
            raise cuda_oom()


class Changing(TinyRegressor):
    """Becomes another module at its second epoch, in whose first window a backward fails.

    The layer that changes is above the failing one, so that its gradient is complete by then.

    Args:
        how: What changes.
        call: The backward that fails, ``None`` for none.
    """

    def __init__(self, how: str, call: int | None) -> None:
        super().__init__(hidden=4)
        self.how = how
        self.body.insert(1, FailsInBackward(call))
        self.seen: Any = None
        if how == "unfrozen":
            self.body[-1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        """Change."""
        if self.current_epoch != 1:
            return
        if self.how == "unfrozen":
            self.body[-1].requires_grad_(True)
        elif self.how == "head replaced":
            self.body[-1] = nn.Linear(4, 1)
            self.trainer.strategy.setup_optimizers(self.trainer)
        elif self.how == "layer added":
            self.body.append(nn.Linear(1, 1))
            self.optimizers().optimizer.add_param_group({"params": [*self.body[-1].parameters()]})
        elif self.how == "normalisation added":
            self.body[-2] = nn.BatchNorm1d(4)
        elif self.how == "metric made":
            self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss, counted by a metric once there is one."""
        loss = super().training_step(batch, batch_idx)
        if self.seen is not None:
            self.seen.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        """Log what the metric has counted."""
        if self.seen is not None:
            self.log("seen", self.seen.compute())


CHANGES = ["unfrozen", "head replaced", "layer added", "normalisation added", "metric made"]


@pytest.mark.parametrize("how", CHANGES)
def test_a_module_that_changes_in_mid_run_is_put_back_as_it_is_then(how):
    """Heads, adapters and metrics of a later epoch are rolled back as those of the first are."""
    options = {"max_epochs": 2, "accumulate_grad_batches": 2}
    batches = batches_of([8] * 4)
    expected, _ = fit(lambda: Changing(how, None), batches, **options)
    guard = recovery(ladder=["release"])
    actual, _ = fit(lambda: Changing(how, 5), batches, guard, **options)

    assert guard.summary.num_recovered == 1
    assert compare(end_state(expected), end_state(actual)) == []


class NormalisesLater(TinyRegressor):
    """Fits four rows; batch normalisation comes with the second epoch."""

    def __init__(self) -> None:
        super().__init__(fits_rows=4)

    def on_train_epoch_start(self) -> None:
        """Put the layer in."""
        if self.current_epoch == 1:
            self.body[0] = nn.Sequential(self.body[0], nn.BatchNorm1d(16))


def test_a_changed_module_is_asked_again_whether_it_may_be_split():
    """An answer about the module of the first epoch says nothing about that of the second."""
    guard = recovery(ladder=["split"])
    with pytest.raises(OutOfMemoryError):
        fit(NormalisesLater, batches_of([8] * 2), guard, max_epochs=2)

    assert guard.summary.num_recovered == 1


class WritesToItsBatch(TinyRegressor):
    """Scales its rows in place, as image pipelines do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of rows twice as large."""
        return super().training_step([batch[0].mul_(2), batch[1]], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The same."""
        super().validation_step([batch[0].mul_(2), batch[1]], batch_idx)


def test_the_check_before_a_split_does_not_write_to_the_batch():
    """A step that changes its batch in place is tried on copies of a few rows."""

    def loaders() -> tuple[Any, Any]:  # made anew: the step writes to what they hold
        return batches_of([8] * 2), batches_of([8] * 2, seed=2)

    expected, _ = fit(WritesToItsBatch, loaders())
    actual, _ = fit(WritesToItsBatch, loaders(), recovery(max_rows=4))

    assert compare(end_state(expected), end_state(actual), tolerance=1e-5) == []


class KeepsAnAverage(TinyRegressor):
    """Moves a teacher towards its body in ``training_step``.

    Args:
        fits_rows: Rows that fit, ``None`` for any number.
        as_parameter: Keep the teacher as a parameter without gradient, else as a buffer.
        is_queue: Keep the newest rows instead of an average.
    """

    def __init__(
        self, *, fits_rows: int | None, as_parameter: bool = False, is_queue: bool = False
    ) -> None:
        super().__init__(fits_rows=fits_rows)
        self.is_queue = is_queue
        start = torch.zeros(64) if is_queue else self.body[0].weight.detach().clone()
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        if as_parameter:
            self.teacher = nn.Parameter(start, requires_grad=False)
        else:
            self.register_buffer("teacher", start)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss, and one update of the teacher."""
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            if self.is_queue:
                start, rows = int(self.place), len(batch[0])
                self.teacher[start : start + rows] = batch[0].sum(-1)
                self.place += rows
            else:
                self.teacher.lerp_(self.body[0].weight, 0.1)
        return loss


def test_an_average_that_the_step_moves_is_not_moved_once_for_every_micro_batch():
    """The original error names the buffer; gradients alone would have allowed the split."""
    with pytest.raises(OutOfMemoryError) as caught:
        fit(lambda: KeepsAnAverage(fits_rows=4), batches_of([8] * 2), recovery(ladder=["split"]))

    assert "the step changes teacher" in notes_of(caught.value)


def test_a_queue_of_rows_may_be_filled_in_parts():
    """A buffer that ends the same in parts is no reason against a split."""
    batches = batches_of([8] * 4)
    expected, _ = fit(lambda: KeepsAnAverage(fits_rows=None, is_queue=True), batches)
    guard = recovery(ladder=["split"])
    actual, _ = fit(lambda: KeepsAnAverage(fits_rows=4, is_queue=True), batches, guard)

    assert guard.summary.num_recovered == 1
    assert compare(end_state(expected), end_state(actual), tolerance=1e-5) == []


def test_a_trial_on_a_few_rows_that_writes_to_parameters_is_not_hidden():
    """What cannot be put back ends the run: with the OOM where there was one, else on its own."""

    def make(fits_rows: int | None) -> KeepsAnAverage:
        return KeepsAnAverage(fits_rows=fits_rows, as_parameter=True)

    with pytest.raises(OutOfMemoryError) as caught:
        fit(lambda: make(4), batches_of([8] * 2), recovery(ladder=["split"]))
    assert "changed for good: teacher" in notes_of(caught.value)

    with pytest.raises(NotSeparableError, match="teacher"):
        fit(lambda: make(None), batches_of([8] * 2), recovery(max_rows=4))


class FitsAnother(Callback):
    """Fits a second model with the same guard before the third batch."""

    def __init__(self, guard: Callback) -> None:
        self.guard = guard

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        """Fit it once."""
        if batch_idx == 2:
            quiet(self.guard).fit(TinyRegressor(), batches_of([8]))


def test_a_guard_that_is_busy_goes_on_guarding_its_trainer():
    """A second trainer, fitted inside of the first one's run, is declined with a warning."""
    batches = batches_of([8, 8, 8, 12])
    guard = recovery(ladder=["split"])
    with pytest.warns(RecoveryDisabledWarning, match="another trainer"):
        fit(lambda: TinyRegressor(fits_rows=8), batches, guard, FitsAnother(guard))

    assert guard.summary.num_recovered == 1

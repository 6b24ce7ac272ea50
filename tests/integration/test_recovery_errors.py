"""Which errors are survived, what is kept of them, and what is raised in the end."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from fakes import FailsAt, RowLimit, Tally, TinyRegressor, batches_of, cuda_oom, failing
from fits import AtBatch, end_state, fit, quiet, recovery, weights
from lightning.pytorch.loggers.logger import DummyLogger
from states import compare, plain_copy
from torch import Tensor, nn

from lightning_oom._torch import OutOfMemoryError


class HoldsMemory(nn.Module):
    """Fails with a large local tensor alive, and looks at the retry whether that is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = _Sightings()

    def forward(self, x: Tensor) -> Tensor:
        """Fail once, from an exception that wraps another."""
        if self.seen.scratch is None:
            scratch = torch.zeros(1000)
            self.seen.scratch = weakref.ref(scratch)
            self._fail(scratch)
        elif self.seen.alive_at_retry is None:
            self.seen.alive_at_retry = self.seen.scratch() is not None
        return x

    def _fail(self, scratch: Tensor) -> None:
        try:
            torch.zeros(3) @ scratch
        except RuntimeError as error:
            raise cuda_oom() from error


class _Sightings:
    """What was seen; with slots, so that no rollback of attributes touches it."""

    __slots__ = ("alive_at_retry", "scratch")

    def __init__(self) -> None:
        self.scratch: Any = None
        self.alive_at_retry: bool | None = None

    def __deepcopy__(self, memo: Any) -> _Sightings:
        return self


@pytest.mark.parametrize("ladder", [("release",), ("chunk",), ("split",)])
def test_nothing_of_the_failed_attempt_is_alive_at_the_retry(ladder):
    """The retry happens outside of ``except``, with the whole chain of frames cleared (PT#27600)."""
    model = TinyRegressor()
    model.body.insert(1, HoldsMemory())

    quiet(recovery(ladder=ladder)).fit(model, batches_of([8, 8]))

    assert model.body[1].seen.alive_at_retry is False


def test_no_exception_is_kept_after_a_recovery():
    """Only words remain: no error object, no traceback (ipython/ipython#11572)."""
    guard = recovery()
    kept: list[int] = []

    def look(trainer: Any, model: Any) -> None:
        gc.collect()
        kept.append(sum(type(o) is OutOfMemoryError for o in gc.get_objects()))

    look(None, None)  # another test may have left one
    fit(failing(0), batches_of([8, 8]), guard, AtBatch(look))

    assert guard.summary.num_recovered == 1
    assert kept == [kept[0]] * 3


class RaisesInBackward(torch.autograd.Function):
    """An identity whose backward runs out of memory once, when armed."""

    armed: Tally

    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: Tally) -> Tensor:
        """Remember who is asked."""
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Fail while armed."""
        if ctx.armed.numbers:
            ctx.armed.numbers.pop()
            raise cuda_oom()
        return gradient, None


class ThreeLayers(TinyRegressor):
    """A failure between the second and the first layer: the upper ones have their gradient."""

    def __init__(self, *, fail_in_batch: int | None = None) -> None:
        super().__init__()
        self.lower, self.middle, self.upper = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.fail_in_batch = fail_in_batch
        self.armed = Tally()

    def forward(self, x: Tensor) -> Tensor:
        """Three layers with a trap below the middle one."""
        hidden = RaisesInBackward.apply(torch.tanh(self.lower(x)), self.armed)
        return self.upper(torch.tanh(self.middle(hidden))).squeeze(-1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Arm the trap."""
        if batch_idx == self.fail_in_batch:
            self.armed.add(1)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("fail_in_batch", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(("ladder", "tolerance"), [("release", 0.0), ("split", 1e-5)])
def test_gradients_of_the_failed_backward_are_taken_out(
    accumulate, fail_in_batch, ladder, tolerance
):
    """Those of an earlier micro-step of the window stay (PT#18853, fairseq#689)."""
    rows = [8] * 5
    guard = recovery(ladder=(ladder,))

    expected, _ = fit(ThreeLayers, batches_of(rows), accumulate_grad_batches=accumulate)
    actual, _ = fit(
        lambda: ThreeLayers(fail_in_batch=fail_in_batch),
        batches_of(rows),
        guard,
        accumulate_grad_batches=accumulate,
    )

    assert guard.summary.num_recovered == 1
    assert compare(end_state(expected), end_state(actual), tolerance=tolerance) == []


class FullDisk(DummyLogger):
    """A logger that cannot write what the recovery has to say."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Fail on the keys of the package."""
        if any(key.startswith("oom/") for key in metrics):
            raise OSError(28, "No space left on device")


def test_a_full_disk_does_not_hide_the_error():
    """The OOM reaches the caller although its report cannot be written (k2-fsa/icefall#343)."""
    with pytest.raises(OutOfMemoryError, match="Tried to allocate"):
        fit(failing(), batches_of([8]), recovery(), logger=FullDisk())


@pytest.mark.filterwarnings("ignore:.*No space left on device")
def test_a_full_disk_does_not_end_a_recovered_run():
    """A report that cannot be written costs the report, not the run."""
    guard = recovery()

    trainer, _ = fit(failing(1), batches_of([8, 8, 8]), guard, logger=FullDisk())

    assert trainer.global_step == 3
    assert guard.summary.num_recovered == 1


class ClosedStream:
    """A terminal that is gone."""

    def write(self, text: str) -> int:
        """Fail."""
        raise ValueError("I/O operation on closed file")

    def flush(self) -> None:
        """Fail."""
        raise ValueError("I/O operation on closed file")


def test_a_closed_terminal_does_not_hide_the_error(monkeypatch):
    """Console lines that cannot be printed leave the OOM as it is."""
    from lightning_oom import OOMRecovery

    monkeypatch.setattr("sys.stdout", ClosedStream())
    monkeypatch.setattr("sys.stderr", ClosedStream())

    with pytest.raises(OutOfMemoryError):
        fit(failing(), batches_of([8]), OOMRecovery())


def test_after_the_final_error_all_is_as_before_the_batch():
    """Weights, optimizer, buffers, metrics, random state and logs are those before the failed batch."""
    before: dict[str, Any] = {}

    class Watched(TinyRegressor):
        def __init__(self) -> None:
            super().__init__(fits_rows=8)
            self.body.append(nn.BatchNorm1d(1))
            self.body.append(nn.Dropout(0.2))
            self.limit_at_end = RowLimit(0)
            self.num_steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                before.update(
                    weights=weights(self),
                    optimizer=plain_copy(self.optimizers().optimizer.state_dict()),
                    random=torch.get_rng_state(),
                    num_steps=self.num_steps,
                ) if not before else None
            self.num_steps += 1
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                self.limit_at_end(batch[0])
            return loss

    torch.manual_seed(1)
    model, trainer = Watched(), quiet(recovery())
    with pytest.raises(OutOfMemoryError):
        trainer.fit(model, batches_of([8, 8, 4]))

    after = {
        "weights": weights(model),
        "optimizer": plain_copy(trainer.optimizers[0].state_dict()),
        "random": torch.get_rng_state(),
        "num_steps": model.num_steps,
    }
    assert compare(before, after) == []
    assert trainer.global_step == 2


def test_a_batch_that_cannot_be_saved_may_be_skipped_on_request():
    """``on_unrecoverable="skip"`` leaves the batch out, counts it, lists it, and trains on."""
    from lightning_oom.errors import StepSkippedWarning

    guard = recovery(on_unrecoverable="skip")

    expected, _ = fit(TinyRegressor, batches_of([8, 8]))
    loader = batches_of([8, 8, 1])
    with pytest.warns(StepSkippedWarning):
        actual, model = fit(OnlyLastFails, loader, guard)

    assert guard.summary.num_skipped == 1
    assert len(guard.summary.skipped) == 1
    assert compare(weights(expected.lightning_module), weights(model)) == []
    assert actual.fit_loop.epoch_loop.batch_progress.total.completed == 3


class OnlyLastFails(TinyRegressor):
    """Batches of one row never fit."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Fail on one row."""
        if len(batch[0]) == 1:
            raise cuda_oom()
        return super().training_step(batch, batch_idx)


def test_dropout_is_the_same_in_an_unsplit_retry():
    """The random state of attempt 1 is used for attempt 2 (allenai/OLMo-core#828)."""

    def with_dropout(*calls: int) -> Any:
        def make() -> TinyRegressor:
            model = TinyRegressor()
            model.body.insert(2, nn.Dropout(0.5))
            model.body.append(FailsAt(*calls) if calls else nn.Identity())
            return model

        return make

    expected, _ = fit(with_dropout(), batches_of([8] * 4))
    actual, _ = fit(with_dropout(1), batches_of([8] * 4), recovery(ladder=("release",)))

    assert compare(end_state(expected), end_state(actual)) == []


def test_a_split_with_dropout_is_reproducible():
    """Another draw than the whole batch's, but the same in each run."""

    def make() -> TinyRegressor:
        model = TinyRegressor(fits_rows=4)
        model.body.insert(3, nn.Dropout(0.5))
        return model

    runs = [end_state(fit(make, batches_of([8] * 4), recovery(ladder=("split",)))[0]) for _ in "12"]

    assert compare(*runs) == []

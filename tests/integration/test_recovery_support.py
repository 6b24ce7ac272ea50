"""Set-ups that are not guarded yet say so once, and let every error through."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fakes import TinyRegressor, batches_of, cuda_oom, failing
from fits import end_state, fit, quiet, recovery
from lightning.pytorch.strategies import Strategy
from states import compare
from torch import Tensor

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.errors import RecoveryDisabledWarning


class Manual(TinyRegressor):
    """Steps its optimizer itself."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Backward and step by hand."""
        if self.fails and batch_idx == 1:
            raise cuda_oom()
        loss = self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_manual_optimization_is_not_guarded_and_says_so():
    """One warning at setup; the run is otherwise that of the bare Trainer."""
    expected, _ = fit(Manual, batches_of([8, 8]))
    with pytest.warns(RecoveryDisabledWarning, match="manual") as caught:
        actual, _ = fit(Manual, batches_of([8, 8]), recovery())

    assert sum(issubclass(w.category, RecoveryDisabledWarning) for w in caught) == 1
    assert compare(end_state(expected), end_state(actual)) == []


def test_an_error_in_manual_optimization_passes_through_unchanged():
    """No retry, no note, the same exception."""
    with (
        pytest.warns(RecoveryDisabledWarning),
        pytest.raises(OutOfMemoryError) as caught,
    ):
        fit(lambda: Manual(fails=True), batches_of([8, 8]), recovery())

    assert not getattr(caught.value, "__notes__", [])


class Sharded(Strategy):
    """One process that calls itself by another name; trains as a single device does."""

    global_rank = local_rank = node_rank = 0
    world_size = 1

    @property
    def root_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        """The only rank."""
        return True

    def model_to_device(self) -> None:
        """It is there already."""

    def barrier(self, name: str | None = None) -> None:
        """Nobody to wait for."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Nobody to tell."""
        return obj

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Nobody to add."""
        return tensor

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Nobody to ask."""
        return tensor


class FSDPStrategy(Sharded):
    """Stands for sharded parameters."""


class DeepSpeedStrategy(Sharded):
    """Stands for an engine that accumulates gradients itself."""

    @property
    def handles_gradient_accumulation(self) -> bool:
        """As DeepSpeed says."""
        return True


class ModelParallelStrategy(Sharded):
    """Stands for tensor parallelism."""


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy])
def test_a_sharded_strategy_is_refused_by_name(strategy):
    """The warning names the strategy, and the OOM reaches the caller (HF#24558, HF#29058)."""
    model = failing(0)()
    trainer = quiet(
        recovery(),
        strategy=strategy(),
        accelerator="auto",
        devices="auto",
    )

    with (
        pytest.warns(RecoveryDisabledWarning, match=strategy.__name__),
        pytest.raises(OutOfMemoryError),
    ):
        trainer.fit(model, batches_of([8]))

    assert len(model.body[1].calls.numbers) == 1


def test_a_strategy_of_several_processes_is_not_guarded_and_says_so(monkeypatch):
    """Under DDP an error passes through unchanged on every rank (PL#5243)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else Lightning changes the number of threads
    model = failing(0)()
    trainer = quiet(recovery(), strategy="ddp")
    try:
        with (
            pytest.warns(RecoveryDisabledWarning, match="DDP"),
            pytest.raises(OutOfMemoryError) as caught,
        ):
            trainer.fit(model, batches_of([8]))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    assert not getattr(caught.value, "__notes__", [])
    assert len(model.body[1].calls.numbers) == 1


def test_a_supported_set_up_warns_of_nothing():
    """An ordinary run on one device is silent."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecoveryDisabledWarning)
        trainer, _ = fit(TinyRegressor, batches_of([8]), recovery())

    assert trainer.global_step == 1


BAD_ARGUMENTS = [
    ({"ladder": ()}, r"ladder"),
    ({"ladder": ("relase",)}, r"relase"),
    ({"ladder": ("split", "split")}, r"split"),
    ({"on_unrecoverable": "ignore"}, r"ignore"),
    ({"on_inseparable": "maybe"}, r"maybe"),
    ({"margin": -0.1}, r"-0\.1"),
    ({"margin": 1.0}, r"1\.0"),
    ({"max_rows": 0}, r"0"),
    ({"log_merge": {"x": "median"}}, r"median"),
    ({"weight_fn": 3}, r"weight_fn"),
    ({"split_fn": "rows"}, r"split_fn"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=lambda a: str(a)[:40])
def test_a_bad_argument_is_refused_by_the_constructor(arguments, message):
    """The error names the value, before anything runs."""
    with pytest.raises((ValueError, TypeError), match=message):
        recovery(**arguments)

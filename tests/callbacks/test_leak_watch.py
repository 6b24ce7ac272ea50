"""Leaks in real runs: named by MemoryMonitor(find_leaks=True), once, and no clean run is warned of."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from fakes import TinyRegressor, regression_loader
from fits import quiet
from lightning.pytorch import Callback
from torchmetrics import MeanSquaredError
from torchmetrics.classification import BinaryAUROC

from lightning_oom import MemoryMonitor, MemoryProfiler
from lightning_oom.errors import MemoryLeakWarning
from lightning_oom.testing import SimulatedGPUStrategy


class Keeps(TinyRegressor):
    """Keeps the outputs of validation, and losses in one of three ways."""

    def __init__(self, what: str = "nothing") -> None:
        super().__init__()
        self.what = what
        self.val_outputs: list[Any] = []
        self.hist: list[Any] = []
        self.total: Any = 0.0
        self.auroc = BinaryAUROC(thresholds=None)
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Train, and keep."""
        step = super().training_step(batch, batch_idx)
        loss = step["loss"] if isinstance(step, dict) else step
        if self.what == "sum":
            self.total = self.total + loss
        if self.what == "list":
            self.hist.append(loss)
        return {"loss": loss, "logits": loss.expand(4, 2) * 1}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Keep what an epoch-end hook once got."""
        self.val_outputs.append({"logits": self(batch[0])})
        scores = torch.rand(len(batch[0]), device=self.device)
        self.auroc.update(scores, (scores > 0.5).long())
        self.error.update(scores, scores)
        self.log("error", self.error)

    def on_validation_epoch_end(self) -> None:
        """Clear, unless that is what the test forgets."""
        if self.what != "outputs":
            self.val_outputs.clear()
        if self.what != "metric":
            self.auroc.reset()


class KeepsOutputs(Callback):
    """Keeps what steps return."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Keep it."""
        self.kept.append(outputs)


def warned(
    model: TinyRegressor, *callbacks: Callback, fn: str = "fit", **options: Any
) -> list[str]:
    """Run, and return the warnings of leaks."""
    loaders = {"fit": 2, "validate": 1, "predict": 1}[fn] * [regression_loader(rows=160)]
    trainer = quiet(*callbacks, MemoryMonitor(find_leaks=True), max_epochs=3, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MemoryLeakWarning)
        verbosity = {} if fn == "fit" else {"verbose": False}
        getattr(trainer, fn)(model, *loaders, **verbosity)
    return [str(w.message) for w in caught if w.category is MemoryLeakWarning]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_clean_run_is_not_warned_of(on_gpu) -> None:
    """Outputs cleared, metrics reset, optimizer state, logged metrics, accumulation."""
    options = {"strategy": SimulatedGPUStrategy("64 MiB"), "accelerator": "auto"} if on_gpu else {}
    assert warned(Keeps(), accumulate_grad_batches=2, **options) == []


@pytest.mark.parametrize(
    ("what", "path"),
    [
        ("sum", "model.total"),
        ("list", "model.hist"),
        ("outputs", "model.val_outputs"),
        ("metric", "model.auroc.preds"),
    ],
)
def test_what_is_kept_in_a_fit_is_named(what, path) -> None:
    """Its attribute path, growth and what to change (PL#4556, PL#1510, PL#8453, TM#1461)."""
    messages = warned(Keeps(what))
    assert len([m for m in messages if m.startswith(f"{path} ")]) == 1
    assert "a step" in messages[0]


def test_validation_alone_names_its_outputs() -> None:
    """Also where there is a single epoch (PL#8453)."""
    messages = warned(Keeps("outputs"), fn="validate")
    assert [m.split()[0] for m in messages] == ["model.val_outputs"]


def test_outputs_that_a_callback_keeps_are_named_by_it() -> None:
    """Extra keys of the returned dictionary, kept by somebody else (PL#9336)."""
    messages = warned(Keeps(), KeepsOutputs())
    assert [m.split()[0] for m in messages] == ["trainer.callbacks[0].kept"]


def test_nothing_of_a_run_outlives_it() -> None:
    """Three fits in a process: modules, trainers and callbacks die (PL#3275, PL#8430)."""
    refs = []
    for _ in range(3):
        model, monitor = Keeps(), MemoryMonitor(find_leaks=True)
        profiler = MemoryProfiler(steps=(1, 3), operators=False, max_files=1, folder="/dev/null/x")
        trainer = quiet(monitor, profiler, max_epochs=2)
        with pytest.warns(UserWarning, match="leaves something out"):
            trainer.fit(model, regression_loader(), regression_loader())
        refs += [weakref.ref(item) for item in (model, monitor, profiler, trainer)]
        del model, monitor, profiler, trainer
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)

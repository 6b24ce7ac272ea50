"""What micro-batches log is what the whole batch would have logged, key by key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from torch.nn import functional
from torchmetrics import MetricCollection
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_oom._lightning.results import LogRecorder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # about workers and int values

CLASSES = 4
NEEDS_LOG_MERGE = {"count_mean": "sum"}
# With one row at a time a constant 1 and a count of rows look alike
NEEDS_LOG_MERGE_BY_ROW = {"count_mean": "sum", "intval": "sum"}
UNDECIDABLE_BY_ROW = {"bs_one_epoch"}


class Rows(torch.utils.data.Dataset):
    """Thirty-three rows of noise with labels."""

    def __init__(self, num: int = 33) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(num, 12, generator=generator)
        self.y = torch.randint(0, CLASSES, (num,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class LogsEverything(LightningModule):
    """Logs in every way that ``self.log`` has; weights stay put, so that runs compare."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(12, CLASSES)
        self.acc = MulticlassAccuracy(CLASSES, average="micro")
        self.f1 = MulticlassF1Score(CLASSES)
        self.epoch_f1 = MulticlassF1Score(CLASSES)
        self.auroc = MulticlassAUROC(CLASSES)
        self.mean = MeanMetric()
        self.peak = MaxMetric()
        self.cat = CatMetric()
        self.twice = MulticlassF1Score(CLASSES)
        self.collection = MetricCollection(
            {"cacc": MulticlassAccuracy(CLASSES), "cf1": MulticlassF1Score(CLASSES)}
        )
        self.objects = MetricCollection({"of1": MulticlassF1Score(CLASSES)}, prefix="train_")
        self.run = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """See the class."""
        out = self.layer(batch["x"])
        y = batch["y"]
        loss = functional.cross_entropy(out, y)
        self._log_values(out, loss, y)
        self._log_metrics(out.detach().softmax(-1), y, loss.detach())
        if bool((y == 0).any()) and batch_idx == 0:
            self.log("sometimes", 7.5, on_step=True, on_epoch=True)
        return loss

    def _log_values(self, out: torch.Tensor, loss: torch.Tensor, y: torch.Tensor) -> None:
        """See the class."""
        both = {"on_step": True, "on_epoch": True}
        rows = len(y)
        self.log("inferred", loss, **both)
        self.log("bs_len", loss, batch_size=rows, **both)
        self.log("bs_const", loss, batch_size=10, **both)
        self.log("bs_one", loss, batch_size=1, **both)
        self.log("bs_tok", loss, batch_size=rows * 7, **both)
        whole = functional.cross_entropy(out.detach(), y, reduction="sum")
        self.log("sum", whole, reduce_fx="sum", **both)
        self.log("max", out.max(), reduce_fx="max", **both)
        self.log("min", out.min(), reduce_fx=torch.min, **both)
        self.log("count_mean", (out.argmax(-1) == y).float().sum(), **both)
        self.log("intval", rows, **both)
        self.log("const", 3.3, **both)
        self.log("step_only", loss, on_step=True, on_epoch=False)
        self.log("epoch_only", loss, on_step=False, on_epoch=True)
        self.log("graph", loss, enable_graph=True, **both)
        self.log_dict({"d1": loss, "d2": loss * 2}, prog_bar=True, **both)

    def _log_metrics(self, p: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
        """See the class."""
        both = {"on_step": True, "on_epoch": True}
        self.acc(p, y)
        self.log("acc", self.acc, **both)
        self.f1(p, y)
        self.log("f1", self.f1, **both)
        self.auroc(p, y)
        self.log("auroc", self.auroc, **both)
        self.mean(loss, weight=len(y))
        self.log("mean", self.mean, **both)
        self.peak(p.max())
        self.log("peak", self.peak, on_step=False, on_epoch=True)
        self.epoch_f1.update(p, y)
        self.log("epoch_f1", self.epoch_f1, on_step=False, on_epoch=True)
        self.cat.update(p[:, 1])
        self.log_dict(self.collection(p, y), **both)
        self.objects(p, y)
        self.log_dict(self.objects, **both)
        self.run.update(p, y)
        self.log("so_far", self.run.compute(), **both)
        self.twice(p[:1].repeat(2, 1), y[:1].repeat(2))
        self.twice(p, y)
        self.log("twice", self.twice, on_step=True, on_epoch=False)

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """See the class."""
        self.log("bb", loss.detach(), on_step=True, on_epoch=True)

    def on_after_backward(self) -> None:
        """See the class."""
        self.log("ab", self.layer.weight.grad.norm(), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        """See the class."""
        self.log("cat", self.cat.compute().sum())
        self.cat.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """See the class."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


class RowsInParts(Callback):
    """Runs ``training_step`` part by part under a recorder, as a split does."""

    def __init__(self, together: int, log_merge: dict[str, str]) -> None:
        self.together = together
        self.log_merge = log_merge

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See the class."""
        whole_step = pl_module.training_step

        def training_step(batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            num = len(batch["x"])
            parts = -(-num // self.together)
            rows = [num // parts + (i < num % parts) for i in range(parts)]
            pieces = zip(*(batch[key].split(rows) for key in ("x", "y")), strict=True)
            recorder = LogRecorder(trainer, rows=rows, log_merge=self.log_merge)
            losses = []
            with recorder:
                for index, (x, y) in enumerate(pieces):
                    part = {"x": x, "y": y}
                    with recorder.micro_batch(index, part):
                        losses.append(whole_step(part, batch_idx) * (rows[index] / num))
            recorder.replay()
            return sum(losses[1:], losses[0])

        pl_module.training_step = training_step

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See the class."""
        vars(pl_module).pop("training_step", None)


class ListLogger(DummyLogger):
    """Keeps every row that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """See the class."""
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """See the class."""


def fit(*callbacks: Callback) -> tuple[list[tuple[int | None, dict[str, float]]], Any]:
    """Train two epochs of batches of 10, 10, 10 and 3 rows."""
    seed_everything(0, verbose=False)
    model, logger = LogsEverything(), ListLogger()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        log_every_n_steps=1,
    )
    trainer.fit(model, torch.utils.data.DataLoader(Rows(), batch_size=10))
    return logger.rows, model


def differing(
    expected: list[tuple[int | None, dict[str, float]]],
    got: list[tuple[int | None, dict[str, float]]],
) -> dict[str, tuple[int | None, float, float]]:
    """Return one example of each key that differs."""
    assert [(step, set(row)) for step, row in got] == [(step, set(row)) for step, row in expected]
    return {
        key: (step, row[key], other[key])
        for (step, row), (_, other) in zip(expected, got, strict=True)
        for key in row
        if other[key] != pytest.approx(row[key], rel=1e-6, abs=1e-6)
    }


def states(model: LogsEverything) -> dict[str, Any]:
    """Return count and integer states of every metric."""
    return {
        name: (metric.update_count, metric.tp.tolist(), metric.fn.tolist())
        for name, metric in model.named_modules()
        if isinstance(metric, (MulticlassAccuracy, MulticlassF1Score))
    }


@pytest.mark.parametrize("together", [5, 4, 3])
def test_every_logged_key_is_that_of_the_whole_batch(together: int) -> None:
    """Each key of each row is equal, from the first step on; counts need ``log_merge``."""
    expected, expected_model = fit()

    rows, model = fit(RowsInParts(together, NEEDS_LOG_MERGE))

    assert len({key for _, row in expected for key in row}) >= 46
    assert differing(expected, rows) == {}
    assert states(model) == states(expected_model)


def test_one_row_at_a_time_leaves_one_question_open() -> None:
    """Whether ``batch_size=1`` is a constant or a count cannot be told from micro-batches of 1."""
    expected, expected_model = fit()

    rows, model = fit(RowsInParts(1, NEEDS_LOG_MERGE_BY_ROW))

    assert set(differing(expected, rows)) == UNDECIDABLE_BY_ROW
    assert states(model) == states(expected_model)


def test_without_log_merge_only_counts_are_wrong() -> None:
    """What cannot be inferred from values is a count logged as a mean, nothing else."""
    expected, _ = fit()

    rows, _ = fit(RowsInParts(5, {}))

    assert set(differing(expected, rows)) == {"count_mean_step", "count_mean_epoch"}


def test_metric_objects_are_equal_bit_for_bit() -> None:
    """Values of metrics with counting states do not differ in the last digit either."""
    expected, _ = fit()

    rows, _ = fit(RowsInParts(4, NEEDS_LOG_MERGE))

    keys = {"acc_step", "acc_epoch", "f1_step", "f1_epoch", "auroc_step", "auroc_epoch", "cf1_step"}
    for (_, row), (_, other) in zip(expected, rows, strict=True):
        for key in keys & row.keys():
            assert other[key] == row[key]

"""Each private name of Lightning's result collection exists, and the snapshot covers it."""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from fakes import ListLogger
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torchmetrics.aggregation import MaxMetric, MeanMetric, SumMetric

from lightning_oom._lightning.results import LogRecorder, ResultsPart


class Logs(BoringModel):
    """Calls ``during(trainer, module, batch_idx)`` in each training step, after one ``self.log``."""

    def __init__(self, during: Any) -> None:
        super().__init__()
        self.metric, self.peak = SumMetric(), MaxMetric()
        self.during = during

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        """Log and call."""
        self.log("plain", float(batch_idx), on_step=True, on_epoch=True)
        self.during(self.trainer, self, batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        """``BoringModel`` has nothing to do here."""


def run(during: Any, batches: int = 2, **options: Any) -> tuple[ListLogger, LightningModule]:
    """Fit one epoch."""
    model, logger = Logs(during), ListLogger()
    trainer = Trainer(
        max_epochs=1,
        limit_train_batches=batches,
        limit_val_batches=0,
        accelerator="cpu",
        devices=1,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(model)
    return logger, model


def test_every_private_name_exists() -> None:
    """On the installed Lightning, in the form that is used."""
    found: list[Any] = []

    def during(trainer: Any, module: Any, batch_idx: int) -> None:
        results = trainer._results
        found.append([hasattr(results, n) for n in ("batch", "batch_size", "dataloader_idx")])
        found.append(list(inspect.signature(results.log).parameters)[:3])
        (item,) = results.values()
        found.append(
            [
                hasattr(item, n)
                for n in ("meta", "_forward_cache", "_update_count", "cumulated_batch_size")
            ]
        )
        found.append([item.meta.on_step, item.meta.on_epoch])
        found.append([trainer._logger_connector._current_fx, module._current_fx_name])
        found.append(list(results))

    run(during, batches=1)

    assert found == [
        [True] * 3,
        ["fx", "name", "value"],
        [True] * 4,
        [True, True],
        ["training_step", "training_step"],
        ["training_step.plain"],
    ]


def test_what_a_failed_attempt_logged_is_forgotten() -> None:
    """Values, new names, sums over the epoch, and whose turn it is."""

    def failing(trainer: Any, module: Any, batch_idx: int) -> None:
        saved = ResultsPart(trainer).take()
        for _ in range(3):
            module.log("plain", 100.0, on_step=True, on_epoch=True)
            module.log("new", 1.0, on_step=True)
            trainer._results.batch = None
            trainer._logger_connector._current_fx = "elsewhere"
            module._current_fx_name = "elsewhere"
            assert saved.restore() == ()
        assert list(trainer._results) == ["training_step.plain"]

    expected, _ = run(lambda *_: None)
    got, _ = run(failing)

    assert got.rows == expected.rows


def test_a_snapshot_without_a_collection_restores() -> None:
    """Prediction has none."""
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)
    assert trainer._results is None

    assert ResultsPart(trainer).take().restore() == ()


def test_the_recorder_leaves_nothing_behind() -> None:
    """The very ``log`` and batch are back, after an error too; nothing was logged."""

    def during(trainer: Any, module: Any, batch_idx: int) -> None:
        results = trainer._results
        before = dict(vars(results)), dict(results)
        recorder = LogRecorder(trainer, rows=[1, 1])
        with (
            contextlib.suppress(ValueError),
            recorder,
            recorder.micro_batch(0, torch.zeros(1)),
        ):
            module.log("other", 1.0)
            raise ValueError("stop")
        after = dict(vars(results)), dict(results)
        assert before[0].keys() == after[0].keys()
        assert all(before[0][key] is after[0][key] for key in before[0])
        assert before[1] == after[1]

    run(during)


def record(*names: Any, rows: list[int], **options: Any) -> Any:
    """Return a step that logs ``names`` in each micro-batch: (name, values, options of log)."""

    def during(trainer: Any, module: Any, batch_idx: int) -> None:
        recorder = LogRecorder(trainer, rows=rows, **options)
        with recorder:
            for index, count in enumerate(rows):
                with recorder.micro_batch(index, torch.zeros(count, 1)):
                    for name, values, how in names:
                        if values[index] is not None:
                            module.log(name, torch.tensor(values[index]), **how)
        trainer._results.batch, trainer._results.batch_size = torch.zeros(sum(rows), 1), None
        recorder.replay()

    return during


def test_names_are_logged_once_in_the_order_first_seen() -> None:
    """Ragged logging too: a name that some micro-batches skip counts those that logged it."""
    step = {"on_step": True}
    logger, _ = run(
        record(
            ("a", [1.0, 4.0, 4.0], step),
            ("late", [None, 3.0, 9.0], step),
            ("early", [2.0, None, None], step),
            rows=[4, 2, 2],
        ),
        batches=1,
    )

    row = logger.rows[0][1]
    assert list(row)[:4] == ["plain_step", "a", "early", "late"]
    assert (row["a"], row["late"], row["early"]) == (2.5, 6.0, 2.0)


def test_the_users_weights_stand_for_rows() -> None:
    """Token means are weighted by tokens."""
    logger, _ = run(
        record(("a", [2.0, 5.0], {"on_step": True}), rows=[1, 1], weights=[3.0, 1.0]), batches=1
    )

    assert logger.rows[0][1]["a"] == 2.75


def test_log_merge_overrides_every_rule() -> None:
    """Whatever ``reduce_fx`` says."""
    step = {"on_step": True}
    logger, _ = run(
        record(
            ("a", [2.0, 5.0], step),
            ("b", [2.0, 5.0], {**step, "reduce_fx": "max"}),
            rows=[1, 1],
            log_merge={"a": "last", "b": "sum"},
        ),
        batches=1,
    )

    assert (logger.rows[0][1]["a"], logger.rows[0][1]["b"]) == (5.0, 7.0)


def test_values_are_reduced_between_processes_once() -> None:
    """After the last micro-batch, with the merged value."""
    reduced: list[float] = []

    def during(trainer: Any, module: Any, batch_idx: int) -> None:
        def reduce(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            reduced.append(float(value))
            return value

        recorder = LogRecorder(trainer, rows=[1, 1])
        with recorder:
            for index in range(2):
                with recorder.micro_batch(index, torch.zeros(1)):
                    trainer._results.log(
                        "training_step",
                        "synced",
                        torch.tensor(float(index)),
                        on_step=True,
                        on_epoch=False,
                        sync_dist=True,
                        sync_dist_fn=reduce,
                    )
        assert reduced == []
        recorder.replay()

    run(during, batches=1)

    assert reduced == [0.5]


def test_dataloaders_are_kept_apart() -> None:
    """The same name of two dataloaders is two values."""

    def during(trainer: Any, module: Any, batch_idx: int) -> None:
        results = trainer._results
        recorder = LogRecorder(trainer, rows=[1, 1])
        with recorder:
            for index in range(2):
                with recorder.micro_batch(index, torch.zeros(1)):
                    for loader in (0, 1):
                        results.dataloader_idx = loader
                        module.log("v", float(10 * loader + index), on_step=False, on_epoch=True)
        recorder.replay()
        assert results.dataloader_idx is None
        values.update({k: float(v.value / v.cumulated_batch_size) for k, v in results.items()})
        for key in list(results):
            if key.endswith((".0", ".1")):
                del results[key]

    values: dict[str, float] = {}
    run(during, batches=1)

    assert values["training_step.v.0"] == 0.5
    assert values["training_step.v.1"] == 10.5


def test_metric_objects_take_the_value_of_the_batch() -> None:
    """Sums by their states, extremes by what they are, in the first step already."""

    def during(trainer: Any, module: Any, batch_idx: int) -> None:
        recorder = LogRecorder(trainer, rows=[1, 1])
        with recorder:
            for index, value in enumerate((3.0, 5.0)):
                with recorder.micro_batch(index, torch.zeros(1)):
                    module.metric(value)
                    module.peak(value - 1)
                    module.log("sum", module.metric, on_step=True, on_epoch=True)
                    module.log("peak", module.peak, on_step=True, on_epoch=False)
        recorder.replay()

    logger, _ = run(during)

    assert [row["sum_step"] for _, row in logger.rows if "sum_step" in row] == [8.0, 8.0]
    assert [row["peak"] for _, row in logger.rows if "peak" in row] == [4.0, 4.0]
    assert logger.rows[-1][1]["sum_epoch"] == 16.0


def test_a_plain_value_of_a_metric_is_recognised_by_value_and_name() -> None:
    """``self.log("mean", self.mean(x))`` is the metric's, a value of another name is not."""

    def during(trainer: Any, module: Any, batch_idx: int) -> None:
        module.sq = MeanMetric()
        recorder = LogRecorder(trainer, rows=[1, 1])
        with recorder:
            for index, weight in enumerate((3.0, 1.0)):
                with recorder.micro_batch(index, torch.zeros(1)):
                    value = module.sq(float(index), weight=weight)
                    module.log("train/sq", value, on_step=True)
                    module.log("elsewhere", value, on_step=True)
        recorder.replay()

    logger, _ = run(during, batches=1)

    assert logger.rows[0][1]["train/sq"] == 0.25
    assert logger.rows[0][1]["elsewhere"] == 0.5


def test_recorded_values_hold_no_graph() -> None:
    """A micro-batch's graph dies with it, ``enable_graph`` or not."""
    alive: list[Any] = []

    def during(trainer: Any, module: Any, batch_idx: int) -> None:
        recorder = LogRecorder(trainer, rows=[1, 1])
        with recorder:
            for index in range(2):
                with recorder.micro_batch(index, torch.zeros(1)):
                    loss = module.layer.weight.sum()
                    module.log("loss", loss, enable_graph=True, on_step=True)
                    node = weakref.ref(loss)
                    del loss
                    gc.collect()
                    alive.append(node())
        recorder.replay()

    run(during, batches=1)

    assert alive == [None, None]


@pytest.mark.parametrize("rule", ["avg", "", "first"])
def test_an_unknown_rule_is_refused_at_once(rule: str) -> None:
    """Before anything runs."""
    with pytest.raises(ValueError, match="log_merge"):
        LogRecorder(Trainer.__new__(Trainer), rows=[1], log_merge={"a": rule})

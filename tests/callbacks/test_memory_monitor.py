"""What the monitor logs, when, and that it changes nothing."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref

import pytest
import torch
from fakes import ListLogger, TinyRegressor, regression_loader
from fits import fit, quiet, recovery, weights
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn

from lightning_oom import MemoryMonitor
from lightning_oom.errors import LightningOOMWarning, NearLimitWarning
from lightning_oom.memory import read_memory
from lightning_oom.memory.phases import PHASES
from lightning_oom.testing import SimulatedGPUStrategy, fail_at
from lightning_oom.units import GIB

CPU_KEYS = {
    "memory/allocated_gib",
    "memory/limit_gib",
    "memory/used_fraction",
    "memory/host_rss_gib",
}
GPU_KEYS = CPU_KEYS | {
    "memory/peak_allocated_gib",
    "memory/reserved_gib",
    "memory/peak_reserved_gib",
    "memory/headroom_gib",
    "memory/fragmentation_fraction",
    "memory/alloc_retries",
    "memory/peak_phase",
}
TRAIN_KEYS = GPU_KEYS | {f"memory/by_phase/{phase}_gib" for phase in PHASES[:3]}


class Wide(TinyRegressor):
    """Activations, weights and optimizer state of some MiB each, and a buffer."""

    def __init__(self) -> None:
        super().__init__(features=64, hidden=512)
        self.body = nn.Sequential(
            nn.Linear(64, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 1)
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Two states a parameter."""
        return torch.optim.Adam(self.parameters())


def on_gpu(*callbacks, **options):
    """A trainer on a simulated GPU."""
    strategy = SimulatedGPUStrategy(options.pop("limit", "256 MiB"))
    return quiet(*callbacks, **{"strategy": strategy, "accelerator": "auto", **options})


def wide_loader(batches: int = 6):
    """Batches of 512 rows."""
    return regression_loader(512 * batches, batch_size=512, features=64)


def memory_rows(trainer):
    """The rows of the monitor: step and scalars."""
    return [
        (step, row)
        for step, row in trainer.logger.rows
        if any(key.startswith("memory/") for key in row)
    ]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_each_entry_point_logs_the_same_handful(stage) -> None:
    """Fit, validate, test and predict: the same keys, units in their names (PL#18652)."""
    monitor = MemoryMonitor(every_n_steps=2)
    trainer = quiet(monitor)
    getattr(trainer, stage)(TinyRegressor(), regression_loader(), **verbosity(stage))

    assert [(r.stage, r.step) for r in monitor.readings] == [(stage, 2), (stage, 4)]
    assert [(step, set(row)) for step, row in memory_rows(trainer)] == [
        (2, CPU_KEYS),
        (4, CPU_KEYS),
    ]


def verbosity(stage):
    """What keeps results off the console."""
    return {} if stage == "predict" else {"verbose": False}


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_on_a_gpu_has_its_own_phase(stage) -> None:
    """A peak in evaluation is that of its phase."""
    monitor = MemoryMonitor()
    trainer = on_gpu(monitor)
    getattr(trainer, stage)(Wide(), wide_loader(2), **verbosity(stage))
    phase = {"validate": "validation"}.get(stage, stage)

    assert set(memory_rows(trainer)[0][1]) == GPU_KEYS | {f"memory/by_phase/{phase}_gib"}
    assert {r.peak_phase for r in monitor.readings} == {phase}


def test_fit_logs_every_n_steps_under_the_steps_of_lightning() -> None:
    """Rows meet those of ``self.log``: the same trainer option, the same step."""
    trainer, _ = fit(TinyRegressor, regression_loader(), MemoryMonitor(), log_every_n_steps=2)
    logged = [step for step, row in trainer.logger.rows if "train_loss_step" in row]

    assert [step for step, _ in memory_rows(trainer)] == logged == [1, 3]


def test_accumulated_batches_are_one_step() -> None:
    """Micro-batches in between are covered by the peak, not read."""
    monitor = MemoryMonitor(every_n_steps=1)
    fit(TinyRegressor, regression_loader(), monitor, accumulate_grad_batches=2)

    assert [reading.step for reading in monitor.readings] == [1, 2, 3]


def test_a_short_run_is_read_at_its_end() -> None:
    """Fewer steps than ``log_every_n_steps`` are no reason for no number."""
    monitor = MemoryMonitor()
    fit(TinyRegressor, regression_loader(), monitor, log_every_n_steps=50)

    assert [reading.step for reading in monitor.readings] == [5]


def test_logging_that_is_switched_off_stays_off() -> None:
    """``log_every_n_steps=0`` reads nothing."""
    monitor = MemoryMonitor()
    fit(TinyRegressor, regression_loader(), monitor, log_every_n_steps=0)

    assert list(monitor.readings) == []


def test_no_logger_is_fine_and_several_all_get_it() -> None:
    """The ring is filled without a logger; each of two gets each row."""
    alone = MemoryMonitor(every_n_steps=1, keep=3)
    fit(TinyRegressor, regression_loader(), alone, logger=False)
    loggers = [ListLogger(), ListLogger()]
    fit(TinyRegressor, regression_loader(), MemoryMonitor(), logger=loggers)

    assert [reading.step for reading in alone.readings] == [3, 4, 5]
    assert [len(logger.values("memory/allocated_gib")) for logger in loggers] == [5, 5]


def test_a_logger_that_fails_is_named_once_and_ends_nothing() -> None:
    """The run goes on, and the other logger has every row."""

    class Broken(ListLogger):
        def log_metrics(self, metrics, step=None):
            if "memory/allocated_gib" in metrics:
                raise OSError("disk full")

    good = ListLogger()
    with pytest.warns(LightningOOMWarning, match="could not log to Broken: OSError: disk full"):
        fit(TinyRegressor, regression_loader(), MemoryMonitor(), logger=[Broken(), good])

    assert len(good.values("memory/allocated_gib")) == 5


def test_peaks_belong_to_phases_and_none_is_lost() -> None:
    """The peak of the run is the highest of its phases, whichever reading it falls into."""
    monitor = MemoryMonitor(every_n_steps=2, keep=100)
    trainer = on_gpu(monitor, num_sanity_val_steps=1)
    trainer.fit(Wide(), wide_loader(5), wide_loader(2))
    first, second, last = monitor.readings

    assert set(first.peaks_by_phase) == set(PHASES[:4])  # the sanity check is a validation
    assert set(second.peaks_by_phase) == set(PHASES[:3])
    assert "validation" in last.peaks_by_phase  # after the last step that was due
    for reading in monitor.readings:
        top = max(reading.peaks_by_phase, key=reading.peaks_by_phase.get)
        assert reading.peak_phase == top
        assert reading.memory.peak_allocated_bytes == reading.peaks_by_phase[top]
    assert first.peak_phase in {"forward", "backward"}
    assert set(memory_rows(trainer)[1][1]) == TRAIN_KEYS


def test_a_peak_between_readings_is_in_the_next_one() -> None:
    """A batch that is larger than the others is found, though its step was not read."""
    from fakes import batches_of

    monitor = MemoryMonitor(every_n_steps=4)
    trainer = on_gpu(monitor)
    trainer.fit(Wide(), batches_of([64, 4096, 64, 64, 64, 64, 64, 64], features=64))
    first, second = monitor.readings

    assert first.memory.peak_allocated_bytes > second.memory.peak_allocated_bytes + 4096 * 512 * 4
    assert first.peak_phase in {"forward", "backward"}


def test_the_breakdown_agrees_with_the_gpu_in_every_phase() -> None:
    """The sum is what was allocated, and what has no kind is below 2 % of it."""
    monitor = MemoryMonitor(every_n_steps=2, breakdown=True)
    trainer = on_gpu(monitor)
    before = 0
    trainer.fit(Wide(), wide_loader())
    for reading in monitor.readings:
        assert set(reading.kinds_by_phase) == set(PHASES[:3])
        for kinds in reading.kinds_by_phase.values():
            assert kinds.other_bytes - before <= 0.02 * kinds.total_bytes
    row = memory_rows(trainer)[0][1]
    kinds = {key: value for key, value in row.items() if key.startswith("memory/by_kind/")}
    first = monitor.readings[0]

    assert sum(kinds.values()) == pytest.approx(row["memory/by_kind_total_gib"])
    assert kinds["memory/by_kind/activations_gib"] * GIB > 2 * 512 * 512 * 4
    assert kinds["memory/by_kind/batch_gib"] * GIB >= 512 * 65 * 4
    assert first.kinds_by_phase["optimizer"].total_bytes == first.memory.allocated_bytes
    assert first.kinds_by_phase["optimizer"].activations_bytes == 0
    assert (
        first.kinds_by_phase["backward"].gradients_bytes
        == first.kinds_by_phase["backward"].parameters_bytes
    )


@pytest.mark.parametrize("options", [{}, {"breakdown": True}], ids=["plain", "breakdown"])
@pytest.mark.parametrize("where", ["cpu", "simgpu"])
def test_training_is_bit_identical(options, where) -> None:
    """Weights are those of a run without the monitor."""
    found = []
    for callbacks in ((), (MemoryMonitor(every_n_steps=1, **options),)):
        torch.manual_seed(5)
        model = Wide()
        trainer = (quiet if where == "cpu" else on_gpu)(*callbacks)
        trainer.fit(model, wide_loader(3))
        found.append(weights(model.cpu()))

    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_recovery_and_the_monitor_keep_their_peaks() -> None:
    """With a step recovered from an OOM both see the run as they would alone."""
    monitor = MemoryMonitor(every_n_steps=1, breakdown=True)
    guard = recovery()
    trainer = on_gpu(monitor, guard, fail_at(3, step=2))
    trainer.fit(Wide(), wide_loader(5))

    assert guard.summary.num_recovered == 1
    assert [reading.step for reading in monitor.readings] == [1, 2, 3, 4, 5]
    assert all(r.memory.peak_allocated_bytes >= r.memory.allocated_bytes for r in monitor.readings)
    before, after = (monitor.readings[n].peaks_by_phase for n in (1, 4))
    batch_bytes = 512 * 65 * 4  # one may wait for the collector
    assert after == pytest.approx(before, abs=2 * batch_bytes)


def test_nothing_is_synchronised(monkeypatch) -> None:
    """No step waits for the device."""
    SimulatedGPUStrategy()
    waits = []
    monkeypatch.setattr(torch.simgpu, "synchronize", lambda *_: waits.append("simgpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append("cuda"))
    trainer = on_gpu(MemoryMonitor(every_n_steps=1, breakdown=True, progress_bar=True))
    trainer.fit(Wide(), wide_loader(3), wide_loader(1))

    assert waits == []


def test_the_limit_is_warned_of_once_per_run() -> None:
    """The message has the device, the fraction, the step and the phase."""
    trainer = on_gpu(MemoryMonitor(every_n_steps=1, warn_above=0.01), max_steps=3)
    with pytest.warns(NearLimitWarning) as caught:
        trainer.fit(Wide(), wide_loader())

    near = [str(w.message) for w in caught if w.category is NearLimitWarning]
    assert len(near) == 1
    assert near[0].startswith("simgpu:0 came to ")
    assert "of its limit of 256.00 MiB in " in near[0]


def test_the_progress_bar_has_an_entry_on_request() -> None:
    """Peak and limit, and the bar is as before afterwards."""
    bar, seen = TQDMProgressBar(refresh_rate=0), []

    class Look(MemoryMonitor):
        def on_train_batch_end(self, trainer, pl_module, *args):
            super().on_train_batch_end(trainer, pl_module, *args)
            seen.append(bar.get_metrics(trainer, pl_module).get("memory"))

    trainer = on_gpu(
        Look(every_n_steps=2, progress_bar=True), bar, max_steps=2, enable_progress_bar=True
    )
    trainer.fit(Wide(), wide_loader())

    assert seen[0] is None
    assert seen[1].endswith("MiB/256.00MiB")
    assert "get_metrics" not in vars(bar)


def test_aggregates_come_at_the_end_of_an_epoch() -> None:
    """Minimum, mean and maximum of what was read, once an epoch."""
    trainer = on_gpu(MemoryMonitor(every_n_steps=1, across_ranks=True), max_epochs=2)
    trainer.fit(Wide(), wide_loader(3))
    logger = trainer.logger
    held, top = logger.values("memory/allocated_gib"), logger.values("memory/allocated_gib_max")

    assert top == pytest.approx([max(held[:3]), max(held[3:])])
    assert logger.values("memory/allocated_gib_min") == pytest.approx(
        [min(held[:3]), min(held[3:])]
    )


@pytest.mark.parametrize("raises", [False, True], ids=["to its end", "exception"])
def test_nothing_is_left_behind(raises) -> None:
    """Threads, batches, module and monitor are gone when the run is (PL#3275, PL#8430)."""

    class Failing(Wide):
        def training_step(self, batch, batch_idx):
            if raises and batch_idx == 1:
                raise ValueError("user code")
            return super().training_step(batch, batch_idx)

    threads = threading.active_count()
    monitor = MemoryMonitor(every_n_steps=1, breakdown=True)
    model = Failing()
    trainer = on_gpu(monitor)
    try:
        trainer.fit(model, wide_loader(3))
    except ValueError:
        assert raises
    dead = [weakref.ref(thing) for thing in (monitor, model, trainer)]
    assert threading.active_count() == threads
    assert (
        torch.autograd.graph.disable_saved_tensors_hooks.__name__ == "disable_saved_tensors_hooks"
    )
    assert monitor._batch is None

    del monitor, model, trainer
    gc.collect()

    assert [reference() for reference in dead] == [None, None, None]


def test_it_survives_a_pickle_and_a_second_fit() -> None:
    """Before a run it can go to another process; after one it starts again."""
    monitor = pickle.loads(pickle.dumps(MemoryMonitor(every_n_steps=5)))  # noqa: S301
    for _ in range(2):
        fit(TinyRegressor, regression_loader(), monitor)

    assert [reading.step for reading in monitor.readings] == [5, 5]


def test_no_tensor_is_held_between_steps() -> None:
    """Neither the batch nor a saved tensor outlives its step (PL#1510)."""
    monitor = MemoryMonitor(every_n_steps=1, breakdown=True)
    trainer = on_gpu(monitor)
    trainer.fit(Wide(), wide_loader(2))
    held = read_memory("simgpu:0").allocated_bytes
    del monitor
    gc.collect()

    assert read_memory("simgpu:0").allocated_bytes == held


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("every_n_steps", 0, "every_n_steps is at least 1, got 0"),
        ("keep", 0, "keep is at least 1, got 0"),
        ("warn_above", 1.5, "warn_above is a fraction in"),
        ("sample_seconds", 0, "sample_seconds is above 0, got 0"),
    ],
)
def test_arguments_are_checked_at_once(option, value, message) -> None:
    """The constructor names the value and the range."""
    with pytest.raises(ValueError, match=message):
        MemoryMonitor(**{option: value})

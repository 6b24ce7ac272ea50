"""The profiler writes bounded files for chosen steps, and never stands in the way."""

from __future__ import annotations

import functools
import json

import psutil
import pytest
import torch
from fakes import ListLogger, TinyRegressor, regression_loader
from fits import quiet
from lightning.pytorch import Callback
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_oom.callbacks.memory_profiler import MemoryProfiler
from lightning_oom.errors import LightningOOMWarning
from lightning_oom.memory.history import AllocatorHistory
from lightning_oom.testing import SimulatedGPUStrategy, fail_at


def profiled(memory, *others, steps=8, **options):
    """Fit for some steps with a profiler."""
    trainer = quiet(memory, *others, max_epochs=-1, max_steps=steps, **options)
    trainer.fit(TinyRegressor(), regression_loader())
    return trainer


class FakeRecorder:
    """Stands for CUDA's allocator history."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def is_recording(self) -> bool:
        """Say whether it records."""
        return "start" in self.calls and "stop" not in self.calls

    def start(self, max_entries: int) -> None:
        """Record."""
        self.calls.append("start")

    def stop(self) -> None:
        """Stop."""
        self.calls.append("stop")

    def dump(self, path: str) -> None:
        """Write."""
        self.calls.append("dump")
        with open(path, "wb") as file:  # noqa: PTH123 - as torch does
            file.write(b"snapshot")


def with_history(profiler: MemoryProfiler) -> FakeRecorder:
    """Give a profiler a device that keeps a history."""
    recorder = FakeRecorder()
    profiler._make_history = functools.partial(AllocatorHistory, recorder=recorder)
    return recorder


def test_table_and_timeline_of_the_window_are_written(tmp_path) -> None:
    """The table sorts operators by memory; the timeline has the phases of the other steps."""
    profiler = MemoryProfiler(steps=(2, 6), folder=tmp_path)
    profiled(profiler)
    assert [file.name for file in profiler.files] == [
        "memory-rank0-step2.operators.txt",
        "memory-rank0-step2.timeline.json",
    ]
    (table,) = profiler.tables
    assert "Self CPU Mem" in table
    assert "aten::" in table
    assert table == profiler.files[0].read_text()
    events = json.loads(profiler.files[1].read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"step 4 forward", "step 4 backward", "step 5 optimizer"} <= names
    assert not any(name.startswith(("step 2", "step 6")) for name in names)


def test_the_simulated_gpu_has_a_timeline_of_its_own_memory(tmp_path) -> None:
    """Live bytes at the end of a step are those of the device."""
    seen: list[int] = []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            if trainer.global_step == 5:
                parameters = sum(p.nbytes for p in pl_module.parameters())
                seen.append(parameters)

    profiler = MemoryProfiler(steps=(4, 6), folder=tmp_path, operators=False)
    profiled(profiler, Look(), strategy=SimulatedGPUStrategy("64 MiB"), accelerator="auto", steps=7)
    events = json.loads(profiler.files[0].read_text())["traceEvents"]
    live = [event["args"]["live_bytes"] for event in events if event["ph"] == "C"]
    assert min(live) >= seen[0]
    assert max(live) <= torch.simgpu.max_memory_allocated()


def test_several_windows_and_a_run_that_ends_in_one(tmp_path) -> None:
    """Each window has its files; the last is written when the run ends."""
    profiler = MemoryProfiler(steps=[(0, 2), (3, 4), (6, 100)], folder=tmp_path)
    profiled(profiler)
    starts = {file.name.split(".")[0] for file in profiler.files}
    assert starts == {"memory-rank0-step0", "memory-rank0-step3", "memory-rank0-step6"}


def test_accumulated_batches_belong_to_their_step(tmp_path) -> None:
    """A window of one step has both batches of it."""
    profiler = MemoryProfiler(steps=(1, 2), folder=tmp_path, operators=False)
    profiled(profiler, steps=3, accumulate_grad_batches=2)
    events = json.loads(profiler.files[0].read_text())["traceEvents"]
    steps = {event["args"]["step"] for event in events if event["ph"] == "i"}
    assert steps == {1}


def test_the_history_is_on_before_the_step_and_off_after_it(tmp_path) -> None:
    """The snapshot is taken in between."""
    profiler = MemoryProfiler(steps=(2, 4), folder=tmp_path)
    recorder = with_history(profiler)
    profiled(profiler)
    assert recorder.calls == ["start", "dump", "stop"]
    assert profiler.files[-1].name == "memory-rank0-step2.snapshot.pickle"


def test_an_error_in_the_window_is_written_about_and_raised(tmp_path) -> None:
    """At an OOM all three files are there, everything is off, and the error is torch's."""
    profiler = MemoryProfiler(steps=(2, 6), folder=tmp_path)
    recorder = with_history(profiler)
    with pytest.raises(torch.OutOfMemoryError):
        profiled(profiler, fail_at(3, step=4))
    assert recorder.calls == ["start", "dump", "stop"]
    assert len(profiler.files) == 3


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path) -> None:
    """One warning in a good run, and the same error in a bad one; recordings end all the same."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    profiler = MemoryProfiler(steps=(2, 4), folder=blocked)
    recorder = with_history(profiler)
    with pytest.warns(LightningOOMWarning, match="leaves something out"):
        profiled(profiler)
    assert recorder.calls[-1] == "stop"
    assert profiler.files == []
    assert len(profiler.tables) == 1
    with (
        pytest.warns(LightningOOMWarning, match="leaves something out"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        profiled(profiler, fail_at(3, step=3))


def test_another_profiler_keeps_the_table_away(tmp_path) -> None:
    """There is one profiler at a time: the run goes on and the timeline is written."""
    memory = MemoryProfiler(steps=(0, 4), folder=tmp_path)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.warns(LightningOOMWarning, match="another profiler"),
    ):
        profiled(memory)
    assert [file.name for file in memory.files] == ["memory-rank0-step0.timeline.json"]


def test_lightning_s_profiler_keeps_the_table_away(tmp_path) -> None:
    """Likewise, also between its active steps."""
    memory = MemoryProfiler(steps=(0, 4), folder=tmp_path)
    with pytest.warns(LightningOOMWarning, match="PyTorchProfiler"):
        profiled(memory, profiler=PyTorchProfiler(dirpath=tmp_path, emit_nvtx=False), steps=5)
    assert [file.name for file in memory.files] == ["memory-rank0-step0.timeline.json"]


def test_files_are_capped(tmp_path) -> None:
    """No more than max_files, and one warning that says so."""
    profiler = MemoryProfiler(
        steps=[(0, 1), (2, 3), (4, 5)], folder=tmp_path, operators=False, max_files=2
    )
    with pytest.warns(LightningOOMWarning, match="max_files"):
        profiled(profiler)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_window_of_a_thousand_steps_stays_small(tmp_path) -> None:
    """1,000 steps: records are a ring, the table is of 4 steps, host memory stays."""
    sizes: list[int] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            if trainer.global_step in (200, 1000):
                sizes.append(psutil.Process().memory_info().rss)

    profiler = MemoryProfiler(steps=(0, 1001), folder=tmp_path, max_records=2000)
    profiled(profiler, Look(), steps=1000, logger=False)
    trace = json.loads(profiler.files[-1].read_text())["traceEvents"]
    assert sum(event["ph"] == "C" for event in trace) == 2000
    assert sizes[1] - sizes[0] < 30 * 2**20


def test_training_is_the_same_with_a_profiler(tmp_path) -> None:
    """Weights are equal to the bit."""
    results = []
    for profiler in (MemoryProfiler(steps=(1, 5), folder=tmp_path), Callback()):
        torch.manual_seed(3)
        trainer = profiled(profiler)
        results.append([p.detach().clone() for p in trainer.lightning_module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_default_folder_is_the_logger_s(tmp_path) -> None:
    """Below default_root_dir without a logger."""
    profiler = MemoryProfiler(steps=(0, 2), operators=False)
    profiled(profiler, steps=3, default_root_dir=tmp_path, logger=False)
    assert profiler.files[0].parent == tmp_path / "memory_profile"


@pytest.mark.parametrize(
    "steps", [(3, 3), (-1, 2), (5, 2), [(0, 4), (3, 6)], "ab", (), (1, 2, 3), [(1,)]]
)
def test_windows_out_of_order_are_refused(steps) -> None:
    """The error names the value and the range."""
    with pytest.raises(ValueError, match="start < stop"):
        MemoryProfiler(steps=steps)


@pytest.mark.parametrize("name", ["rows", "max_records", "max_files"])
def test_numbers_below_one_are_refused(name) -> None:
    """Likewise."""
    with pytest.raises(ValueError, match=f"{name} is at least 1, got 0"):
        MemoryProfiler(**{name: 0})


def test_steps_outside_of_windows_enter_no_mode() -> None:
    """Nothing is started before the window."""
    profiler = MemoryProfiler(steps=(50, 60))
    profiled(profiler, logger=ListLogger(), steps=3)
    assert profiler.files == []
    assert profiler._window is None

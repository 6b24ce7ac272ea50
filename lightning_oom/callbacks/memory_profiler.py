"""See which operators and lines take the memory, for some steps of a run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom.errors import LightningOOMWarning
from lightning_oom.memory.history import AllocatorHistory
from lightning_oom.memory.operator_table import OperatorTable
from lightning_oom.memory.timeline_trace import AllocationTimeline, chrome_trace
from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["MemoryProfiler"]

_MAX_TABLE_STEPS = 4


class MemoryProfiler(Callback):
    """Profile the memory of chosen training steps and write what took it to files.

    For each window of steps and each rank, into ``folder``:

    =========================================  ====================================================
    File                                       What it is
    =========================================  ====================================================
    ``memory-rank0-step2.operators.txt``       ``torch.profiler``'s table of operators, those that
                                               allocate most on the device (the host, on the CPU)
                                               first
    ``memory-rank0-step2.timeline.json``       each allocation and free with operator, phase and
                                               step, on every device; for Perfetto or
                                               ``chrome://tracing``
    ``memory-rank0-step2.snapshot.pickle``     on CUDA, the allocator's history with the lines that
                                               allocate; for ``pytorch.org/memory_viz``
    =========================================  ====================================================

    The table measures the first half of a window, at most 4 steps; the timeline records the rest,
    since the operators that it watches would be counted twice (in a window of a single step they
    are). History is recorded throughout. All three are bounded: a window may be as long as the run.
    When a run fails, what was recorded up to the error is written.

    The timeline counts bytes that are held: module, gradients, optimizer state and batch that are
    there when a window begins, and everything allocated in it. Its peak is therefore above what a
    :func:`~lightning_oom.testing.memory_limit` counts that began after the module was made.

    Args:
        steps: ``(start, stop)``: optimizer steps counted from 0, ``stop`` not included; or several
            such windows, ascending and apart.
        folder: Where to write; ``None`` takes ``memory_profile`` below the logger's folder, or below
            ``default_root_dir``.
        rows: Operators in the table, at least 1.
        operators: Make the table.
        timeline: Record the timeline.
        history: Record the allocator's history, where there is one.
        max_records: Allocations and frees kept of each window, at least 1.
        max_files: Files that a rank writes per run, at least 1.

    Attributes:
        files: What was written, in order.
        tables: The text of each table, in order.

    Raises:
        ValueError: An argument is outside its range. Raised by the constructor.

    Note:
        Cost outside of the windows: a comparison per batch. Inside: the profiler's (some 10 us per
        operator), 10 us per operator for the timeline. The batch that begins a window has been moved
        to the device before. A folder that cannot be written is a warning, never an error.

    Example:
        >>> import tempfile
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     profiler = MemoryProfiler(steps=(1, 3), folder=folder, operators=False)
        ...     trainer = Trainer(
        ...         max_steps=4, callbacks=[profiler], accelerator="cpu", logger=False,
        ...         enable_checkpointing=False, enable_progress_bar=False,
        ...         enable_model_summary=False,
        ...     )
        ...     trainer.fit(BoringModel())
        >>> [file.name for file in profiler.files]
        ['memory-rank0-step1.timeline.json']

    References:
        Lightning-AI/pytorch-lightning#10717, #11480, #16901.
    """

    def __init__(
        self,
        *,
        steps: Sequence[int] | Sequence[Sequence[int]] = (2, 6),
        folder: str | Path | None = None,
        rows: int = 20,
        operators: bool = True,
        timeline: bool = True,
        history: bool = True,
        max_records: int = 20_000,
        max_files: int = 24,
    ) -> None:
        for name, value in (("rows", rows), ("max_records", max_records), ("max_files", max_files)):
            if value < 1:
                raise ValueError(f"{name} is at least 1, got {value!r}")
        self.windows = _windows_of(steps)
        self.folder = None if folder is None else Path(folder)
        self.files: list[Path] = []
        self.tables: list[str] = []
        self._rows = rows
        self._wants = {"operators": operators, "timeline": timeline, "history": history}
        self._max_records = max_records
        self._max_files = max_files
        self._make_history: Callable[[torch.device], AllocatorHistory] = AllocatorHistory
        self._window: _Window | None = None
        self._next = 0
        self._warned = False

    @property
    def state_key(self) -> str:
        """Name of the callback in checkpoints, by its windows."""
        return f"{type(self).__qualname__}{self.windows}"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the run before."""
        self.files, self.tables, self._next, self._warned = [], [], 0, False

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a window, or go on to its second part."""
        step = trainer.global_step
        if self._window is None:
            self._window = self._begin(trainer, step)
        window = self._window
        if window is not None:
            self._guarded(lambda: window.enter_step(step, [pl_module, *trainer.optimizers, batch]))

    def _begin(self, trainer: Trainer, step: int) -> _Window | None:
        while self._next < len(self.windows) and step >= self.windows[self._next][1]:
            self._next += 1
        if self._next == len(self.windows) or step < self.windows[self._next][0]:
            return None
        device = trainer.strategy.root_device
        return _Window(
            first=step,
            stop=self.windows[self._next][1],
            operators=OperatorTable(device) if self._makes_table(trainer) else None,
            timeline=(
                AllocationTimeline(device=device, max_records=self._max_records)
                if self._wants["timeline"]
                else None
            ),
            history=self._make_history(device) if self._wants["history"] else None,
        )

    def _makes_table(self, trainer: Trainer) -> bool:
        """Whether the table is wanted, and nobody else uses torch's one profiler."""
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]  # set by a connector
            self._warn("there is no table of operators beside Lightning's PyTorchProfiler")
            return False
        return self._wants["operators"]

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Name the phase."""
        self._enter_phase("backward")

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Name the phase."""
        self._enter_phase("optimizer")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Name the phase."""
        self._enter_phase("validation")

    def _enter_phase(self, phase: str) -> None:
        if self._window is not None and self._window.timeline is not None:
            self._window.timeline.phase = phase

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a window after its last step."""
        self._enter_phase("between steps")
        if self._window is not None and trainer.global_step >= self._window.stop:
            self._end(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a window that the run did not fill."""
        self._end(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write what was recorded up to the error."""
        self._end(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End whatever is still recorded."""
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        self._next += 1
        self._guarded(window.stop_recording)
        self._guarded(lambda: self._write(trainer, window))
        self._guarded(window.stop_history)

    # -- files
    def _write(self, trainer: Trainer, window: _Window) -> None:
        table = window.operators.render(rows=self._rows) if window.operators is not None else None
        if table is not None:
            self.tables.append(table)
            self._write_one(trainer, window, "operators.txt", lambda path: path.write_text(table))
        timeline = window.timeline
        if timeline is not None and timeline.records:
            trace = chrome_trace(timeline.records, rank=trainer.global_rank)
            self._write_one(
                trainer, window, "timeline.json", lambda path: path.write_text(json.dumps(trace))
            )
            if timeline.peak is not None:
                peak = timeline.peak
                rank_zero_info(
                    f"MemoryProfiler: steps {window.first} to {window.stop - 1}: "
                    f"{format_bytes(peak.live_bytes)} held at most, module and optimizer included, in "
                    f"{peak.phase} of step {peak.step}, at {peak.operator}."
                )
        history = window.history
        if history is not None and history.is_available:
            self._write_one(trainer, window, "snapshot.pickle", history.dump)

    def _write_one(
        self, trainer: Trainer, window: _Window, ending: str, write: Callable[[Path], object]
    ) -> None:
        if len(self.files) >= self._max_files:
            self._warn(f"it has written its {self._max_files} files (max_files)")
            return
        folder = self.folder or Path(trainer.log_dir or trainer.default_root_dir, "memory_profile")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"memory-rank{trainer.global_rank}-step{window.first}.{ending}"
        write(path)
        self.files.append(path)

    def _guarded(self, act: Callable[[], object]) -> None:
        """Let no failure of the profiler end the run, or hide the error that does."""
        try:
            act()
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"MemoryProfiler leaves something out: {reason}", LightningOOMWarning, stacklevel=2
            )


class _Window:
    """What is recorded of some steps."""

    def __init__(
        self,
        *,
        first: int,
        stop: int,
        operators: OperatorTable | None,
        timeline: AllocationTimeline | None,
        history: AllocatorHistory | None,
    ) -> None:
        self.first = first
        self.stop = stop
        self.operators = operators
        self.timeline = timeline
        self.history = history
        table_steps = max(min((stop - first) // 2, _MAX_TABLE_STEPS), 1)
        self._table_until = first + table_steps if operators is not None else first
        self._timeline_from = min(self._table_until, stop - 1)
        if timeline is None:
            self._table_until = min(first + _MAX_TABLE_STEPS, stop)
        self._is_profiling = self._is_watching = False

    def enter_step(self, step: int, known: list[Any]) -> None:
        """Start and stop what is to be on in this step, which begins."""
        if step == self.first and self.history is not None:
            self.history.start()
        if self.operators is not None and step >= self._table_until:
            self._stop_profiling()
        if self.timeline is not None:
            self.timeline.phase, self.timeline.step = "forward", step
            if step >= self._timeline_from and not self._is_watching:
                self.timeline.register(known)
                self.timeline.__enter__()
                self._is_watching = True
        if self.operators is not None and step < self._table_until and not self._is_profiling:
            self._is_profiling = True
            self.operators.start()

    def stop_recording(self) -> None:
        """Stop profiler and timeline."""
        try:
            self._stop_profiling()
        finally:
            if self._is_watching and self.timeline is not None:
                self._is_watching = False
                self.timeline.__exit__(None, None, None)

    def _stop_profiling(self) -> None:
        if self._is_profiling and self.operators is not None:
            self._is_profiling = False
            self.operators.stop()

    def stop_history(self) -> None:
        """Stop the recording of the allocator, which a snapshot needs to be on."""
        if self.history is not None:
            self.history.stop()


def _windows_of(steps: Any) -> list[tuple[int, int]]:
    """Check the windows and return them as pairs."""
    try:
        pairs = [steps] if isinstance(steps[0], int) else list(steps)
        windows = [(int(start), int(stop)) for start, stop in pairs]
    except (TypeError, ValueError, IndexError, KeyError):
        windows = []
    is_apart = all(
        before <= start < stop
        for (start, stop), before in zip(windows, [0, *(end for _, end in windows)], strict=False)
    )
    if not windows or not is_apart:
        raise ValueError(
            f"steps is (start, stop) with 0 <= start < stop, or several such pairs that ascend, "
            f"got {steps!r}"
        )
    return windows

"""Foresee the peak memory of a training step, before it runs and without the device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning_oom.errors import StepNotTracedError, add_note
from lightning_oom.planning.fake_step import FakeStep
from lightning_oom.planning.interval import ERRORS
from lightning_oom.planning.on_target import settings_on
from lightning_oom.planning.precision import parse_precision
from lightning_oom.planning.real_step import measure_rows
from lightning_oom.planning.replay import fits_into, replay_trace
from lightning_oom.planning.rows import TraceByRows, count_rows
from lightning_oom.planning.target import TargetDevice, parse_target
from lightning_oom.planning.workspaces import TargetTrace, with_workspaces
from lightning_oom.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from lightning_oom.planning.replay import Replay
    from lightning_oom.planning.trace import MemoryTrace, Substitution

__all__ = ["MemoryEstimate", "estimate_peak", "estimate_trace"]

_MOST_ROWS = 2**24


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What a training step is going to take of a device.

    Attributes:
        allocated_bytes: The most in live blocks (``torch.cuda.max_memory_allocated``).
        reserved_bytes: What the caching allocator ends up with (``max_memory_reserved``).
        device_bytes: With the context of the process: what ``nvidia-smi`` shows. ``None`` where the
            context is unknown.
        peak_phase: Where the most is allocated: ``"forward"``, ``"backward"``, ``"optimizer"`` or
            ``"before"``; ``None`` where nothing is.
        by_kind: Allocated bytes at that moment, by kind, the largest first.
        by_module: The same by module.
        phase_peaks: The most allocated in each phase.
        rows: Rows of the batch; ``None`` where it has none.
        precision: As the Trainer calls it.
        device: Name of the target device.
        tier: ``"fake"`` ran on fake tensors; ``"measured"`` ran few rows for real and extended them.
        substitutions: Questions about values that were answered pessimistically. With any, the
            estimate is an upper bound.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int | None
    peak_phase: str | None
    by_kind: Mapping[str, int]
    by_module: Mapping[str, int]
    phase_peaks: Mapping[str, int]
    rows: int | None
    precision: str
    device: str
    tier: Literal["fake", "measured"]
    substitutions: tuple[Substitution, ...] = ()
    _at: _AtRows | None = field(default=None, repr=False, compare=False)

    @property
    def total_bytes(self) -> int:
        """What has to fit: device bytes, or reserved bytes where the context is unknown."""
        return self.reserved_bytes if self.device_bytes is None else self.device_bytes

    @property
    def bytes_per_row(self) -> float | None:
        """What one more row adds to the allocated bytes here; ``None`` where rows cannot change.

        Taken over a quarter more rows, for blocks are rounded.
        """
        if self._at is None or self.rows is None:
            return None
        more = max(self.rows // 4, 1)
        larger = self._at.replay(self.rows + more)
        return (larger.allocated_bytes - self.allocated_bytes) / more

    def interval(self, coverage: float = 0.9) -> tuple[int, int]:
        """Return bounds that hold the measured total with a probability.

        They come from the errors on published measurements of other models (see
        ``tests/benchmarks/estimate.py``), so they hold on average over models, not for each one.

        Args:
            coverage: The probability, above 0 and below 1.

        Returns:
            Lower and upper bound of :attr:`total_bytes`.

        Raises:
            ValueError: ``coverage`` is outside its range.
        """
        if not 0 < coverage < 1:
            raise ValueError(f"coverage is above 0 and below 1, got {coverage!r}")
        tail = (1 - coverage) / 2
        total = self.total_bytes
        return round(total * ERRORS.ratio(tail)), round(total * ERRORS.ratio(1 - tail))

    def fits(self, limit: int | str) -> float:
        """Return the probability that the step fits into a device.

        Args:
            limit: What the device can hold, in bytes or as text such as ``"24 GiB"``.
        """
        return ERRORS.probability(parse_bytes(limit) / max(self.total_bytes, 1))

    def at_rows(self, rows: int) -> MemoryEstimate:
        """Return the estimate for another number of rows; nothing is run again.

        Args:
            rows: At least 1.

        Raises:
            ValueError: ``rows`` is below 1, or the step cannot be extended to other rows.
        """
        if self._at is None:
            raise ValueError("this step cannot be extended to other rows: estimate it at those")
        return self._at.estimate(rows)

    def largest_rows(self, limit: int | str) -> int:
        """Return the most rows that fit into a device, 0 where not even one does.

        Cached memory that is given back when the device is full is taken into account.

        Args:
            limit: What the device can hold, in bytes or as text such as ``"24 GiB"``; the context is
                part of it.

        Raises:
            ValueError: The step cannot be extended to other rows, or does not grow with them.
        """
        if self._at is None:
            raise ValueError("this step cannot be extended to other rows: estimate it at those")
        room = parse_bytes(limit) - (self.total_bytes - self.reserved_bytes)
        return self._at.largest_rows(room)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        shown = asdict(replace(self, _at=None))
        del shown["_at"]
        lower, upper = self.interval()
        return shown | {
            "substitutions": [substitution._asdict() for substitution in self.substitutions],
            "bytes_per_row": self.bytes_per_row,
            "interval_90": [lower, upper],
        }


@dataclass(frozen=True, slots=True)
class _AtRows:
    """Estimates of one step at any number of rows."""

    by_rows: TraceByRows
    releases: frozenset[int]
    target: TargetDevice
    precision: str

    def replay(self, rows: int) -> Replay:
        trace = TargetTrace(self.by_rows.at(rows), self.releases)
        return replay_trace(trace, expandable_segments=self.target.expandable_segments)

    def estimate(self, rows: int) -> MemoryEstimate:
        trace = TargetTrace(self.by_rows.at(rows), self.releases)
        return replace(_estimate(trace, self.target, self.precision), _at=self)

    def largest_rows(self, room_bytes: int) -> int:
        if room_bytes <= 0 or not self._fits(1, room_bytes):
            return 0
        fitting, failing = 1, 2
        while self._fits(failing, room_bytes):
            fitting, failing = failing, failing * 2
            if failing > _MOST_ROWS:
                raise ValueError("the peak does not grow with the number of rows")
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            if self._fits(middle, room_bytes):
                fitting = middle
            else:
                failing = middle
        return fitting

    def _fits(self, rows: int, room_bytes: int) -> bool:
        trace = self.by_rows.at(rows)
        if trace.peak_bytes > room_bytes:
            return False
        target = TargetTrace(trace, self.releases)
        return fits_into(target, room_bytes, expandable_segments=self.target.expandable_segments)


def estimate_peak(
    module: torch.nn.Module,
    batch: Any,
    *,
    precision: str | int | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    device: TargetDevice | torch.device | str | None = None,
    rows: int | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    **how: Any,
) -> MemoryEstimate:
    """Foresee what two training steps take of a device, without the device.

    The user's own ``training_step``, backward and optimizer step run on fake tensors with the
    operators that the target would run; the workspaces of its kernels are added; the allocations go
    through a model of the caching allocator. Where fake tensors cannot follow, two and three rows are
    run for real where the module is, and every allocation is extended on its own line.

    Args:
        module: A LightningModule, or any ``nn.Module``. It is not changed.
        batch: An example as the module gets it; only shapes and types matter on fake tensors.
        precision: As in ``Trainer(precision=...)``; ``None`` is 32-bit.
        optimizer: Makes an optimizer from parameters (a class, a partial); ``None`` asks
            ``configure_optimizers``.
        device: The target: ``"cuda"``, ``"a100"``, ``"cpu"``, a
            :class:`~lightning_oom.planning.target.TargetDevice`... ``None`` is where the module is,
            and a CUDA device in general for a module on the CPU.
        rows: Rows of the batch; ``None`` takes those of the example.
        loss: For a module without ``training_step``: ``loss(module, batch)``.
        **how: What else :meth:`FakeStep.run <lightning_oom.planning.fake_step.FakeStep.run>` takes.

    Returns:
        The estimate.

    Raises:
        StepNotTracedError: The step runs neither on fake tensors nor for real; the message names the
            line.
        ValueError: An argument is out of its range.

    Note:
        Eager mode, one device, one process; nothing of NCCL. Conditional parts of a step count as
        they were answered (``substitutions``). Cost: two traces, 2 to 8 s for BERT-base.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU())
        >>> estimate = estimate_peak(model, torch.zeros(64, 512), optimizer=torch.optim.Adam)
        >>> estimate.peak_phase, estimate.allocated_bytes < estimate.reserved_bytes
        ('optimizer', True)
        >>> estimate.at_rows(100_000).peak_phase
        'forward'
    """
    target = parse_target(device, module)
    name = parse_precision(precision).name
    wanted = count_rows(batch) if rows is None else rows
    try:
        run = partial(_fake_run, FakeStep(module, batch, loss=loss), target, precision)
        return _estimate_rows(partial(run, optimizer=optimizer, **how), wanted, target, name)
    except StepNotTracedError as error:
        fake_error = error
    try:
        run = partial(measure_rows, module, batch, precision=precision, loss=loss)
        return _estimate_rows(partial(run, optimizer=optimizer, **how), wanted, target, name)
    except StepNotTracedError as error:
        add_note(error, f"before, {fake_error}")
        raise


def estimate_trace(
    trace: MemoryTrace, target: TargetDevice, *, precision: str = "32-true"
) -> MemoryEstimate:
    """Make an estimate of a trace that was recorded with its operators.

    Args:
        trace: Of two steps at least, so that the state of the optimizer is there.
        target: Whose kernels.
        precision: What it was run in, for the record.

    Returns:
        The estimate; its rows cannot change.
    """
    return _estimate(with_workspaces(trace, target), target, precision)


def _fake_run(step: FakeStep, target: TargetDevice, precision: Any, **how: Any) -> MemoryTrace:
    return step.run(record_operators=True, **(settings_on(target, precision) | how))


def _estimate_rows(
    run: Callable[..., MemoryTrace], rows: int | None, target: TargetDevice, precision: str
) -> MemoryEstimate:
    """Run at the wanted rows and at one more, to know the step at any."""
    if rows is None:
        return _estimate(with_workspaces(run(), target), target, precision)
    small = max(rows, 2)  # with one row, other operators may run
    first, second = (with_workspaces(run(rows=n), target) for n in (small, small + 1))
    try:
        by_rows = TraceByRows.between(first.trace, second.trace)
    except StepNotTracedError:
        at = None
    else:
        at = _AtRows(by_rows, first.releases, target, precision)
    exact = first if rows == small else with_workspaces(run(rows=rows), target)
    return replace(_estimate(exact, target, precision), _at=at)


def _estimate(trace: TargetTrace, target: TargetDevice, precision: str) -> MemoryEstimate:
    held = replay_trace(trace, expandable_segments=target.expandable_segments)
    context = target.context_bytes
    return MemoryEstimate(
        allocated_bytes=held.allocated_bytes,
        reserved_bytes=held.reserved_bytes,
        device_bytes=None if context is None else held.reserved_bytes + context,
        peak_phase=held.peak_phase,
        by_kind=held.by_kind,
        by_module=held.by_module,
        phase_peaks=held.phase_peaks,
        rows=trace.trace.rows,
        precision=precision,
        device=target.name,
        tier="measured" if trace.trace.is_measured else "fake",
        substitutions=trace.trace.substitutions,
    )

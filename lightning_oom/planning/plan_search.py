"""Search for the cheapest combination of remedies whose dry run fits."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_oom.errors import StepNotTracedError
from lightning_oom.memory.blocks import LARGE_SEGMENT_BYTES
from lightning_oom.planning.estimate import estimate_peak
from lightning_oom.planning.fake_step import FakeStep
from lightning_oom.planning.light_batch import light_copy
from lightning_oom.planning.longest_batch import size_of
from lightning_oom.planning.offload_dry_run import DryOffload
from lightning_oom.planning.plan_blocks import choices_of_blocks
from lightning_oom.planning.plan_remedies import Remedies, step_in_groups, step_one_by_one
from lightning_oom.planning.plan_time import StepTime, measure_work
from lightning_oom.planning.precision import parse_precision
from lightning_oom.planning.rows import count_rows
from lightning_oom.planning.skeleton import Skeleton
from lightning_oom.planning.target import parse_target
from lightning_oom.reduction.checkpointing import block_levels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from lightning_oom.planning.estimate import MemoryEstimate
    from lightning_oom.planning.target import TargetDevice
    from lightning_oom.planning.trace import MemoryTrace

__all__ = ["Candidate", "PlanSearch"]

_FEW_ROWS = 2


class Candidate(NamedTuple):
    """A combination with what its dry run says.

    Attributes:
        remedies: The combination.
        seconds: Predicted time of a step.
        allocated_bytes: The most in live tensors.
        peak_bytes: What the device has to hold, expected.
        upper_bytes: The upper bound of its interval, and a segment of the allocator: what ran before,
            such as a trial on a few rows, leaves other holes than a dry run.
        peak_phase: Where the most is allocated.
    """

    remedies: Remedies
    seconds: float
    allocated_bytes: int
    peak_bytes: int
    upper_bytes: int
    peak_phase: str | None

    @property
    def order(self) -> tuple[float, bool, int, int]:
        """Smaller is better: time, then numbers kept, then fewer changes."""
        remedies = self.remedies
        names = remedies.names
        return self.seconds, remedies.mixed, len(names), remedies.num_micro_batches


class PlanSearch:
    """Everything that was found out about one training step, for any limit.

    Combinations that differ in rows alone share two dry runs, which are made when they are first
    asked for. What is tried does not depend on the limit, so that more memory never gives a slower
    plan: in each row of combinations that are ordered by time, the first that fits is found by
    bisection, whose every decision is the same or cheaper under a larger limit.

    Args:
        module: As for :class:`~lightning_oom.planning.fake_step.FakeStep`.
        batch: The largest that is to fit.
        precision: As in ``Trainer(precision=...)``.
        optimizer: Makes the optimizer; ``None`` asks ``configure_optimizers``.
        device: The target, as for :func:`~lightning_oom.planning.estimate.estimate_peak`.
        loss: As for :class:`~lightning_oom.planning.fake_step.FakeStep`.
        coverage: Of the interval whose upper bound has to fit, above 0 and below 1.
        accumulate: Batches per optimizer step without any plan, at least 1.

    Attributes:
        rows: Of the batch; ``None`` where it has none.
        num_dry_runs: How often the step was run so far.

    Raises:
        StepNotTracedError: The plain step cannot be run on fake tensors.
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        batch: Any,
        *,
        precision: str | int | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        device: TargetDevice | torch.device | str | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        coverage: float = 0.9,
        accumulate: int = 1,
    ) -> None:
        if not 0 < coverage < 1:
            raise ValueError(f"coverage is above 0 and below 1, got {coverage!r}")
        self.precision = parse_precision(precision).name
        self.target = parse_target(device, module)
        self.coverage = coverage
        self.accumulate = accumulate
        self.rows = count_rows(batch)
        self.num_dry_runs = 0
        place = next((parameter.device for parameter in module.parameters()), "cpu")
        batch = light_copy(batch, place)  # a search may live longer than the step
        self._module, self._batch, self._loss = module, batch, loss
        self._optimizer = optimizer
        self._step = FakeStep(module, batch, loss=loss)
        self._how: dict[str, Any] = {"precision": precision, "optimizer": optimizer}
        self._levels = [[block.path for block in level] for level in block_levels(module)]
        self._batch_bytes = sum(t.numel() * t.element_size() for t in _tensors_in(batch))
        self._operators = self._run(prepare_optimizers=step_in_groups)
        self._time = self._measure_time()
        self._choices: list[list[tuple[str, ...]]] | None = None
        self._estimates: dict[tuple[Remedies, int | None], tuple[MemoryEstimate, float]] = {}
        self._known: dict[Remedies, Candidate | None] = {}
        self._moved_bytes: dict[tuple[str, ...], float] = {}

    def best(self, limit_bytes: int, allow: Iterable[str]) -> Candidate | None:
        """Return the fastest combination whose upper bound is not above a limit.

        Args:
            limit_bytes: What the device can hold.
            allow: Remedies that may be used.

        Returns:
            ``None`` where nothing fits.
        """
        plain = self.candidate(Remedies())
        if plain is not None and plain.upper_bytes <= limit_bytes:
            return plain
        best: Candidate | None = None
        for line in sorted(self._lines(frozenset(allow)), key=self._least_seconds):
            if best is not None and self._least_seconds(line) >= best.seconds:
                break
            if self._may_help(line) and self._reaches(line, limit_bytes):
                found = self._first_fitting(line, limit_bytes)
                if found is not None and (best is None or found.order < best.order):
                    best = found
        return best

    def leanest(self, allow: Iterable[str]) -> Candidate:
        """Return the combination, of those that go furthest, with the lowest upper bound.

        Args:
            allow: Remedies that may be used.
        """
        plain = self.candidate(Remedies())
        assert plain is not None  # noqa: S101 - it was run when the search was made
        found = [plain]
        for remedies in {self._furthest(line) for line in self._lines(frozenset(allow))}:
            candidate = self.candidate(remedies)
            if candidate is not None:
                found.append(candidate)
        return min(found, key=lambda candidate: (candidate.upper_bytes, candidate.order))

    def candidate(self, remedies: Remedies) -> Candidate | None:
        """Run a combination; ``None`` where it does not go with the module."""
        if remedies not in self._known:
            try:
                self._known[remedies] = self._judge(remedies)
            except StepNotTracedError:
                if remedies == Remedies():
                    raise
                self._known[remedies] = None
        return self._known[remedies]

    def allocated_bytes_of(self, batch: Any, remedies: Remedies) -> int:
        """Predict the most that the step has in tensors with another batch of the same kind.

        Args:
            batch: In micro-batches of as many rows as the planned one, or fewer.
            remedies: What is done to the step.

        Raises:
            StepNotTracedError: The step cannot be run with this batch.
        """
        known = self.candidate(remedies) if size_of(batch) == size_of(self._batch) else None
        if known is not None:
            return known.allocated_bytes
        rows, together, waiting = count_rows(batch), None, 0
        if rows is not None:
            most = -(-(self.rows or 1) // remedies.num_micro_batches)
            together = -(-rows // -(-rows // most))
            remedies = replace(remedies, num_micro_batches=1 if together == rows else 2)
            num_bytes = sum(t.numel() * t.element_size() for t in _tensors_in(batch))
            waiting = num_bytes * (rows - together) // max(rows, 1)
        return self._foresee(batch, remedies, together)[0].allocated_bytes + waiting

    def micro_batches(self) -> list[int]:
        """Return the numbers of parts that are tried: 1, 2, 3, 4, 6, 8, 12... up to single rows."""
        rows = self.rows or 1
        wanted = {1, rows}
        power = 2
        while power < rows:
            wanted |= {power, min(power * 3 // 2, rows)}
            power *= 2
        return sorted({-(-rows // -(-rows // parts)) for parts in wanted})

    def _lines(self, allow: frozenset[str]) -> Iterator[list[Remedies]]:
        """Give combinations in rows: each one more of the same, slower and smaller."""
        early = "zero_grad" in allow
        parts = self.micro_batches() if "rows" in allow else [1]
        for mixed in (False, True) if self._may_mix(allow) else (False,):
            for single in (False, True) if "optimizer" in allow else (False,):
                for number in parts:
                    base = Remedies(num_micro_batches=number, one_by_one=single, mixed=mixed)
                    yield from self._lines_of(base, allow, early=early)

    def _lines_of(
        self, base: Remedies, allow: frozenset[str], *, early: bool
    ) -> Iterator[list[Remedies]]:
        last = replace(base, early_zero_grad=early)
        start = [base, last] if early else [base]
        choices = self._blocks() if "checkpoint" in allow else []
        if not choices:
            yield start
        for level in choices:
            more = [replace(last, checkpointed=paths) for paths in level]
            yield [*start, *sorted(more, key=self._time.seconds)]
        # Few rows have few storages that are worth moving: with all rows, or as a last resort.
        if "offload" in allow and base.num_micro_batches in (1, self.micro_batches()[-1]):
            yield [replace(last, offload=True)]
            for level in choices:
                yield [replace(last, offload=True, checkpointed=level[-1])]

    def _may_mix(self, allow: frozenset[str]) -> bool:
        return "precision" in allow and self.precision == "32-true"

    def _furthest(self, line: list[Remedies]) -> Remedies:
        """Return the end of a line with as few rows as it goes."""
        last = line[-1]
        parts = self.micro_batches()[-1] if last.num_micro_batches > 1 else 1
        return replace(last, num_micro_batches=parts)

    def _reaches(self, line: list[Remedies], limit_bytes: int) -> bool:
        """Say whether a line with as few rows as it goes would fit; saves trying all the others."""
        furthest = self.candidate(self._furthest(line))
        return furthest is not None and furthest.upper_bytes - self._batch_bytes <= limit_bytes

    def _may_help(self, line: list[Remedies]) -> bool:
        """Leave out steps tensor by tensor where it is not the optimizer that sets the peak."""
        if not line[-1].one_by_one:
            return True
        if self._time.single_kernels == self._time.grouped_kernels:
            return False
        grouped = self.candidate(replace(line[-1], one_by_one=False))
        return grouped is not None and grouped.peak_phase == "optimizer"

    def _least_seconds(self, line: list[Remedies]) -> float:
        first = line[0]
        is_known = first.offload and first.num_micro_batches == 1
        return self._time.seconds(first, moved_bytes=self._moved(first) if is_known else 0)

    def _moved(self, remedies: Remedies) -> float:
        """Return what a forward over all rows moves to the host; 0 where that cannot be run."""
        if remedies.checkpointed not in self._moved_bytes:
            offload = self._dry_offload(self._batch)
            options = Remedies(checkpointed=remedies.checkpointed).run_options(offload)
            with suppress(StepNotTracedError):
                self._run(**options)
            moved_bytes = offload.moved_bytes / max(offload.num_forwards, 1)
            self._moved_bytes[remedies.checkpointed] = moved_bytes
        return self._moved_bytes[remedies.checkpointed]

    def _dry_offload(self, batch: Any) -> DryOffload:
        return DryOffload(batch=_tensors_in(batch), has_streams=self.target.kernels == "cuda")

    def _first_fitting(self, line: list[Remedies], limit_bytes: int) -> Candidate | None:
        best = self._fitting(line[-1], limit_bytes)
        low, high = 0, len(line) - 1
        while best is not None and low < high:
            middle = (low + high) // 2
            candidate = self._fitting(line[middle], limit_bytes)
            if candidate is None:
                low = middle + 1
            else:
                best, high = candidate, middle
        return best

    def _fitting(self, remedies: Remedies, limit_bytes: int) -> Candidate | None:
        candidate = self.candidate(remedies)
        return candidate if candidate and candidate.upper_bytes <= limit_bytes else None

    def _judge(self, remedies: Remedies) -> Candidate:
        parts = remedies.num_micro_batches
        rows = None if self.rows is None else -(-self.rows // parts)
        estimate, moved_bytes = self._estimate(remedies, rows)
        # A batch that is split after it has come to the device lies there whole.
        waiting = 0
        if self.rows and rows is not None:
            waiting = self._batch_bytes * (self.rows - rows) // self.rows
        return Candidate(
            remedies=remedies,
            seconds=self._time.seconds(remedies, moved_bytes=moved_bytes * parts),
            allocated_bytes=estimate.allocated_bytes + waiting,
            peak_bytes=estimate.total_bytes + waiting,
            upper_bytes=estimate.interval(self.coverage)[1] + waiting + LARGE_SEGMENT_BYTES,
            peak_phase=estimate.peak_phase,
        )

    def _estimate(self, remedies: Remedies, rows: int | None) -> tuple[MemoryEstimate, float]:
        """Estimate at some rows, from a run at all rows where that can be extended."""
        alike = replace(remedies, num_micro_batches=min(remedies.num_micro_batches, 2))
        if remedies.offload:  # with fewer rows, fewer storages are large enough to be moved
            return self._estimate_at(alike, rows)
        whole = self._estimate_at(alike, self.rows)
        if rows == self.rows or rows is None:
            return whole
        try:
            return whole[0].at_rows(rows), 0.0
        except ValueError:
            return self._estimate_at(alike, rows)

    def _estimate_at(self, remedies: Remedies, rows: int | None) -> tuple[MemoryEstimate, float]:
        key = remedies, rows
        if key not in self._estimates:
            self._estimates[key] = self._foresee(self._batch, remedies, rows)
        return self._estimates[key]

    def _foresee(
        self, batch: Any, remedies: Remedies, rows: int | None
    ) -> tuple[MemoryEstimate, float]:
        """Return the estimate, and the bytes that one forward moves to the host."""
        offload = self._dry_offload(batch) if remedies.offload else None
        self.num_dry_runs += 2
        estimate = estimate_peak(
            self._module,
            batch,
            precision=remedies.precision_from(self.precision),
            optimizer=self._optimizer,
            device=self.target,
            rows=rows,
            loss=self._loss,
            **remedies.run_options(offload, accumulate=self.accumulate),
        )
        moved = 0.0 if offload is None else offload.moved_bytes / max(offload.num_forwards, 1)
        return estimate, moved

    def _blocks(self) -> list[list[tuple[str, ...]]]:
        if self._choices is None:
            how = {**self._how, "zero_grad": "early"}
            self.num_dry_runs += 2 * len(self._levels)
            found = (
                choices_of_blocks(self._step, self._operators, level, **how)
                for level in self._levels
            )
            self._choices = [choices for choices in found if choices]
        return self._choices

    def _run(self, **options: Any) -> MemoryTrace:
        """Run one step without remedies, with its operators."""
        self.num_dry_runs += 1
        return self._step.run(**self._how, **options, num_steps=1, record_operators=True)

    def _measure_time(self) -> StepTime:
        large = self._operators
        rows = self.rows or 1
        small = large
        if rows > _FEW_ROWS:
            small = self._run(rows=_FEW_ROWS, prepare_optimizers=step_in_groups)
        single = self._run(prepare_optimizers=step_one_by_one)
        work, grouped = measure_work(large, self._levels)
        return StepTime(
            rows=rows,
            large=work,
            small=measure_work(small, self._levels)[0],
            small_rows=min(rows, _FEW_ROWS),
            grouped_kernels=grouped,
            single_kernels=measure_work(single, [])[1],
        )


def _tensors_in(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    Skeleton(collect).value(batch)
    return found

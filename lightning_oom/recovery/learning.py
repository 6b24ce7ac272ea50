"""What a finished step teaches the rows policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.memory import PeakWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lightning_oom.memory import MemoryReading
    from lightning_oom.recovery.batches import BatchSignature
    from lightning_oom.recovery.knowledge import RowsPolicies
    from lightning_oom.recovery.plan import AttemptPlan, Mode, Trial

__all__ = ["RowsLearning"]


class RowsLearning:
    """Asks the policies how many rows to run, and tells them what happened.

    Args:
        policies: One per mode.
        device: Where steps run.
        read: Reads the device's counters, ``None`` where it cannot.

    Note:
        Before anything has failed, a step costs one dictionary look-up per policy and no counter is
        read or reset. Afterwards peaks are read when a policy has use for one.
    """

    def __init__(
        self,
        policies: RowsPolicies,
        *,
        device: torch.device,
        read: Callable[[], MemoryReading | None],
    ) -> None:
        self.policies = policies
        self.device = device
        self.read = read
        self.limit_bytes: int | None = None
        self.base_bytes: int | None = None
        self._watch: PeakWatch | None = None
        self._retries: int | None = None

    def note_base(self, reading: MemoryReading) -> None:
        """Remember what is allocated between steps; a resident set is no allocator's counter."""
        if reading.peak_allocated_bytes is not None:
            self.limit_bytes = reading.limit_bytes
            self.base_bytes = reading.allocated_bytes

    def propose(self, mode: Mode, signature: BatchSignature | None, rows: int | None) -> int:
        """Return how many rows a policy would run together."""
        if signature is None or rows is None:
            return rows or 1
        return self.policies.of(mode).propose(
            signature, rows, limit_bytes=self.limit_bytes, base_bytes=self.base_bytes
        )

    def shrink(
        self, mode: Mode, signature: BatchSignature | None, rows: int | None, failed: int
    ) -> int | None:
        """Return fewer rows than failed; ``None`` after one."""
        if signature is None:
            return failed // 2 or None
        return self.policies.of(mode).next_rows(
            signature, failed, rows=rows, limit_bytes=self.limit_bytes, base_bytes=self.base_bytes
        )

    def before_attempt(self) -> None:
        """Start a new peak, once peaks are worth watching."""
        if self._watch is not None:
            self._watch.restart()

    def after_success(self, trial: Trial, plan: AttemptPlan) -> None:
        """Record which rows fitted and which did not."""
        self._learn_holding(trial, plan)
        signature, rows = trial.signature, plan.rows_together or trial.rows
        if signature is None or rows is None or plan.contexts:
            return
        modes: tuple[Mode, ...] = ("split", "chunk") if plan.mode == "whole" else (plan.mode,)
        peak, near_miss = self._peak(signature, rows, modes)
        if trial.failures:
            if self._watch is None:
                self._watch = PeakWatch(self.device)
            if plan.mode != "whole":
                self._record_failures(trial, signature)
                self.policies.preferred = plan.mode
        for mode in modes:
            self.policies.of(mode).record_success(
                signature, rows, peak_bytes=peak, base_bytes=self.base_bytes, near_miss=near_miss
            )

    def _learn_holding(self, trial: Trial, plan: AttemptPlan) -> None:
        policy, size = self.policies.holding, trial.num_elements
        if size is None:
            return
        if plan.holding and trial.failures:
            policy.learn(size, plan.holding[-1], plan.rows_together)
        elif policy.needs and plan.mode == "whole" and not plan.holding:
            policy.forget(size)

    def _peak(
        self, signature: BatchSignature, rows: int, modes: tuple[Mode, ...]
    ) -> tuple[int | None, bool]:
        if self._watch is None or not any(
            self.policies.of(mode).wants_peak(signature, rows) for mode in modes
        ):
            return None, False
        reading = self.read()
        if reading is None:
            return None, False
        before, self._retries = self._retries, reading.alloc_retries
        near_miss = None not in (before, self._retries) and before != self._retries
        return self._watch.read().allocated_bytes, near_miss

    def _record_failures(self, trial: Trial, signature: BatchSignature) -> None:
        for failure in trial.failures:
            plan = failure.plan
            if plan.contexts or failure.cause.confidence == "likely":
                continue
            if plan.mode == "whole":
                if trial.rows is not None:
                    self.policies.split.record_failure(signature, trial.rows)
                    self.policies.chunk.record_failure(signature, trial.rows)
            elif plan.rows_together is not None:
                self.policies.of(plan.mode).record_failure(signature, plan.rows_together)

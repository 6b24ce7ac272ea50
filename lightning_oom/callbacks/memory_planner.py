"""Plan the training step for the memory of the device before the first step, and apply the plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence  # noqa: TC003 - jsonargparse reads the annotations
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Union

from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom._lightning.plan import apply_plan, impossible_remedies, planned_batch
from lightning_oom.errors import LightningOOMWarning, StepNotTracedError
from lightning_oom.memory import PeakWatch, read_memory
from lightning_oom.planning.longest_batch import size_of
from lightning_oom.planning.memory_plan import MemoryPlan, make_plan
from lightning_oom.planning.plan_remedies import ALWAYS_ALLOWED, check_remedies
from lightning_oom.planning.plan_search import PlanSearch
from lightning_oom.planning.target import parse_target
from lightning_oom.report.plan_text import plan_line
from lightning_oom.undo import UndoStack
from lightning_oom.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["MemoryPlanner"]

_STEPS_MEASURED = 2


class MemoryPlanner(Callback):
    """Choose how to run the training step so that it fits, before the first step runs.

    At the first batch of a fit the step is run on fake tensors, with the longest batch that the
    training data has where that can be told; the fastest combination of remedies whose predicted
    upper bound fits is printed, and applied until the fit ends:

    ==============  ==================================================  =======================
    Remedy          What is done                                        Result
    ==============  ==================================================  =======================
    ``zero_grad``   old gradients are dropped before the forward        bit-equal
    ``checkpoint``  chosen blocks run their forward again               bit-equal
    ``rows``        ``OOMRecovery``, which has to be there, runs fewer  equal (rounding)
                    rows together, and checks that the step may be
                    split
    ``offload``     saved activations wait on the host                  bit-equal
    ``optimizer``   ``foreach=False``                                   equal (rounding)
    ``precision``   bfloat16 autocast; only where ``allow`` names it    other numbers
    ==============  ==================================================  =======================

    The peak of the first two optimizer steps is compared with the prediction for their batches. Where
    more was needed than the plan has room for, it is made anew with what was measured.

    ===============================  =========  =====================================================
    Key                              Unit       Meaning
    ===============================  =========  =====================================================
    ``memory/plan_error_fraction``   fraction   measured peak over the predicted one, less 1; logged
                                                once, after the second optimizer step
    ===============================  =========  =====================================================

    Args:
        limit: What the device can hold, in bytes or as text such as ``"24 GiB"``, above 0; ``None``
            asks the device.
        apply: Apply the plan; otherwise it is only printed.
        margin: Fraction of the limit, in [0, 1), that is kept free beside the interval.
        coverage: Of the interval whose upper bound has to fit, above 0 and below 1.
        allow: Remedies out of those above that may be used.

    Attributes:
        plan: Of the present or last fit, a :class:`~lightning_oom.planning.memory_plan.MemoryPlan`;
            ``None`` where none could be made.
        error_fraction: What was logged; ``None`` before, and where the device tells no peak.

    Raises:
        ValueError: An argument is outside its range. Raised by the constructor.

    Note:
        Where the step cannot be run on fake tensors, one line says so and training goes on. Rank 0
        plans for all. Remedies that do not go with the run (offloading on the CPU, early zeroing
        under manual optimization, rows without ``OOMRecovery``) are not used when the plan is applied.

        Cost: 5 to 50 dry runs before the first step, each about as long as two steps on the CPU with
        few rows; host memory for the traces until the second step.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> planner = MemoryPlanner(limit="64 MiB")
        >>> trainer = Trainer(
        ...     max_steps=1, callbacks=[planner], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(BoringModel())
        >>> planner.plan.fits, planner.plan.remedies.names
        (True, ())
    """

    def __init__(
        self,
        *,
        limit: Union[int, str, None] = None,  # noqa: UP007 - Python 3.10 evaluates it
        apply: bool = True,
        margin: float = 0.0,
        coverage: float = 0.9,
        allow: Sequence[str] = ALWAYS_ALLOWED,
    ) -> None:
        self._limit_bytes = None if limit is None else parse_bytes(limit)
        if self._limit_bytes is not None and self._limit_bytes < 1:
            raise ValueError(f"limit is an amount of memory above 0 or None, got {limit!r}")
        if not isinstance(margin, (int, float)) or not 0 <= margin < 1:
            raise ValueError(f"margin is a fraction in [0, 1), got {margin!r}")
        if not isinstance(coverage, (int, float)) or not 0 < coverage < 1:
            raise ValueError(f"coverage is above 0 and below 1, got {coverage!r}")
        self._allowed = check_remedies(allow)
        self.apply = apply
        self.margin = margin
        self.coverage = coverage
        self.plan: MemoryPlan | None = None
        self.error_fraction: float | None = None
        self._undos = UndoStack()
        self._start_run()

    def _start_run(self) -> None:
        self._is_waiting = True
        self._search: PlanSearch | None = None
        self._limit_now = 0
        self._allowed_now: frozenset[str] = frozenset()
        self._peaks: PeakWatch | None = None
        self._expected: dict[int, int] = {}
        self._first_step = 0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier fit, and wait for a batch."""
        self._undos()
        self._start_run()
        self.plan, self.error_fraction = None, None

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Plan at the first batch; predict the batches that are measured."""
        if self._is_waiting:
            self._is_waiting = False
            self._begin(trainer, pl_module, batch)
        if self._peaks is not None:
            self._expect(batch)

    def _begin(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        outcome: MemoryPlan | str = ""
        if trainer.is_global_zero:
            try:
                outcome = self._make(trainer, module, batch)
            except (StepNotTracedError, ValueError) as error:
                outcome = " ".join(str(error).split())
            except Exception as error:  # a plan never ends a training
                outcome = f"{type(error).__name__}: {' '.join(str(error).split())}"
        outcome = trainer.strategy.broadcast(outcome)
        if isinstance(outcome, str):
            self._search = None
            rank_zero_info(f"MemoryPlanner has no plan: {outcome}")
            return
        self.plan = outcome
        rank_zero_info(f"MemoryPlanner: {plan_line(outcome)}.")
        if self.apply:
            apply_plan(trainer, module, outcome.remedies, outcome.rows_per_micro_batch, self._undos)
        device = trainer.strategy.root_device
        if self._search is not None and read_memory(device).peak_allocated_bytes is not None:
            self._peaks, self._first_step = PeakWatch(device), trainer.global_step

    def _make(self, trainer: Trainer, module: LightningModule, batch: Any) -> MemoryPlan:
        device = trainer.strategy.root_device
        target, limit_bytes = parse_target(device), self._limit_bytes
        if limit_bytes is None:
            limit_bytes = read_memory(device).limit_bytes
            target = replace(target, context_bytes=None)  # has been taken from what is left
        if limit_bytes is None:
            raise ValueError(f"{device} does not tell what it can hold: give limit")
        self._limit_now = int(limit_bytes * (1 - self.margin))
        found = planned_batch(trainer, module, batch)
        self._search = PlanSearch(
            module,
            found.batch,
            precision=trainer.precision,
            device=target,
            coverage=self.coverage,
            accumulate=trainer.accumulate_grad_batches,
        )
        impossible = impossible_remedies(trainer, module) if self.apply else frozenset()
        self._allowed_now = self._allowed - impossible
        return make_plan(
            self._search, module, self._limit_now, allow=self._allowed_now, batch=found.origin
        )

    def _expect(self, batch: Any) -> None:
        """Predict the peak of a batch that is going to be measured."""
        search, plan, size = self._search, self.plan, size_of(batch)
        if search is None or plan is None or size in self._expected:
            return
        remedies = plan.remedies if self.apply else type(plan.remedies)()
        try:
            self._expected[size] = search.allocated_bytes_of(batch, remedies)
        except Exception:  # nothing to compare with
            self._search = self._peaks = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare with what was predicted, after two optimizer steps."""
        if self._peaks is None or trainer.global_step < self._first_step + _STEPS_MEASURED:
            return
        peaks, self._peaks = self._peaks.read(), None
        search, self._search = self._search, None
        if search is None or peaks.allocated_bytes is None or not self._expected:
            return
        expected = max(self._expected.values())
        self.error_fraction = peaks.allocated_bytes / expected - 1
        self._tell(trainer, peaks.allocated_bytes, expected)
        if self.plan is not None:
            self._recalibrate(trainer, pl_module, search, self.plan)

    def _tell(self, trainer: Trainer, measured: int, expected: int) -> None:
        assert self.error_fraction is not None  # noqa: S101 - set by the caller
        rank_zero_info(
            f"MemoryPlanner: the first steps took {format_bytes(measured)} in tensors, predicted "
            f"were {format_bytes(expected)} ({self.error_fraction:+.1%})."
        )
        for logger in trainer.loggers:
            try:
                logger.log_metrics(
                    {"memory/plan_error_fraction": self.error_fraction}, step=trainer.global_step
                )
            except Exception as error:  # noqa: PERF203 - every logger gets its turn
                warnings.warn(
                    f"MemoryPlanner could not log to {type(logger).__name__}: {error}",
                    LightningOOMWarning,
                    stacklevel=2,
                )

    def _recalibrate(
        self, trainer: Trainer, module: LightningModule, search: PlanSearch, plan: MemoryPlan
    ) -> None:
        """Plan anew where the step needs more than there is, going by what was measured."""
        factor = 1 + (self.error_fraction or 0.0)
        if not self.apply or trainer.world_size > 1 or factor * plan.peak_bytes <= self._limit_now:
            return
        allowed = self._allowed_now - {"precision"}  # not in mid-run
        limit_bytes = int(self._limit_now * plan.upper_bytes / (factor * plan.peak_bytes))
        again = make_plan(search, module, limit_bytes, allow=allowed, batch=plan.batch)
        if again.remedies == plan.remedies:
            return
        self._undos()
        self.plan = again
        rank_zero_info(f"MemoryPlanner, going by that: {plan_line(again)}.")
        apply_plan(trainer, module, again.remedies, again.rows_per_micro_batch, self._undos)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take everything back."""
        self._close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Take everything back."""
        self._close()

    def _close(self) -> None:
        self._search = self._peaks = None
        self._undos()

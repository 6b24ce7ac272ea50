"""Validation, test and predict batches as programs, at the strategy's public step methods."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lightning_oom._lightning.log_check import differing_logs, explain_differing_logs
from lightning_oom._lightning.results import LogRecorder, ResultsPart
from lightning_oom.recovery.batches import split_batch
from lightning_oom.recovery.batches.containers import clone_batch
from lightning_oom.recovery.batches.part_rows import rows_of_parts
from lightning_oom.recovery.outputs import merge_outputs
from lightning_oom.recovery.separability import Separability
from lightning_oom.recovery.snapshot import Attributes, BatchContainers, merge_attributes
from lightning_oom.undo import Undo, UndoStack, shadow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightning.pytorch import Trainer

    from lightning_oom._lightning.transfer import Transfer
    from lightning_oom.recovery.plan import AttemptPlan, Failure, Trial
    from lightning_oom.recovery.snapshot import SavedSnapshot
    from lightning_oom.recovery.snapshot.part import Part

__all__ = ["EvaluationProgram", "EvaluationSetup", "install_steps"]

_STEPS = {"validation_step": "validation", "test_step": "test", "predict_step": "predict"}


class EvaluationSetup:
    """What all evaluation programs share.

    Args:
        trainer: The trainer that runs them.
        transfer: The guard of batch transfers.
        attributes: The part that keeps the module's attributes; merged after a split.
        split_fn: The user's way to cut a batch, or ``None``.
        log_merge: Name -> how values of micro-batches become one, for what cannot be inferred.
        warn: Called with a sentence when a split would change logged values.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        transfer: Transfer,
        attributes: Attributes,
        split_fn: Callable[[Any, int], Sequence[Any]] | None = None,
        log_merge: dict[str, str] | None = None,
        warn: Callable[[str], None],
    ) -> None:
        self.trainer = trainer
        self.warn = warn
        self.transfer = transfer
        self.attributes = attributes
        self.split_fn = split_fn
        self.log_merge = dict(log_merge or {})
        self.results = ResultsPart(trainer)


def install_steps(setup: EvaluationSetup, run: Callable[[EvaluationProgram], Any]) -> Undo:
    """Let every validation, test and predict step run through ``run``.

    Args:
        setup: What the programs share.
        run: Gets one program per step and returns the step's output.

    Returns:
        The undo.
    """
    undos = UndoStack()
    for name, stage in _STEPS.items():
        undos.push(_install_step(setup, run, name, stage))
    return Undo(undos)


def _install_step(
    setup: EvaluationSetup, run: Callable[[EvaluationProgram], Any], name: str, stage: str
) -> Undo:
    strategy = setup.trainer.strategy
    step = getattr(strategy, name)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not args or kwargs or hasattr(args[0], "__next__"):  # a `dataloader_iter` step
            return step(*args, **kwargs)
        return run(EvaluationProgram(setup, step, args, stage))

    return shadow(strategy, name, guarded)


class EvaluationProgram:
    """One evaluation batch.

    Args:
        setup: What all programs share.
        step: The strategy's own step method.
        args: Its arguments, the batch first.
        stage: Shown in events.
    """

    can_chunk = False
    can_split = True

    def __init__(
        self, setup: EvaluationSetup, step: Callable[..., Any], args: tuple[Any, ...], stage: str
    ) -> None:
        self.setup = setup
        self.batch = args[0]
        self.phase = stage
        self.on_host = setup.transfer.is_on_host(self.batch)
        self.prior_failure: Failure | None = setup.transfer.failure if self.on_host else None
        self._step = step
        self._rest = args[1:]
        self.stage = stage
        self._containers = BatchContainers(self.batch)
        self._saved: SavedSnapshot | None = None

    def parts(self) -> Sequence[Part]:
        """Return what this batch alone can change."""
        return (self._containers, self.setup.results)

    def begin(self, saved: SavedSnapshot) -> None:
        """Keep the state before the first attempt: containers and attributes come from it."""
        self._saved = saved

    def gradients_droppable(self) -> bool:
        """Evaluation holds no gradients of its own."""
        return False

    def reset(self) -> tuple[str, ...]:
        """Nothing beside the snapshot has to be put back."""
        return ()

    def succeed(self) -> None:
        """Nothing was set aside."""

    def learn(self, trial: Trial, plan: AttemptPlan) -> None:
        """Evaluation has no gradients to drop first."""

    def give_up(self) -> Any:
        """Return what stands for the output of a batch that was left out."""
        return None

    def run_whole(self, *, attempt: int) -> Any:
        """Run the step on the whole batch."""
        batch = self.batch if attempt == 1 else self._fresh_batch()
        if self.on_host:
            batch = self.setup.transfer.move(batch)
        results = self.setup.trainer._results
        if attempt > 1 and results is not None:
            results.batch = batch
        return self._step(batch, *self._rest)

    def _fresh_batch(self) -> Any:
        return self.batch if self._saved is None else self._saved.of(self._containers).fresh()

    def chunked(self, rows: int, rows_together: int) -> contextlib.AbstractContextManager[Any]:
        """Never asked for: evaluation holds no activations that chunks would save."""
        return contextlib.nullcontext()

    def run_parts(self, rows_together: int) -> Any:
        """Run the step on micro-batches; logs merged, outputs joined."""
        setup = self.setup
        batch = self._fresh_batch()
        parts = split_batch(batch, rows_together, split_fn=setup.split_fn)
        rows = rows_of_parts(parts, setup.split_fn)
        outputs, counted = [], []
        recorder = LogRecorder(setup.trainer, rows=rows, log_merge=setup.log_merge)
        with recorder:
            for index in range(len(parts)):
                part, parts[index] = parts[index], None
                if self.on_host:
                    part = setup.transfer.move(part)
                with recorder.micro_batch(index, part):
                    outputs.append(self._step(part, *self._rest))
                if self._saved is not None:
                    counted.append(self._saved.of(setup.attributes).counters())
                del part
        if self._saved is not None:
            merge_attributes(self._saved.of(setup.attributes), counted, rows)
        results = setup.trainer._results
        if results is not None:
            results.batch, results.batch_size = batch, None
        recorder.replay()
        return merge_outputs(outputs, rows)

    def check_separability(self, *, whole_failed: bool) -> Separability:
        """Without a loss there are no gradients to compare; warn of logged values that differ."""
        setup, saved = self.setup, self._saved
        names: tuple[str, ...] = ()
        if saved is not None:
            with contextlib.suppress(Exception):  # user code on few rows, not made for it
                names = differing_logs(
                    setup.trainer,
                    self._run_step,
                    self._fresh_batch(),
                    log_merge=setup.log_merge,
                    restore=saved.restore,
                )
        if names:
            setup.warn(explain_differing_logs(names))
        return Separability(
            separable=True,
            largest_relative_difference=0.0,
            parameter=None,
            reason="evaluation steps have no gradients to compare",
        )

    def estimate_chunk_gain(self) -> None:
        """Never asked for: evaluation is not chunked."""

    def _run_step(self, rows: Any) -> Any:
        rows = clone_batch(rows)  # the step may write to them
        if self.on_host:
            rows = self.setup.transfer.move(rows)
        return self._step(rows, *self._rest)

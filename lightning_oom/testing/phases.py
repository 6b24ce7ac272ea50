"""Out of memory in a named phase of a named step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from lightning_oom.testing.faults import ErrorFactory, FaultWatcher, FiringPlan
from lightning_oom.testing.shadows import Shadow

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer

__all__ = ["PHASES", "PhaseFault", "fail_on"]

PHASES = {
    "transfer": "batch_to_device",
    "forward": "training_step",
    "backward": "backward",
    "optimizer": "optimizer_step",
    "validation": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
"""Each phase, with the public method of the strategy that it is."""

_EVALUATION = ("validation", "test", "predict")


def fail_on(
    *,
    step: int,
    phase: str,
    error: ErrorFactory | str | None = None,
    times: int = 1,
    allocation: int = 1,
) -> PhaseFault:
    """Let a phase of one step run out of memory; for ``Trainer(callbacks=[...])``.

    ==============  ==================================================================
    Phase           What it covers
    ==============  ==================================================================
    ``transfer``    a training batch on its way to the device
    ``forward``     the ``training_step``
    ``backward``    the backward pass
    ``optimizer``   after the backward pass: hooks before the update, clipping, update
    ``validation``  one ``validation_step`` (not those of the sanity check)
    ``test``        one ``test_step``
    ``predict``     one ``predict_step``
    ==============  ==================================================================

    The error comes where the phase allocates on the device of the strategy. A phase that allocates
    nothing cannot run out of memory: ``raised`` then stays 0.

    Args:
        step: For the first four phases the optimizer step, from 0 as ``trainer.global_step``; for
            the others the batch, counted from 0 over the whole run.
        phase: One of the names above.
        error: What makes the error that is raised, or the text of a ``RuntimeError``. ``None``
            raises :class:`torch.OutOfMemoryError` with the text of CUDA's.
        times: How many attempts at the phase fail, at least 1.
        allocation: Which allocation of the phase fails, from 1.

    Returns:
        The fault, with ``count`` (attempts at the phase) and ``raised``.

    Raises:
        ValueError: The phase is unknown or a number is out of range.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> fault = fail_on(step=1, phase="backward")
        >>> trainer = Trainer(
        ...     max_steps=3, callbacks=[fault], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(BoringModel())
        Traceback (most recent call last):
            ...
        torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4 bytes. (fail_on...)
        >>> fault.raised, trainer.global_step
        (1, 1)
    """
    return PhaseFault(step=step, phase=phase, error=error, times=times, allocation=allocation)


class PhaseFault(Callback):
    """Fails a phase of a step; made by :func:`fail_on`.

    Attributes:
        step: The step it fails in.
        phase: The phase that it fails.
        count: How many attempts at the phase of that step it has seen.
        raised: How many of them failed.
    """

    def __init__(
        self,
        *,
        step: int,
        phase: str,
        error: ErrorFactory | str | None,
        times: int,
        allocation: int,
    ) -> None:
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}: use one of {', '.join(PHASES)}")
        if step < 0:
            raise ValueError(f"step is counted from 0, got {step!r}")
        if times < 1:
            raise ValueError(f"times is at least 1, got {times!r}")
        if allocation < 1:
            raise ValueError(f"allocations are counted from 1, got {allocation!r}")
        self.step = step
        self.phase = phase
        self.count = 0
        self.raised = 0
        self._error = error
        self._times = times
        self._allocation = allocation
        self._batches = -1
        self._shadow: Shadow | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stand before the strategy's method."""
        self._stand_before(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stand before the strategy's method."""
        self._stand_before(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stand before the strategy's method."""
        self._stand_before(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stand before the strategy's method."""
        self._stand_before(trainer)

    def on_validation_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Count the batches of validation."""
        self._batches += self.phase == "validation" and not trainer.sanity_checking

    def on_test_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Count the batches of the test."""
        self._batches += self.phase == "test"

    def on_predict_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Count the batches of the prediction."""
        self._batches += self.phase == "predict"

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the strategy as it was."""
        self._leave()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the strategy as it was."""
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the strategy as it was, also after a run that ended unseen."""
        self._leave()

    def _stand_before(self, trainer: Trainer) -> None:
        if self._shadow is None:
            self._shadow = Shadow(
                trainer.strategy,
                PHASES[self.phase],
                lambda method: _FailingMethod(self, trainer, method),
            )

    def _leave(self) -> None:
        if self._shadow is not None:
            self._shadow.remove()
            self._shadow = None

    def is_turn(self, trainer: Trainer) -> bool:
        """Say whether the phase that begins now is the one to fail."""
        if self.raised >= self._times or trainer.sanity_checking:
            return False
        if self.phase in _EVALUATION:
            return self._batches == self.step
        return bool(trainer.training) and trainer.global_step == self.step

    def make_plan(self) -> FiringPlan:
        """Plan the failure of one attempt."""
        self.count += 1
        return FiringPlan([self._allocation], times=1, error=self._error)


class _FailingMethod:
    """A method of the strategy, under a watcher when it is the turn of a fault."""

    def __init__(self, fault: PhaseFault, trainer: Trainer, method: Callable[..., Any]) -> None:
        self._fault = fault
        self._trainer = trainer
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fault = self._fault
        if not fault.is_turn(self._trainer):
            return self._method(*args, **kwargs)
        plan = fault.make_plan()
        device = self._trainer.strategy.root_device
        watcher = FaultWatcher(plan, name=f"fail_on phase {fault.phase!r}", device=device)
        if fault.phase == "optimizer":
            args, kwargs = _arm_after_closure(watcher, args, kwargs)
        try:
            with watcher:
                return self._method(*args, **kwargs)
        finally:
            fault.raised += plan.raised


def _arm_after_closure(
    watcher: FaultWatcher, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the closure among the arguments of ``optimizer_step`` by one that arms at its end."""
    watcher.armed = False
    optimizer, *rest = args
    closure = kwargs["closure"] if "closure" in kwargs else rest.pop(0)

    def arming(*closure_args: Any, **closure_kwargs: Any) -> Any:
        watcher.armed = False
        result = closure(*closure_args, **closure_kwargs)
        watcher.armed = True
        return result

    return (optimizer, arming, *rest), {k: v for k, v in kwargs.items() if k != "closure"}

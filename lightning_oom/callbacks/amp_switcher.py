"""Compute in 16 bits from the start, when memory runs short, or after it ran out."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom._lightning.precision import (
    install_precision,
    reason_against_optimizers,
    reason_not_to_switch,
    restore_scaler,
    scaler_state,
)
from lightning_oom.errors import LightningOOMWarning, StepSkippedWarning, add_note
from lightning_oom.memory import PeakWatch, read_memory
from lightning_oom.reduction.precision import (
    NonFiniteWatch,
    PrecisionChange,
    PrecisionSwitch,
    choose_precision,
    find_unsafe_losses,
)
from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_oom.recovery.events import StepOutcome
    from lightning_oom.reduction.precision import MixedPrecisionName
    from lightning_oom.undo import Undo

__all__ = ["AMPSwitcher"]

_STAYS = "weights, gradients and optimizer state stay in 32 bits and are not smaller for it"


class AMPSwitcher(Callback):
    """Switch a 32-bit run to mixed precision, and back where 16 bits do not carry it.

    Mixed precision computes matrix products and convolutions in 16 bits. It about halves what most
    activations hold, and **nothing else**: weights, gradients and optimizer state stay in 32 bits. A
    large model on a small batch gains next to nothing. It is not exact: losses differ from those of
    a 32-bit run in the third digit.

    Each fit begins as the arguments say, a resumed one as its checkpoint says. The trainer's
    precision plugin is exchanged, as ``Trainer(precision="bf16-mixed")`` would have set it:
    ``trainer.precision`` says so; clipping, logging, checkpoints and validation follow it. float16
    gets a loss scaler, whose state is kept in checkpoints. A change takes effect with the first
    batch after an optimizer step, never within an accumulation window.

    Goes back to 32-bit when a loss or gradient is not finite. With bfloat16 that one update is left
    out (the gradients are dropped). With float16 the scaler leaves such updates out and lowers its
    scale; what counts is a scale below 1 or 20 updates left out in a row.

    Args:
        precision: ``"bf16-mixed"``, ``"16-mixed"``, or ``"auto"``: bfloat16 where the device computes
            in it (CUDA from compute capability 8.0 on, the CPU), else float16.
        when: ``"start"``: from the first step on, also in validate, test and predict. ``"oom"``: after
            a training step that ran out of memory, as :class:`~lightning_oom.OOMRecovery` reports it;
            without an ``OOMRecovery`` in the trainer, never: the step itself is not repeated by this
            callback. A fraction in (0, 1]: once the peak of allocated memory has passed that part of
            the device's limit at the end of a step, on devices that count a peak.
        back_off_steps: Optimizer steps in 32-bit after one that was not finite, at least 1; ``None``
            for the rest of the run.
        watch: Look at losses and gradients for it. ``False`` never goes back.
        verbose: Print one line per change.

    Attributes:
        changes: Every change of precision of the last run, oldest first, each a
            :class:`~lightning_oom.reduction.precision.PrecisionChange`.

    Raises:
        ValueError: An argument is outside its range. Raised by the constructor.

    Note:
        Stands aside with one warning, at the beginning of the run, where it must not act: a trainer
        that is not in plain 32-bit, strategies other than a single device and DDP, LBFGS, float16 under
        manual optimization or with a fused optimizer and clipping, more than one process unless
        ``when="start"`` (ranks would have to agree), and a loss on probabilities (``BCELoss``,
        ``binary_cross_entropy``; see
        :func:`~lightning_oom.reduction.precision.find_unsafe_losses` for what is found).

        Checkpoints remember whether the run had switched or gone back; a resumed run goes on from
        there, in whichever precision its trainer and device allow.

        Cost before the switch: 2 us a step; with a fraction, one look at the allocator's counters.
        After it, with bfloat16 and ``watch``: each gradient is read once more and the host waits once
        for the device, as it does for each update with a loss scaler.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from lightning_oom import OOMRecovery
        >>> from lightning_oom.testing import fail_at
        >>> switcher = AMPSwitcher(when="oom", verbose=False)
        >>> trainer = Trainer(
        ...     max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False,
        ...     enable_progress_bar=False, enable_model_summary=False,
        ...     callbacks=[OOMRecovery(verbose=False), switcher, fail_at(2, step=1)],
        ... )
        >>> trainer.fit(BoringModel())
        >>> [(change.step, change.precision) for change in switcher.changes]
        [(2, 'bf16-mixed')]

    References:
        Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740);
        Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning Training" (arXiv:1905.12322).
    """

    def __init__(
        self,
        *,
        precision: Literal["auto", "bf16-mixed", "16-mixed"] = "auto",
        when: Literal["oom", "start"] | float = "oom",
        back_off_steps: int | None = None,
        watch: bool = True,
        verbose: bool = True,
    ) -> None:
        if precision not in ("auto", "bf16-mixed", "16-mixed"):
            raise ValueError(
                f"precision is one of 'auto', 'bf16-mixed' and '16-mixed', got {precision!r}; "
                "Trainer(precision=...) has the others"
            )
        is_fraction = isinstance(when, (int, float)) and not isinstance(when, bool)
        if when not in ("oom", "start") and not (is_fraction and 0 < float(when) <= 1):
            raise ValueError(f"when is 'oom', 'start' or a fraction in (0, 1], got {when!r}")
        is_count = isinstance(back_off_steps, int) and not isinstance(back_off_steps, bool)
        if back_off_steps is not None and not (is_count and back_off_steps >= 1):
            raise ValueError(
                f"back_off_steps is at least 1, or None for good, got {back_off_steps!r}"
            )
        self.precision = precision
        self.when = when
        self.back_off_steps = back_off_steps
        self.watch = watch
        self.verbose = verbose
        self.changes: list[PrecisionChange] = []
        self._trainer: Trainer | None = None
        self._has_told_what_stays = False
        self._warned: set[str] = set()
        self._start_run()

    def _start_run(self) -> None:
        self.changes = []
        self._switch = PrecisionSwitch(back_off_steps=self.back_off_steps)
        self._reason = 'when="start"'
        self._undo: Undo | None = None
        self._watch: NonFiniteWatch | None = None
        self._scaler_state: dict[str, Any] | None = None
        self._peaks: PeakWatch | None = None
        self._seen_bytes = 0
        self._last_step = 0

    # -- beginning
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take this trainer on, or say why not; with ``when="start"`` switch it."""
        if self._trainer is not None and self._trainer is not trainer:
            self._stand_aside("it is at work in another trainer; give each one of its own")
            return
        self._close()
        if stage != "fit" and self.when != "start":
            return
        if stage == "fit":
            self._start_run()
        chosen = self._chosen(trainer)
        if chosen is None:
            self._stand_aside(f"torch has no autocast for {trainer.strategy.root_device.type}")
            return
        reason = reason_not_to_switch(trainer, pl_module, chosen)
        if reason is None and self.when != "start" and trainer.world_size > 1:
            reason = f"{trainer.world_size} processes would have to agree on when to switch"
        if reason is not None:
            self._stand_aside(reason)
            return
        self._trainer = trainer
        if self.when == "start":
            self._switch.request()
            self._follow(trainer)

    def _chosen(self, trainer: Trainer) -> MixedPrecisionName | None:
        if self.precision != "auto":
            return self.precision
        return choose_precision(trainer.strategy.root_device)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where the saved run was; called before Lightning restores the scaler."""
        trainer = self._trainer
        if trainer is None or trainer.state.fn != "fit":
            return
        self._switch.load_state_dict(state_dict)
        self._reason = "as in the checkpoint"
        self._follow(trainer)
        restore_scaler(trainer, state_dict.get("scaler"))

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the optimizers and losses, which are all there now, before anything has run."""
        if self._is_mine(trainer):
            self._check_losses(trainer, pl_module)
        chosen = self._chosen(trainer)
        if self._is_mine(trainer) and chosen is not None:
            reason = reason_against_optimizers(trainer, chosen)
            if reason is not None:
                self._give_up(reason)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting steps and peaks; say in what the run begins, if not in 32-bit."""
        if not self._is_mine(trainer):
            return
        self._last_step = trainer.global_step
        if self._switch.is_mixed:
            self._record(trainer)
        if isinstance(self.when, str):
            return
        reading = read_memory(trainer.strategy.root_device)
        if reading.peak_allocated_bytes is None or reading.limit_bytes is None:
            if not self._switch.is_mixed:
                self._give_up(f"{reading.device} does not tell how much of it was used at most")
            return
        self._peaks = PeakWatch(trainer.strategy.root_device)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the losses of a validation that is not part of a fit."""
        if trainer.state.fn != "fit":
            self._check_losses(trainer, pl_module)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the losses."""
        self._check_losses(trainer, pl_module)

    def _check_losses(self, trainer: Trainer, pl_module: LightningModule) -> None:
        places = find_unsafe_losses(pl_module) if self._is_mine(trainer) else []
        if places:
            self._give_up(
                f"a loss on probabilities does not go with 16 bits: {', '.join(places)}. Return "
                "logits and use BCEWithLogitsLoss (binary_cross_entropy_with_logits), or switch "
                'autocast off around it: torch.autocast("cuda", enabled=False) and .float()'
            )

    # -- steps
    def on_oom_outcome(
        self, trainer: Trainer, pl_module: LightningModule, outcome: StepOutcome
    ) -> None:
        """Switch after this step, which ran out of memory; called by ``OOMRecovery``.

        Args:
            trainer: Whose step it was.
            pl_module: The module that it trains.
            outcome: What happened in the step.
        """
        if self.when == "oom" and outcome.stage == "train" and self._is_mine(trainer):
            self._reason = f"a step ran out of memory with {outcome.describe_batch()}"
            self._switch.request()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Change the precision where that is due, between two optimizer steps."""
        if trainer is not self._trainer:
            return
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        failure = self._watch.take_failure() if self._watch is not None else None
        if failure is not None:
            self._back_off(trainer, step, failure)
        elif self._peaks is not None and not self._switch.is_mixed:
            self._look_at_memory(self._peaks)
        if self._switch.advance(step):
            self._reason = f"{self.back_off_steps} steps after the last that was not finite"
        if self._follow(trainer):
            self._record(trainer)

    def _look_at_memory(self, peaks: PeakWatch) -> None:
        """Ask for the switch where a new peak came too near to the limit."""
        peak_bytes = peaks.read().allocated_bytes
        if peak_bytes is None or peak_bytes <= self._seen_bytes:
            return
        self._seen_bytes = peak_bytes
        limit_bytes = read_memory(peaks.device).limit_bytes
        if limit_bytes and peak_bytes > float(self.when) * limit_bytes:
            self._reason = (
                f"a peak of {format_bytes(peak_bytes)} passed {float(self.when):.0%} of "
                f"{format_bytes(limit_bytes)}"
            )
            self._switch.request()

    def _back_off(self, trainer: Trainer, step: int, failure: str) -> None:
        self._switch.back_off(step)
        self._reason = failure
        until = "for the rest of the run"
        if self.back_off_steps is not None:
            until = f"for {self.back_off_steps} steps"
        warnings.warn(
            f"AMPSwitcher: {failure} in {trainer.precision}, and the update of step {step} was left "
            f"out; the run goes on in 32-bit {until}.",
            StepSkippedWarning,
            stacklevel=2,
        )

    def _follow(self, trainer: Trainer) -> bool:
        """Let the trainer compute in what the switch says; return whether that is a change."""
        chosen = self._chosen(trainer)
        if chosen is None or self._switch.is_mixed == (self._undo is not None):
            return False
        if self._switch.is_mixed:
            self._watch = NonFiniteWatch(losses=trainer.world_size == 1) if self.watch else None
            self._undo = install_precision(trainer, chosen, watch=self._watch)
        else:
            self._take_back()
        return True

    def _record(self, trainer: Trainer) -> None:
        change = PrecisionChange(
            step=trainer.global_step, precision=str(trainer.precision), reason=self._reason
        )
        self.changes.append(change)
        if not self.verbose:
            return
        text = f"AMPSwitcher: step {change.step}, {change.precision} from here on: {change.reason}"
        if self._switch.is_mixed and not self._has_told_what_stays:
            self._has_told_what_stays = True
            text += f"; activations shrink, {_STAYS}"
        rank_zero_info(f"{text}.")

    # -- end
    def _is_mine(self, trainer: Trainer) -> bool:
        return trainer is self._trainer

    def _give_up(self, reason: str) -> None:
        self._close()
        self._switch = PrecisionSwitch(back_off_steps=self.back_off_steps)
        self._stand_aside(reason)

    def _stand_aside(self, reason: str) -> None:
        text = f"AMPSwitcher stands aside: {reason}."
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, LightningOOMWarning, stacklevel=2)

    def _take_back(self) -> None:
        undo, self._undo, self._watch = self._undo, None, None
        if undo is not None:
            undo()

    def _close(self) -> None:
        """Put the trainer's own precision back; what a checkpoint needs is kept."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None and self._undo is not None:
            self._scaler_state = scaler_state(trainer)
        self._peaks = None
        self._take_back()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the trainer's own precision back."""
        if self._is_mine(trainer):
            self._close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Put the trainer's own precision back; explain an error that the switch has caused."""
        if not self._is_mine(trainer):
            return
        if self._undo is not None and "unsafe to autocast" in str(exception):
            add_note(
                exception,
                f"lightning_oom: AMPSwitcher had switched to {trainer.precision}. Return logits and "
                "use BCEWithLogitsLoss, or switch autocast off around this loss.",
            )
        self._close()

    # -- checkpoints
    @override
    def state_dict(self) -> dict[str, Any]:
        """Return whether the run has switched or gone back, and the loss scale, as plain data."""
        trainer = self._trainer
        scaler = self._scaler_state
        if trainer is not None:
            scaler = scaler_state(trainer) if self._undo is not None else None
        return {**self._switch.state_dict(), "scaler": scaler}

"""The precision of a running trainer: exchange its plugin, and say where that is not safe."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.optim import LBFGS
from typing_extensions import override

from lightning_oom._lightning.names import PRECISION_NAMES, missing_names
from lightning_oom._torch.gradients import unscales_gradients_itself
from lightning_oom.recovery.scaler import LossScaler
from lightning_oom.undo import Undo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor

    from lightning_oom.recovery.snapshot.part import Saved
    from lightning_oom.reduction.precision import MixedPrecisionName, NonFiniteWatch

__all__ = [
    "CurrentLossScaler",
    "MixedPrecision",
    "install_precision",
    "reason_against_optimizers",
    "reason_not_to_switch",
    "restore_scaler",
    "scaler_state",
    "within_precision",
]


class MixedPrecision(LightningMixedPrecision):
    """Lightning's plugin, which also tells a watch what is not finite.

    It has the name of its base: Lightning keeps the state of a plugin in checkpoints under the name
    of its class, and either one is to find the other's.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``; the latter makes a loss scaler.
        device: Type of the device that autocast is for.
        watch: Asked before each update; ``None`` leaves the plugin as Lightning's.
    """

    def __init__(
        self, precision: MixedPrecisionName, device: str, *, watch: NonFiniteWatch | None = None
    ) -> None:
        super().__init__(precision, device)
        self._watch = watch
        self._note_scale()

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]  # as its base
        if self._watch is not None and self.scaler is None:
            self._watch.note_loss(tensor)
        return super().pre_backward(tensor, module)

    @override
    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        watch = self._watch if self.scaler is None else None
        finite = watch is None or watch.is_update_finite(_gradients(optimizer))
        super()._after_closure(model, optimizer)
        if not finite:  # after the clipping, which may refuse to clip nothing
            optimizer.zero_grad(set_to_none=True)  # the update then changes nothing

    @override
    def optimizer_step(  # type: ignore[override]  # as its base
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        self._note_scale()
        return result

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._watch is not None:
            self._watch.scale = None  # another scale is no skipped update
        self._note_scale()

    def _note_scale(self) -> None:
        if self._watch is not None and self.scaler is not None:
            self._watch.note_scale(self.scaler.get_scale())


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def install_precision(
    trainer: Trainer, precision: MixedPrecisionName, *, watch: NonFiniteWatch | None = None
) -> Undo:
    """Let a trainer compute in mixed precision from here on.

    Lightning looks its precision plugin up at each use, so this works at any time between two
    optimizer steps. Within a step, or within an accumulation window with ``"16-mixed"``, it does not:
    gradients with and without a loss scale would be added up.

    Args:
        trainer: One that :func:`reason_not_to_switch` has nothing against.
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        watch: Told of losses, gradients and loss scales. It makes updates be left out whose
            gradients are not finite.

    Returns:
        The undo: it brings the very plugin back that was there, with the same restrictions; nothing
        when somebody else has put in another one meanwhile.
    """
    strategy = trainer.strategy
    before = strategy.precision_plugin
    plugin = MixedPrecision(precision, strategy.root_device.type, watch=watch)
    strategy.precision_plugin = plugin

    def action() -> None:
        if strategy.precision_plugin is plugin:
            strategy.precision_plugin = before

    return Undo(action)


@contextlib.contextmanager
def within_precision(trainer: Trainer, precision: MixedPrecisionName) -> Iterator[None]:
    """Compute forward and backward of one attempt of a step in mixed precision.

    The update that follows the block runs under the plugin that was there before it.

    Args:
        trainer: One that :func:`reason_not_to_switch` has nothing against.
        precision: ``"bf16-mixed"``. A loss scale, which ``"16-mixed"`` needs, goes from the forward
            through the update and cannot be had for a part of a step.

    Raises:
        ValueError: Another ``precision``.
    """
    if precision != "bf16-mixed":
        raise ValueError(
            f"precision is 'bf16-mixed' for a part of a step, got {precision!r}: a loss scale has to "
            "last until the update; install_precision between two steps"
        )
    undo = install_precision(trainer, precision)
    try:
        yield
    finally:
        undo()


def reason_not_to_switch(
    trainer: Trainer, module: LightningModule, precision: MixedPrecisionName
) -> str | None:
    """Return why a trainer's precision must stay as it is, or ``None`` when it need not.

    Args:
        trainer: From its ``setup`` stage on.
        module: The module it runs.
        precision: What it would be switched to.
    """
    strategy, plugin = trainer.strategy, trainer.precision_plugin
    if isinstance(plugin, LightningMixedPrecision):
        return f"the trainer computes in {trainer.precision} already"
    if type(plugin) is not Precision:
        return (
            f"{type(plugin).__name__} ({trainer.precision}) decides in what the trainer computes; "
            "only plain 32-bit is switched"
        )
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        return f"{type(strategy).__name__} keeps weights in a way of its own"
    if precision == "16-mixed" and trainer.training and not module.automatic_optimization:
        return (
            f"{type(module).__name__} uses manual optimization, where its own code sees gradients "
            "that are multiplied by the loss scale of float16"
        )
    missing = missing_names(trainer, module, table=PRECISION_NAMES)
    if missing:
        return "this Lightning release has moved what a switch relies on: " + ", ".join(missing)
    return reason_against_optimizers(trainer, precision)


def reason_against_optimizers(trainer: Trainer, precision: MixedPrecisionName) -> str | None:
    """Return which optimizer does not go with mixed precision, or ``None`` when all do.

    Args:
        trainer: With its optimizers, from ``on_fit_start`` on.
        precision: What it is, or would be, switched to.
    """
    for optimizer in trainer.optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            return f"{name} compares losses of one step to more digits than 16 bits have"
        if (
            precision == "16-mixed"
            and trainer.gradient_clip_val
            and unscales_gradients_itself(optimizer)
        ):
            return (
                f"{name} removes the loss scale of float16 in its own step, after "
                "gradient_clip_val would have clipped: pass fused=False to it, or do not clip, or "
                "use 'bf16-mixed', which has no scale, where the device has it"
            )
    return None


def scaler_state(trainer: Trainer) -> dict[str, Any] | None:
    """Return the loss scaler's state as plain data; ``None`` where there is no scaler.

    Args:
        trainer: Of any stage.
    """
    scaler = trainer.scaler
    return None if scaler is None else dict(scaler.state_dict())


def restore_scaler(trainer: Trainer, state: dict[str, Any] | None) -> None:
    """Give the loss scaler the state of an earlier one; nothing where either is missing.

    Args:
        trainer: Of any stage.
        state: From :func:`scaler_state`.
    """
    if state and trainer.scaler is not None:
        trainer.precision_plugin.load_state_dict(state)


class CurrentLossScaler:
    """A part of a snapshot: the scaler that the trainer has when an attempt begins, if any.

    Args:
        trainer: Its precision may change between two steps.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def take(self) -> Saved:
        """Remember the scaler's state."""
        scaler = self._trainer.scaler
        return _NoScaler() if scaler is None else LossScaler(scaler).take()


class _NoScaler:
    def restore(self) -> tuple[str, ...]:
        return ()

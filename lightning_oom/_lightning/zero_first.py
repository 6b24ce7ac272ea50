"""Drop the gradients of the last step before the forward: when that is safe, and how.

Lightning's closure runs forward, ``zero_grad``, backward, so that the old gradients lie beside the
activations of the forward. In between nothing reads them, unless code of the user does.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback

from lightning_oom._lightning.support import overrides
from lightning_oom.undo import Undo, shadow

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Iterable, Iterator

    from lightning.pytorch import LightningModule, Trainer

__all__ = [
    "install_zero_first",
    "reason_not_to_zero_first",
    "runs_step_several_times",
    "zeroes_first",
]

_HOOK = "on_before_zero_grad"
_ZEROING: weakref.WeakSet[Any] = weakref.WeakSet()


def reason_not_to_zero_first(trainer: Trainer, module: LightningModule) -> str | None:
    """Return why gradients must be dropped where Lightning does it; ``None`` when they need not.

    Args:
        trainer: The trainer, after its optimizers exist.
        module: The module it trains.
    """
    return next(_reasons(trainer, module), None)


def _reasons(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    name = type(module).__name__
    if not module.automatic_optimization:
        yield f"{name} uses manual optimization and drops gradients itself"
    for hook in (_HOOK, "optimizer_zero_grad"):
        if overrides(module, hook) or hook in vars(module):
            yield f"{name}.{hook} may look at the gradients before they are dropped"
    callbacks: Iterable[Callback] = trainer.callbacks  # type: ignore[attr-defined] # by a connector
    for callback in callbacks:
        plain = getattr(type(callback), _HOOK) is Callback.on_before_zero_grad
        if not plain or _HOOK in vars(callback):
            yield f"{type(callback).__name__}.{_HOOK} may look at the gradients"
    if trainer.strategy.handles_gradient_accumulation:
        yield f"{type(trainer.strategy).__name__} keeps gradients itself"
    if len(trainer.optimizers) > 1:
        yield f"{name} has {len(trainer.optimizers)} optimizers"
    for optimizer in trainer.optimizers:
        if runs_step_several_times(optimizer):
            yield f"{type(optimizer).__name__} runs the training step several times an update"


def runs_step_several_times(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer cannot step without a closure, and so may call it more than once."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def install_zero_first(trainer: Trainer) -> Undo:
    """Let every closure that the loop makes drop gradients before its forward.

    Lightning's own condition stays: a closure inside an accumulation window has nothing to drop.
    Closures of the recovery keep their own order and ask :func:`zeroes_first`.

    Args:
        trainer: The trainer, in ``on_train_start``.

    Returns:
        The undo.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    make = loop._make_closure

    def make_closure(kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        closure = make(kwargs, optimizer, batch_idx)
        kind = type(closure)
        if closure._zero_grad_fn is None or getattr(kind, "asks_zeroes_first", False):
            return closure
        return _zero_first_class(kind)(
            closure._step_fn, closure._backward_fn, closure._zero_grad_fn
        )

    undo = shadow(loop, "_make_closure", make_closure)
    _ZEROING.add(loop)

    def remove() -> None:
        _ZEROING.discard(loop)
        undo()

    return Undo(remove)


def zeroes_first(loop: Any) -> bool:
    """Whether gradients are to be dropped before the forward in this loop of automatic optimization."""
    return loop in _ZEROING


@functools.cache
def _zero_first_class(kind: type[Any]) -> type[Any]:
    """Return a kind of closure whose first act is to drop gradients."""

    class ZeroFirstClosure(kind):  # type: ignore[misc] # a class that is known at run time only
        _zero_grad_fn: Callable[[], None] | None

        @torch.enable_grad()
        def closure(self, *args: Any, **kwargs: Any) -> Any:
            zero_grad, self._zero_grad_fn = self._zero_grad_fn, None
            try:
                if zero_grad is not None:
                    zero_grad()
                return super().closure(*args, **kwargs)
            finally:
                self._zero_grad_fn = zero_grad

    return ZeroFirstClosure

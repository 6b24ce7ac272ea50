"""Run training steps on a clone in Lightning's order, without Lightning, phase by phase."""

from __future__ import annotations

import inspect
from contextlib import ExitStack, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import tree_leaves, tree_map_only
from lightning_oom.planning.optimizers import schedulers_of, stateful_tensors
from lightning_oom.planning.stand_ins import OptimizerProxy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from lightning_oom.planning.step_settings import StepSettings
    from lightning_oom.planning.tracing import StepTracer

__all__ = ["StepRunner", "runs_own_step"]

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric", "torch")


class StepRunner:
    """Trains a clone for some steps and tells a tracer where it is.

    Args:
        module: The clone.
        batch: On the device of the module; used for every step.
        tracer: Entered already.
        settings: How.
    """

    def __init__(self, module: Any, batch: Any, tracer: StepTracer, settings: StepSettings) -> None:
        self.module = module
        self._batch = batch
        self._tracer = tracer
        self._settings = settings
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._schedulers: list[Any] = []
        self._toggled: dict[torch.nn.Parameter, bool] = {}
        self._scale: torch.Tensor | None = None
        self._kept: Any = None
        self._device_type = next((p.device.type for p in module.parameters()), "cpu")

    def run(self, optimizers: Sequence[torch.optim.Optimizer], configured: Any = None) -> None:
        """Run all steps.

        Args:
            optimizers: What is stepped; none leaves the gradients.
            configured: What ``configure_optimizers`` returned, for its schedulers.
        """
        self._optimizers = optimizers
        self._schedulers = schedulers_of(configured)
        is_manual = runs_own_step(self.module) and not getattr(
            self.module, "automatic_optimization", True
        )
        if is_manual:
            self._stand_in_for_manual_optimization()
        if self._settings.precision.scales_loss:
            self._scale = torch.full((), 65536.0)
        handles = [
            parameter.register_post_accumulate_grad_hook(self._label_gradient)
            for parameter in self.module.parameters()
            if parameter.requires_grad
        ]
        try:
            with torch.enable_grad(), self._default_dtype():
                for step in range(self._settings.num_steps):
                    self._tracer.step = step
                    self._tracer.mark("step")
                    self._run_window(step, is_manual=is_manual)
                    self._kept = None
            self._tracer.mark("end")
        finally:
            for handle in handles:
                handle.remove()

    def step_manually(self, optimizer: torch.optim.Optimizer, closure: Any, **kwargs: Any) -> Any:
        """Step an optimizer out of ``training_step``."""
        before = self._tracer.enter_phase("optimizer")
        try:
            if closure is None:
                return optimizer.step(**kwargs)

            def in_forward() -> Any:
                self._tracer.enter_phase("forward")
                with torch.enable_grad():
                    result = closure()
                self._tracer.enter_phase("optimizer")
                return result

            return optimizer.step(in_forward, **kwargs)
        finally:
            self._tracer.label(stateful_tensors([optimizer]), "optimizer")
            self._tracer.enter_phase(before)

    def toggle(self, optimizer: Any) -> None:
        """Let only the parameters of ``optimizer`` ask for gradients."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        for other in self._optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    self._toggled.setdefault(parameter, parameter.requires_grad)
                    parameter.requires_grad = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.requires_grad = self._toggled[parameter]

    def untoggle(self, optimizer: Any = None) -> None:
        """Undo :meth:`toggle`."""
        toggled, self._toggled = self._toggled, {}
        for parameter, requires_grad in toggled.items():
            parameter.requires_grad = requires_grad

    def _run_window(self, step: int, *, is_manual: bool) -> None:
        accumulate = self._settings.accumulate
        for micro in range(accumulate):
            index = step * accumulate + micro
            self._hook("on_train_batch_start", self._batch, index)
            if is_manual:
                self._tracer.enter_phase("forward")
                self._forward(index)
            elif micro < accumulate - 1:
                self._closure(index, first=micro == 0)
            else:
                self._step(index, first=micro == 0)
            self._hook("on_train_batch_end", self._kept, self._batch, index)

    def _step(self, index: int, *, first: bool) -> None:
        """Run the last batch of a window, which steps the optimizers, as Lightning does, around it."""
        tracer = self._tracer

        def closure() -> Any:
            with torch.enable_grad():
                loss = self._closure(index, first=first)
            for optimizer in self._optimizers:
                self._hook("on_before_optimizer_step", optimizer)
            tracer.enter_phase("optimizer")
            return loss

        if not self._optimizers:
            closure()
        for optimizer in self._optimizers[:1]:
            if self._scale is not None:
                closure()
                optimizer.step()
            elif self._is_overridden("optimizer_step"):
                self.module.optimizer_step(0, index, optimizer, closure)
            else:
                optimizer.step(closure)
        tracer.label(stateful_tensors(self._optimizers), "optimizer")

    def _closure(self, index: int, *, first: bool) -> torch.Tensor | None:
        """Run forward, zero_grad and backward on one batch, in this order."""
        tracer = self._tracer
        early = self._settings.zero_grad == "early"
        if first and early:
            self._zero_grad(index)
        tracer.enter_phase("forward")
        loss, self._kept = _loss_and_rest(self._forward(index))
        if first and not early:
            tracer.mark("zero_grad")
            self._zero_grad(index)
        if loss is None:
            return None
        if self._settings.accumulate > 1:
            loss = loss / self._settings.accumulate
        value = loss.detach().clone()
        tracer.enter_phase("backward")
        self._hook("on_before_backward", loss)
        self._backward(loss)
        del loss
        self._label_gradients()
        self._hook("on_after_backward")
        return value

    def _forward(self, index: int) -> Any:
        settings = self._settings
        with ExitStack() as stack:
            stack.enter_context(
                settings.precision.around_forward(self._device_type, settings.autocast)
            )
            if settings.forward_context is not None:
                stack.enter_context(settings.forward_context(self.module))
            if settings.loss is not None:
                return settings.loss(self.module, self._batch)
            if not runs_own_step(self.module):
                return _sum_of_outputs(self.module, self._batch)
            return self.module.training_step(*self._step_arguments(index))

    def _step_arguments(self, index: int) -> tuple[Any, ...]:
        names = list(inspect.signature(self.module.training_step).parameters)
        if "dataloader_iter" in names:
            return (((self._batch, position, 0) for position in count(index)),)
        return (self._batch, index, 0)[: max(len(names), 1)]

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._scale is not None:
            loss = loss * self._scale
        if self._is_overridden("backward"):
            self.module.backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)

    def _zero_grad(self, index: int) -> None:
        for optimizer in self._optimizers:
            self._hook("on_before_zero_grad", optimizer)
            if self._is_overridden("optimizer_zero_grad"):
                self.module.optimizer_zero_grad(0, index, optimizer)
            else:
                optimizer.zero_grad()
        if not self._optimizers:
            self.module.zero_grad()

    def _backward_manually(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        before = self._tracer.enter_phase("backward")
        self._backward(loss, *args, **kwargs)
        self._label_gradients()
        self._tracer.enter_phase(before)

    def _stand_in_for_manual_optimization(self) -> None:
        proxies = [OptimizerProxy(optimizer, self) for optimizer in self._optimizers]
        schedulers = self._schedulers

        def only(items: list[Any]) -> Any:
            return items[0] if len(items) == 1 else items

        self.module.__dict__.update(
            optimizers=lambda use_pl_optimizer=True: only(proxies),  # noqa: ARG005 - Lightning's name
            lr_schedulers=lambda: only(schedulers) if schedulers else None,
            manual_backward=self._backward_manually,
            clip_gradients=_clip_gradients,
            toggle_optimizer=self.toggle,
            untoggle_optimizer=self.untoggle,
        )

    def _default_dtype(self) -> AbstractContextManager[Any]:
        dtype = self._settings.precision.weights_dtype
        return nullcontext() if dtype is None else _DefaultDtype(dtype)

    def _label_gradient(self, parameter: torch.Tensor) -> None:
        self._tracer.label([parameter.grad], "gradient")

    def _label_gradients(self) -> None:
        self._tracer.label((p.grad for p in self.module.parameters()), "gradient")

    def _is_overridden(self, name: str) -> bool:
        """Say whether the user wrote this method, or somebody put it on the instance."""
        if not runs_own_step(self.module):
            return False
        if name in self.module.__dict__:
            return True
        owner = next((cls for cls in type(self.module).__mro__ if name in vars(cls)), None)
        return owner is not None and owner.__module__.split(".")[0] not in _LIGHTNING

    def _hook(self, name: str, *args: Any) -> None:
        if self._is_overridden(name):
            hook = getattr(self.module, name)
            hook(*args[: len(inspect.signature(hook).parameters)])


class _DefaultDtype:
    """Makes new tensors of a type, inside of a ``with`` block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        """Set the type."""
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exc_details: object) -> None:
        """Put the former type back."""
        torch.set_default_dtype(self._before)


def runs_own_step(module: Any) -> bool:
    """Say whether a module brings its own ``training_step``."""
    return callable(getattr(module, "training_step", None))


def _loss_and_rest(output: Any) -> tuple[torch.Tensor | None, Any]:
    """Return the loss, and what Lightning keeps of a step's output until the batch ends."""
    if not isinstance(output, dict):
        return output, None
    rest = {name: value for name, value in output.items() if name != "loss"}
    return output.get("loss"), tree_map_only(torch.Tensor, torch.Tensor.detach, rest)


def _sum_of_outputs(module: Any, batch: Any) -> torch.Tensor:
    """Call a plain module on its batch; its own loss, or the sum of what it returns, is the loss."""
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        output = module(**batch)
    elif isinstance(batch, (list, tuple)):
        output = module(*batch)
    else:
        output = module(batch)
    loss = getattr(output, "loss", None)
    if isinstance(output, dict) and loss is None:
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not leaves:
        raise ValueError("the module returned nothing that asks for a gradient: pass `loss=`")
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum()


def _clip_gradients(
    optimizer: Any,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not gradient_clip_val:
        return
    if gradient_clip_algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

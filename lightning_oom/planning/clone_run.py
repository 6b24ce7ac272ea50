"""Train a clone under a tracer, whether its tensors are fake or real."""

from __future__ import annotations

import random
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_oom._torch.fake import quiet_failures
from lightning_oom.planning.optimizers import optimizers_of
from lightning_oom.planning.skeleton import Skeleton
from lightning_oom.planning.stand_ins import silence, view_trainer
from lightning_oom.planning.step_runner import StepRunner, runs_own_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.planning.step_settings import StepSettings
    from lightning_oom.planning.tracing import StepTracer

__all__ = ["isolated_randomness", "run_clone"]


def run_clone(clone: Any, batch: Any, tracer: StepTracer, settings: StepSettings) -> None:
    """Prepare a clone for a dry step, make its optimizers, and run the steps under a tracer.

    Args:
        clone: Belongs to the caller alone: it is changed, and trained.
        batch: Likewise.
        tracer: Not yet entered.
        settings: How.

    Raises:
        ValueError: ``configure_model`` has not made the parameters yet.
    """
    if hasattr(clone, "configure_model") and next(clone.parameters(), None) is None:
        raise ValueError("the module has no parameters yet: call its configure_model() first")
    optimizers: list[torch.optim.Optimizer] = []
    silence(clone)
    view_trainer(clone, optimizers)
    if settings.transform is not None:
        settings.transform(clone)
    configured: Any = None
    if settings.optimizer is not None:
        optimizers.append(settings.optimizer([p for p in clone.parameters() if p.requires_grad]))
    elif runs_own_step(clone):
        configured = clone.configure_optimizers()
        optimizers.extend(optimizers_of(configured))
    if settings.prepare_optimizers is not None:
        settings.prepare_optimizers(optimizers)
    _register_standing(tracer, clone, batch)
    with ExitStack() as stack:
        stack.callback(quiet_failures())
        stack.callback(tracer.follow_modules(clone))
        stack.enter_context(tracer)
        if settings.context is not None:
            stack.enter_context(settings.context(clone))
        StepRunner(clone, batch, tracer, settings).run(optimizers, configured)


def _register_standing(tracer: StepTracer, module: torch.nn.Module, batch: Any) -> None:
    """Tell ``tracer`` of what is there before the first step: parameters, buffers, batch."""
    for path, part in module.named_modules():
        tracer.register(part.parameters(recurse=False), "parameter", path)
    for path, part in module.named_modules():
        tracer.register(part.buffers(recurse=False), "buffer", path)
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    Skeleton(collect).value(batch)
    tracer.register(found, "batch")


@contextmanager
def isolated_randomness() -> Iterator[None]:
    """Put the random states of Python, numpy, torch and its devices back at the end."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - what user code draws from
    try:
        with torch.random.fork_rng(devices=_initialized_devices()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 - as above


def _initialized_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []

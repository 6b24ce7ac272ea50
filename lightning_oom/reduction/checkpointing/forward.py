"""A forward that keeps its input only, and runs once more when the backward pass needs the rest."""

from __future__ import annotations

import functools
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from lightning_oom.reduction.checkpointing.buffers import BufferGuard, BufferValues

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch import nn

    from lightning_oom.reduction.checkpointing.meter import CheckpointMeter

__all__ = ["CheckpointedForward", "CheckpointedLayerCall"]


class _Checkpointing:
    """What both forms share: when to checkpoint, and how.

    Plain attributes only, and a class at the level of its module: copies and pickles of the module
    take it along, and the copy checkpoints its own module.
    """

    meter: CheckpointMeter | None = None

    def __init__(self, module: nn.Module, path: str, meter: CheckpointMeter | None) -> None:
        self.module = module
        self.path = path
        self.is_active = True
        self.buffers = BufferGuard(module)
        if meter is not None:
            self.meter = meter

    def __getstate__(self) -> dict[str, Any]:
        """Leave the meter behind: it measures one fit."""
        return {name: value for name, value in vars(self).items() if name != "meter"}

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``function`` under checkpointing, or plainly where nothing is to be gained."""
        if not (self.is_active and self.module.training and torch.is_grad_enabled()):
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self.buffers.may_change():
                raise RuntimeError(_NOT_COMPILED.format(path=self.path))
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        watch = self.buffers.watch()
        if watch is None and self.meter is None:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        values = BufferValues([])
        contexts = functools.partial(_contexts, values, self.path, self.meter)
        out = checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if watch is not None:
            watch.finish(values)
        return out


class CheckpointedForward(_Checkpointing):
    """Stands in ``module.__dict__["forward"]``; the class, names and hooks of the module stay.

    Non-reentrant: keyword arguments, nested outputs, ``None``, strings and inputs without gradient
    pass through, gradients reach frozen and shared parameters as ever, ``autograd.grad`` and double
    backward work. Torch's random state and the autocast state are the same in the recomputation;
    buffers that the forward changes are put back for it and changed once. In eval mode and where no
    gradient is wanted, the forward runs plainly.

    Args:
        module: Whose forward this is.
        path: Its name in the model, for messages.
        meter: Measures recomputations, while it wants to.

    Note:
        The forward runs twice. Hooks on modules inside the block run twice as well, hooks on the
        block once. What a forward changes other than buffers (counters, caches, Python's and
        numpy's random state) is changed twice.
    """

    def __init__(
        self, module: nn.Module, path: str = "", meter: CheckpointMeter | None = None
    ) -> None:
        super().__init__(module, path, meter)
        self.before = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module."""
        return self.run(self._plain, args, kwargs)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


class CheckpointedLayerCall(_Checkpointing):
    """The function by which layers of transformers checkpoint themselves."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what the layer wants to be checkpointed."""
        return self.run(function, args, kwargs)


_NOT_COMPILED = (
    "the block {path!r} has buffers that its forward may change (BatchNorm, spectral norm): they "
    "cannot be put back inside of a compiled recomputation. Leave it out of "
    "ActivationCheckpointing(modules=...), or compile less"
)


def _contexts(
    values: BufferValues, path: str, meter: CheckpointMeter | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Make what is entered around the forward, and around each of its recomputations."""
    return nullcontext(), _Recomputing(values, path, meter)


class _Recomputing:
    """Entered once for every walk over the graph, which may be several."""

    def __init__(self, values: BufferValues, path: str, meter: CheckpointMeter | None) -> None:
        self._values = values
        self._path = path
        self._meter = meter
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(self._values.in_place())
        if self._meter is not None and self._meter.is_measuring:
            stack.enter_context(self._meter.recomputing(self._path))
        self._entered.append(stack)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)

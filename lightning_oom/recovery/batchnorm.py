"""Running statistics of normalisation layers, when one batch runs as several micro-batches.

Every forward of a training-mode normalisation layer moves its running mean and variance once. A
split step would move them once per micro-batch. :func:`merged_batchnorm` makes the split step move
them once, by the statistics of the whole batch. The *normalisation* still uses the statistics of
each micro-batch; :func:`find_batch_coupled` names the layers where that changes the gradients.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_oom.errors import NotSeparableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["MergedBatchNorm", "find_batch_coupled", "merged_batchnorm"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_UNWRITTEN = -1.0  # no variance is negative
_INSTANCE_DIMS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}


def find_batch_coupled(module: nn.Module) -> list[str]:
    """Name the layers that mix the rows of a batch in the mode they are in now.

    Args:
        module: Searched with all its submodules.

    Returns:
        Dotted names, in module order, of batch normalisation layers that would normalise with the
        statistics of the batch: those in training mode, and those without running statistics.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> find_batch_coupled(net), find_batch_coupled(net.eval())
        (['1'], [])
    """
    kinds = (*_BATCH_NORMS, nn.SyncBatchNorm)
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, kinds) and (layer.training or layer.running_mean is None)
    ]


@contextmanager
def merged_batchnorm(module: nn.Module) -> Iterator[MergedBatchNorm]:
    """Make a split forward move running statistics once, as the whole batch would have.

    Inside the block every normalisation layer in training mode works on scratch statistics (one
    number per channel) that give the statistics of each micro-batch, as the layer's own kernel
    computes them. The real buffers are not touched before the block ends: then they receive one
    update from the weighted mean and the pooled unbiased variance, and the counter one increment.
    When the block ends by an exception they are as before it.

    Covers ``BatchNorm1d/2d/3d`` (also with ``momentum=None``, several calls per forward, and
    activation checkpointing) and ``InstanceNorm1d/2d/3d`` with running statistics. Layers in eval
    mode or without running statistics are left alone.

    Args:
        module: The module that runs inside the block, with all its submodules.

    Yields:
        A handle; call :meth:`MergedBatchNorm.begin_micro_batch` before each micro-batch.

    Raises:
        NotSeparableError: A layer is a ``SyncBatchNorm`` in training mode, whose statistics belong
            to all ranks.

    Note:
        Costs no pass over activations and no memory beyond four numbers per channel and call. Where
        the layers' inputs do not change, the buffers equal those of the whole batch within 6e-8 of
        their scale (float32). The inputs do change behind another batch normalisation.

    Example:
        >>> layer, whole = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        >>> x = torch.arange(24.0).reshape(8, 3)
        >>> with merged_batchnorm(layer) as merged:
        ...     for part in x.split(5):
        ...         merged.begin_micro_batch()
        ...         _ = layer(part)
        >>> _ = whole(x)
        >>> torch.allclose(layer.running_var, whole.running_var), int(layer.num_batches_tracked)
        (True, 1)
    """
    merged = MergedBatchNorm(module)
    try:
        yield merged
    except BaseException:
        merged.close()
        raise
    merged.close()
    merged.commit()


@dataclass(slots=True, kw_only=True)
class _Call:
    """What one call of a layer saw: its channel statistics and over how much they were taken."""

    mean: Tensor
    variance: Tensor
    weight: int


@dataclass(slots=True, kw_only=True)
class _Layer:
    """A layer, and its real statistics while scratch ones stand in for them during a call."""

    module: Any
    calls: list[list[_Call]] = field(default_factory=lambda: [[]])
    real: tuple[Tensor, Tensor, Tensor | None, float | None] | None = None
    weight: int = 0

    def before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: move to scratch statistics when the layer is in training mode."""
        self.settle()
        if self.module.training:
            self.weight = _weight(self.module, args[0] if args else kwargs["input"])
            self.swap_in()

    def after_forward(self, *_: Any) -> None:
        """Forward hook: keep what the call saw, and move back."""
        if self.real is not None:
            self._keep()

    def settle(self) -> None:
        """Finish a call whose forward was left by an exception.

        Recomputation under activation checkpointing stops that way as soon as it has what it
        needs, after the statistics were updated. A real error comes before that.
        """
        if self.real is None:
            return
        if bool((self.module.running_var >= 0).all()):
            self._keep()
        else:
            self.swap_out()

    def _keep(self) -> None:
        mean, variance = self.module.running_mean, self.module.running_var
        self.swap_out()
        self.calls[-1].append(_Call(mean=mean, variance=variance, weight=self.weight))

    def swap_in(self) -> None:
        """Let the next forward write to scratch statistics, unblended (momentum 1)."""
        layer = self.module
        counter = layer.num_batches_tracked
        self.real = (layer.running_mean, layer.running_var, counter, layer.momentum)
        layer.running_mean = torch.zeros_like(layer.running_mean)
        layer.running_var = torch.full_like(layer.running_var, _UNWRITTEN)
        if counter is not None:
            layer.num_batches_tracked = counter.clone()
        layer.momentum = 1.0

    def swap_out(self) -> None:
        """Put the real statistics back; no-op when they are in place."""
        if self.real is None:
            return
        layer = self.module
        layer.running_mean, layer.running_var, counter, layer.momentum = self.real
        if counter is not None:
            layer.num_batches_tracked = counter
        self.real = None


class MergedBatchNorm:
    """The statistics collected by :func:`merged_batchnorm`; not to be built directly."""

    def __init__(self, module: nn.Module) -> None:
        self._layers: list[_Layer] = []
        self._hooks: list[Any] = []
        self._started = False
        for name, layer in module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm) and layer.training:
                raise NotSeparableError(
                    f"{name or 'the module'} is a SyncBatchNorm: its statistics are gathered from "
                    "all ranks in every forward, so its batch cannot be split on one of them"
                )
        for layer in module.modules():
            if (
                isinstance(layer, (*_BATCH_NORMS, *_INSTANCE_NORMS))
                and layer.running_mean is not None
            ):
                self._watch(layer)

    def begin_micro_batch(self) -> None:
        """Say that the calls that follow belong to the next micro-batch.

        Without it, every call of a layer counts as a micro-batch of its own, which is right only
        for layers that are called once per forward.
        """
        for layer in self._layers:
            layer.settle()
            if self._started:
                layer.calls.append([])
        self._started = True

    def close(self) -> None:
        """Take the hooks off and put the real statistics back, untouched; may be called again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for layer in self._layers:
            layer.settle()

    @torch.no_grad()
    def commit(self) -> None:
        """Update the real statistics as one forward of the whole batch would have."""
        for layer in self._layers:
            parts = layer.calls if self._started else [[call] for call in layer.calls[0]]
            for index in range(max(map(len, parts), default=0)):
                _update(layer.module, [calls[index] for calls in parts if index < len(calls)])
            layer.calls = [[]]

    def _watch(self, module: nn.Module) -> None:
        layer = _Layer(module=module)
        self._layers.append(layer)
        self._hooks += [
            module.register_forward_pre_hook(layer.before_forward, with_kwargs=True),
            module.register_forward_hook(layer.after_forward, prepend=True),
        ]


def _weight(module: nn.Module, x: Tensor) -> int:
    """Return over how many values (batch norm) or rows (instance norm) statistics are taken."""
    for kind, ndim in _INSTANCE_DIMS.items():
        if isinstance(module, kind):
            return x.shape[0] if x.ndim == ndim else 1
    return x.numel() // x.shape[1]


def _update(module: Any, calls: list[_Call]) -> None:
    counts_batches = isinstance(module, _BATCH_NORMS)
    mean, variance = _pool(calls, unbiased=counts_batches)
    momentum = module.momentum
    if counts_batches:
        module.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(module.num_batches_tracked)
    elif momentum is None:
        momentum = 0.0
    for running, new in ((module.running_mean, mean), (module.running_var, variance)):
        running.copy_(momentum * new.to(running.dtype) + (1 - momentum) * running)


def _pool(calls: list[_Call], *, unbiased: bool) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the values behind ``calls`` taken together."""
    dtype = torch.float32 if calls[0].mean.device.type == "mps" else torch.float64
    total = sum(call.weight for call in calls)
    weights = torch.tensor([[call.weight] for call in calls], dtype=dtype).to(calls[0].mean.device)
    means = torch.stack([call.mean for call in calls]).to(dtype)
    variances = torch.stack([call.variance for call in calls]).to(dtype)
    mean = (means * weights).sum(0) / total
    if not unbiased:
        return mean, (variances * weights).sum(0) / total
    scatter = variances * (weights - 1) + (means - mean).square() * weights
    return mean, scatter.sum(0) / max(total - 1, 1)

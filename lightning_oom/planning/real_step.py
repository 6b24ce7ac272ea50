"""A training step on real tensors, small, where fake ones cannot follow; then extended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.memory.storages import strided_parts
from lightning_oom.planning.clone_run import isolated_randomness, run_clone
from lightning_oom.planning.precision import parse_precision
from lightning_oom.planning.refusals import not_traced
from lightning_oom.planning.rows import TraceByRows, count_rows, take_rows
from lightning_oom.planning.skeleton import Skeleton
from lightning_oom.planning.step_settings import StepSettings
from lightning_oom.planning.tracing import StepTracer

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_oom.planning.trace import MemoryTrace

__all__ = ["measure_rows", "measure_step"]

_SMALL_ROWS = (2, 3)


def measure_step(
    module: torch.nn.Module,
    batch: Any,
    *,
    rows: int | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    **how: Any,
) -> MemoryTrace:
    """Run training steps for real on copies with 2 and with 3 rows, and extend them to more rows.

    Each allocation grows on its own line; the peak is the largest of them. A batch of 3 rows or
    fewer is run as it is.

    Args:
        module: As for :class:`~lightning_oom.planning.fake_step.FakeStep`. It is copied, and runs
            where it is.
        batch: With real values: rows are taken from it over and over.
        rows: Rows wanted; ``None`` takes those of the batch.
        loss: As for :class:`~lightning_oom.planning.fake_step.FakeStep`.
        **how: What :meth:`FakeStep.run <lightning_oom.planning.fake_step.FakeStep.run>` takes.

    Returns:
        The trace, marked as measured.

    Raises:
        StepNotTracedError: The step fails, or runs other operators at other numbers of rows, so that
            nothing can be extended; the message names the line or the operator.
        ValueError: An argument is out of its range.

    Note:
        Holds a second copy of the parameters, their gradients and optimizer state while it runs.
        Not affine in anything but rows: batches have to be of the wanted length.

    Example:
        >>> trace = measure_step(torch.nn.Linear(4, 2), torch.zeros(8, 4), optimizer=torch.optim.SGD)
        >>> trace.rows, trace.is_measured
        (8, True)
    """
    wanted = count_rows(batch) if rows is None else rows
    if wanted is None or wanted <= max(_SMALL_ROWS):
        return measure_rows(module, batch, rows=wanted, loss=loss, **how)
    traces = [measure_rows(module, batch, rows=small, loss=loss, **how) for small in _SMALL_ROWS]
    return TraceByRows.between(*traces).at(wanted)


def measure_rows(
    module: torch.nn.Module,
    batch: Any,
    *,
    rows: int | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    record_operators: bool = False,
    precision: str | int | None = None,
    **how: Any,
) -> MemoryTrace:
    """Run training steps for real on a copy, at exactly so many rows; see :func:`measure_step`."""
    settings = StepSettings(precision=parse_precision(precision), loss=loss, **how)
    tracer = StepTracer(record_operators=record_operators)
    copying = _Copying(module, settings.precision.weights_dtype)
    try:
        with isolated_randomness():
            clone = Skeleton(copying.member).module(module)
            copied = Skeleton(copying.batch).value(batch)
            if rows is not None:
                copied = take_rows(copied, rows)
            copying.forget()
            run_clone(clone, copied, tracer, settings)
    except Exception as error:
        raise not_traced(error, "for real") from error
    return tracer.trace(rows=count_rows(copied), is_measured=True)


class _Copying:
    """Makes copies that share storages where the originals do."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._members = {id(t) for t in (*module.parameters(), *module.buffers())}
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def member(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a parameter, a buffer or another tensor of the module."""
        return self.batch(tensor) if id(tensor) in self._members else self._like(tensor, None)

    def batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor that is cast with the module."""
        return self._like(tensor, self._dtype if tensor.is_floating_point() else None)

    def forget(self) -> None:
        """Hold the copies no longer."""
        self._storages.clear()

    def _like(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        with torch.no_grad():
            copied = self._copy(tensor.detach())
            if dtype is not None:
                copied = copied.to(dtype)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if next(strided_parts(tensor), None) is not tensor:
            return tensor.clone()
        storage = tensor.untyped_storage()
        known = self._storages.get(id(storage))
        if known is None:
            known = self._storages[id(storage)] = (storage, storage.clone())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(known[1], tensor.storage_offset(), tensor.shape, tensor.stride())

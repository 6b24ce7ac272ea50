"""Out of memory at a chosen place: the n-th allocation, or a named phase of a named step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.memory.allocations import AllocationWatcher
from lightning_oom.testing.messages import cuda_oom_message
from lightning_oom.testing.shadows import Shadow

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from typing_extensions import Self

__all__ = ["AllocationFault", "ErrorFactory", "fail_at"]

ErrorFactory = Callable[[], BaseException]

_name_of = functools.cache(str)


def fail_at(
    n: int | Iterable[int],
    *,
    step: int | None = None,
    error: ErrorFactory | str | None = None,
    times: int = 1,
    include_transfer: bool = False,
    device: str | None = None,
) -> AllocationFault:
    """Let the n-th allocation run out of memory, in a ``with`` block or in a step of a run.

    As a context manager it counts the allocations inside the block. In
    ``Trainer(callbacks=[...])`` it counts those of one optimizer step: of all its micro-batches
    under gradient accumulation, of every closure call of an optimizer such as LBFGS, and of the
    attempts that follow a failure. Counting starts at this callback's ``on_train_batch_start`` and
    ends at its ``on_train_batch_end``; what callbacks before it do in the latter counts, what they
    do in the former does not. Put it last to count neither of its neighbours' starts.

    Each of the numbers fires once, so that a retry of the step can succeed.

    Args:
        n: Which allocation fails, counted from 1, or several. With none (``()``) nothing fails and
            the allocations are counted.
        step: The optimizer step to count in, from 0 as ``trainer.global_step``. ``None`` counts
            through all of them. Only for use as a callback.
        error: What makes the error that is raised, or the text of a ``RuntimeError``. ``None``
            raises :class:`torch.OutOfMemoryError` with the text of CUDA's.
        times: How many allocations in a row fail from each of the numbers on, at least 1: the
            retries of a step fail too.
        include_transfer: Count the transfer of the batch to the device as well. Only for use as a
            callback.
        device: Count allocations on this device alone. ``None`` counts everywhere in a block, and
            on the device of the strategy in a run.

    Returns:
        The fault, with ``count``, ``raised`` and ``trace``.

    Raises:
        ValueError: A number is below 1.

    Note:
        The operator has run when the error is raised, and its result is freed first: random
        numbers are drawn and statistics updated as they may be when a later allocation of a real
        operator fails. An operator on a list of tensors counts as one allocation.

    Example:
        >>> import torch
        >>> with fail_at(2) as fault:
        ...     kept = torch.zeros(256)
        ...     try:
        ...         kept + 1
        ...     except RuntimeError as error:
        ...         print(str(error).split(" (")[0])
        CUDA out of memory. Tried to allocate 1024 bytes.
        >>> fault.count, fault.raised, fault.trace
        (2, 1, [(1, 'aten.zeros.default', 1024), (2, 'aten.add.Tensor', 1024)])
    """
    numbers = (n,) if isinstance(n, int) else tuple(n)
    return AllocationFault(
        numbers,
        step=step,
        error=error,
        times=times,
        include_transfer=include_transfer,
        device=device,
    )


class FiringPlan:
    """Counts allocations and says at which ones to fail; each number fires once."""

    def __init__(
        self, numbers: Iterable[int], *, times: int, error: ErrorFactory | str | None
    ) -> None:
        numbers = tuple(numbers)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"allocations are counted from 1, got {number!r}")
        if times < 1:
            raise ValueError(f"times is at least 1, got {times!r}")
        self.pending = {number + more for number in numbers for more in range(times)}
        self.error = error
        self.count = 0
        self.raised = 0
        self.trace: list[tuple[int, str, int]] = []

    def fires(self, operator: Any, num_bytes: int) -> bool:
        """Count one allocation; say whether it fails."""
        self.count += 1
        self.trace.append((self.count, _name_of(operator), num_bytes))
        if self.count not in self.pending:
            return False
        self.pending.discard(self.count)
        self.raised += 1
        return True

    def make_error(self, operator: Any, num_bytes: int, *, name: str) -> BaseException:
        """Make the error that was asked for."""
        if isinstance(self.error, str):
            return RuntimeError(self.error)
        if self.error is not None:
            return self.error()
        remark = f"{name}, allocation {self.count}, operator {operator}"
        return OutOfMemoryError(cuda_oom_message(requested_bytes=num_bytes, remark=remark))


class FaultWatcher(AllocationWatcher):
    """Fails the allocations of a plan while it is armed."""

    def __init__(self, plan: FiringPlan, *, name: str, device: torch.device | None) -> None:
        super().__init__(device=device)
        self.plan = plan
        self.name = name
        self.armed = True

    def refuses(self, operator: Any, num_bytes: int) -> bool:
        """Count the allocation and fail it if it is its turn."""
        return self.armed and self.plan.fires(operator, num_bytes)

    def make_error(self, operator: Any, num_bytes: int) -> BaseException:
        """Make the error of the plan."""
        return self.plan.make_error(operator, num_bytes, name=self.name)


class AllocationFault(Callback):
    """Fails chosen allocations; made by :func:`fail_at`.

    Attributes:
        step: The optimizer step it counts in, ``None`` for all.
    """

    def __init__(
        self,
        numbers: Iterable[int],
        *,
        step: int | None,
        error: ErrorFactory | str | None,
        times: int,
        include_transfer: bool,
        device: str | None,
    ) -> None:
        if step is not None and step < 0:
            raise ValueError(f"step is counted from 0, got {step!r}")
        self.step = step
        self._plan = FiringPlan(numbers, times=times, error=error)
        self._include_transfer = include_transfer
        self._device = device
        self._watcher: FaultWatcher | None = None
        self._shadow: Shadow | None = None

    @property
    def count(self) -> int:
        """How many allocations were counted."""
        return self._plan.count

    @property
    def raised(self) -> int:
        """How many of them failed."""
        return self._plan.raised

    @property
    def trace(self) -> list[tuple[int, str, int]]:
        """Number, operator and bytes of each allocation that was counted."""
        return self._plan.trace

    def __enter__(self) -> Self:
        """Count from here on."""
        if self._watcher is not None:
            raise RuntimeError("this fault is already active: make another")
        self._watch(None)
        return self

    def __exit__(self, *exc_details: object) -> None:
        """Stop counting."""
        self._rest()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look into the transfer of batches if that is to be counted."""
        if self._include_transfer and self._shadow is None:
            self._shadow = Shadow(
                trainer.strategy, "batch_to_device", self._around_transfer(trainer)
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count if this batch belongs to the step."""
        if self._is_turn(trainer):
            self._rest()
            self._watch(trainer.strategy.root_device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop counting until the next batch."""
        self._rest()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the strategy as it was."""
        self._leave()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave everything as it was."""
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave everything as it was, also after a run that ended unseen."""
        self._leave()

    def _is_turn(self, trainer: Trainer) -> bool:
        return self.step is None or trainer.global_step == self.step

    def _watch(self, device: torch.device | None) -> None:
        if self._device is not None:
            device = torch.device(self._device)
        self._watcher = FaultWatcher(self._plan, name="fail_at", device=device)
        self._watcher.__enter__()

    def _rest(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.__exit__(None, None, None)

    def _leave(self) -> None:
        self._rest()
        if self._shadow is not None:
            self._shadow.remove()
            self._shadow = None

    def _around_transfer(
        self, trainer: Trainer
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(transfer: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                if self._watcher is not None or not (trainer.training and self._is_turn(trainer)):
                    return transfer(*args, **kwargs)
                self._watch(trainer.strategy.root_device)
                try:
                    return transfer(*args, **kwargs)
                finally:
                    self._rest()

            return counted

        return make

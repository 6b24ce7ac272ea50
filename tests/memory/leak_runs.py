"""Small training runs, clean and leaking, as a leak finder sees them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_oom.memory.leaks import LeakFinder

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CLEAN", "Run", "run_epochs"]


class Run(nn.Module):
    """A module with an optimizer; a subclass keeps something after each step or epoch.

    Attributes:
        accumulate: Micro-batches per optimizer step.
    """

    accumulate = 1

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def rows(self, index: int) -> int:
        """Rows of a batch."""
        return 6

    def keep(self, index: int, loss: Any, output: Any) -> None:
        """Called with what a step made, before its backward pass."""

    def end_epoch(self) -> None:
        """Called after the last step of an epoch."""

    def step(self, index: int) -> None:
        """Train on one micro-batch."""
        output = self.net(torch.randn(self.rows(index), 4))
        loss = output.square().mean()
        self.keep(index, loss, output)
        loss.backward()
        if (index + 1) % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def run_epochs(
    run: Run,
    *,
    epochs: int = 3,
    batches: int = 40,
    finder: LeakFinder | None = None,
    after_step: Callable[[int, LeakFinder], None] | None = None,
) -> LeakFinder:
    """Train, and let a leak finder look after each batch and epoch."""
    finder = finder or LeakFinder()
    steps = 0
    roots = {"model": run}
    for _ in range(epochs):
        for index in range(batches):
            run.step(index)
            steps += (index + 1) % run.accumulate == 0
            finder.observe(steps, roots)
            if after_step is not None:
                after_step(steps, finder)
        finder.end_epoch()
        run.end_epoch()
    finder.finish(roots)
    return finder


class _MovingAverage(Run):
    def __init__(self) -> None:
        super().__init__()
        self.average = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def keep(self, index, loss, output) -> None:
        for name, p in self.net.named_parameters():
            self.average[name] = 0.9 * self.average[name] + 0.1 * p.detach()


class _Accumulating(Run):
    accumulate = 16

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []

    def keep(self, index, loss, output) -> None:
        if index % self.accumulate == 0:
            self.losses.clear()
        self.losses.append(loss)


class _VariableLengths(Run):
    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.by_length: dict[int, Any] = {}

    def rows(self, index: int) -> int:
        return int(torch.randint(2, 12, ()))

    def keep(self, index, loss, output) -> None:
        self.last = output
        self.by_length.setdefault(len(output), torch.zeros(len(output)))


class _SawTooth(Run):
    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Any] = []
        self.long: list[Any] = []

    def keep(self, index, loss, output) -> None:
        if len(self.pending) == 5:
            self.pending.clear()
        self.pending.append(loss)
        if len(self.long) == 23:
            self.long.clear()
        self.long.append(output.detach())


class _WarmUp(Run):
    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[Any] = deque(maxlen=30)
        self.first: list[Any] = []

    def keep(self, index, loss, output) -> None:
        self.recent.append(output.detach())
        if len(self.first) < 8:
            self.first.append(output.detach())


class _ResetsEachEpoch(Run):
    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import CatMetric
        from torchmetrics.classification import BinaryAUROC

        self.auroc, self.seen = BinaryAUROC(thresholds=None), CatMetric()
        self.outputs: list[Any] = []

    def keep(self, index, loss, output) -> None:
        scores = output.detach()[:, 0].sigmoid()
        self.auroc.update(scores, torch.ones(len(scores), dtype=torch.long))
        self.seen.update(scores)
        self.outputs.append({"logits": output.detach()})

    def end_epoch(self) -> None:
        self.auroc.reset()
        self.seen.reset()
        self.outputs.clear()


class _LastLoss(Run):
    def __init__(self) -> None:
        super().__init__()
        self.last_loss: Any = None
        self.means: list[Any] = []

    def keep(self, index, loss, output) -> None:
        self.last_loss = loss

    def end_epoch(self) -> None:
        self.means.append(self.last_loss.detach())


CLEAN: dict[str, Callable[[], Run]] = {
    "optimizer state at step 1": Run,
    "moving average of the weights": _MovingAverage,
    "gradient accumulation": _Accumulating,
    "variable lengths": _VariableLengths,
    "saw-tooth": _SawTooth,
    "warm-up": _WarmUp,
    "metrics and lists reset each epoch": _ResetsEachEpoch,
    "last loss and a mean per epoch": _LastLoss,
}
"""Models that hold tensors from step to step and leak none."""

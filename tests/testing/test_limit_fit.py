"""``memory_limit`` around a whole fit, with data loader workers and everything else."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import TinyRegressor, regression_loader
from quiet_runs import quiet_trainer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.testing import memory_limit

if TYPE_CHECKING:
    from lightning_oom.testing import MemoryLimit

limit_cpu = functools.partial(memory_limit, device="cpu")


class BigRows(Dataset[torch.Tensor]):
    """Rows that need more memory on the way than the limit of the main process."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(256, 1024).sum(0)[:8] + index


def test_data_loader_workers_are_not_limit_cpu() -> None:
    """Forked workers inherit the mode; it sleeps in them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork beside threads
        with limit_cpu("64 KiB") as limit:
            loader = DataLoader(
                BigRows(), batch_size=4, num_workers=2, multiprocessing_context="fork"
            )
            batches = [batch.shape for batch in loader]

    assert batches == [(4, 8)] * 4
    assert limit.num_refused == 0


class Checkpointed(TinyRegressor):
    """Recomputes its forward pass, and steps with a foreach optimizer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Recompute in the backward pass."""
        return checkpoint(super().forward, x, use_reentrant=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on lists of tensors."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=True)


def fitted(precision: str, limit: MemoryLimit | None) -> tuple[list[torch.Tensor], list[int]]:
    """Fit; return the weights, and what was alive after each batch."""
    torch.manual_seed(7)
    model = Checkpointed()
    alive: list[int] = []

    def remember(*_: Any) -> None:
        alive.append(limit.live_bytes if limit is not None else 0)

    model.on_train_batch_end = remember
    quiet_trainer(max_epochs=2, precision=precision).fit(model, regression_loader())
    return [weight.detach() for weight in model.parameters()], alive


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fit_under_a_limit_is_the_fit_without_one(precision: str) -> None:
    """Same weights, nothing refused, and no step leaves more behind than the one before."""
    reference, _ = fitted(precision, None)

    with limit_cpu("64 MiB") as limit:
        weights, alive = fitted(precision, limit)

    assert all(torch.equal(a, b) for a, b in zip(reference, weights, strict=True))
    assert limit.num_refused == 0
    assert len(set(alive[-4:])) == 1, alive  # the first epoch adds what it logged


def test_a_fit_that_does_not_fit_raises_and_leaves_no_mode() -> None:
    """The error comes out of ``trainer.fit``; afterwards torch allocates freely."""
    with limit_cpu("4 KiB") as limit, pytest.raises(OutOfMemoryError):
        quiet_trainer().fit(TinyRegressor(), regression_loader())

    assert limit.num_refused == 1
    assert torch.zeros(4096).sum() == 0

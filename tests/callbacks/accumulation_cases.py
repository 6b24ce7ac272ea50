"""Batches of unequal length, and the same rows in effective batches."""

from __future__ import annotations

import torch
from fakes import TinyRegressor
from fits import fit
from torch.utils.data import DataLoader

from lightning_oom import GradientAccumulation

__all__ = ["CASES", "TOLERANCE", "accumulate", "rows_of", "run"]

TOLERANCE = 2e-6
"""Relative to the largest weight: float32 sums in another order, a few steps of SGD."""


def rows_of(*sizes):
    """The same rows whatever the sizes of the batches are."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 8, generator=generator)[: sum(sizes)]
    y = x.sum(-1) + x[:, 0].sin()
    batches = list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))
    return DataLoader(batches, batch_size=None)


def accumulate(rows, **options):
    """The callback under test, silent."""
    return GradientAccumulation(effective_batch_size=rows, verbose=False, **options)


def run(sizes, *callbacks, make=TinyRegressor, **options):
    """Train two epochs over these batches."""
    return fit(make, rows_of(*sizes), *callbacks, **{"max_epochs": 2, **options})[0]


CASES = {
    "equal": ([4] * 6, 8, [8, 8, 8]),
    "last window": ([4] * 5, 8, [8, 8, 4]),
    "last batch": ([4, 4, 4, 3], 8, [8, 7]),
    "ragged": ([4, 3, 2, 5, 1, 6, 2], 9, [9, 12, 2]),
    "growing": ([2] * 4 + [4] * 3, 8, [8, 8, 4]),
    "one batch": ([8, 8, 3], 8, [8, 8, 3]),
    "larger batches": ([12, 5], 4, [12, 5]),
}

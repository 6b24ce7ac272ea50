"""The kernel refuses, torch raises its own error, and that error is recognised."""

from __future__ import annotations

import sys

import pytest
from kernel_limit import run_under_data_limit

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_DATA")


def test_the_kernels_refusal_reaches_the_classifier() -> None:
    """A real allocation fails for real; afterwards the process goes on."""
    finished = run_under_data_limit(
        """
import torch
from lightning_oom.recovery.classify import classify_oom
torch.set_num_threads(1)
torch.zeros(2**20).sum()
limit_data(64 * 2**20)
try:
    torch.ones(2**28)
except RuntimeError as error:
    cause = classify_oom(error)
    print(type(error).__name__, cause.scope, cause.requested_bytes, cause.recoverable_on("cpu"))
print(torch.ones(2**20).sum().item())
"""
    )

    assert finished.stderr == ""
    assert finished.stdout.split() == ["RuntimeError", "host", str(2**30), "True", "1048576.0"]


def test_a_training_step_fails_in_the_kernel() -> None:
    """A batch that is too large dies with the allocator's error, a smaller one trains on."""
    finished = run_under_data_limit(
        """
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
def step(rows):
    model.zero_grad()
    loss = model(torch.ones(rows, 64)).mean()
    loss.backward()
    return loss.item()
small = step(64)
limit_data(64 * 2**20)
try:
    step(16384)
except RuntimeError as error:
    print("DefaultCPUAllocator: can't allocate memory" in str(error))
print(step(64) == small)
"""
    )

    assert finished.stderr == ""
    assert finished.stdout.split() == ["True", "True"]

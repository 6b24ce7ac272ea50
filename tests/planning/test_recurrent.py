"""LSTM layers as they run off the CPU."""

from __future__ import annotations

import pytest
import torch

from lightning_oom._torch.fake import fake_mode
from lightning_oom.planning.estimate import estimate_peak
from lightning_oom.planning.kernels import cuda_choices


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_results_have_the_form_of_torch(bidirectional: bool, batch_first: bool) -> None:
    """Outputs and both states."""

    def run() -> list[tuple[int, ...]]:
        layer = torch.nn.LSTM(
            8, 16, 2, dropout=0.1, bidirectional=bidirectional, batch_first=batch_first
        )
        output, (hidden, cell) = layer(torch.zeros(5, 3, 8))
        output.sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
        return [tuple(tensor.shape) for tensor in (output, hidden, cell)]

    wanted = run()
    with fake_mode(), cuda_choices():
        assert run() == wanted


def test_the_gates_of_each_step_are_kept() -> None:
    """Four gates and the cell state, per row, step and layer."""
    module = torch.nn.LSTM(8, 32, batch_first=True)

    def loss(module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch)[0].sum()

    batch = torch.zeros(64, 10, 8)
    estimate = estimate_peak(module, batch, loss=loss, optimizer=torch.optim.SGD, device="simgpu")
    assert estimate.by_kind["activation"] >= 64 * 10 * 5 * 32 * 4

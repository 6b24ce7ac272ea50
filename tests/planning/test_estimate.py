"""Peak estimates, held against the simulated GPU, and what they promise beside the peak."""

from __future__ import annotations

import json
from functools import partial

import lightning as L  # noqa: N812 - as everybody calls it
import numpy as np
import pytest
import torch
from torch import nn

from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.estimate import estimate_peak
from lightning_oom.testing import SimulatedGPU
from lightning_oom.units import MIB

ADAM = partial(torch.optim.AdamW, lr=1e-3)


def mlp() -> nn.Module:
    """Weights dominate."""
    return nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2048, 256))


def convolutions() -> nn.Module:
    """Activations dominate."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def transformer() -> nn.Module:
    """Attention and dropout."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def square(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss."""
    return module(batch).square().mean()


CASES = {
    "mlp": (mlp, (256,)),
    "convolutions": (convolutions, (3, 64, 64)),
    "transformer": (transformer, (96, 64)),
}


def train(module: nn.Module, batch: torch.Tensor) -> dict[str, int]:
    """Train two steps in Lightning's order; return the peak of each phase, and what is reserved."""
    optimizer = ADAM(module.parameters())
    peaks = {"forward": 0, "backward": 0, "optimizer": 0}

    def note(phase: str) -> None:
        peaks[phase] = max(peaks[phase], torch.simgpu.max_memory_allocated())
        torch.simgpu.reset_peak_memory_stats()

    torch.simgpu.reset_peak_memory_stats()
    for _ in range(2):
        loss = square(module, batch)
        note("forward")
        optimizer.zero_grad()
        loss.backward()
        note("backward")
        optimizer.step()
        note("optimizer")
    return {**peaks, "reserved": torch.simgpu.memory_reserved()}


@pytest.mark.parametrize(
    ("case", "rows"), [("mlp", 4), ("mlp", 2048), ("convolutions", 16), ("transformer", 8)]
)
def test_the_simulated_gpu_agrees(case: str, rows: int) -> None:
    """Allocated bytes within 1 %, reserved ones within 3 %, the peak in the same phase."""
    make, shape = CASES[case]
    with SimulatedGPU("2 GiB") as gpu:
        module, batch = make().to(gpu.device), torch.zeros(rows, *shape, device=gpu.device)
        estimate = estimate_peak(module, batch, optimizer=ADAM, loss=square)
        measured = train(module, batch)
    reserved = measured.pop("reserved")

    assert estimate.device == "simgpu"
    assert estimate.allocated_bytes == pytest.approx(max(measured.values()), rel=0.01)
    assert estimate.reserved_bytes == pytest.approx(reserved, rel=0.03)
    assert estimate.peak_phase == max(measured, key=measured.__getitem__)


def test_other_rows_cost_no_run_and_are_as_if_they_had_run() -> None:
    """Every allocation grows on its own line."""
    module, batch = convolutions(), torch.zeros(4, 3, 32, 32)
    small = estimate_peak(module, batch, optimizer=ADAM, loss=square)
    large = estimate_peak(module, batch, optimizer=ADAM, loss=square, rows=48)

    assert small.at_rows(48) == large
    assert (small.rows, large.rows) == (4, 48)
    grown = small.at_rows(96).allocated_bytes - large.allocated_bytes
    assert large.bytes_per_row == pytest.approx(grown / 48, rel=0.05)


def test_the_largest_rows_fit_and_a_tenth_more_does_not() -> None:
    """On the device model itself, with a limit."""
    with SimulatedGPU("64 MiB") as gpu:
        module = convolutions().to(gpu.device)
        estimate = estimate_peak(
            module, torch.zeros(2, 3, 32, 32, device=gpu.device), optimizer=ADAM, loss=square
        )
        rows = estimate.largest_rows("64 MiB")
        train(module, torch.zeros(rows, 3, 32, 32, device=gpu.device))
        with pytest.raises(torch.OutOfMemoryError):
            train(module, torch.zeros(rows * 11 // 10, 3, 32, 32, device=gpu.device))
    assert estimate.largest_rows("1 MiB") == 0


def test_a_larger_limit_is_likelier_to_do() -> None:
    """From 0 to 1; the interval holds what its coverage says."""
    estimate = estimate_peak(mlp(), torch.zeros(8, 256), optimizer=ADAM, loss=square)
    total = estimate.total_bytes
    chances = [estimate.fits(total * percent // 100) for percent in (50, 95, 100, 105, 200)]
    assert chances == sorted(chances)
    assert (chances[0], chances[-1]) == (0, 1)
    low, high = estimate.interval(0.5)
    assert estimate.interval(0.9)[0] < low < high < estimate.interval(0.9)[1]
    assert estimate.fits(estimate.interval(0.9)[1]) == pytest.approx(0.95, abs=0.001)
    with pytest.raises(ValueError, match="coverage is above 0 and below 1, got 1"):
        estimate.interval(1)


def test_the_record_is_plain_data() -> None:
    """It can be written as JSON, and its parts add up."""
    estimate = estimate_peak(mlp(), torch.zeros(8, 256), optimizer=ADAM, loss=square, device="a100")
    read = json.loads(json.dumps(estimate.to_dict()))
    assert (read["device"], read["precision"], read["tier"]) == ("a100", "32-true", "fake")
    assert (
        sum(read["by_kind"].values()) == sum(read["by_module"].values()) == read["allocated_bytes"]
    )
    assert read["device_bytes"] == read["reserved_bytes"] + 500 * MIB
    assert "_at" not in read


def test_the_module_is_as_before() -> None:
    """No gradients, no hooks, the same numbers."""
    module = mlp()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    estimate_peak(module, torch.zeros(8, 256), optimizer=ADAM, loss=square, precision="bf16-mixed")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


class Numbers(L.LightningModule):
    """Looks at numbers, which fake tensors have not."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.fails = fails

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Leave torch."""
        np.asarray(batch.numpy()).sum()
        if self.fails:
            raise KeyError("no such label")
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters())


def test_where_fake_tensors_cannot_follow_a_few_rows_are_measured() -> None:
    """And extended; the estimate says so."""
    estimate = estimate_peak(Numbers(fails=False), torch.ones(50, 64))
    assert (estimate.tier, estimate.rows) == ("measured", 50)
    assert estimate.at_rows(500).by_kind["batch"] >= 500 * 64 * 4


def test_where_nothing_can_be_run_the_line_is_named() -> None:
    """With what fake tensors could not do as a note."""
    with pytest.raises(StepNotTracedError, match=r"test_estimate\.py:\d+.*no such label") as caught:
        estimate_peak(Numbers(fails=True), torch.ones(50, 64))
    assert "numpy" in "".join(caught.value.__notes__)


def test_a_batch_without_rows_is_estimated_as_it_is() -> None:
    """It cannot be extended."""
    estimate = estimate_peak(mlp(), {"seed": 1}, loss=lambda m, _: square(m, torch.zeros(3, 256)))
    assert estimate.rows is None
    assert estimate.bytes_per_row is None
    with pytest.raises(ValueError, match="cannot be extended"):
        estimate.at_rows(2)
    with pytest.raises(ValueError, match="cannot be extended"):
        estimate.largest_rows("1 GiB")

"""On a real device: offload gives the same bits, holds less, and copies beside the computation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_oom.reduction.offload import (
    BlockOffload,
    OptimizerStateOffload,
    activations,
    find_blocks,
    offload_activations,
    streams,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _same_algorithms(monkeypatch):
    """Convolutions and products that give the same bits each time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def cnn(depth: int = 16) -> nn.Module:
    """Activations outweigh weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def steps(model: nn.Module, x: torch.Tensor, count: int, *, on: bool) -> tuple[list, int]:
    """Gradients, buffers and random state after some steps, and the most that they held."""
    torch.manual_seed(1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(count):
        if on:
            with offload_activations(keep=[*model.parameters(), *model.buffers(), x]):
                loss = model(x).square().mean()
        else:
            loss = model(x).square().mean()
        loss.backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    values = [p.grad for p in model.parameters()] + list(model.buffers())
    return [value.cpu() for value in values] + [torch.cuda.get_rng_state()], peak


def test_bits_and_peak_of_a_cnn():
    """Equal over several steps, so that no copy races with what computes; well below the plain peak."""
    x = torch.randn(16, 3, 128, 128, device=DEVICE)
    plain, plain_peak = steps(cnn().to(DEVICE), x, 5, on=False)
    moved, moved_peak = steps(cnn().to(DEVICE), x, 5, on=True)

    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    assert moved_peak <= 0.4 * plain_peak


def test_copies_run_beside_the_computation(monkeypatch):
    """With much to compute a byte, most of the time that waiting for each copy takes is hidden."""
    side = 4096
    weights = [torch.randn(side, side, device=DEVICE, requires_grad=True) for _ in range(8)]
    x = torch.randn(side, side, device=DEVICE)

    def milliseconds(*, on: bool) -> float:
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            with offload_activations(keep=[*weights, x]) if on else nullcontext():
                y = x
                for weight in weights * 4:
                    y = torch.tanh(y @ weight) + 1e-3 * (y @ weight)
                loss = y.mean()
            loss.backward()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return min(times[1:])

    plain, beside = milliseconds(on=False), milliseconds(on=True)
    waiting = streams.Copies()
    monkeypatch.setattr(activations, "copies_for", lambda device: waiting)
    in_turn = milliseconds(on=True)

    assert beside - plain < 0.5 * (in_turn - plain)


def test_optimizer_state_and_pinned_homes():
    """Equal after several steps; state rests in pinned memory."""
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(1024, 1024).to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        mover = OptimizerStateOffload([optimizer], device=DEVICE, min_bytes=1024)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 1024, device=DEVICE)).square().mean().backward()
            if on:
                mover.move_in()
            optimizer.step()
            if on:
                mover.move_out()
        state = optimizer.state[model.weight]["exp_avg"]
        assert state.is_pinned() == on
        results.append((model.weight.detach().cpu(), state.cpu()))

    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_blocks_come_in_from_pinned_memory():
    """Equal outputs; less than all blocks on the device."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval()
    x = torch.randn(2, 16, 512, device=DEVICE)
    with torch.no_grad():
        plain = model.to(DEVICE)(x).cpu()
    model.cpu()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    blocks = BlockOffload(model, find_blocks(model), device=DEVICE)
    with blocks.away():
        model.to(DEVICE)
    undo = blocks.attach()
    with torch.no_grad():
        output = model(x).cpu()
    undo()

    assert torch.equal(output, plain)
    assert torch.cuda.max_memory_allocated() - before < 0.6 * blocks.kept_bytes

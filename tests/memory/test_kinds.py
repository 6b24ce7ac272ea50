"""Who holds the memory: against the ledger of the simulated GPU, and without touching a result."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from lightning_oom.memory.devices import read_memory
from lightning_oom.memory.kinds import read_kinds
from lightning_oom.memory.saved_tensors import SavedTensorTracker
from lightning_oom.memory.storages import StorageCount
from lightning_oom.testing import SimulatedGPU


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both."""
        return self.second(self.first(x).relu())


def convolutions() -> nn.Module:
    """Convolutions, batch normalisation, dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, 8, 3)
    )


def attention() -> nn.Module:
    """A transformer layer."""
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


MODELS = {
    "tied": (Tied, (256, 64)),
    "convolutions": (convolutions, (32, 3, 32, 32)),
    "attention": (attention, (32, 16, 64)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_named_kinds_are_nearly_all_that_is_allocated(name, optimizer) -> None:
    """After forward, backward and step, what has a name is within 2 % of the GPU's own ledger.

    ``other`` is left out of the sum, so that it cannot make up for what was missed; the output and
    the loss, which belong to no kind, are added by hand.
    """
    make, shape = MODELS[name]
    with SimulatedGPU("1 GiB") as gpu:
        before = read_memory(gpu.device).allocated_bytes
        model = make().to(gpu.device)
        optimiser = optimizer(model.parameters(), lr=0.01)
        tracker = SavedTensorTracker()
        for step in range(2):
            batch = torch.randn(shape).to(gpu.device)
            tracker.start()
            output = model(batch)
            loss = output.square().mean()
            moments = {"forward": kinds_and_ledger(model, optimiser, batch, tracker, before)}
            loss.backward()
            moments["backward"] = kinds_and_ledger(model, optimiser, batch, tracker, before)
            optimiser.step()
            moments["optimizer"] = kinds_and_ledger(model, optimiser, batch, tracker, before)
            tracker.stop()
            outputs = StorageCount(gpu.device).add([output, loss])
            for phase, (kinds, ledger) in moments.items():
                named = kinds.total_bytes - kinds.other_bytes
                free_standing = 0 if phase == "forward" else outputs
                assert abs(named + free_standing - ledger) <= 0.02 * ledger, (step, phase, kinds)
                assert kinds.other_bytes >= 0
            optimiser.zero_grad()
            del output, loss


def kinds_and_ledger(model, optimizer, batch, tracker, before):
    """Count now; return the kinds and what the ledger says beyond what was there before."""
    reading = read_memory(model.parameters().__next__().device)
    kinds = read_kinds(model, [optimizer], batch, saved=tracker, reading=reading)
    return kinds, reading.allocated_bytes - before


def test_each_storage_counts_once() -> None:
    """Views, tied weights and a batch that is also saved are no more memory than one."""
    model = Tied()
    x = torch.randn(8, 64)
    tracker = SavedTensorTracker()
    tracker.start()
    loss = model(x).sum()
    tracker.stop()

    kinds = read_kinds(model, [], {"x": x, "again": x[2:]}, saved=tracker)

    assert kinds.parameters_bytes == (64 * 64 + 2 * 64) * 4
    assert kinds.batch_bytes == 8 * 64 * 4
    assert kinds.activations_bytes == 8 * 64 * 4  # relu's output, saved twice
    del loss


def test_sparse_tensors_count_their_parts() -> None:
    """Indices and values of a sparse batch are its memory."""
    x = torch.eye(4).to_sparse()

    assert StorageCount(torch.device("cpu")).add([x]) == 4 * 2 * 8 + 4 * 4


def test_tensors_elsewhere_do_not_count() -> None:
    """Only the device that is read."""
    assert StorageCount(torch.device("cpu")).add([torch.zeros(4, device="meta"), None, "x"]) == 0


def test_gradients_are_the_same_bits() -> None:
    """Saving an alias changes no gradient, not of the second order either."""
    grads = []
    for tracked in (False, True):
        torch.manual_seed(3)
        model, x = attention(), torch.randn(2, 4, 64, requires_grad=True)
        tracker = SavedTensorTracker()
        if tracked:
            tracker.start()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        tracker.stop()
        grads.append([x.grad, *(p.grad for p in model.parameters())])

    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None)


def test_a_graph_dies_without_the_collector() -> None:
    """An output that is saved does not keep its own graph alive."""
    tracker = SavedTensorTracker()
    tracker.start()
    x = torch.ones(4, requires_grad=True)
    y = x.exp()  # saves its output
    tracker.stop()
    gc.disable()
    try:
        assert len(list(tracker.alive())) == 1
        del y
        assert list(tracker.alive()) == []
    finally:
        gc.enable()


def test_peak_memory_stays_the_same() -> None:
    """The tracker holds nothing that would otherwise have been freed."""
    peaks = []
    for tracked in (False, True):
        with SimulatedGPU("1 GiB") as gpu:
            model = convolutions().to(gpu.device)
            x = torch.randn(16, 3, 32, 32).to(gpu.device)
            torch.simgpu.reset_peak_memory_stats()
            before = torch.simgpu.memory_allocated()
            tracker = SavedTensorTracker()
            if tracked:
                tracker.start()
            model(x).square().mean().backward()
            tracker.stop()
            peaks.append(torch.simgpu.max_memory_allocated() - before)
            del model, x
            gc.collect()

    assert peaks[0] == peaks[1]


def test_a_write_to_a_saved_tensor_is_still_an_error() -> None:
    """Below hooks torch checks no versions; the tracker does, with the same words."""
    tracker = SavedTensorTracker()
    tracker.start()
    w = torch.ones(3, requires_grad=True)
    y = w.exp()
    z = y * 2
    y.mul_(3)
    tracker.stop()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (y.sum() + z.sum()).backward()


def test_transforms_that_refuse_hooks_run() -> None:
    """``torch.func.grad`` works inside, and what follows it is seen again."""
    tracker = SavedTensorTracker()
    disable = torch.autograd.graph.disable_saved_tensors_hooks
    tracker.start()
    inner = torch.func.grad(lambda x: x.square().sum())(torch.ones(3))
    y = torch.ones(3, requires_grad=True).exp()
    tracker.stop()

    assert inner.tolist() == [2, 2, 2]
    assert len(list(tracker.alive())) == 1
    assert torch.autograd.graph.disable_saved_tensors_hooks is disable
    del y


def test_hooks_of_user_code_go_first() -> None:
    """Offloaded and checkpointed tensors are where the user put them, and gradients are right."""
    tracker = SavedTensorTracker()
    x = torch.ones(3, requires_grad=True)
    tracker.start()
    with save_on_cpu():
        y = x.exp()
    z = checkpoint(torch.exp, x, use_reentrant=False)
    tracker.stop()
    seen = {tensor.data_ptr() for tensor in tracker.alive()}
    (y.sum() + z.sum()).backward()

    assert seen == {x.data_ptr()}  # the input of the checkpoint
    assert torch.allclose(x.grad, 2 * x.detach().exp())

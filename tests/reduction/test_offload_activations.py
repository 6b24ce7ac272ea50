"""Activations on the host: the same bits, less on the device, nothing copied twice or kept."""

from __future__ import annotations

import gc

import pytest
import torch
from checkpoint_cases import CASES, batches, end_of_training, make
from states import compare
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_oom.reduction.offload import OffloadTally, offload_activations
from lightning_oom.reduction.offload.streams import HostCopy
from lightning_oom.testing import SimulatedGPU

KIB = 2**10
OFTEN = ("mlp", "cnn", "encoder", "lstm", "vit", "gpt2", "bert")


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    """A simulated GPU without a limit."""
    return SimulatedGPU.enable()


def held() -> int:
    """Bytes on the device."""
    return torch.simgpu.memory_allocated()


def offloaded(tally: OffloadTally | None = None, **options):
    """A loss under offloading of everything that may be moved."""

    def loss(model, batch):
        keep = [*model.parameters(), *model.buffers(), batch]
        with offload_activations(**{"min_bytes": 0, "keep": keep, "tally": tally, **options}):
            return model(batch)

    return loss


def on(device, data):
    """Batches there."""
    return [batch.to(device) for batch in data]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in OFTEN else pytest.mark.slow)
        for case in CASES  # the slow ones differ from these in their forward alone
    ],
)
def test_training_is_the_same_to_the_bit(case, gpu) -> None:
    """Losses, weights, buffers and random numbers after three steps, the second accumulated."""
    data, tally = on(gpu, batches(case, 3)), OffloadTally()
    plain = end_of_training(make(case).to(gpu), data, accumulate=2)
    actual = end_of_training(make(case).to(gpu), data, accumulate=2, loss=offloaded(tally))

    assert compare(to_host(plain), to_host(actual)) == []
    assert tally.num_to_host > 0


def to_host(state):
    """Losses and weights on the CPU."""
    return {
        "losses": [loss.cpu() for loss in state["losses"]],
        "state": {name: value.cpu() for name, value in state["state"].items()},
        "random": state["random"],
    }


def wide_cnn() -> nn.Module:
    """Convolutions whose activations outweigh their weights."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def peak_of_step(model, x, loss=None) -> int:
    """The most that a step holds beside weights and batch."""
    before = held()
    torch.simgpu.reset_peak_memory_stats()
    value = model(x) if loss is None else loss(model, x)
    value.square().mean().backward()
    return torch.simgpu.max_memory_allocated() - before


def test_the_peak_of_a_cnn_falls_below_two_fifths(gpu) -> None:
    """The activation peak of a deep enough CNN."""
    x = torch.randn(4, 3, 64, 64, device=gpu)
    plain = peak_of_step(wide_cnn().to(gpu), x)
    tally = OffloadTally()

    assert peak_of_step(wide_cnn().to(gpu), x, offloaded(tally, min_bytes="64 KiB")) <= 0.4 * plain
    assert tally.to_host_bytes >= 0.6 * plain


def test_nothing_is_left_after_many_steps(gpu) -> None:
    """Device bytes return to the start, and no host copy stays alive."""
    model = wide_cnn().to(gpu)
    x = torch.randn(1, 3, 16, 16, device=gpu)
    loss = offloaded()
    for _ in range(2):  # gradients are made by the first, and seen by Python in the second
        loss(model, x).sum().backward()
    gc.collect()
    before, tensors = held(), num_tensors()
    for _ in range(20):
        loss(model, x).sum().backward()
    gc.collect()

    assert held() == before
    assert num_tensors() == tensors


def num_tensors() -> int:
    """Tensors that Python knows of."""
    return sum(type(item) in (torch.Tensor, nn.Parameter) for item in gc.get_objects())


def num_copies() -> int:
    """Host copies that are alive."""
    return sum(type(item) is HostCopy for item in gc.get_objects())


def test_a_dropped_graph_frees_its_copies_without_a_collection(gpu) -> None:
    """No cycle holds them: an output that is saved by its own node is the usual trap."""
    gc.collect()
    gc.disable()
    try:
        before = held()
        with offload_activations(min_bytes=0):
            y = torch.ones(KIB, device=gpu, requires_grad=True).exp()
        assert num_copies() == 1
        del y
        assert num_copies() == 0
        assert held() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("wrap", [lambda w: w, lambda w: w.t(), lambda w: w.to(torch.float64)])
def test_weights_are_never_copied(wrap, gpu) -> None:
    """Nor are their views, nor their casts; here without being named in keep."""
    weight = nn.Parameter(torch.randn(64, 64, device=gpu))
    x = torch.randn(4, 64, device=gpu, requires_grad=True)
    with offload_activations(min_bytes=0) as tally:
        (x.to(wrap(weight).dtype) @ wrap(weight)).sum().backward()

    assert tally.to_host_bytes in (0, 4 * 64 * 8)  # the input's cast is an activation
    assert weight.grad is not None


def test_autocast_weights_are_never_copied(gpu) -> None:
    """Only the inputs of the layers are."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(gpu)
    x = torch.randn(2, 256, device=gpu)
    with torch.autocast("simgpu", torch.bfloat16), offload_activations(min_bytes=0) as tally:
        model(x).sum().backward()

    assert tally.to_host_bytes == 2 * (2 * 256 * 2)


def test_what_is_kept_stays(gpu) -> None:
    """Frozen weights, the batch, and what is smaller than the threshold."""
    weight = torch.randn(64, 64, device=gpu)
    x = torch.randn(4, 64, device=gpu, requires_grad=True)
    for options in ({"min_bytes": 0, "keep": [weight, x, None, "text"]}, {"min_bytes": "1 MiB"}):
        with offload_activations(**options) as tally:
            (x @ weight).sum().backward()
        assert tally.to_host_bytes == 0


def test_views_of_a_storage_share_one_copy(gpu) -> None:
    """Expanded, transposed and sliced views come back as they were, by way of one copy."""
    x = torch.randn(8, 12, device=gpu, requires_grad=True)
    other = torch.randn(12, 8, device=gpu)

    def loss():
        y = x.exp()
        return ((y * y).t()[2:] * other[2:]).sum() + (y[:, :1].expand(8, 12) * y).sin().sum()

    loss().backward()
    plain, x.grad = x.grad, None
    with offload_activations(min_bytes=0, keep=[other]) as tally:
        value = loss()
    value.backward()

    assert torch.equal(x.grad.cpu(), plain.cpu())
    assert tally.num_shared >= 3
    assert tally.to_host_bytes == 2 * 8 * 12 * 4  # y, and what sin is taken of


def test_a_reused_address_is_not_taken_for_the_old_storage(gpu) -> None:
    """A storage that takes the place of a dead one gets a copy of its own."""
    scale = torch.ones(KIB, device=gpu, requires_grad=True)
    with offload_activations(min_bytes=0, keep=[scale]):
        losses = [(scale * torch.full((KIB,), float(i), device=gpu)).sum() for i in range(50)]
    for number, loss in enumerate(losses):
        scale.grad = None
        loss.backward()
        assert torch.equal(scale.grad.cpu(), torch.full((KIB,), float(number)))


def test_a_tensor_that_was_overwritten_is_noticed(gpu) -> None:
    """The same error as without offloading, for moved and for kept tensors, also by way of a view."""
    for options in ({"min_bytes": 0}, {"min_bytes": "1 GiB"}, None):
        for overwrite in (lambda y: y.add_(1), lambda y: y[0].zero_()):
            x = torch.ones(8, device=gpu, requires_grad=True)
            if options is None:
                y = x.exp()
            else:
                with offload_activations(**options):
                    y = x.exp()
            loss = y.sum()
            with torch.no_grad():
                overwrite(y)
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1"):
                loss.backward()


def test_two_backward_passes_and_second_derivatives(gpu) -> None:
    """retain_graph and create_graph, inside and after the block."""
    x = torch.randn(8, device=gpu, requires_grad=True)

    def second(inside: bool):
        with offload_activations(min_bytes=0):
            y = x.exp().sin().sum()
            if inside:
                (first,) = torch.autograd.grad(y, x, create_graph=True)
        if not inside:
            (first,) = torch.autograd.grad(y, x, create_graph=True)
        (result,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(first.square().sum(), x)
        return result.cpu(), again.cpu()

    y = x.exp().sin().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (plain,) = torch.autograd.grad(first.square().sum(), x)
    for results in (second(inside=True), second(inside=False)):
        assert all(torch.equal(result, plain.cpu()) for result in results)


def test_inside_and_around_checkpoints(gpu) -> None:
    """Inputs of checkpointed blocks are moved; what they recompute is theirs."""
    model, x = wide_cnn().to(gpu), torch.randn(2, 3, 16, 16, device=gpu)

    def run(model, x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    gradients = []
    for context in (None, offload_activations(min_bytes=0, keep=[*model.parameters(), x])):
        model.zero_grad()
        if context is None:
            loss = run(model, x)
        else:
            with context as tally:
                loss = run(model, x)
        loss.square().mean().backward()
        gradients.append([parameter.grad.cpu() for parameter in model.parameters()])

    assert compare(*gradients) == []
    assert tally.num_to_host >= 18


def test_transforms_of_torch_func_run_inside(gpu) -> None:
    """They refuse saved-tensor hooks, and get to work without."""
    x = torch.randn(5, 3, device=gpu, requires_grad=True)
    with offload_activations(min_bytes=0) as tally:
        inner = torch.func.vmap(torch.func.grad(lambda row: row.exp().sum()))(x.detach())
        y = x.exp().sum()
    y.backward()

    assert torch.equal(inner.cpu(), x.grad.cpu())
    assert tally.num_to_host == 1


def test_where_hooks_are_disabled_it_stands_aside(gpu) -> None:
    """As inside such a transform."""
    x = torch.randn(5, device=gpu, requires_grad=True)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        offload_activations(min_bytes=0) as tally,
    ):
        x.exp().sum().backward()

    assert tally == OffloadTally()


def test_an_exception_takes_the_hooks_off(gpu) -> None:
    """What is saved afterwards stays."""
    with pytest.raises(KeyError), offload_activations(min_bytes=0) as tally:
        raise KeyError
    torch.randn(5, device=gpu, requires_grad=True).exp().sum().backward()

    assert tally == OffloadTally()


def test_no_graph_no_copies_and_nothing_of_the_host(gpu) -> None:
    """Without a graph nothing is saved; tensors on the CPU stay themselves."""
    with offload_activations(min_bytes=0) as tally:
        with torch.no_grad():
            wide_cnn().to(gpu)(torch.randn(1, 3, 8, 8, device=gpu))
        torch.ones(5, requires_grad=True).exp().sum().backward()

    assert (tally.num_to_host, tally.num_kept) == (0, 1)


@pytest.mark.parametrize("value", ["many", -1, "1 GB"])
def test_a_threshold_that_is_none_is_refused(value) -> None:
    """With the value in the message."""
    with pytest.raises(ValueError, match=str(value)), offload_activations(min_bytes=value):
        pass

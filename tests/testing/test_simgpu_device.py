"""Tensors on the simulated GPU behave as tensors on a GPU do."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_oom.testing import SimulatedGPU

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def gpu() -> torch.device:
    """The first of two simulated GPUs without a limit."""
    return SimulatedGPU(num_devices=2).device


def test_it_is_an_ordinary_tensor_on_another_device(gpu: torch.device) -> None:
    """Class, device and string are those of a device tensor."""
    x = torch.arange(3.0, device=gpu)

    assert type(x) is torch.Tensor
    assert str(x) == "tensor([0., 1., 2.], device='simgpu:0')"
    assert (x.device, x.is_cpu, x.is_simgpu) == (torch.device("simgpu", 0), False, True)
    assert x.tolist() == [0.0, 1.0, 2.0]
    assert x[1].item() == 1.0


def test_host_and_device_are_apart(gpu: torch.device) -> None:
    """Both sides of a copy have memory of their own, and numpy needs one on the host."""
    host = torch.zeros(3)
    x = host.to(gpu)
    x.add_(1)
    back = x.cpu()
    back.add_(1)

    assert (host.tolist(), x.tolist(), back.tolist()) == ([0.0] * 3, [1.0] * 3, [2.0] * 3)
    with pytest.raises(TypeError, match="can't convert simgpu:0 device type tensor to numpy"):
        x.numpy()


@pytest.mark.parametrize("other", ["cpu", "simgpu:1"])
def test_devices_do_not_mix(gpu: torch.device, other: str) -> None:
    """Operands on two devices are an error; a number on the host is none."""
    x = torch.ones(3, device=gpu)

    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.ones(3, device=other)
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 3


def test_an_unknown_device_is_named(gpu: torch.device) -> None:
    """An index that does not exist is refused."""
    with pytest.raises(RuntimeError, match="invalid device ordinal: simgpu:7 does not exist"):
        torch.ones(2, device="simgpu:7")


def test_parameters_keep_their_identity_and_ties(gpu: torch.device) -> None:
    """Moving a module there and back changes no parameter object, as on CUDA."""
    module = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    module[1].weight = module[0].weight
    weight = module[0].weight
    module.to(gpu)
    assert weight.device == gpu
    assert module[0].weight is module[1].weight is weight
    module.cpu()

    assert weight.is_cpu
    assert module[0].weight is weight
    assert type(weight) is nn.Parameter


def test_views_share_storage_and_block(gpu: torch.device) -> None:
    """A view allocates nothing and sees writes; so does a detached tensor."""
    x = torch.zeros(4, 4, device=gpu)
    before = torch.simgpu.memory_stats()["allocation.all.allocated"]
    views = [
        x.view(2, 8),
        x.t(),
        x[1:],
        x.detach(),
        x.unsqueeze(0),
        x.split(2)[1],
        x.expand(2, 4, 4),
    ]
    x.fill_(1)

    assert torch.simgpu.memory_stats()["allocation.all.allocated"] - before == 0
    assert all(v.untyped_storage()._cdata == x.untyped_storage()._cdata for v in views)
    assert views[0]._base is x
    assert all(v.min().item() == 1 for v in views)


def in_place_calls(device: Any) -> list[int]:
    """Write to tensors in many ways and return their versions."""
    x = torch.ones(4, device=device)
    many = [torch.ones(2, device=device) for _ in range(2)]
    versions = []

    def note(*tensors: torch.Tensor) -> None:
        versions.extend(t._version for t in tensors)

    x.add_(1)
    note(x)
    x[1:].zero_()
    note(x)
    x.copy_(torch.ones(4))
    x.detach().add_(1)
    x.data.add_(1)
    torch.add(x, 1, out=x)
    note(x)
    torch._foreach_add_(many, 1.0)
    torch._foreach_mul_(many, many)
    torch._foreach_copy_(many, [torch.zeros(2, device=device)] * 2)
    note(*many)
    linear = nn.Linear(2, 2).to(device)
    linear(torch.ones(1, 2, device=device)).sum().backward()
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        torch.optim.AdamW(linear.parameters(), **options).step()
        note(linear.weight)
    nn.utils.clip_grad_norm_(linear.parameters(), 0.1, foreach=True)
    note(linear.weight.grad)
    return versions


def test_versions_count_as_on_the_cpu(gpu: torch.device) -> None:
    """Every write in place moves the version counter as it does on the CPU."""
    assert in_place_calls(gpu) == in_place_calls("cpu")


def test_in_place_and_out_return_the_same_object(gpu: torch.device) -> None:
    """``add_`` and ``out=`` give back the tensor they were given, and resize it where torch does."""
    x = torch.ones(3, device=gpu)
    out = torch.empty(3, device=gpu)
    pointer = out.data_ptr()

    assert x.add_(1) is x
    assert torch.mul(x, 2, out=out) is out
    assert (out.data_ptr(), out.tolist()) == (pointer, [4.0] * 3)
    assert torch.cat([x, x], out=torch.empty(0, device=gpu)).shape == (6,)


def test_resizing_keeps_what_was_there(gpu: torch.device) -> None:
    """``resize_`` and ``set_`` move a tensor to another storage."""
    x = torch.arange(3.0, device=gpu)
    y = torch.zeros(5, device=gpu)
    x.resize_(2, 3)
    assert x[0].tolist() == [0.0, 1.0, 2.0]
    x.set_(y)

    assert x.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("location", [None, "cpu", "simgpu:1"])
def test_checkpoints_load_where_they_are_asked_to(gpu: torch.device, location: str | None) -> None:
    """A state dict goes through ``torch.save`` and ``torch.load`` to any device."""
    module = nn.Linear(3, 2).to(gpu)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location=location)

    assert str(state["weight"].device) == (location or "simgpu:0")
    assert torch.equal(state["weight"].cpu(), module.weight.cpu())
    nn.Linear(3, 2).to(gpu).load_state_dict(state)


def test_copies_are_on_the_device(gpu: torch.device) -> None:
    """``deepcopy`` and ``pickle`` give tensors with storages of their own on the same device."""
    module = nn.Linear(3, 2).to(gpu)
    twin = copy.deepcopy(module)
    x = torch.ones(3, device=gpu)
    copies = [copy.deepcopy(x), pickle.loads(pickle.dumps(x))]  # noqa: S301 - our own bytes

    assert twin.weight.device == gpu
    assert torch.equal(twin.weight, module.weight)
    assert twin.weight.data_ptr() != module.weight.data_ptr()
    assert all(c.device == gpu and torch.equal(c, x) for c in copies)
    assert len({x.data_ptr(), *(c.data_ptr() for c in copies)}) == 3


CALLS: dict[str, Callable[[Any], Any]] = {
    "boolean index": lambda d: torch.arange(4, device=d)[torch.arange(4, device=d) > 1],
    "index on the host": lambda d: torch.arange(4, device=d)[torch.tensor([2, 0])],
    "nonzero": lambda d: torch.arange(3, device=d).nonzero(),
    "unique": lambda d: torch.tensor([2, 1, 2], device=d).unique(return_counts=True)[1],
    "sort": lambda d: torch.tensor([3, 1, 2], device=d).sort().indices,
    "svd": lambda d: torch.linalg.svdvals(torch.eye(3, device=d)),
    "fft": lambda d: torch.view_as_real(torch.fft.rfft(torch.ones(8, device=d))),
    "einsum": lambda d: torch.einsum(
        "ij,jk->ik", torch.ones(2, 3, device=d), torch.ones(3, 4, device=d)
    ),
    "as int": lambda d: torch.ones(3, device=d).view(torch.int32),
    "float8": lambda d: torch.ones(3, device=d).to(torch.float8_e4m3fn).float(),
    "where": lambda d: torch.where(torch.ones(3, device=d) > 0, 1.0, torch.zeros(3, device=d)),
    "vmap": lambda d: torch.vmap(torch.sin)(torch.ones(3, 2, device=d)),
    "grad": lambda d: torch.func.grad(lambda x: (x * x).sum())(torch.ones(3, device=d)),
    "randn": lambda d: torch.randn(3, device=d),
    "randperm": lambda d: torch.randperm(10, device=d),
    "rand_like": lambda d: torch.rand_like(torch.zeros(2, device=d)),
    "to_empty": lambda d: nn.Linear(2, 2, device="meta").to_empty(device=d).weight.detach().zero_(),
    "interpolate": lambda d: nn.functional.interpolate(
        torch.ones(1, 1, 4, device=d), scale_factor=2
    ),
    "ctc": lambda d: nn.functional.ctc_loss(
        torch.zeros(5, 1, 4, device=d).log_softmax(2),
        torch.ones(1, 2, device=d, dtype=torch.long),
        torch.tensor([5]),
        torch.tensor([2]),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_cpu(gpu: torch.device, name: str) -> None:
    """The same call gives the same values, random ones included, on the device it was asked for."""
    torch.manual_seed(1)
    expected = CALLS[name]("cpu")
    torch.manual_seed(1)
    actual = CALLS[name](gpu)

    assert actual.device == gpu
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_dropout_draws_as_the_cpu_does(gpu: torch.device, p: float) -> None:
    """Mask, scale and gradient of dropout are equal to the last bit."""
    results = []
    for device in ("cpu", gpu):
        torch.manual_seed(2)
        x = torch.randn(100, device=device, requires_grad=True)
        y = nn.functional.dropout(x, p)
        y.square().sum().backward()
        results.append((y.cpu(), x.grad.cpu(), torch.get_rng_state()))

    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mask", ["none", "causal", "boolean"])
def test_attention_builds_no_matrix(gpu: torch.device, mask: str) -> None:
    """Attention keeps its output and one number per row, and equals the CPU's to the last bit."""
    results = []
    allowed = torch.ones(256, 256, dtype=torch.bool).tril()
    for device in ("cpu", gpu):
        torch.manual_seed(3)
        q = torch.randn(1, 2, 256, 8, device=device, requires_grad=True)
        y = nn.functional.scaled_dot_product_attention(
            q,
            q,
            q,
            attn_mask=allowed.to(device) if mask == "boolean" else None,
            is_causal=mask == "causal",
        )
        y.square().sum().backward()
        results.append((y.cpu(), q.grad.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    q, matrix_bytes = torch.randn(1, 1, 512, 8, device=gpu), 512 * 512 * 4
    torch.simgpu.reset_peak_memory_stats()
    before = torch.simgpu.memory_allocated()
    nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch.simgpu.max_memory_allocated() - before < matrix_bytes / 4


def test_checkpointed_dropout_draws_the_same_again(gpu: torch.device) -> None:
    """Recomputing under ``checkpoint`` sees the random state of the first forward."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(gpu)
    x = torch.ones(2, 4, device=gpu)
    gradients = []
    for run in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
        module.zero_grad()
        torch.manual_seed(5)
        run(x).sum().backward()
        gradients.append(module[0].weight.grad.clone())

    assert torch.equal(*gradients)


def test_saved_tensors_can_leave_the_device(gpu: torch.device) -> None:
    """``save_on_cpu`` frees device memory between forward and backward."""
    x = torch.ones(1000, device=gpu, requires_grad=True)
    base = torch.simgpu.memory_allocated()
    with torch.autograd.graph.save_on_cpu():
        y = x.exp().exp().sum()

    assert torch.simgpu.memory_allocated() - base == 512
    y.backward()
    assert x.grad is not None


def test_sparse_gradients_work(gpu: torch.device) -> None:
    """An embedding with ``sparse=True`` trains as on the CPU, and its gradient is on the device."""
    weights = []
    for device in ("cpu", gpu):
        torch.manual_seed(6)
        embedding = nn.Embedding(10, 4, sparse=True).to(device)
        optimizer = torch.optim.SparseAdam(embedding.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            embedding(torch.tensor([1, 2, 2], device=device)).square().sum().backward()
            optimizer.step()
        assert embedding.weight.grad.is_sparse
        assert embedding.weight.grad.device == torch.device(device)
        weights.append(embedding.weight.detach().cpu())

    assert torch.equal(*weights)


def test_other_sparse_layouts_are_a_clear_error(gpu: torch.device) -> None:
    """What is not there says so, and the process lives on."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # the warning comes once in a process, maybe in another test
    try:
        with (
            pytest.warns(UserWarning, match="Sparse CSR tensor support"),
            pytest.raises(NotImplementedError, match="holds strided and sparse COO tensors"),
        ):
            torch.eye(3, device=gpu).to_sparse_csr()
    finally:
        torch.set_warn_always(always)


def test_autocast_computes_in_the_lower_precision(gpu: torch.device) -> None:
    """Products are in bfloat16, losses in float32, and both equal the CPU's to the last bit."""
    results = []
    for device in (torch.device("cpu"), gpu):
        torch.manual_seed(7)
        linear = nn.Linear(8, 4).to(device)
        x = torch.randn(3, 8).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            y = linear(x)
            loss = nn.functional.mse_loss(y, torch.zeros(3, 4, device=device))
        loss.backward()
        assert (y.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
        results.append((y.cpu(), loss.cpu(), linear.weight.grad.cpu()))

    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_scaler_scales(gpu: torch.device) -> None:
    """``GradScaler`` unscales gradients, and skips a step whose gradients overflowed."""
    scaler = torch.amp.GradScaler("simgpu")
    linear = nn.Linear(4, 1).to(gpu)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    for factor, scale in ((1.0, 2.0**16), (float("inf"), 2.0**15)):
        before = linear.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(linear(torch.ones(2, 4, device=gpu)).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, linear.weight) == (factor == float("inf"))
        assert scaler.get_scale() == scale


def test_host_memory_is_never_pinned(gpu: torch.device) -> None:
    """``pin_memory`` is accepted and copies."""
    pinned = torch.ones(3).pin_memory()

    assert pinned.tolist() == [1.0] * 3
    assert not pinned.is_pinned()


def test_random_state_is_the_hosts(gpu: torch.device) -> None:
    """The device's random state is the host's: seeding and setting either acts on both."""
    torch.simgpu.manual_seed_all(3)
    first = torch.rand(2, device=gpu)
    torch.manual_seed(3)
    state = torch.simgpu.get_rng_state(gpu)
    assert torch.equal(torch.rand(2), first.cpu())
    torch.simgpu.set_rng_state(state)

    assert torch.equal(torch.rand(2, device=gpu), first)


def test_the_current_device_is_what_no_index_means(gpu: torch.device) -> None:
    """``set_device`` and ``torch.simgpu.device`` choose the device for ``"simgpu"``."""
    with torch.simgpu.device(1):
        assert torch.ones(1, device="simgpu").get_device() == 1
    assert torch.ones(1, device="simgpu").get_device() == 0
    assert torch.simgpu.device_count() >= 2
    assert torch.accelerator.current_accelerator() == torch.device("simgpu")


def test_a_default_device_reaches_the_modules(gpu: torch.device) -> None:
    """``with torch.device(...)`` makes modules and tensors on the device."""
    with gpu:
        assert nn.Linear(2, 2).weight.device == gpu
        assert torch.zeros(2).device == gpu

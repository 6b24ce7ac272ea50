"""Memory of the simulated GPU: one block per storage, and CUDA's error when there is no room."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from lightning_oom._torch import OutOfMemoryError, tree_leaves
from lightning_oom.testing import SimulatedGPU
from lightning_oom.testing.simgpu.devices import find_device
from lightning_oom.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    """A simulated GPU that can hold 64 MiB, empty."""
    with SimulatedGPU("64 MiB") as gpu:
        assert torch.simgpu.memory_allocated() == 0
        yield gpu.device


def test_each_storage_owns_one_rounded_block(gpu: torch.device) -> None:
    """Allocated bytes are the sum of the live storages, each rounded to 512."""
    sizes = [1, 128, 129, 1000, 4096]
    tensors = [torch.zeros(n, device=gpu) for n in sizes]
    views = [t[:1] for t in tensors]
    expected = sum(-(-n * 4 // 512) * 512 for n in sizes)
    assert torch.simgpu.memory_allocated() == expected
    del tensors
    assert torch.simgpu.memory_allocated() == expected
    del views

    assert torch.simgpu.memory_allocated() == 0


def test_a_storage_dies_with_its_last_reference(gpu: torch.device) -> None:
    """A weak reference to a storage lives as long as a view or a graph node needs the memory."""
    x = torch.ones(1000, device=gpu, requires_grad=True)
    y = x.exp()  # kept by its own backward
    storage = weakref.ref(y.untyped_storage())
    loss = y.sum()
    del y
    gc.collect()
    assert storage() is not None
    loss.backward()
    del loss

    assert storage() is None
    assert torch.simgpu.memory_allocated() == 2 * 4096


def test_a_training_step_leaves_only_what_lives(gpu: torch.device) -> None:
    """After a step, weights, gradients and optimizer state are held, and nothing when they go."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(gpu)
    weights = torch.simgpu.memory_allocated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 64, device=gpu)).sum().backward()
        optimizer.step()
    assert torch.simgpu.memory_allocated() == 3 * weights
    model.cpu()
    optimizer.zero_grad()
    optimizer.state.clear()

    assert torch.simgpu.memory_allocated() == 0


def test_the_message_is_cudas(gpu: torch.device) -> None:
    """Every figure of CUDA's message is there, in its words."""
    kept = torch.ones(5 * MIB, device=gpu)
    with pytest.raises(OutOfMemoryError) as caught:
        torch.ones(11 * MIB + 1, device=gpu)

    assert str(caught.value).startswith(
        "simgpu out of memory. Tried to allocate 46.00 MiB. GPU 0 has a total capacity of 64.00 MiB "
        "of which 44.00 MiB is free. Of the allocated memory 20.00 MiB is allocated by PyTorch, "
        "and 0 bytes is reserved by PyTorch but unallocated."
    )
    assert type(caught.value) is torch.OutOfMemoryError
    assert kept.sum().item() == 5 * MIB


def test_a_request_beyond_the_host_is_the_devices_refusal(gpu: torch.device) -> None:
    """What not even the host could hold is refused by the device, in its own words."""
    with pytest.raises(
        OutOfMemoryError, match=re.escape("Tried to allocate 16384.00 TiB")
    ) as caught:
        torch.ones(1, device=gpu).expand(2**52).clone()

    assert caught.value.__cause__ is None


def frames_of(error: BaseException) -> list[FrameType]:
    """Return the frames of the traceback that belong to the simulated GPU."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        if "simgpu" in traceback.tb_frame.f_code.co_filename:
            frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return [f for f in frames if "test_simgpu" not in f.f_code.co_filename]


def test_the_error_keeps_no_tensor_alive(gpu: torch.device) -> None:
    """The frames of a refused call hold neither its arguments nor half-made results."""
    model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 4096)).to(gpu)
    before = torch.simgpu.memory_allocated()
    with pytest.raises(OutOfMemoryError) as caught:
        model(torch.ones(2000, 256, device=gpu)).sum().backward()
    frames = frames_of(caught.value)
    held = tree_leaves([list(frame.f_locals.values()) for frame in frames])

    assert frames
    assert not any(isinstance(value, torch.Tensor) for value in held)
    del caught, frames, held  # torch's own frames hold what they were working on, as on CUDA
    gc.collect()
    assert torch.simgpu.memory_allocated() == before


def test_backward_can_run_out(gpu: torch.device) -> None:
    """An error in the backward pass leaves the process, and the device, as after one in the forward."""
    x = torch.ones(4 * MIB, device=gpu, requires_grad=True)
    loss = (x.exp() + x).sum()  # 32 MiB live; the backward needs 48
    before = torch.simgpu.memory_allocated()
    filler = torch.ones(4 * MIB, device=gpu)
    with pytest.raises(OutOfMemoryError):
        loss.backward()
    del filler, loss
    gc.collect()

    assert torch.simgpu.memory_allocated() < before
    (x * 2).sum().backward()


@pytest.mark.parametrize("what", ["batch", "module"])
def test_a_transfer_can_run_out(gpu: torch.device, what: str) -> None:
    """Moving a batch or a module there allocates, and is refused when there is no room."""
    host = torch.zeros(20 * MIB) if what == "batch" else nn.Linear(4096, 5000)

    with pytest.raises(OutOfMemoryError):
        host.to(gpu)
    del host
    gc.collect()
    assert torch.simgpu.memory_allocated() == 0


def test_a_refused_call_draws_no_random_numbers(gpu: torch.device) -> None:
    """As on CUDA, memory comes first: the random state is what it was."""
    x = torch.ones(6 * MIB, device=gpu)
    y = torch.empty(6 * MIB, device=gpu)
    state = torch.get_rng_state()
    with pytest.raises(OutOfMemoryError):
        nn.functional.dropout(x, 0.5)

    assert torch.equal(torch.get_rng_state(), state)
    assert y.numel() == x.numel()


def test_cached_segments_are_used_before_an_error(gpu: torch.device) -> None:
    """Freed memory stays reserved, comes back on demand and by ``empty_cache``, and is counted."""
    del_me = torch.ones(12 * MIB, device=gpu)
    del del_me
    assert torch.simgpu.memory_reserved() == 48 * MIB
    retries = torch.simgpu.memory_stats()["num_alloc_retries"]
    kept = torch.ones(14 * MIB, device=gpu)

    assert torch.simgpu.memory_stats()["num_alloc_retries"] == retries + 1
    del kept
    torch.simgpu.empty_cache()
    assert torch.simgpu.memory_reserved() == 0
    assert torch.simgpu.mem_get_info() == (64 * MIB, 64 * MIB)


def test_peaks_can_be_reset(gpu: torch.device) -> None:
    """The peak is the most that was held at once, until it is reset."""
    x = torch.ones(MIB, device=gpu)
    x = x + 1
    assert torch.simgpu.max_memory_allocated() == 8 * MIB
    torch.simgpu.reset_peak_memory_stats()

    assert torch.simgpu.max_memory_allocated() == torch.simgpu.memory_allocated() == 4 * MIB
    assert torch.simgpu.max_memory_reserved() == 20 * MIB


def test_stats_have_the_names_of_cuda(gpu: torch.device) -> None:
    """Every counter is one of ``torch.cuda.memory_stats``, and the summary shows the limit."""
    x = torch.ones(1000, device=gpu)
    stats = torch.simgpu.memory_stats()
    pattern = re.compile(
        r"(allocated_bytes|active_bytes|requested_bytes|reserved_bytes|allocation|active|segment|"
        r"inactive_split|inactive_split_bytes)\.(all|large_pool|small_pool)\."
        r"(current|peak|allocated|freed)|num_alloc_retries|num_ooms|num_device_alloc|"
        r"num_sync_all_streams|oversize_(allocations|segments)\.(current|peak|allocated|freed)"
    )

    assert all(pattern.fullmatch(name) for name in stats)
    assert stats["allocated_bytes.small_pool.current"] == 4096
    assert stats["requested_bytes.all.current"] == x.nbytes
    assert "limit: 64.00 MiB" in torch.simgpu.memory_summary()


def test_devices_are_filled_apart() -> None:
    """One device may be full while the other has room; a copy between them allocates there."""
    with SimulatedGPU("64 MiB", num_devices=2):
        full = torch.ones(12 * MIB, device="simgpu:0")
        with pytest.raises(OutOfMemoryError, match="GPU 0 has"):
            full.clone()
        assert full.to("simgpu:1").get_device() == 1
        torch.simgpu.empty_cache()
        assert torch.simgpu.memory_allocated(1) == torch.simgpu.memory_reserved(1) == 0


@pytest.mark.parametrize("expandable_segments", [False, True])
def test_expandable_segments_fit_where_fixed_ones_do_not(expandable_segments: bool) -> None:
    """Two neighbours in two fixed segments leave two holes; in one expandable segment, one."""
    with SimulatedGPU("50 MiB", expandable_segments=expandable_segments) as gpu:
        blocks = [torch.ones(9 * MIB // 4, device=gpu.device) for _ in range(4)]
        del blocks[1:3]
        if expandable_segments:
            blocks.append(torch.ones(18 * MIB // 4, device=gpu.device))
        else:
            with pytest.raises(OutOfMemoryError, match=r"20\.00 MiB|22\.00 MiB is reserved"):
                torch.ones(18 * MIB // 4, device=gpu.device)
        del blocks
    SimulatedGPU()


def test_limits_change_and_bad_ones_are_named() -> None:
    """A later object sets the limit anew; the kind of segments only changes on an empty device."""
    SimulatedGPU("64 MiB")
    x = torch.ones(1, device="simgpu")
    SimulatedGPU("128 MiB")
    assert torch.simgpu.mem_get_info()[1] == 128 * MIB
    with pytest.raises(RuntimeError, match="expandable_segments can only change while"):
        SimulatedGPU(expandable_segments=True)
    with pytest.raises(ValueError, match="limit must be above 0, got 0"):
        SimulatedGPU(0)
    with pytest.raises(ValueError, match="num_devices must be at least 1, got 0"):
        SimulatedGPU(num_devices=0)
    SimulatedGPU()

    assert x.item() == 1


def test_blocks_come_back_from_any_thread_and_from_the_collector(gpu: torch.device) -> None:
    """Threads that allocate and free while cycles die leave the device empty and consistent."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(100):
                cycle = [torch.ones(300, device=gpu)]
                cycle.append(cycle)
                (torch.ones(10, device=gpu, requires_grad=True) * 2).sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    threshold = gc.get_threshold()
    gc.set_threshold(5)  # collect inside the allocator, too
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()

    assert errors == []
    assert torch.simgpu.memory_allocated() == 0
    assert find_device(gpu).allocator.pools[0].num_live == 0

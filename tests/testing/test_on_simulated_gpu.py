"""Limits, faults and readings on the simulated GPU, where host and device are apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import TinyRegressor, regression_loader
from lightning.pytorch import Callback, Trainer

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.memory import read_memory, release_cached, reset_peak
from lightning_oom.testing import (
    SimulatedGPU,
    SimulatedGPUStrategy,
    fail_at,
    fail_on,
    memory_limit,
)
from lightning_oom.units import MIB


def trainer_on_gpu(*callbacks: Callback) -> Trainer:
    """A Trainer on a simulated GPU that writes nothing."""
    return Trainer(
        strategy=SimulatedGPUStrategy("256 MiB"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


def test_readings_are_those_of_the_allocator() -> None:
    """Allocated, reserved, peaks, limit and what is free, before and after the cache is emptied."""
    gpu = SimulatedGPU("64 MiB")
    release_cached(gpu.device)
    reset_peak(gpu.device)
    before = read_memory(gpu.device)
    kept = torch.zeros(4 * MIB // 4, device=gpu.device)
    extra = torch.zeros(30 * MIB // 4, device=gpu.device)
    del extra
    reading = read_memory(gpu.device)

    assert reading.device == "simgpu:0"
    assert reading.limit_bytes == 64 * MIB
    assert before.allocated_bytes is not None
    assert reading.allocated_bytes == before.allocated_bytes + kept.nbytes
    assert reading.peak_allocated_bytes == reading.allocated_bytes + 30 * MIB
    assert reading.reserved_bytes is not None
    assert reading.free_bytes == 64 * MIB - reading.reserved_bytes
    assert reading.alloc_retries is not None
    assert release_cached(gpu.device) == 30 * MIB
    reset_peak(gpu.device)
    assert read_memory(gpu.device).peak_allocated_bytes == reading.allocated_bytes


def test_a_limit_counts_one_device_alone() -> None:
    """Host tensors and other devices do not count."""
    gpu = SimulatedGPU(num_devices=2)
    with memory_limit("8 MiB", device=gpu.device) as limit:
        host = torch.zeros(16 * MIB // 4)
        other = torch.zeros(16 * MIB // 4, device="simgpu:1")
        kept = torch.zeros(4 * MIB // 4, device=gpu.device)
        with pytest.raises(OutOfMemoryError):
            host.to(gpu.device)

        assert (limit.live_bytes, limit.num_refused) == (4 * MIB, 1)
        assert read_memory(gpu.device).limit_bytes == 8 * MIB
        assert read_memory("simgpu:1").limit_bytes != 8 * MIB
    del kept, other


def test_the_transfer_of_a_batch_can_fail() -> None:
    """With the transfer included, the first two allocations of a step are the batch's tensors."""
    fault = fail_at((), step=1, include_transfer=True)
    trainer_on_gpu(fault).fit(TinyRegressor(), regression_loader())

    assert [operator for _, operator, _ in fault.trace[:2]] == ["aten._to_copy.default"] * 2

    failing = fail_at(2, step=1, include_transfer=True)
    trainer = trainer_on_gpu(failing)
    with pytest.raises(OutOfMemoryError, match=r"allocation 2, operator aten\._to_copy"):
        trainer.fit(TinyRegressor(), regression_loader())
    assert trainer.global_step == 1


@pytest.mark.parametrize("phase", ["transfer", "forward", "backward"])
def test_a_phase_on_the_device_fails(phase: str) -> None:
    """Each phase of a training step allocates on the device."""
    fault = fail_on(step=2, phase=phase)
    trainer = trainer_on_gpu(fault)

    with pytest.raises(OutOfMemoryError, match=f"phase '{phase}'"):
        trainer.fit(TinyRegressor(), regression_loader())

    assert (fault.raised, trainer.global_step) == (1, 2)


def test_host_allocations_are_not_those_of_the_step() -> None:
    """A run on a device counts what is allocated there, not what the host needs beside it."""

    class UsesHost(TinyRegressor):
        """Allocates on the host in each step."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            """Waste some host memory."""
            torch.zeros(1000).add(1)
            return super().training_step(batch, batch_idx)

    counts = []
    for model in (TinyRegressor(), UsesHost()):
        fault = fail_at((), step=1)
        trainer_on_gpu(fault).fit(model, regression_loader())
        counts.append(fault.count)

    assert counts[0] == counts[1] > 10

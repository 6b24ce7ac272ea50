"""Different causes get different diagnoses, and remedies that fit them."""

from __future__ import annotations

import pytest
from report_cases import cuda_report, steps

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.memory.nvml import ProcessMemory
from lightning_oom.memory.reading import MemoryReading
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.report.diagnosis import CAUSES, diagnose
from lightning_oom.report.record import (
    GrowingThing,
    OOMReport,
    OptimizerMemory,
)
from lightning_oom.report.remedies import REMEDIES, find_remedies
from lightning_oom.units import GIB

OTHERS = (
    ProcessMemory(pid=1, name="python", used_bytes=14 * GIB),
    ProcessMemory(pid=77, name="jupyter", used_bytes=9 * GIB),
)


def from_error(error: BaseException) -> OOMReport:
    """A report that knows nothing but the error."""
    cause = classify_oom(error)
    assert cause is not None
    return OOMReport(cause=cause)


CASES = {
    "too big": (cuda_report(), "too_big"),
    "fragmentation": (
        cuda_report(allocated=12 * GIB, unallocated=11 * GIB, requested=2 * GIB),
        "fragmentation",
    ),
    "other processes": (
        cuda_report(allocated=13 * GIB, processes=OTHERS, own_pid=1, other_processes_bytes=9 * GIB),
        "other_processes",
    ),
    "leak seen in the timeline": (
        cuda_report(timeline=steps([GIB * n for n in (1, 4, 6, 8, 10, 12, 14, 16, 18)])),
        "leak",
    ),
    "leak named by a finder": (
        cuda_report(
            growing=(
                GrowingThing(
                    path="model.history",
                    num_bytes=15 * GIB,
                    bytes_per_step=GIB / 4,
                    holds_graph=True,
                ),
            )
        ),
        "leak",
    ),
    "optimizer state": (
        cuda_report(
            phase="optimizer",
            step=0,
            optimizers=(OptimizerMemory(type_name="AdamW", state_bytes=0, expected_bytes=2 * GIB),),
        ),
        "optimizer_state",
    ),
    "one request larger than the card": (
        cuda_report(requested=128 * GIB),
        "request_exceeds_device",
    ),
    "memory outside of PyTorch": (
        from_error(
            RuntimeError(
                "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 24.00 GiB total capacity; 8.00 "
                "GiB already allocated; 1.00 GiB free; 8.50 GiB reserved in total by PyTorch)"
            )
        ),
        "outside_torch",
    ),
    "a refusal with room": (
        from_error(
            OutOfMemoryError(
                "HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 64.00 "
                "GiB of which 50.00 GiB is free. Of the allocated memory 8.00 GiB is allocated by "
                "PyTorch, and 4.00 GiB is reserved by PyTorch but unallocated."
            )
        ),
        "refused_with_room",
    ),
    "a library": (
        from_error(
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
        ),
        "driver_full",
    ),
    "restore from a checkpoint": (cuda_report(phase="restore"), "checkpoint_restore"),
    "host memory": (from_error(MemoryError()), "host_memory"),
    "host memory of a tensor": (
        from_error(
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate "
                "memory)"
            )
        ),
        "host_memory",
    ),
    "shared memory": (
        from_error(
            RuntimeError(
                "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that "
                "dataloader's workers are out of shared memory. Please try to raise your shared "
                "memory limit."
            )
        ),
        "shared_memory",
    ),
    "a bare message": (from_error(OutOfMemoryError("Allocation on device 0")), "too_big"),
}


@pytest.mark.parametrize(("report", "expected"), CASES.values(), ids=CASES)
def test_each_cause_is_named(report, expected) -> None:
    """The likeliest diagnosis is the cause, with evidence and at least one remedy."""
    first = diagnose(report)[0]

    assert first.cause == expected
    assert first.evidence
    assert find_remedies(report, (first,))


def test_every_cause_has_remedies_and_a_case() -> None:
    """The tables of causes and remedies have the same names."""
    assert {rule.name for rule in CAUSES} == set(REMEDIES)


@pytest.mark.parametrize(
    "allocated",
    [
        [4 * GIB] * 9,
        [1 * GIB, 3 * GIB] + [4 * GIB] * 7,
        [4 * GIB, 5 * GIB, 4 * GIB, 5 * GIB, 4 * GIB, 5 * GIB, 4 * GIB, 5 * GIB],
        [4 * GIB] * 6 + [20 * GIB] * 2,
        [1 * GIB, 20 * GIB],
    ],
    ids=["constant", "optimizer state in step 1", "up and down", "one jump", "two steps"],
)
def test_memory_that_does_not_grow_steadily_is_no_leak(allocated) -> None:
    """Optimizer state, alternating batches and one large batch are not mistaken for a leak."""
    causes = [found.cause for found in diagnose(cuda_report(timeline=steps(allocated)))]

    assert "leak" not in causes


def test_other_processes_are_read_from_the_message_as_well() -> None:
    """Without NVML, the processes that torch's own text lists count."""
    message = (
        "CUDA out of memory. Tried to allocate 1.17 GiB. GPU 0 has a total capacity of 24.00 GiB of "
        "which 39.62 MiB is free. Process 101553 has 8.19 GiB memory in use. Including non-PyTorch "
        "memory, this process has 13.82 GiB memory in use. Of the allocated memory 13.14 GiB is "
        "allocated by PyTorch, and 77.26 MiB is reserved by PyTorch but unallocated."
    )
    first = diagnose(from_error(OutOfMemoryError(message)))[0]

    assert first.cause == "other_processes"
    assert "process 101553: 8.19 GiB" in first.evidence


def test_a_backward_that_has_let_go_is_not_fragmented() -> None:
    """The counters are read after the frames are gone, the error's text was written before."""
    after = MemoryReading(
        device="cuda:0",
        allocated_bytes=6 * GIB,
        reserved_bytes=22 * GIB,
        limit_bytes=24 * GIB,
        free_bytes=GIB,
    )
    report = cuda_report(reading=after, allocated=22 * GIB, unallocated=0)

    assert report.unallocated_bytes == 0
    assert "fragmentation" not in [found.cause for found in diagnose(report)]


def test_the_cpu_has_no_fragmentation() -> None:
    """It has no caching allocator, whatever a text says."""
    report = cuda_report(device="cpu", allocated=12 * GIB, unallocated=11 * GIB, requested=2 * GIB)

    assert (report.reserved_bytes, report.unallocated_bytes) == (None, None)
    assert "fragmentation" not in [found.cause for found in diagnose(report)]


def test_a_cap_on_the_process_bounds_what_was_free() -> None:
    """What the device could give is not what the process may have."""
    cause = classify_oom(
        OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
            "of which 20.00 GiB is free. 4.00 GiB allowed; Of the allocated memory 3.00 GiB is "
            "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
        )
    )
    assert cause is not None
    report = OOMReport(cause=cause)

    assert report.missing_bytes == GIB
    assert diagnose(report)[0].cause == "too_big"

"""Different causes get different diagnoses, and remedies that fit them."""

from __future__ import annotations

import pytest
from report_cases import cuda_report, steps

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.memory.nvml import ProcessMemory
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.report.diagnosis import CAUSES, diagnose
from lightning_oom.report.record import GrowingThing, OOMReport, OptimizerMemory
from lightning_oom.report.remedies import REMEDIES, find_remedies, with_advice
from lightning_oom.units import GIB, MIB

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


def expandable(report: OOMReport) -> list[str]:
    """What the remedies say of expandable segments as a setting."""
    settings = [remedy.setting or "" for remedy in with_advice(report).remedies]
    return [setting for setting in settings if "expandable_segments" in setting]


def fragmented(**facts) -> OOMReport:
    """A fragmented device."""
    return cuda_report(allocated=12 * GIB, unallocated=11 * GIB, requested=2 * GIB, **facts)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]),
        ({"torch_version": "2.13.0+cu130"}, ["PYTORCH_ALLOC_CONF=expandable_segments:True"]),
        ({"is_mig": True}, []),
        ({"platform": "win32"}, []),
        ({"device": "xpu:0"}, []),
        ({"allocator_settings": "expandable_segments:True"}, []),
    ],
    ids=["CUDA", "newer name", "MIG", "Windows", "no CUDA", "already on"],
)
def test_expandable_segments_are_advised_only_where_they_are_safe(facts, expected) -> None:
    """Not on MIG, not where the backend lacks them, not where they are on."""
    assert expandable(fragmented(**facts)) == expected


def test_the_advice_says_that_the_setting_is_read_before_cuda_starts() -> None:
    """Set in the script after the first allocation it does nothing."""
    first = with_advice(fragmented()).remedies[0]

    assert "before CUDA starts" in first.action
    assert first.saving_bytes == 11 * GIB


def test_rows_are_predicted_from_the_numbers_in_the_report() -> None:
    """What grows with the rows has to fit beside what does not."""
    report = cuda_report(requested=4 * GIB)
    (remedy,) = [r for r in with_advice(report).remedies if "batch_size" in (r.setting or "")]
    standing = 4 * GIB
    moving = 22 * GIB - standing + 4 * GIB
    available = 22 * GIB + 128 * MIB + 256 * MIB - standing
    rows = int(0.9 * 64 * available / moving)

    assert f"batch_size={rows})" in (remedy.setting or "")
    assert f"accumulate_grad_batches={-(-64 // rows)}" in (remedy.setting or "")
    assert remedy.suffices


def test_one_row_cannot_be_split() -> None:
    """No batch of zero rows is advised."""
    remedies = with_advice(cuda_report(rows=1)).remedies

    assert not [remedy for remedy in remedies if "batch_size" in (remedy.setting or "")]


def test_remedies_that_free_enough_come_first() -> None:
    """Within a cause: enough before too little, then the cheaper one."""
    verdicts = [r.suffices is True for r in with_advice(cuda_report(requested=6 * GIB)).remedies]

    assert verdicts == sorted(verdicts, reverse=True)


def test_a_graph_in_validation_is_pointed_out() -> None:
    """What autograd records there is of no use."""
    report = cuda_report(stage="validate", phase="forward", uses_graph=True)

    assert with_advice(report).remedies[0].setting == "Trainer(inference_mode=True)"


def test_recovery_is_not_advised_to_those_who_have_it() -> None:
    """Remedies that are in place are left out."""
    with_it = with_advice(cuda_report(has_recovery=True)).remedies

    assert not [remedy for remedy in with_it if "OOMRecovery" in remedy.action]

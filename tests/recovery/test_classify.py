"""Which errors are out of memory: by class, by text, by what they came from."""

from __future__ import annotations

import errno

import pytest
import torch

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.errors import BatchSplitError
from lightning_oom.recovery.classify import OOMCause, classify_oom

MIB = 2**20
CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 52.00 MiB. GPU 3 has a total capacity of 32.00 GiB of "
    "which 40.00 MiB is free. Including non-PyTorch memory, this process has 13.00 GiB memory in "
    "use. Of the allocated memory 11.50 GiB is allocated by PyTorch, and 512.00 MiB is reserved "
    "by PyTorch but unallocated."
)


NOT_OOM = [
    RuntimeError("If you run into CUDA out of memory errors, lower the batch size."),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError("See the docs about 'CUDA error: out of memory'."),
    RuntimeError("cudaMalloc may say out of memory here"),
    RuntimeError("CUDA out of memory handling is disabled in this build"),
    ValueError("see docs on CUDA out of memory"),
    ValueError(CUDA_TEXT),
    KeyError("CUDA out of memory."),
    AssertionError("CUDA error: out of memory"),
    NotImplementedError("CUDA out of memory. Tried to allocate 1.00 GiB"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"),
    RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements"),
    RuntimeError("Storage size calculation overflowed with sizes=[9223372036854775807]"),
    RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376."),
    RuntimeError("No executable batch size found, reached zero."),
    RuntimeError("ptxas error: Entry function 'triton_' uses too much shared data"),
    RuntimeError("RESOURCE_EXHAUSTED: Received message larger than max (4194305 vs. 4194304)"),
    RuntimeError("DataLoader worker (pid 4) is killed by signal: Segmentation fault. "),
    RuntimeError("unable to open shared memory object </torch_5_0>: Too many open files (24)"),
    OSError(errno.ENOSPC, "No space left on device", "/home/me/last.ckpt"),
    OSError(errno.ENOENT, "No such file or directory"),
    OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory:"
        " you tried to allocate 18446744065119617024 bytes. Error code 12 (Cannot allocate memory)"
    ),
    KeyboardInterrupt("CUDA out of memory."),
]


@pytest.mark.parametrize("error", NOT_OOM, ids=lambda error: str(error)[:40])
def test_error_that_only_resembles_is_not_out_of_memory(error):
    """Mentions of the words, mistakes of the caller, other device errors and limits stay errors."""
    assert classify_oom(error) is None


def test_class_is_enough_without_text():
    """An error of torch's or Python's own class needs no words."""
    device, host = classify_oom(OutOfMemoryError()), classify_oom(MemoryError())
    fork = classify_oom(OSError(errno.ENOMEM, "Speicher voll"))

    assert device is not None
    assert (device.scope, device.recoverable, device.requested_bytes) == ("device", True, None)
    assert host is not None
    assert (host.scope, host.recoverable) == ("host", False)
    assert fork is not None
    assert (fork.scope, fork.recoverable_on("cpu")) == ("host", False)


def raised_from(outer: BaseException, inner: BaseException) -> BaseException:
    """``outer`` as ``raise outer from inner`` leaves it."""
    outer.__cause__ = inner
    return outer


def raised_while_handling(outer: BaseException, inner: BaseException) -> BaseException:
    """``outer`` as raised inside ``except inner``."""
    outer.__context__ = inner
    return outer


def test_cause_of_an_error_is_found():
    """An error raised from an out-of-memory error is one, whatever its own class."""
    error = raised_from(ValueError("step 3 failed"), OutOfMemoryError(CUDA_TEXT))

    cause = classify_oom(raised_from(RuntimeError("fit failed"), error))

    assert cause is not None
    assert (cause.confidence, cause.error_type) == (
        "certain",
        f"{OutOfMemoryError.__module__}.OutOfMemoryError",
    )


def test_context_of_an_error_is_only_likely():
    """An error in the cleanup after an out-of-memory error counts, as likely; not if suppressed."""
    inner = OutOfMemoryError(CUDA_TEXT)

    cause = classify_oom(raised_while_handling(RuntimeError("cleanup failed"), inner))
    hidden = raised_while_handling(RuntimeError("handled"), inner)
    hidden.__suppress_context__ = True  # as ``raise ... from None`` does

    assert cause is not None
    assert cause.confidence == "likely"
    assert classify_oom(hidden) is None


def test_inner_exception_and_groups_are_followed():
    """The compiler hides the first error in an attribute; groups hold several."""
    compiled = RuntimeError("backend='inductor' raised")
    compiled.inner_exception = OutOfMemoryError(CUDA_TEXT)
    grouped = RuntimeError("two tasks failed")
    grouped.exceptions = (ValueError("a"), MemoryError())

    assert classify_oom(compiled) is not None
    found = classify_oom(grouped)
    assert found is not None
    assert found.scope == "host"


def test_circle_of_causes_ends():
    """A chain that bites its tail is walked once."""
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first

    assert classify_oom(first) is None


def test_own_errors_and_interrupts_are_never_out_of_memory():
    """A batch that cannot be split is reported, not retried; Ctrl-C during an OOM ends the run."""
    inner = OutOfMemoryError(CUDA_TEXT)

    assert classify_oom(raised_from(BatchSplitError("no rows"), inner)) is None
    assert classify_oom(raised_while_handling(KeyboardInterrupt(), inner)) is None


@pytest.mark.parametrize(
    "message",
    [
        (
            "NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled cuda error (run with NCCL_DEBUG=INFO "
            "for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed."
            "\nLast error:\nCuda failure 2 'out of memory'"
        ),
        "NCCL error in: NCCLUtils.hpp:275\nLast error:\nFailed to CUDA calloc async 608 bytes",
        "NCCL WARN Cuda failure 'out of memory'",
    ],
    ids=["failure", "calloc", "warn"],
)
def test_collective_is_never_retried(message):
    """Memory that ran out in a collective is known as such; the peers have moved on."""
    cause = classify_oom(torch.distributed.DistBackendError(message))

    assert cause is not None
    assert (cause.kind, cause.recoverable) == ("collective", False)


def test_error_raised_inside_a_collective_is_never_retried(monkeypatch):
    """The same words are not recoverable where the traceback runs through a collective."""

    def fails(*_args, **_kwargs):
        raise OutOfMemoryError(CUDA_TEXT)

    monkeypatch.setattr(torch.distributed.distributed_c10d, "_rank_not_in_group", fails)
    with pytest.raises(OutOfMemoryError) as caught:
        torch.distributed.all_reduce(torch.zeros(1))

    cause = classify_oom(caught.value)

    assert cause is not None
    assert (cause.kind, cause.scope, cause.recoverable) == ("collective", "device", False)


def test_error_of_a_worker_is_never_retried():
    """A DataLoader worker's error arrives in the main process but is not the step's."""
    text = (
        "Caught OutOfMemoryError in DataLoader worker process 0.\nOriginal Traceback (most recent "
        f'call last):\n  File "a.py", line 3, in f\ntorch.OutOfMemoryError: {CUDA_TEXT}\n'
    )

    cause = classify_oom(OutOfMemoryError(text))

    assert cause is not None
    assert (cause.kind, cause.scope, cause.recoverable) == ("worker", "device", False)
    assert cause.requested_bytes == 52 * MIB
    assert cause.message == f"torch.OutOfMemoryError: {CUDA_TEXT}"


def test_replica_of_data_parallel_is_recoverable():
    """An error sent from a replica thread of this process is the step's own."""
    text = (
        "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback (most recent call "
        f"last):\n  ...\ntorch.cuda.OutOfMemoryError: {CUDA_TEXT}"
    )

    for error in (RuntimeError(text), OutOfMemoryError(text)):
        cause = classify_oom(error)
        assert cause is not None
        assert (cause.kind, cause.recoverable) == ("allocator", True)


def test_error_of_torch_class_is_about_the_device():
    """Words of another form in the text do not turn torch's own error into a host error."""
    cause = classify_oom(OutOfMemoryError("Cannot allocate memory"))

    assert cause is not None
    assert (cause.scope, cause.confidence, cause.recoverable) == ("device", "certain", True)


def test_real_allocator_error_is_host_memory():
    """What the allocator of this torch really raises is recognised, with its size."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)

    cause = classify_oom(caught.value)

    assert cause is not None
    assert (cause.kind, cause.scope) == ("host_allocator", "host")
    assert cause.requested_bytes == 2**50
    assert cause.recoverable_on("cpu")


def test_error_whose_text_fails_is_judged_by_class():
    """A broken ``__str__`` neither raises nor hides the class."""

    class BrokenError(MemoryError):
        def __str__(self):
            raise RuntimeError("no text")

    cause = classify_oom(BrokenError())

    assert isinstance(cause, OOMCause)
    assert (cause.scope, cause.message) == ("host", "")


def test_long_text_is_cut():
    """A report of a thousand lines does not travel with every record."""
    cause = classify_oom(RuntimeError(CUDA_TEXT + "\nline" * 1000))

    assert cause is not None
    assert len(cause.message) <= 1000
    assert cause.message.count("\n") < 10

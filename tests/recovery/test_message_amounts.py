"""What the text of an out-of-memory error says in bytes."""

from __future__ import annotations

import pytest

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.classify import classify_oom

GIB, MIB = 2**30, 2**20
CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 52.00 MiB. GPU 3 has a total capacity of 32.00 GiB of "
    "which 40.00 MiB is free. Including non-PyTorch memory, this process has 13.00 GiB memory in "
    "use. Of the allocated memory 11.50 GiB is allocated by PyTorch, and 512.00 MiB is reserved "
    "by PyTorch but unallocated."
)


def test_amounts_are_read_in_bytes():
    """The form of torch 2.x is read completely."""
    cause = classify_oom(OutOfMemoryError(CUDA_TEXT))

    assert cause is not None
    assert cause.requested_bytes == 52 * MIB
    assert cause.limit_bytes == 32 * GIB
    assert cause.free_bytes == 40 * MIB
    assert cause.allocated_bytes == 11 * GIB + GIB // 2
    assert cause.reserved_unallocated_bytes == 512 * MIB
    assert cause.device == "cuda:3"
    assert cause.message == CUDA_TEXT


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            (
                "CUDA out of memory. Tried to allocate 512.00 KiB (GPU 1; 4.00 GiB total capacity; "
                "2.00 GiB already allocated; 0 bytes free; 2.50 GiB reserved in total by PyTorch)"
            ),
            (512 * 1024, 4 * GIB, 0, 2 * GIB, 512 * MIB, "cuda:1"),
        ),
        (
            (
                "CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 8.00 GiB total capacity; "
                "7.00 GiB already allocated; 16.00 MiB free; 48.00 MiB cached)"
            ),
            (2 * MIB, 8 * GIB, 16 * MIB, 7 * GIB, 48 * MIB, "cuda:0"),
        ),
        (
            (
                "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 80.00 "
                "GiB of which 1.00 GiB is free. 20.00 GiB allowed; Of the allocated memory 19.00 GiB "
                "is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
            ),
            (2 * MIB, 20 * GIB, GIB, 19 * GIB, 0, "cuda:0"),
        ),
        (
            (
                "MPS backend out of memory (MPS allocated: 9.50 GiB, other allocations: 17.00 GiB, max "
                "allowed: 27.00 GiB). Tried to allocate 256.00 MiB on private pool."
            ),
            (256 * MIB, 27 * GIB, None, 9 * GIB + GIB // 2, None, "mps"),
        ),
        (
            (
                "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
                "Currently allocated     : 15.00 GiB\nRequested               : 512.00 KiB\n"
                "Device limit            : 16.00 GiB\nFree (according to CUDA): 0 bytes\n"
            ),
            (512 * 1024, 16 * GIB, 0, 15 * GIB, None, "cuda:0"),
        ),
        (
            "HIP out of memory. Tried to allocate 1.00 GiB. GPU 7 has a total capacty of 2.00 GiB",
            (GIB, 2 * GIB, None, None, None, "cuda:7"),
        ),
        ("CUDA error: out of memory", (None, None, None, None, None, "cuda")),
        (
            (
                "Out of memory allocating 4,000 bytes (allocated so far: 1,024 bytes, limit set to: "
                "8,192 bytes)."
            ),
            (4000, 8192, None, 1024, None, None),
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_amounts_of_other_forms(message, expected):
    """What a form says is read; what it does not say is None, never 0."""
    cause = classify_oom(RuntimeError(message))

    assert cause is not None
    assert expected == (
        cause.requested_bytes,
        cause.limit_bytes,
        cause.free_bytes,
        cause.allocated_bytes,
        cause.reserved_unallocated_bytes,
        cause.device,
    )

"""How errors about host memory and shared memory read."""

from __future__ import annotations

from lightning_oom.recovery.classify.oom_form import LINE_START, OOMPattern, form

__all__ = ["HOST_FORMS", "SHARED_MEMORY_FORMS"]

_SHARED_FILE = r"(?:shared memory|</?torch_\d)"

SHARED_MEMORY_FORMS: tuple[OOMPattern, ...] = (
    form(
        r"is killed by signal: Bus error",
        "shared_memory",
        "host_shm",
        likely=True,
        example="DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
    ),
    form(
        rf"(?i){_SHARED_FILE}.*(?:No space left|Cannot allocate memory)",
        "shared_memory",
        "host_shm",
        example="unable to write to file </torch_76_3625483894>: No space left on device (28)",
    ),
    form(
        r"(?i)No space left on device.*/dev/shm|/dev/shm.*No space left on device",
        "shared_memory",
        "host_shm",
        example="[Errno 28] No space left on device: '/dev/shm/torch_7_12'",
    ),
    form(
        rf"(?i)unable to (?:open|allocate|mmap|resize|write)[^\n]*{_SHARED_FILE}",
        "shared_memory",
        "host_shm",
        likely=True,
        example="unable to open shared memory object </torch_29919_1396182366> in read-write mode",
    ),
    form(
        r"insufficient shared memory \(shm\)|workers? (?:are|is) out of shared memory",
        "shared_memory",
        "host_shm",
        example="Unexpected bus error encountered in worker. "
        "This might be caused by insufficient shared memory (shm).",
    ),
)

HOST_FORMS: tuple[OOMPattern, ...] = (
    form(
        r"Default\w*Allocator: (?:can't allocate memory|not enough memory)",
        "host_allocator",
        "host",
        example="[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 132426121216 bytes. Error code 12 (Cannot allocate memory)",
    ),
    form(
        r"posix_memalign\(&\w+, \w+, \w+\) == 0\. 12 vs 0",
        "host_allocator",
        "host",
        example="[enforce fail at CPUAllocator.cpp:56] "
        "posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
    ),
    form(
        r"\$ Torch: not enough memory: you tried to allocate",
        "host_allocator",
        "host",
        example="$ Torch: not enough memory: you tried to allocate 1GB. Buy new RAM! "
        "at /pytorch/aten/src/TH/THGeneral.c:201",
    ),
    form(
        r"(?i)unable to allocate (?:[\d.]+ (?:\w?i?B|bytes) for an )?array with shape",
        "host",
        "host",
        example="Unable to allocate 1.37 GiB for an array with shape (1, 546, 820, 820) "
        "and data type float32",
    ),
    form(
        rf"std::bad_alloc|{LINE_START}bad allocation\s*$",
        "host",
        "host",
        example="std::bad_alloc",
    ),
    form(
        r"WinError 1455\b|The paging file is too small for this operation",
        "system",
        "host",
        any_class=True,
        example="[WinError 1455] The paging file is too small for this operation to complete.",
    ),
    form(
        r"WinError 8\]|Not enough memory resources are available to process this command",
        "system",
        "host",
        any_class=True,
        example="[WinError 8] Not enough memory resources are available to process this command",
    ),
    form(
        r"\[Errno 12\] |Cannot allocate memory(?=\s*$|[.:)'\"\[]| \(12\))",
        "system",
        "host",
        example="[Errno 12] Cannot allocate memory",
    ),
    form(
        r"OUT_OF_HOST_MEMORY|_STATUS_\w*HOST_ALLOCATION_FAILED|ErrorOutOfHostMemory",
        "system",
        "host",
        example="level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
    ),
    form(
        r"is killed by signal: Killed|process \d+ terminated with signal SIGKILL",
        "worker",
        "host",
        likely=True,
        example="DataLoader worker (pid 12847) is killed by signal: Killed. ",
    ),
)

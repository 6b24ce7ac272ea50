"""The one table of error forms: what an out-of-memory error looks like, and what only looks like one.

The first row whose pattern is found in the message decides. A row of kind ``"none"`` says that the
message is *not* out of memory although it resembles one. Patterns stand at the start of a line
(after an optional ``SomeError:``, as in a traceback sent from another process) wherever the words
alone could come from a person, so that an error that merely mentions the words is not taken for one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "OOM_PATTERNS",
    "SPLIT_ON_CPU_KINDS",
    "Confidence",
    "OOMPattern",
    "Scope",
    "pattern_table",
]

SPLIT_ON_CPU_KINDS = ("host", "host_allocator")
"""Kinds of host memory that a smaller attempt needs less of, when the training device is the CPU."""

Scope = Literal["device", "host", "host_shm"]
Confidence = Literal["certain", "likely"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OOMPattern:
    """One row of the table.

    Attributes:
        pattern: Regular expression, searched in the message (multi-line mode).
        kind: What failed; ``"none"`` says that the message is not out of memory.

            ==================  ==================================================================
            ``allocator``       the allocator of torch, for a device
            ``driver``          the runtime or driver of the device
            ``library``         a device library (cuBLAS, cuDNN, cuFFT, ...) could not allocate
            ``disguised``       another error that a full device often turns into
            ``collective``      a collective operation between processes
            ``worker``          another process or thread: DataLoader worker, spawned rank
            ``host_allocator``  the allocator of torch, for host memory
            ``host``            host memory of Python, NumPy or C++
            ``system``          the operating system: fork, page file, memory map
            ``shared_memory``   shared memory (``/dev/shm``)
            ``none``            not out of memory
            ==================  ==================================================================
        scope: Whose memory: ``"device"``, ``"host"`` or ``"host_shm"``.
        confidence: ``"likely"`` where the text does not say so plainly.
        recoverable: A smaller attempt on an accelerator may succeed.
        example: A real message of the form.
        any_class: The row also counts for classes that otherwise report a mistake of the caller.
    """

    pattern: re.Pattern[str]
    kind: str
    scope: Scope
    confidence: Confidence
    recoverable: bool
    example: str
    any_class: bool = False


def _row(
    pattern: str,
    kind: str,
    scope: Scope = "device",
    *,
    example: str,
    likely: bool = False,
    recoverable: bool | None = None,
    any_class: bool = False,
) -> OOMPattern:
    return OOMPattern(
        pattern=re.compile(pattern, re.MULTILINE),
        kind=kind,
        scope=scope,
        confidence="likely" if likely else "certain",
        recoverable=scope == "device" if recoverable is None else recoverable,
        example=example,
        any_class=any_class,
    )


_LINE = r"^\s*(?:\[\w+\]:? *)?(?:[\w.]*(?:Error|Exception): +)?"
_END = r"(?=\s*$|[.!:;,(]|\s+\()"
_BACKEND = r"(?:CUDA|HIP|ROCm|XPU|SYCL|NPU|MUSA|MLU|HPU|GCU|MPS|CPU|[Ss]im[Gg][Pp][Uu]|SIMGPU)"

_NOT_MEMORY = (
    _row(
        r"Tried to allocate more than 1 ?EB",
        "none",
        example="CUDA out of memory. Tried to allocate more than 1EB memory.",
    ),
    _row(
        r"Ran out of memory in memory space (?:vmem|smem|sflag)",
        "none",
        example="RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. "
        "Ran out of memory in memory space vmem.",
    ),
    _row(
        r"Too many open files",
        "none",
        example="unable to open shared memory object </torch_1_2> in read-write mode: "
        "Too many open files (24)",
    ),
    _row(
        r"is killed by signal: (?!Killed|Bus error)",
        "none",
        example="DataLoader worker (pid 7) is killed by signal: Segmentation fault. ",
    ),
)

_COLLECTIVES = (
    _row(
        r"(?is)(?:nccl|rccl|hccl|xccl|oneccl).*"
        r"(?:failure (?:\d+ )?'?out of memory|Failed to CUDA \w+(?: async)?|"
        r"CUDA(?: driver)? error: out of memory|(?:CUDA|HIP|XPU|NPU) out of memory)",
        "collective",
        recoverable=False,
        example="NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled cuda error, NCCL version "
        "2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'",
    ),
    _row(
        r"(?i)\bcuda failure (?:\d+ )?'out of memory'",
        "collective",
        recoverable=False,
        example="Cuda failure 'out of memory'",
    ),
    _row(
        r"(?is)(?:nccl|/dev/shm/nccl).*shared memory segment.*No space left on device",
        "collective",
        "host_shm",
        example="ncclSystemError: System call (e.g. socket, malloc) or external library call failed"
        " or device error.\nLast error:\nError while creating shared memory segment "
        "/dev/shm/nccl-x (size 9637888), error: No space left on device (28)",
    ),
)

_SHARED_MEMORY = (
    _row(
        r"is killed by signal: Bus error",
        "shared_memory",
        "host_shm",
        likely=True,
        example="DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
    ),
    _row(
        r"(?i)unable to (?:allocate shared memory|resize shared|mmap \d+ bytes from file"
        r"|write to file)\b.*(?:No space left|Cannot allocate memory|Resource temporarily)",
        "shared_memory",
        "host_shm",
        example="unable to write to file </torch_76_3625483894>: No space left on device (28)",
    ),
    _row(
        r"(?i)(?:/dev/shm|shared memory|</?torch_\d).*No space left on device"
        r"|No space left on device.*(?:/dev/shm|/torch_\d)",
        "shared_memory",
        "host_shm",
        example="[Errno 28] No space left on device: '/dev/shm/torch_7_12'",
    ),
    _row(
        r"(?i)unable to (?:open|allocate|mmap|resize|write)[^\n]*"
        r"(?:shared memory|</?torch_\d)",
        "shared_memory",
        "host_shm",
        likely=True,
        example="unable to open shared memory object </torch_29919_1396182366> in read-write mode",
    ),
    _row(
        r"(?i)workers? (?:are|is) out of shared memory|out of shared memory",
        "shared_memory",
        "host_shm",
        example="Unexpected bus error encountered in worker. This might be caused by insufficient "
        "shared memory (shm): workers are out of shared memory",
    ),
    _row(
        r"insufficient shared memory \(shm\)",
        "shared_memory",
        "host_shm",
        example="Unexpected bus error encountered in worker. "
        "This might be caused by insufficient shared memory (shm).",
    ),
)

_HOST = (
    _row(
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
        "host_allocator",
        "host",
        example="[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 132426121216 bytes. Error code 12 (Cannot allocate memory)",
    ),
    _row(
        r"posix_memalign\(&\w+, \w+, \w+\) == 0\. 12 vs 0",
        "host_allocator",
        "host",
        example="[enforce fail at CPUAllocator.cpp:56] "
        "posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
    ),
    _row(
        r"\$ Torch: not enough memory: you tried to allocate",
        "host_allocator",
        "host",
        example="$ Torch: not enough memory: you tried to allocate 1GB. Buy new RAM! "
        "at /pytorch/aten/src/TH/THGeneral.c:201",
    ),
    _row(
        r"(?i)unable to allocate [\d.]+ (?:\w?i?B|bytes) for an array with shape",
        "host",
        "host",
        example="Unable to allocate 1.37 GiB for an array with shape (1, 546, 820, 820) "
        "and data type float32",
    ),
    _row(
        r"std::bad_alloc|" + _LINE + r"bad allocation\s*$",
        "host",
        "host",
        example="std::bad_alloc",
    ),
    _row(
        r"\[?WinError 1455\]?|The paging file is too small for this operation",
        "system",
        "host",
        any_class=True,
        example="[WinError 1455] The paging file is too small for this operation to complete.",
    ),
    _row(
        r"\[WinError 8\]|Not enough memory resources are available to process this command",
        "system",
        "host",
        any_class=True,
        example="[WinError 8] Not enough memory resources are available to process this command",
    ),
    _row(
        r"\[Errno 12\] |Cannot allocate memory(?=\s*$|[.:)'\"\[]| \(12\))",
        "system",
        "host",
        example="[Errno 12] Cannot allocate memory",
    ),
    _row(
        r"is killed by signal: Killed",
        "worker",
        "host",
        likely=True,
        example="DataLoader worker (pid 12847) is killed by signal: Killed. ",
    ),
)

_DEVICE = (
    _row(
        r"\b\w+(?: backend)? out of memory[.,:]? *\(?(?:Tried to allocate [\d.]+ *(?:\w?i?B|bytes)|"
        r"\w+ allocated: )",
        "allocator",
        example="CUDA out of memory. Tried to allocate 52.00 MiB. GPU 0 has a total capacity of "
        "31.74 GiB of which 39.62 MiB is free.",
    ),
    _row(
        rf"{_LINE}{_BACKEND}(?: backend)? out of memory{_END}",
        "allocator",
        example="HIP out of memory.",
    ),
    _row(
        rf"{_LINE}Allocation on device(?: \d+)?(?: would exceed allowed memory|[\s.:]*$)",
        "allocator",
        example="Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 15.16 GiB\nRequested               : 512.00 KiB",
    ),
    _row(
        r"Invalid buffer size: [\d.]+ \w*B|Failed to allocate private MTLBuffer",
        "allocator",
        example="Invalid buffer size: 9.75 GB",
    ),
    _row(
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory|Insufficient Memory \(0*8:",
        "driver",
        example="Error: command buffer exited with error status.\n"
        "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    ),
    _row(
        rf"(?i){_LINE}(?:\S.*: +)?(?:CUDA|HIP|MUSA|XPU|NPU)"
        r"(?: driver| runtime)? error(?: \(?\d+\)?)? ?: ?"
        rf"out of memory{_END}",
        "driver",
        example="CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at "
        "some other API call, so the stacktrace below might be incorrect.",
    ),
    _row(
        r"(?i)cuda runtime error \(2\) ?: out of memory|error=2 ?: out of memory",
        "driver",
        example="cuda runtime error (2) : out of memory at "
        "/pytorch/aten/src/THC/generic/THCStorage.cu:58",
    ),
    _row(
        r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|"
        r"HIP_ERROR_OutOfMemory|hipErrorMemoryAllocation|cuda\w+ failed(?: with error)?:? "
        r"out of memory|failed with error out of memory|musaErrorMemoryAllocation",
        "driver",
        example="radix_sort: failed on 1st step: cudaErrorMemoryAllocation: out of memory",
    ),
    _row(
        r"Triton Error \[\w+\]: out of memory",
        "driver",
        example="Triton Error [CUDA]: out of memory",
    ),
    _row(
        r"(?i)\bcuda out of memory at line \d+|after \w+(?:::\w+)*: out of memory|"
        r"failed to synchronize: out of memory",
        "driver",
        example="Error CUDA out of memory at line 380 in file csrc/pythonInterface.c",
    ),
    _row(
        rf"{_LINE}[Oo]ut of memory\s*\.?\s*$",
        "driver",
        example="out of memory",
    ),
    _row(
        r"OUT_OF_DEVICE_MEMORY|OUT_OF_HOST_MEMORY|(?:PI|UR|CL)_(?:RESULT_)?(?:ERROR_)?"
        r"MEM_OBJECT_ALLOCATION_FAILURE",
        "driver",
        example="level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    ),
    _row(
        r"(?:UR_RESULT_ERROR|PI_ERROR|ZE_RESULT_ERROR|CL)_OUT_OF_RESOURCES|"
        r"Native API returns: -(?:5|997) ",
        "driver",
        likely=True,
        example="level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    ),
    _row(
        r"(?is)(?:RESOURCE_EXHAUSTED|ResourceExhausted)\b.*(?:out of memory|to allocate|to reserve|"
        r"OOM when allocating|\bHBM\b|memory space hbm)",
        "allocator",
        example="RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7406166528 bytes.",
    ),
    _row(
        r"OOM when allocating tensor|Ran out of memory in memory space hbm|"
        r"Out of memory (?:while trying to allocate|allocating) [\d,]+ bytes",
        "allocator",
        example="Out of memory allocating 4,000,000,000 bytes (allocated so far: 1,024 bytes).",
    ),
    _row(
        r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUSPARSELT|HIPBLAS|HIPSPARSE|HIPSOLVER|CURAND)_STATUS_"
        r"ALLOC_FAILED|(?:CUFFT|HIPFFT|ROCFFT|CUFFT_STATUS)_ALLOC_FAILED|"
        r"CURAND_STATUS_ALLOCATION_FAILED|"
        r"CUBLASLT_STATUS_ALLOC_FAILED|miopenStatusAllocFailed|rocblas_status_memory_error|"
        r"mublas\w*ALLOC_FAILED|ACLNN\w*ALLOC",
        "library",
        example="CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    _row(
        r"(?i)cublas runtime error : resource allocation failed|Memory not available to allocate "
        r"buffer|MAGMA\w*.*(?:allocation failed|device_malloc|MAGMA_ERR_DEVICE_ALLOC)",
        "library",
        example="cublas runtime error : resource allocation failed at "
        "/pytorch/aten/src/THC/THCGeneral.cpp:405",
    ),
    _row(
        r"CUDNN_STATUS_(?:NOT_SUPPORTED|INTERNAL_ERROR)\b|"
        r"[Uu]nable to find a valid cuDNN algorithm|"
        r"(?:FIND|GET) was unable to find an engine to execute this computation|"
        r"CUSPARSE_STATUS_INSUFFICIENT_RESOURCES|No valid solution found to run convolution|"
        r"miopenStatus(?:UnknownError|InternalError)",
        "disguised",
        likely=True,
        example="Unable to find a valid cuDNN algorithm to run convolution",
    ),
    _row(
        r"(?i)\bNVML_SUCCESS == r\b.*INTERNAL ASSERT FAILED|"
        r"INTERNAL ASSERT FAILED at .*CachingAllocator\.cpp",
        "disguised",
        likely=True,
        example='NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp"'
        ":1154, please report a bug to PyTorch.",
    ),
    _row(
        r"aoti_torch_\w*(?:empty|new|clone|copy|alloc)\w*\(.*API call failed",
        "disguised",
        likely=True,
        example="aoti_torch_empty_strided(3, int_array_74, int_array_75, "
        "cached_torch_dtype_bfloat16, cached_torch_device_type_cuda, 0, &buf80_handle) "
        "API call failed at main.cpp, line 3311",
    ),
)

OOM_PATTERNS: tuple[OOMPattern, ...] = (
    *_NOT_MEMORY,
    *_COLLECTIVES,
    *_SHARED_MEMORY,
    *_DEVICE[:3],
    *_HOST,
    *_DEVICE[3:],
)
"""Every row, in the order in which they are tried."""


def pattern_table() -> str:
    """Render :data:`OOM_PATTERNS` as a Markdown table, one line per row.

    Example:
        >>> print(pattern_table().splitlines()[0])
        | Message (example) | Kind | Scope | Confidence | A smaller attempt may help |
    """
    lines = [
        "| Message (example) | Kind | Scope | Confidence | A smaller attempt may help |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in OOM_PATTERNS:
        text = row.example.splitlines()[0].replace("|", "\\|")
        if row.kind == "none":
            lines.append(f"| `{text}` | not out of memory | | | |")
            continue
        helps = "yes" if row.recoverable else "no"
        helps = "on a CPU run" if row.kind in SPLIT_ON_CPU_KINDS else helps
        lines.append(f"| `{text}` | {row.kind} | {row.scope} | {row.confidence} | {helps} |")
    return "\n".join(lines)

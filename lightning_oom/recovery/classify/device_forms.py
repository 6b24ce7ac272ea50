"""How errors about device memory read, by backend, release and library."""

from __future__ import annotations

from lightning_oom.recovery.classify.oom_form import LINE_START, OOMPattern, form

__all__ = ["ALLOCATOR_FORMS", "DEVICE_FORMS"]

_END = r"(?=\s*$|[.!:;,(]|\s+\(|\s*Search for)"
_BACKEND = r"(?:CUDA|HIP|ROCm|XPU|SYCL|NPU|MUSA|MLU|HPU|GCU|MPS|CPU|simgpu)"
_LIBRARY = r"(?:CU|HIP|ROC|MU)(?:BLAS|BLASLT|DNN|SOLVER|SPARSE|SPARSELT|RAND|FFT)"

ALLOCATOR_FORMS: tuple[OOMPattern, ...] = (
    form(
        r"(?i)\b\w+(?: backend)? out of memory[.,:]?\s*\(?"
        r"(?:Tried to allocate [\d.]+\s*(?:\w?i?B|bytes)|\w+ allocated: )",
        "allocator",
        example="CUDA out of memory. Tried to allocate 52.00 MiB. GPU 0 has a total capacity of "
        "31.74 GiB of which 39.62 MiB is free.",
    ),
    form(
        rf"(?i){LINE_START}{_BACKEND}(?: backend)? out of memory{_END}",
        "allocator",
        example="HIP out of memory.",
    ),
    form(
        rf"{LINE_START}Allocation on device(?: \d+)?(?: would exceed allowed memory|[\s.:]*$)",
        "allocator",
        example="Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 15.16 GiB\nRequested               : 512.00 KiB",
    ),
)

_RUNTIME_FORMS = (
    form(
        r"Invalid buffer size: [\d.]+ \w*[Bb]|Failed to allocate private MTLBuffer",
        "allocator",
        example="Invalid buffer size: 9.75 GB",
    ),
    form(
        r"CommandBufferCallbackErrorOutOfMemory|Insufficient Memory \(0*8:",
        "driver",
        example="Error: command buffer exited with error status.\n"
        "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    ),
    form(
        rf"(?i){LINE_START}(?:\S.*: +)?{_BACKEND}(?: driver| runtime)? error"
        rf"(?: \(?\d+\)?)? ?: ?out of memory{_END}",
        "driver",
        example="CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at "
        "some other API call, so the stacktrace below might be incorrect.",
    ),
    form(
        r"(?i)cuda runtime error \(2\) ?: out of memory|error=2 ?: out of memory",
        "driver",
        example="cuda runtime error (2) : out of memory at "
        "/pytorch/aten/src/THC/generic/THCStorage.cu:58",
    ),
    form(
        r"cudaErrorMemoryAllocation|hipError(?:OutOfMemory|MemoryAllocation)|"
        r"musaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|HIP_ERROR_OutOfMemory",
        "driver",
        example="radix_sort: failed on 1st step: cudaErrorMemoryAllocation: out of memory",
    ),
    form(
        r"(?i)\b(?:cuda|hip)\w+ (?:failed|error)(?: 2)?:? out of memory|"
        r"failed with error(?: 2)?:? out of memory|failed to synchronize: out of memory|"
        r"after \w+(?:::\w+)*: out of memory|\bcuda out of memory at line \d+",
        "driver",
        example="cuda failed with error 2 out of memory. use CUDA_LAUNCH_BLOCKING=1",
    ),
    form(
        r"Triton Error \[\w+\]: out of memory",
        "driver",
        example="Triton Error [CUDA]: out of memory",
    ),
    form(
        rf"{LINE_START}[Oo]ut of memory\s*\.?\s*$",
        "driver",
        likely=True,
        example="out of memory",
    ),
    form(
        r"OUT_OF_DEVICE_MEMORY|ErrorOutOfDeviceMemory|MEM_OBJECT_ALLOCATION_FAILURE|"
        r"out of device memory on current platform|not enough GPU video memory",
        "driver",
        example="level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    ),
    form(
        r"(?:UR_RESULT_ERROR|PI_ERROR|ZE_RESULT_ERROR|CL)_OUT_OF_RESOURCES",
        "driver",
        likely=True,
        example="level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    ),
    form(
        r"ACL_ERROR_RT_MEMORY_ALLOCATION|\bEL0004\b|PT_DEVMEM Allocation failed",
        "driver",
        example="EL0004: Failed to allocate memory.",
    ),
    form(
        r"(?is)RESOURCE_?EXHAUSTED\b.*(?:out of memory|to allocate|to reserve|"
        r"OOM when allocating|memory space hbm)",
        "allocator",
        example="RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7406166528 bytes.",
    ),
    form(
        r"OOM when allocating tensor|Ran out of memory in memory space hbm|"
        r"Out of memory (?:while trying to allocate|allocating) [\d,]+ bytes|"
        r"Failed to allocate memory for requested buffer of size",
        "allocator",
        example="Out of memory allocating 4,000,000,000 bytes (allocated so far: 1,024 bytes).",
    ),
)

_LIBRARY_FORMS = (
    form(
        rf"{_LIBRARY}(?:_STATUS)?_(?:\w*DEVICE_)?ALLOC(?:ATION)?_FAILED|"
        r"rocblas_status_memory_error|miopenStatusAllocFailed",
        "library",
        example="CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    form(
        r"(?i)cublas runtime error ?: resource allocation failed|"
        r"Memory not available to allocate buffer",
        "library",
        example="cublas runtime error : resource allocation failed at "
        "/pytorch/aten/src/THC/THCGeneral.cpp:405",
    ),
)

_DISGUISED_FORMS = (
    form(
        r"CUDNN_STATUS_(?:NOT_SUPPORTED|INTERNAL_ERROR)\b|"
        r"[Uu]nable to find a valid cuDNN algorithm|"
        r"(?:FIND|GET) was unable to find an engine to execute this computation|"
        r"CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
        "disguised",
        likely=True,
        example="Unable to find a valid cuDNN algorithm to run convolution",
    ),
    form(
        r"NVML_SUCCESS == .*INTERNAL ASSERT FAILED",
        "disguised",
        likely=True,
        example='NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp"'
        ":1154, please report a bug to PyTorch.",
    ),
    form(
        r"aoti_torch_\w*(?:empty|new|clone|copy|alloc)\w*\(.*API call failed",
        "disguised",
        likely=True,
        example="aoti_torch_empty_strided(3, int_array_74, int_array_75, "
        "cached_torch_dtype_bfloat16, cached_torch_device_type_cuda, 0, &buf80_handle) "
        "API call failed at main.cpp, line 3311",
    ),
)

DEVICE_FORMS: tuple[OOMPattern, ...] = (*_RUNTIME_FORMS, *_LIBRARY_FORMS, *_DISGUISED_FORMS)

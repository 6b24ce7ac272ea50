"""Read the amounts of memory out of the text of an out-of-memory error."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["MessageAmounts", "parse_amounts"]

_AMOUNT = r"([\d.,]*\d) ?(bytes|B|[KMGTPE]i?B|[KMGT])\b"
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50, "E": 2**60}

_REQUESTED = (
    rf"[Tt]ried to allocate {_AMOUNT}",
    r"allocate [\d.]+\w* \((\d+) (bytes)\)",
    rf"(?:trying to allocate|Out of memory allocating|Attempting to reserve) {_AMOUNT}",
    rf"Requested\s*: {_AMOUNT}",
    rf"[Uu]nable to allocate {_AMOUNT} for an array",
    rf"Invalid buffer size: {_AMOUNT}",
    rf"[Cc]ould not allocate tensor with {_AMOUNT}",
    r"(?:MTLBuffer for|requested buffer of) size (\d+)()",
    r"allocate buffer: (\d+)()",
    r"unable to mmap (\d+) (bytes)",
)
_LIMIT = (
    rf"\b{_AMOUNT} allowed;",
    rf"max allowed: {_AMOUNT}",
    rf"total capaci?ty of {_AMOUNT}",
    rf"{_AMOUNT} total capaci?ty",
    rf"Device limit\s*: {_AMOUNT}",
    rf"limit set to: {_AMOUNT}",
)
_FREE = (
    rf"of which {_AMOUNT} is free",
    rf"{_AMOUNT} free",
    rf"Free \(according to \w+\)\s*: {_AMOUNT}",
)
_ALLOCATED = (
    rf"Of the allocated memory {_AMOUNT} is allocated",
    rf"{_AMOUNT} already allocated",
    rf"\w+ allocated: {_AMOUNT}",
    rf"Currently allocated\s*: {_AMOUNT}",
    rf"allocated so far: {_AMOUNT}",
)
_UNALLOCATED = (
    rf"{_AMOUNT} is reserved by PyTorch but unallocated",
    rf"{_AMOUNT} cached\)",
)
_RESERVED_IN_TOTAL = (rf"{_AMOUNT} reserved in total",)
_DEVICES = (
    r"\b(?P<kind>\w+)(?: backend)? out of memory\b.*?\b(?:GPU|\w+) (?P<index>\d+)(?: has a total|;)",
    r"(?P<kind>)Allocation on device (?P<index>\d+)",
    r"\b(?P<kind>CUDA|HIP|XPU|MPS|NPU|MUSA|simgpu)(?P<index>)(?: backend)? out of memory",
    r"\b(?P<kind>CUDA|HIP|XPU|NPU|MUSA)(?P<index>)(?: driver| runtime)? error",
    r"(?P<kind>)(?P<index>)(?:CU\w+_(?:STATUS_)?ALLOC|CUDNN_|NVML_|CUDA_ERROR|cudaError|cuda runtime)",
)
_DEVICE_TYPES = {"hip": "cuda", "": "cuda"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageAmounts:
    """What a message says, in bytes; ``None`` for what it does not say."""

    requested_bytes: int | None
    limit_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_unallocated_bytes: int | None
    device: str | None


def parse_amounts(message: str) -> MessageAmounts:
    """Read the amounts in the message of an out-of-memory error.

    Knows the forms of torch from 1.0 on (for every backend), of ``cudaMallocAsync``, NumPy, CuPy,
    XLA and the CPU allocator. Torch prints two decimals, so amounts are exact to 0.5 % only.

    Args:
        message: Text of the error.

    Example:
        >>> amounts = parse_amounts(
        ...     "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 7.93 GiB total capacity; "
        ...     "7.20 GiB already allocated; 17.56 MiB free; 46.25 MiB cached)"
        ... )
        >>> amounts.requested_bytes, amounts.device
        (20971520, 'cuda:1')
    """
    allocated = _first_amount(_ALLOCATED, message)
    unallocated = _first_amount(_UNALLOCATED, message)
    reserved = _first_amount(_RESERVED_IN_TOTAL, message)
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    return MessageAmounts(
        requested_bytes=_first_amount(_REQUESTED, message),
        limit_bytes=_first_amount(_LIMIT, message),
        free_bytes=_first_amount(_FREE, message),
        allocated_bytes=allocated,
        reserved_unallocated_bytes=unallocated,
        device=_device(message),
    )


def _first_amount(patterns: tuple[str, ...], message: str) -> int | None:
    for pattern in patterns:
        match = re.search(pattern, message)
        if match is not None:
            number, unit = match.groups()
            # torch before 2.4 prints MPS amounts as "GB", counted in 2**30
            factor = _FACTORS[unit[:1] if unit[:1] not in ("b", "B") else ""]
            return int(float(number.replace(",", "")) * factor)
    return None


def _device(message: str) -> str | None:
    for pattern in _DEVICES:
        match = re.search(pattern, message, re.DOTALL)
        if match is not None:
            kind = match["kind"].lower()
            kind = _DEVICE_TYPES.get(kind, kind)
            return f"{kind}:{match['index']}" if match["index"] else kind
    return None

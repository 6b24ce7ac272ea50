"""Move values between host and device, whatever their layout; say no as CUDA does."""

from __future__ import annotations

import re

import torch

from lightning_oom._torch import SPARSE_CPU_KEYS, redispatch_of
from lightning_oom.memory.allocator import AllocationFailure
from lightning_oom.memory.blocks import segment_bytes
from lightning_oom.testing.simgpu.devices import DEVICE_TYPE, SimDevice
from lightning_oom.testing.simgpu.storage import adopt_strided, host_of_strided, oom_error

__all__ = ["adopt", "adopt_or_raise", "host_of", "refusal_by_host", "to_host"]

_aten = torch.ops.aten
_indices = redispatch_of(_aten._indices.default)  # noqa: SLF001 - an operator's name
_values = redispatch_of(_aten._values.default)  # noqa: SLF001 - an operator's name
_is_coalesced = redispatch_of(_aten.is_coalesced.default)
_make_sparse = redispatch_of(_aten._sparse_coo_tensor_with_dims_and_tensors.default)  # noqa: SLF001 - an operator's name

_HOST_REFUSAL = re.compile(r"DefaultCPUAllocator.*?tried to allocate (\d+) bytes", re.DOTALL)


def host_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory of a device tensor."""
    try:
        return host_of_strided(tensor)
    except NotImplementedError:
        _check_layout(tensor)
    return _assemble(
        host_of_strided(_indices(SPARSE_CPU_KEYS, tensor)),
        host_of_strided(_values(SPARSE_CPU_KEYS, tensor)),
        tensor,
    )


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor behind a device tensor, any other tensor as it is."""
    return host_of(tensor) if tensor.device.type == DEVICE_TYPE else tensor


def adopt(host: torch.Tensor, device: SimDevice) -> torch.Tensor | AllocationFailure:
    """Turn a CPU tensor that nobody else uses into a tensor of ``device``, or return the refusal."""
    try:
        return adopt_strided(host, device)
    except NotImplementedError:
        _check_layout(host)
    indices = adopt_strided(_indices(SPARSE_CPU_KEYS, host), device)
    if isinstance(indices, AllocationFailure):
        return indices
    values = adopt_strided(_values(SPARSE_CPU_KEYS, host), device)
    if isinstance(values, AllocationFailure):
        return values
    return _assemble(indices, values, host)


def adopt_or_raise(host: torch.Tensor, device: SimDevice) -> torch.Tensor:
    """Adopt a fresh CPU tensor, or raise the device's out-of-memory error."""
    tensor = adopt(host, device)
    if isinstance(tensor, AllocationFailure):
        del host
        raise oom_error(tensor, device)
    return tensor


def refusal_by_host(error: RuntimeError, device: SimDevice) -> AllocationFailure | None:
    """Read the refusal of the simulated device off an error of the host's allocator.

    Operators run on the host first, and a request far above the device's limit may already be too
    much for the host.

    Returns:
        The refusal, or ``None`` if the error is another one or the device would have had room.
    """
    match = _HOST_REFUSAL.search(str(error))
    allocator = device.allocator
    if match is None or allocator.limit_bytes is None:
        return None
    num_bytes = int(match[1])
    if num_bytes + allocator.allocated_bytes <= allocator.limit_bytes:
        return None
    allocator.num_ooms += 1
    return AllocationFailure(
        requested_bytes=num_bytes,
        segment_bytes=segment_bytes(num_bytes),
        limit_bytes=allocator.limit_bytes,
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
    )


def _assemble(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a sparse COO tensor of the given parts, where they are, in the form of ``like``."""
    sparse_dims = indices.shape[0]
    tensor: torch.Tensor = _make_sparse(
        SPARSE_CPU_KEYS,
        sparse_dims,
        like.dim() - sparse_dims,
        like.shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        pin_memory=False,
        is_coalesced=_is_coalesced(SPARSE_CPU_KEYS, like),
    )
    return tensor


def _check_layout(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.sparse_coo:
        raise NotImplementedError(
            f"the simulated GPU holds strided and sparse COO tensors, not {tensor.layout} ones"
        )

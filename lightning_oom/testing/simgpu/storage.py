"""Between host and simulated device: one device tensor, one host tensor behind it, one block.

A device tensor is an ordinary ``torch.Tensor`` in torch's out-of-tree device slot. Its storage owns a
host tensor (``host``), whose memory it uses, and a :class:`Lease` on one block of the device's
allocator (``lease``). Both are attributes of the storage, so they live exactly as long as it does:
views share them, and the block goes back when the last view, graph node or storage reference is gone.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import (
    CPU_KEYS,
    OutOfMemoryError,
    dlpack_of,
    host_storage_at,
    identity_of,
    is_backward_multithreaded,
    redispatch_of,
    set_backward_multithreaded,
    tensor_from_dlpack,
)
from lightning_oom.memory.allocator import AllocationFailure
from lightning_oom.testing.simgpu.messages import format_oom_message

if TYPE_CHECKING:
    from lightning_oom.memory.blocks import Block
    from lightning_oom.testing.simgpu.devices import SimDevice

__all__ = [
    "Lease",
    "adopt_strided",
    "host_bytes",
    "host_of_strided",
    "oom_error",
    "view_of_storage",
]

_aten = torch.ops.aten
_as_strided = redispatch_of(_aten.as_strided.default)
_set_storage = redispatch_of(_aten.set_.source_Storage_storage_offset)
_view_dtype = redispatch_of(_aten.view.dtype)

_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype = ctypes.c_void_p
_pointer_in.argtypes = [ctypes.py_object, ctypes.c_char_p]
_DeviceField = ctypes.c_int32 * 2
_DEVICE_FIELD_OFFSET = ctypes.sizeof(ctypes.c_void_p)  # behind the data pointer of a DLTensor
_DLPACK_EXTENSION_DEVICE = 12

_devices_of_hosts: dict[int, weakref.ref[Any]] = {}  # host storage address -> device storage


class Lease:
    """Holds one block of a device for one storage and gives it back at the storage's death."""

    __slots__ = ("block", "device", "host_address")

    def __init__(self, device: SimDevice, block: Block | None, host_address: int) -> None:
        self.device = device
        self.block = block
        self.host_address = host_address

    def __del__(self) -> None:
        entry = _devices_of_hosts.get(self.host_address)
        if entry is not None and entry() is None:
            del _devices_of_hosts[self.host_address]
        if self.block is not None:
            self.device.give_back(self.block)


def host_of_strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory, with the form, of a strided device tensor.

    Raises:
        NotImplementedError: The tensor has no storage, as a sparse one.
    """
    storage: Any = tensor.untyped_storage()
    try:
        host: torch.Tensor = storage.host
    except AttributeError:
        host = host_bytes(storage)  # a storage that torch made over the memory of one of ours
    dtype = tensor.dtype
    if host.dtype is dtype:
        stride = tensor.stride()
        if (
            host.stride() == stride
            and host.shape == tensor.shape
            and host.data_ptr() == tensor.data_ptr()
        ):
            return host
        view: torch.Tensor = _as_strided(
            CPU_KEYS, host, tensor.shape, stride, tensor.storage_offset()
        )
        return view
    view = _aten.empty.memory_format((0,), dtype=dtype)
    _set_storage(
        CPU_KEYS,
        view,
        host.untyped_storage(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )
    return view


def host_bytes(storage: Any) -> torch.Tensor:
    """Return the bytes of a device storage as a CPU tensor over the same memory."""
    num_bytes = storage.nbytes()
    view: torch.Tensor = _aten.empty.memory_format((0,), dtype=torch.uint8)
    memory = host_storage_at(storage.data_ptr(), num_bytes)
    _set_storage(CPU_KEYS, view, memory, 0, (num_bytes,), (1,))
    return view


def adopt_strided(host: torch.Tensor, device: SimDevice) -> torch.Tensor | AllocationFailure:
    """Turn a strided CPU tensor that nobody else uses into a tensor of ``device``.

    Args:
        host: The tensor; it must not be used directly any more.
        device: Where it is to be.

    Returns:
        The device tensor, or the allocator's refusal. If the storage of ``host`` is already that of a
        device tensor, a view of it, at no cost.

    Raises:
        NotImplementedError: ``host`` has no storage, as a sparse tensor.
    """
    storage = host.untyped_storage()
    address = identity_of(storage)
    known = _devices_of_hosts.get(address)
    if known is not None and (owner := known()) is not None:
        return view_of_storage(owner, host)
    num_bytes = storage.nbytes()
    block = device.reserve(num_bytes)
    if isinstance(block, AllocationFailure):
        return block
    if is_backward_multithreaded():
        # The number of torch's backward threads is fixed by the first backward of the process, which
        # may have run before these devices existed. Without threads no device needs one.
        set_backward_multithreaded(False)
    tensor = _put_on_device(host, num_bytes, device.index)
    device_storage: Any = tensor.untyped_storage()
    device_storage.host = host
    device_storage.lease = Lease(device, block, address)
    _devices_of_hosts[address] = weakref.ref(device_storage)
    return tensor


def view_of_storage(storage: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a device tensor over a device storage, with dtype and form of ``like``."""
    seed = _relabel(_aten.empty.memory_format((0,), dtype=torch.uint8), storage.device.index)
    view = _as_strided(CPU_KEYS, seed, (0,), (1,), 0)
    if like.dtype is not torch.uint8:
        view = _view_dtype(CPU_KEYS, view, like.dtype)
    _set_storage(CPU_KEYS, view, storage, like.storage_offset(), like.shape, like.stride())
    found: torch.Tensor = view
    return found


def oom_error(failure: AllocationFailure, device: SimDevice) -> RuntimeError:
    """Return the error for a refusal; the caller drops its tensors, then raises it."""
    return OutOfMemoryError(format_oom_message(failure, device.index))


def _put_on_device(host: torch.Tensor, num_bytes: int, index: int) -> torch.Tensor:
    """Return a device tensor whose storage is the whole storage of ``host``."""
    tensor: torch.Tensor
    if host.numel() * host.itemsize == num_bytes:
        try:
            tensor = _relabel(host, index)
        except (BufferError, RuntimeError):
            pass  # a dtype that DLPack has no name for
        else:
            if tensor.stride() == host.stride():
                return tensor
            tensor = _as_strided(CPU_KEYS, tensor, host.shape, host.stride(), 0)
            return tensor
    whole = _aten.empty.memory_format((0,), dtype=torch.uint8)
    _set_storage(CPU_KEYS, whole, host.untyped_storage(), 0, (num_bytes,), (1,))
    return view_of_storage(_relabel(whole, index).untyped_storage(), host)


def _relabel(host: torch.Tensor, index: int) -> torch.Tensor:
    """Hand the memory of ``host`` to a tensor that says it is on the simulated device.

    DLPack carries a tensor between frameworks with its device written beside the data pointer; the
    out-of-tree slot is DLPack's extension device. Torch keeps ``host`` alive until the new storage
    dies.
    """
    capsule = dlpack_of(host)
    field = _DeviceField.from_address(_pointer_in(capsule, b"dltensor") + _DEVICE_FIELD_OFFSET)
    field[0] = _DLPACK_EXTENSION_DEVICE
    field[1] = index
    tensor: torch.Tensor = tensor_from_dlpack(capsule)
    return tensor

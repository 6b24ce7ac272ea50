"""Between host and simulated device: one device tensor, one host tensor behind it, one block.

A device tensor is an ordinary ``torch.Tensor`` in torch's out-of-tree device slot. Its storage owns a
host tensor (:data:`HOST`), whose memory it uses, and a :class:`Lease` on one block of the device's
allocator. Both hang on the storage, so they live exactly as long as the storage does: views share
them, and the block goes back when the last view, graph node or storage reference is gone.
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
    is_backward_multithreaded,
    redispatch_of,
    set_backward_multithreaded,
    tensor_from_dlpack,
)
from lightning_oom.memory.allocator import AllocationFailure, Block
from lightning_oom.testing.simgpu.devices import SimDevice, find_device
from lightning_oom.testing.simgpu.messages import format_oom_message

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Lease", "adopt", "host_view", "move_out", "oom_error", "view_of_storage"]

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

    def release(self) -> None:
        """Give the block back; nothing the second time."""
        block, self.block = self.block, None
        if block is not None:
            self.device.give_back(block)

    def __del__(self) -> None:
        entry = _devices_of_hosts.get(self.host_address)
        if entry is not None and entry() is None:
            del _devices_of_hosts[self.host_address]
        self.release()


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory, with the form, of a strided device tensor."""
    host: torch.Tensor = tensor.untyped_storage().host  # type: ignore[attr-defined]  # set by adopt
    if (
        host.data_ptr() == tensor.data_ptr()
        and host.shape == tensor.shape
        and host.dtype is tensor.dtype
        and host.stride() == tensor.stride()
    ):
        return host
    if host.dtype is tensor.dtype:
        return _as_strided(  # type: ignore[no-any-return]  # a torch operator
            CPU_KEYS, host, tensor.shape, tensor.stride(), tensor.storage_offset()
        )
    view = _aten.empty.memory_format((0,), dtype=tensor.dtype)
    return _set_storage(  # type: ignore[no-any-return]  # a torch operator
        CPU_KEYS,
        view,
        host.untyped_storage(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )


def adopt(host: torch.Tensor, device: SimDevice) -> torch.Tensor | AllocationFailure:
    """Turn a strided CPU tensor that nobody else uses into a tensor of ``device``.

    Args:
        host: The tensor; it must not be used directly any more.
        device: Where it is to be.

    Returns:
        The device tensor, or the allocator's refusal. If the storage of ``host`` is already that of a
        device tensor, a view of it, at no cost.
    """
    storage = host.untyped_storage()
    address = storage._cdata  # noqa: SLF001 - the only name of a storage's identity
    known = _devices_of_hosts.get(address)
    if known is not None and (device_storage := known()) is not None:
        return view_of_storage(device_storage, host)
    num_bytes = storage.nbytes()
    block = device.reserve(num_bytes)
    if block.__class__ is AllocationFailure:
        return block  # type: ignore[return-value]  # narrowed by the line above
    if is_backward_multithreaded():
        # The number of torch's backward threads is fixed by the first backward of the process, which
        # may have run before these devices existed. Without threads no device needs one.
        set_backward_multithreaded(False)
    tensor = _put_on_device(host, num_bytes, device.index)
    device_storage = tensor.untyped_storage()
    device_storage.host = host
    device_storage.lease = Lease(device, block, address)  # type: ignore[arg-type]  # not a failure
    _devices_of_hosts[address] = weakref.ref(device_storage)
    return tensor


def move_out(hosts: Iterable[torch.Tensor], device: SimDevice) -> list[torch.Tensor]:
    """Adopt several tensors, or raise the device's out-of-memory error and keep none."""
    moved = []
    for host in hosts:
        tensor = adopt(host, device)
        if isinstance(tensor, AllocationFailure):
            del host, hosts, moved
            raise oom_error(tensor, device)
        moved.append(tensor)
    return moved


def view_of_storage(storage: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a device tensor over a device storage, with dtype and form of ``like``."""
    seed = _relabel(_aten.empty.memory_format((0,), dtype=torch.uint8), storage.device.index)
    view = _as_strided(CPU_KEYS, seed, (0,), (1,), 0)
    if like.dtype is not torch.uint8:
        view = _view_dtype(CPU_KEYS, view, like.dtype)
    return _set_storage(  # type: ignore[no-any-return]  # a torch operator
        CPU_KEYS, view, storage, like.storage_offset(), like.shape, like.stride()
    )


def oom_error(failure: AllocationFailure, device: SimDevice) -> RuntimeError:
    """Return the error for a refusal; the caller drops its tensors, then raises it."""
    return OutOfMemoryError(format_oom_message(failure, device.index))


def storage_device(storage: Any) -> SimDevice:
    """Return the device that a device storage is on."""
    return find_device(storage.device)


def _put_on_device(host: torch.Tensor, num_bytes: int, index: int) -> torch.Tensor:
    """Return a device tensor whose storage is the whole storage of ``host``."""
    if host.numel() * host.itemsize == num_bytes:
        try:
            tensor = _relabel(host, index)
        except (BufferError, RuntimeError):
            pass  # a dtype that DLPack has no name for
        else:
            if tensor.stride() == host.stride():
                return tensor
            return _as_strided(CPU_KEYS, tensor, host.shape, host.stride(), 0)  # type: ignore[no-any-return]  # a torch operator
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
    return tensor_from_dlpack(capsule)

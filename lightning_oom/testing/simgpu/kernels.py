"""Kernels written by hand: copies between host and device, storages, views, resizing."""

from __future__ import annotations

from typing import Any

import torch

from lightning_oom._torch import CPU_KEYS, SPARSE_CPU_KEYS, redispatch_of
from lightning_oom.testing.simgpu.devices import DEVICE_TYPE, SimDevice, find_device
from lightning_oom.testing.simgpu.placement import adopt_or_raise, refusal_by_host, to_host
from lightning_oom.testing.simgpu.storage import host_bytes, oom_error

__all__ = ["MANUAL_KERNELS", "run_on_metadata"]

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_copy = redispatch_of(_aten.copy_.default)
_to_copy = redispatch_of(_aten._to_copy.default)  # noqa: SLF001 - an operator's name
_empty_strided = redispatch_of(_aten.empty_strided.default)
_empty = redispatch_of(_aten.empty.memory_format)
_set_storage = redispatch_of(_aten.set_.source_Storage_storage_offset)


def run_on_metadata(operator: Any) -> Any:
    """Return a kernel for an operator that only reads and writes sizes, strides and storage.

    Torch's CPU kernel for it works on tensors of any device.
    """
    run = redispatch_of(operator)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run(CPU_KEYS, *args, **kwargs)

    return kernel


def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Write ``src`` into ``self``; either may be on the host."""
    _copy(CPU_KEYS, to_host(self), to_host(src), non_blocking)
    return self


def copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Write ``self`` into ``dst``; either may be on the host."""
    _copy(CPU_KEYS, to_host(dst), to_host(self), non_blocking)
    return dst


def copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """Write ``self`` into ``dst`` after giving it the same form."""
    dst.resize_(self.shape)
    return copy_from(self, dst)


def to_copy(self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Copy a tensor to another dtype, layout or device, from or to the simulated one."""
    place = kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    source = to_host(self)
    keys = CPU_KEYS if source.layout is torch.strided else SPARSE_CPU_KEYS
    host = _to_copy(keys, source, device=_CPU, **kwargs)
    if place is not None and place.type == "cpu":
        return host  # type: ignore[no-any-return]  # a torch operator
    if place is not None and place.type != DEVICE_TYPE:
        return host.to(place)  # type: ignore[no-any-return]  # a torch operator
    return adopt_or_raise(host, find_device(self.device if place is None else place))


def empty(
    size: Any, *, device: torch.device, pin_memory: bool | None = None, **kwargs: Any
) -> torch.Tensor:
    """Make an uninitialised device tensor."""
    _refuse_pinned(pin_memory)
    return _make(_empty, (size,), kwargs, find_device(device))


def empty_strided(
    size: Any, stride: Any, *, device: torch.device, pin_memory: bool | None = None, **kwargs: Any
) -> torch.Tensor:
    """Make an uninitialised device tensor with given strides."""
    _refuse_pinned(pin_memory)
    return _make(_empty_strided, (size, stride), kwargs, find_device(device))


def _make(run: Any, args: tuple[Any, ...], options: Any, device: SimDevice) -> torch.Tensor:
    try:
        host = run(CPU_KEYS, *args, device=_CPU, **options)
    except RuntimeError as error:
        refusal = refusal_by_host(error, device)
        if refusal is None:
            raise
    else:
        return adopt_or_raise(host, device)
    raise oom_error(refusal, device)


def _refuse_pinned(pin_memory: bool | None) -> None:
    if pin_memory:
        raise RuntimeError("Only dense CPU tensors can be pinned")


def resize_(
    self: torch.Tensor, size: Any, *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """Give ``self`` another shape; a storage that is too small is replaced by a larger one."""
    like = _empty(CPU_KEYS, size, dtype=self.dtype, device=_CPU, memory_format=memory_format)
    offset = self.storage_offset()
    storage = self.untyped_storage()
    needed = (offset + like.numel()) * self.itemsize
    if needed > storage.nbytes():
        grown = _empty(CPU_KEYS, (needed,), dtype=torch.uint8, device=_CPU)
        old = host_bytes(storage)
        grown[: old.numel()].copy_(old)
        storage = adopt_or_raise(grown, find_device(self.device)).untyped_storage()
    return _set_storage(CPU_KEYS, self, storage, offset, like.shape, like.stride())  # type: ignore[no-any-return]  # a torch operator


def set_storage(
    self: torch.Tensor, source: Any, storage_offset: Any = 0, size: Any = None, stride: Any = ()
) -> torch.Tensor:
    """Point ``self`` at another device storage."""
    if size is None:
        size, stride = (source.nbytes() // self.itemsize,), (1,)
    return _set_storage(CPU_KEYS, self, source, storage_offset, size, stride)  # type: ignore[no-any-return]  # a torch operator


def set_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Point ``self`` at the storage of ``source``, with its form."""
    return set_storage(
        self, source.untyped_storage(), source.storage_offset(), source.shape, source.stride()
    )


def set_empty(self: torch.Tensor) -> torch.Tensor:
    """Let go of the storage."""
    blank = _empty(CPU_KEYS, (0,), dtype=self.dtype, device=_CPU)
    return set_tensor(self, adopt_or_raise(blank, find_device(self.device)))


def is_pinned(*_: Any) -> bool:
    """Say that nothing is ever pinned."""
    return False


def record_stream(self: torch.Tensor, s: Any) -> None:
    """There is one stream; nothing to remember."""


def pin_memory(self: torch.Tensor, *_: Any) -> torch.Tensor:
    """Copy a host tensor: there is no page to lock for a simulated transfer."""
    return self.clone()


def has_compatible_shallow_copy_type(self: torch.Tensor, from_: torch.Tensor) -> bool:
    """Let ``parameter.data`` move between host and device, so that parameters keep their identity."""
    return self.layout is from_.layout


HOST_KERNELS: dict[str, Any] = {"_pin_memory": pin_memory, "is_pinned": is_pinned}
"""For host tensors, by operator name: torch would ask a pinning allocator in C++."""

MANUAL_KERNELS: dict[str, Any] = {
    "_has_compatible_shallow_copy_type": has_compatible_shallow_copy_type,
    "copy_": copy_,
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from_and_resize,
    "_to_copy": to_copy,
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "resize_": resize_,
    "set_.source_Storage": set_storage,
    "set_.source_Storage_storage_offset": set_storage,
    "set_.source_Tensor": set_tensor,
    "set_": set_empty,
    "is_pinned": is_pinned,
    "record_stream": record_stream,
}
"""By operator name within ``aten``."""

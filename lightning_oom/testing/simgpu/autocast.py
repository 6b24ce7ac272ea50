"""``torch.autocast("simgpu")``, with the rules of the CPU's autocast."""

from __future__ import annotations

from typing import Any

import torch

from lightning_oom._torch import has_kernel, without_autocast
from lightning_oom.testing.simgpu.devices import DEVICE_TYPE

__all__ = ["make_autocast_kernel"]

# What the CPU's autocast computes in the lower precision, and what in the widest type among its
# arguments. Everything else that it knows is computed in float32.
_LOWER = frozenset(
    {
        "_convolution",
        "_native_multi_head_attention",
        "addbmm",
        "addmm",
        "baddbmm",
        "bmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "linalg_vecdot",
        "linear",
        "matmul",
        "mkldnn_rnn_layer",
        "mm",
        "prelu",
        "scaled_dot_product_attention",
    }
)
_WIDEST = frozenset({"cat", "index_copy", "stack"})


def make_autocast_kernel(operator: Any) -> Any:
    """Return the kernel that casts and goes on, ``None`` if autocast has nothing to do with it."""
    if not has_kernel(operator, "AutocastCPU"):
        return None
    packet = operator.name().removeprefix("aten::").partition(".")[0]
    if packet in _LOWER:
        return _cast_and_call(operator, lambda _: torch.get_autocast_dtype(DEVICE_TYPE))
    if packet in _WIDEST:
        return _cast_and_call(operator, _widest)
    return _cast_and_call(operator, lambda _: torch.float32)


def _cast_and_call(operator: Any, choose: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            dtype = choose(args)
            cast = [_cast(value, dtype) for value in args]
            return operator(*cast, **{name: _cast(v, dtype) for name, v in kwargs.items()})

    return kernel


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if _takes_part(value) else value
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    return value


def _takes_part(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == DEVICE_TYPE
        and tensor.is_floating_point()
        and tensor.dtype is not torch.float64
    )


def _widest(args: Any) -> torch.dtype:
    """Return the widest type among the tensors, at least that of autocast."""
    dtype = torch.get_autocast_dtype(DEVICE_TYPE)
    for value in args:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and _takes_part(tensor):
                dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype

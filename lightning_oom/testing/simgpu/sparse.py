"""Sparse COO tensors on the simulated device: two device tensors inside one of torch's own."""

from __future__ import annotations

from typing import Any

import torch

from lightning_oom._torch import SPARSE_CPU_KEYS, redispatch_of
from lightning_oom.testing.simgpu.devices import DEVICE_TYPE, find_device
from lightning_oom.testing.simgpu.dispatch import make_kernel
from lightning_oom.testing.simgpu.kernels import to_copy
from lightning_oom.testing.simgpu.placement import adopt_or_raise, to_host
from lightning_oom.testing.simgpu.schemas import read_plan

__all__ = ["make_sparse_kernel", "refuse_layout"]

_aten = torch.ops.aten
_replace = redispatch_of(_aten.copy_sparse_to_sparse_.default)

# These only look at, or put together, the two parts; torch's own code does that on any device.
_ON_PARTS = frozenset(
    {
        "_coalesced_",
        "_dimI",
        "_dimV",
        "_indices",
        "_nnz",
        "_sparse_coo_tensor_with_dims_and_tensors",
        "_values",
        "dense_dim",
        "indices",
        "is_coalesced",
        "sparse_dim",
        "values",
    }
)


def make_sparse_kernel(operator: Any) -> Any:
    """Return the kernel of ``operator`` for calls with at least one sparse device tensor."""
    packet, _, overload = operator.name().removeprefix("aten::").partition(".")
    if packet in _ON_PARTS and overload != "out":
        run = redispatch_of(operator)
        return lambda *args, **kwargs: run(SPARSE_CPU_KEYS, *args, **kwargs)
    if operator is _aten._to_copy.default:  # noqa: SLF001 - an operator's name
        return to_copy
    if packet in ("copy_", "copy_sparse_to_sparse_"):
        return _copy
    if read_plan(operator).returned == (0,):
        return _make_in_place_kernel(operator)
    return make_kernel(operator, operator)


def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Write one sparse tensor into another; either may be on the host."""
    source = to_host(src)
    if self.device.type == DEVICE_TYPE:
        source = adopt_or_raise(source.clone(), find_device(self.device))
    _replace(SPARSE_CPU_KEYS, self, source, non_blocking)
    return self


def _make_in_place_kernel(operator: Any) -> Any:
    """Return a kernel that writes to its first argument, whose parts may become other ones."""

    def run(host: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        operator(host, *args, **kwargs)
        return host

    compute = make_kernel(operator, run)

    def kernel(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.layout is torch.strided:
            compute(self, *args, **kwargs)
            return self
        host = to_host(self).clone()
        operator(host, *(_lower(value) for value in args), **kwargs)
        _replace(SPARSE_CPU_KEYS, self, adopt_or_raise(host, find_device(self.device)), False)
        return self

    return kernel


def _lower(value: Any) -> Any:
    return to_host(value) if isinstance(value, torch.Tensor) else value


def refuse_layout(operator: Any, *_: Any, **__: Any) -> Any:
    """Say that a layout is not there."""
    raise NotImplementedError(
        f"{operator}: the simulated GPU holds strided and sparse COO tensors, not other sparse layouts"
    )

"""Fill torch's out-of-tree device slot with the simulated GPU, once per process, on first use."""

from __future__ import annotations

import threading
from typing import Any

import torch

from lightning_oom._torch import (
    aten_operators,
    backend_slot_name,
    has_kernel,
    python_backend_bases,
    setup_python_backend,
)
from lightning_oom.errors import UnsupportedTorchError
from lightning_oom.testing.simgpu.attention import ATTENTION_OPERATORS, choose_attention
from lightning_oom.testing.simgpu.autocast import make_autocast_kernel
from lightning_oom.testing.simgpu.backend import make_backend_module
from lightning_oom.testing.simgpu.devices import DEVICE_TYPE
from lightning_oom.testing.simgpu.dispatch import make_kernel
from lightning_oom.testing.simgpu.fused import FUSED_OPERATORS
from lightning_oom.testing.simgpu.kernels import HOST_KERNELS, MANUAL_KERNELS, run_on_metadata
from lightning_oom.testing.simgpu.schemas import is_view
from lightning_oom.testing.simgpu.sparse import make_sparse_kernel, refuse_layout
from lightning_oom.testing.simgpu.unwinding import let_errors_through, set_pending_error_aside

__all__ = ["install_backend", "is_installed"]

_LOCK = threading.Lock()
_LIBRARIES: list[Any] = []  # kernels stay registered as long as these objects live

_HOST_FUNCTIONS = FUSED_OPERATORS | ATTENTION_OPERATORS

# Kernels written by hand, and composites in C++ whose parts run on the device while something of
# theirs stays on the host.
_LEFT_ALONE = frozenset(
    {*MANUAL_KERNELS, *HOST_KERNELS, "_pack_padded_sequence", "scaled_dot_product_attention"}
)
_SPARSE_TOO = frozenset({"aten::_to_copy"})  # a composite for dense tensors, wrong for sparse ones


def is_installed() -> bool:
    """Say whether this process has the device ``simgpu``."""
    return bool(_LIBRARIES)


def install_backend() -> None:
    """Make ``torch.device("simgpu")`` work; does nothing the second time.

    Raises:
        UnsupportedTorchError: This torch cannot be given a device from Python, or another package
            has taken the one slot there is.
    """
    with _LOCK:
        if _LIBRARIES:
            return
        _check_torch()
        hooks, guard, device_type = python_backend_bases()
        setup_python_backend(
            rename=DEVICE_TYPE,
            backend_module=make_backend_module(),
            hook=_make_hooks(hooks),
            device_guard=_make_guard(guard, device_type),
        )
        _LIBRARIES.extend(_register_kernels())
        _teach_storage_class()
        let_errors_through()


def _check_torch() -> None:
    if setup_python_backend is None:
        raise UnsupportedTorchError(
            "the simulated GPU needs a torch that can be given a device from Python, "
            f"which is torch 2.10 or later; this is torch {torch.__version__}. "
            "memory_limit and fail_at work with every torch"
        )
    name = backend_slot_name()
    if name not in ("privateuseone", DEVICE_TYPE):
        raise UnsupportedTorchError(
            f"torch has one slot for a device from outside, and {name!r} has taken it in this process"
        )


def _teach_storage_class() -> None:
    """Let ``torch.UntypedStorage(num_bytes, device="simgpu")`` make a device storage.

    Torch makes the storages of a deep copy and of a loaded checkpoint in this way. It asks an
    allocator in C++ for the memory, which an outside device in Python does not have: it crashes.
    """
    make: Any = torch.UntypedStorage.__new__

    def make_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == DEVICE_TYPE:
            num_bytes = args[0] if args else kwargs.get("size", 0)
            if not isinstance(num_bytes, int):
                raise TypeError(f"a storage on {DEVICE_TYPE} is made from a number of bytes")
            return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
        return (
            make(cls, *args, **kwargs)
            if device is None
            else make(cls, *args, device=device, **kwargs)
        )

    torch.UntypedStorage.__new__ = make_storage  # type: ignore[method-assign]  # see the docstring


def _make_hooks(base: Any) -> Any:
    class Hooks(base):  # type: ignore[misc]  # a class made in C++
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, dev_id: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    return Hooks()


def _make_guard(base: Any, device_type: Any) -> Any:
    class Guard(base):  # type: ignore[misc]  # a class made in C++
        def type_(self) -> Any:
            set_pending_error_aside()
            return device_type

    return Guard()


def _register_kernels() -> list[Any]:
    kernels = torch.library.Library("aten", "IMPL")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        kernels.impl("scaled_dot_product_attention", choose_attention, key)
    for name, kernel in MANUAL_KERNELS.items():
        kernels.impl(name, kernel, "PrivateUse1")
    for name, kernel in HOST_KERNELS.items():
        kernels.impl(name, kernel, "CPU")
    for operator in aten_operators():
        for key, make in (
            ("PrivateUse1", _make_dense_kernel),
            ("SparsePrivateUse1", _make_sparse_kernel),
            ("AutocastPrivateUse1", make_autocast_kernel),
        ):
            kernel = make(operator)
            if kernel is not None:
                kernels.impl(operator, kernel, key)
    fallbacks = torch.library.Library("_", "IMPL")
    fallbacks.fallback(_FallbackKernel(), "PrivateUse1")
    fallbacks.fallback(refuse_layout, "SparseCsrPrivateUse1")
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return [kernels, fallbacks]


def _make_dense_kernel(operator: Any) -> Any:
    """Return the kernel for strided tensors, ``None`` to leave the operator to torch."""
    name = operator.name().removeprefix("aten::")
    if name in _LEFT_ALONE:
        return None
    host_function = _HOST_FUNCTIONS.get(name)
    if host_function is not None:
        return make_kernel(operator, host_function)
    has_cpu = has_kernel(operator, "CPU")
    is_composite = has_kernel(operator, "CompositeExplicitAutograd")
    if not has_cpu and has_kernel(operator, "CompositeImplicitAutograd"):
        return None
    if is_view(operator):
        return None if is_composite else run_on_metadata(operator)
    return make_kernel(operator) if is_composite or has_cpu else None


def _make_sparse_kernel(operator: Any) -> Any:
    """Return the kernel for sparse COO tensors, ``None`` if torch has none on the CPU."""
    if has_kernel(operator, "SparseCPU") or operator.name() in _SPARSE_TOO:
        return make_sparse_kernel(operator)
    return None


class _FallbackKernel:
    """Serves every operator that has no kernel of its own, such as those of other packages."""

    def __init__(self) -> None:
        self._kernels: dict[Any, Any] = {}

    def __call__(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = self._kernels.get(operator)
        if kernel is None:
            if not has_kernel(operator, "CPU"):
                raise NotImplementedError(
                    f"{operator} has no CPU kernel, so the simulated GPU cannot run it"
                )
            kernel = self._kernels[operator] = make_kernel(operator)
        return kernel(*args, **kwargs)

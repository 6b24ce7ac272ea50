"""Fill torch's out-of-tree device slot with the simulated GPU, once per process, on first use."""

from __future__ import annotations

import threading
from typing import Any

import torch

from lightning_oom._torch import (
    aten_operators,
    has_kernel,
    python_backend_bases,
    schema_of,
    setup_python_backend,
)
from lightning_oom.errors import UnsupportedTorchError
from lightning_oom.testing.simgpu.attention import ATTENTION_OPERATORS, choose_attention
from lightning_oom.testing.simgpu.backend import make_backend_module
from lightning_oom.testing.simgpu.devices import DEVICE_TYPE
from lightning_oom.testing.simgpu.dispatch import make_kernel
from lightning_oom.testing.simgpu.fused import FUSED_OPERATORS
from lightning_oom.testing.simgpu.kernels import MANUAL_KERNELS, run_on_metadata

__all__ = ["install_backend", "is_installed"]

_LOCK = threading.Lock()
_LIBRARIES: list[Any] = []  # kernels stay registered as long as these objects live

_HOST_FUNCTIONS = FUSED_OPERATORS | ATTENTION_OPERATORS

# Composites in C++ whose parts run on the device; as a whole they keep something on the host.
_LEFT_TO_TORCH = frozenset({"aten::_pack_padded_sequence", "aten::_pin_memory"})


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


def _check_torch() -> None:
    if setup_python_backend is None:
        raise UnsupportedTorchError(
            "the simulated GPU needs a torch that can be given a device from Python, "
            f"which is torch 2.10 or later; this is torch {torch.__version__}. "
            "memory_limit and fail_at work with every torch"
        )
    name = torch._C._get_privateuse1_backend_name()  # noqa: SLF001 - replaced below
    if name not in ("privateuseone", DEVICE_TYPE):
        raise UnsupportedTorchError(
            f"torch has one slot for a device from outside, and {name!r} has taken it in this process"
        )


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
            return device_type

    return Guard()


def _register_kernels() -> list[Any]:
    kernels = torch.library.Library("aten", "IMPL")
    done = set()
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        kernels.impl("scaled_dot_product_attention", choose_attention, key)
    done.add("aten::scaled_dot_product_attention")
    for name, kernel in MANUAL_KERNELS.items():
        kernels.impl(name, kernel, "PrivateUse1")
        done.add(f"aten::{name}")
    for operator in aten_operators():
        name = operator.name()
        host_function = _HOST_FUNCTIONS.get(name.removeprefix("aten::"))
        if host_function is not None:
            kernels.impl(operator, make_kernel(operator, host_function), "PrivateUse1")
            continue
        if name in done or name in _LEFT_TO_TORCH:
            continue
        kernel = _choose_kernel(operator)
        if kernel is not None:
            kernels.impl(operator, kernel, "PrivateUse1")
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_FallbackKernel(), "PrivateUse1")
    return [kernels, fallback]


def _choose_kernel(operator: Any) -> Any:
    """Return the kernel for one of torch's operators, ``None`` to leave it to torch."""
    if not has_kernel(operator, "CPU") and has_kernel(operator, "CompositeImplicitAutograd"):
        return None
    is_composite = has_kernel(operator, "CompositeExplicitAutograd")
    if _is_view(operator):
        return None if is_composite else run_on_metadata(operator)
    if is_composite or has_kernel(operator, "CPU"):
        return make_kernel(operator)
    return None


def _is_view(operator: Any) -> bool:
    """Say whether the operator returns a view, or changes the form of a tensor in place."""
    if torch.Tag.inplace_view in operator.tags:
        return True
    return any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in schema_of(operator).returns
    )


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

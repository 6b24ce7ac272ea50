"""The device that an estimate is made for, which need not be the one at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lightning_oom.units import MIB

__all__ = ["TARGETS", "TargetDevice", "parse_target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDevice:
    """What of a device matters to memory.

    Attributes:
        name: As people call it.
        kernels: ``"cuda"`` takes the operators that torch runs on CUDA, with their workspaces;
            ``"simgpu"`` those of the simulated GPU, which has the CPU's attention and no workspaces;
            ``"host"`` those of the CPU.
        context_bytes: Memory of the process outside the caching allocator: the CUDA context, loaded
            kernels, handles. ``None`` for unknown. It depends on the driver and on how much code is
            loaded (``CUDA_MODULE_LOADING``) more than on the device.
        matmul_workspace_bytes: What cuBLAS takes once, from the caching allocator.
        benchmarks_convolutions: Whether cuDNN tries out algorithms
            (``torch.backends.cudnn.benchmark``); torch then empties the allocator's cache after each
            new shape. ``None`` takes the setting of this process.
        expandable_segments: As in ``PYTORCH_CUDA_ALLOC_CONF``.

    Example:
        >>> parse_target("a100").matmul_workspace_bytes
        8519680
    """

    name: str
    kernels: Literal["cuda", "simgpu", "host"] = "cuda"
    context_bytes: int | None = None
    matmul_workspace_bytes: int = 8 * MIB + 128 * 1024
    benchmarks_convolutions: bool | None = None
    expandable_segments: bool = False

    @property
    def empties_cache(self) -> bool:
        """Whether the allocator's cache is emptied after each new convolution."""
        if self.kernels != "cuda":
            return False
        if self.benchmarks_convolutions is None:
            return bool(torch.backends.cudnn.benchmark)
        return self.benchmarks_convolutions


_HOPPER_WORKSPACE_BYTES = 32 * MIB

TARGETS = {
    target.name: target
    for target in (
        TargetDevice(name="cuda", context_bytes=500 * MIB),
        TargetDevice(name="a100", context_bytes=500 * MIB),
        TargetDevice(name="rtx3090", context_bytes=400 * MIB),
        TargetDevice(
            name="h100", context_bytes=600 * MIB, matmul_workspace_bytes=_HOPPER_WORKSPACE_BYTES
        ),
        TargetDevice(
            name="h200", context_bytes=600 * MIB, matmul_workspace_bytes=_HOPPER_WORKSPACE_BYTES
        ),
        TargetDevice(name="simgpu", kernels="simgpu", context_bytes=0),
        TargetDevice(name="host", kernels="host"),
    )
}
"""Devices by name. The contexts are round figures for a lazily loading CUDA 12 or later."""


def parse_target(
    device: TargetDevice | torch.device | str | None, module: Any = None
) -> TargetDevice:
    """Return the device that is meant.

    Args:
        device: A target, a name out of :data:`TARGETS`, or a torch device. ``None`` takes the device
            that the module is on; for a module on the CPU, a CUDA device in general.
        module: Asked for its device.

    Raises:
        ValueError: The name is not known.

    Example:
        >>> parse_target(None, torch.nn.Linear(1, 1)).name, parse_target("cpu").name
        ('cuda', 'host')
    """
    if isinstance(device, TargetDevice):
        return device
    if isinstance(device, str) and device.lower() in TARGETS:
        return TARGETS[device.lower()]
    if device is None:
        parameters = module.parameters() if isinstance(module, torch.nn.Module) else ()
        device = next((p.device for p in parameters), torch.device("cpu"))
        if device.type in ("cpu", "meta"):
            return TARGETS["cuda"]
    try:
        device = torch.device(device)
    except RuntimeError as error:
        known = ", ".join(sorted(TARGETS))
        raise ValueError(f"device is a torch device or one of {known}, got {device!r}") from error
    if device.type == "cuda":
        return _present(device)
    return TARGETS.get(device.type, TARGETS["host"])


def _present(device: torch.device) -> TargetDevice:
    """Return what is known of a CUDA device, with its own context where it has one already."""
    if not torch.cuda.is_available():
        return TARGETS["cuda"]
    major, _ = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device).lower().replace(" ", "")
    target = next((t for key, t in TARGETS.items() if key in name), TARGETS["cuda"])
    if major == 9:  # noqa: PLR2004 - Hopper
        target = replace(target, matmul_workspace_bytes=_HOPPER_WORKSPACE_BYTES)
    return target

"""What a machine has and how it is set up, as far as it matters for memory."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.memory import MemoryReading, read_memory
from lightning_oom.memory.nvml import ProcessMemory, read_processes

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SETTINGS", "DeviceFacts", "Environment", "collect_environment"]

PACKAGES = ("torch", "lightning", "torchmetrics", "lightning-oom", "nvidia-ml-py", "torchao")

SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
)
"""Environment variables that change how a device's memory behaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One device that torch can use.

    Attributes:
        name: As torch and a person name it: ``"cuda:0 (NVIDIA A10)"``.
        limit_bytes: What it holds, ``None`` for unknown.
        free_bytes: What is free now, ``None`` for unknown.
        supports_bf16: Whether it computes in bfloat16 without emulation, ``None`` for unknown.
        is_mig: Whether it is a slice of a GPU.
        processes: Who is on it, ``None`` where the driver does not tell.
    """

    name: str
    limit_bytes: int | None = None
    free_bytes: int | None = None
    supports_bf16: bool | None = None
    is_mig: bool = False
    processes: tuple[ProcessMemory, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The facts, without a verdict; see :func:`lightning_oom.report.environment_findings.judge`.

    Attributes:
        versions: Package -> version, ``None`` where it is not installed.
        python: Version of Python.
        system: ``"Linux"``, ``"Windows"`` or ``"Darwin"``.
        cuda_build: CUDA version that torch was built for, ``None`` for a build without.
        has_driver: Whether a driver of NVIDIA is installed.
        devices: Accelerators that torch can use.
        host: Main memory.
        shared_bytes: Size of ``/dev/shm``, ``None`` where there is none.
        settings: Those of :data:`SETTINGS` that are set.
        missing_names: Internals of Lightning that the recovery needs and that are gone; ``None``
            when nobody looked.
    """

    versions: dict[str, str | None]
    python: str
    system: str
    cuda_build: str | None
    has_driver: bool
    devices: tuple[DeviceFacts, ...]
    host: MemoryReading
    shared_bytes: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    missing_names: tuple[str, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; amounts in bytes."""
        return asdict(self)


def collect_environment(
    *,
    variables: Mapping[str, str] | None = None,
    missing_names: tuple[str, ...] | None = None,
) -> Environment:
    """Look at packages, devices, driver and settings. Starts CUDA where there is one.

    Args:
        variables: The environment variables, ``None`` for those of the process.
        missing_names: What a check of Lightning's internals has found.

    Returns:
        The facts. What cannot be read is ``None``.

    Example:
        >>> environment = collect_environment(variables={"CUDA_LAUNCH_BLOCKING": "1"})
        >>> environment.settings
        {'CUDA_LAUNCH_BLOCKING': '1'}
        >>> environment.versions["torch"] is not None
        True
    """
    variables = os.environ if variables is None else variables
    return Environment(
        versions={name: _version(name) for name in PACKAGES},
        python=platform.python_version(),
        system=platform.system(),
        cuda_build=torch.version.cuda,
        has_driver=shutil.which("nvidia-smi") is not None or os.path.exists("/dev/nvidiactl"),  # noqa: PTH110 - a device file
        devices=tuple(_look_at(index) for index in range(_num_cuda())),
        host=read_memory("cpu"),
        shared_bytes=_shared_bytes(),
        settings={name: variables[name] for name in SETTINGS if name in variables},
        missing_names=missing_names,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _num_cuda() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _look_at(index: int) -> DeviceFacts:
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    reading = read_memory(device)
    with torch.cuda.device(device):
        supports_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return DeviceFacts(
        name=f"{device} ({properties.name})",
        limit_bytes=reading.limit_bytes,
        free_bytes=reading.free_bytes,
        supports_bf16=supports_bf16,
        is_mig="MIG" in properties.name,
        processes=read_processes(device),
    )


def _shared_bytes() -> int | None:
    if sys.platform != "linux":
        return None
    try:
        return shutil.disk_usage("/dev/shm").total  # noqa: S108 - asked for its size only
    except OSError:
        return None

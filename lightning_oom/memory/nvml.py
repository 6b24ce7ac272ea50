"""What the driver knows of a GPU: every process on it and what each one holds.

NVML is asked through the module ``pynvml`` of nvidia-ml-py, which is imported on first use. Where the
module, the library, the driver or the permission is missing, the answer is ``None``.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from lightning_oom.memory.devices import one_device
from lightning_oom.memory.nvml_handle import find_handle

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NVMLDevice", "ProcessMemory", "read_processes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One process on a GPU, as ``nvidia-smi`` lists it.

    Attributes:
        pid: Its id as the driver sees it: in a container, that of the host.
        name: Of its program, ``None`` where it may not be asked.
        used_bytes: What it holds on the device, its CUDA context included; ``None`` where the driver
            does not tell (Windows, some MIG set-ups).
    """

    pid: int
    name: str | None = None
    used_bytes: int | None = None


def read_processes(device: torch.device | str) -> tuple[ProcessMemory, ...] | None:
    """List the processes on a CUDA device, the one that holds most first.

    Args:
        device: The device as this process names it, such as ``"cuda:0"``. On a GPU that is divided
            by MIG: the processes on the same instance.

    Returns:
        The processes, this one included when it has a context; ``None`` where NVML cannot tell.

    Raises:
        ValueError: torch does not know a device of that name.

    Note:
        Opens an NVML session and closes it again, some 10 ms. To ask again and again, keep an
        :class:`NVMLDevice`.

    Example:
        >>> read_processes("cpu") is None
        True
    """
    opened = NVMLDevice.open(device)
    if opened is None:
        return None
    with opened:
        return opened.read_processes()


class NVMLDevice:
    """One GPU or MIG instance in an open NVML session; made by :meth:`open`.

    The session belongs to the process that opened it: after a fork the child gets ``None``.
    """

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle
        self._pid: int | None = os.getpid()

    @classmethod
    def open(cls, device: torch.device | str) -> Self | None:
        """Find a device; ``None`` where it is no CUDA device or NVML cannot find it.

        Args:
            device: As this process names it, such as ``"cuda:0"``.

        Raises:
            ValueError: torch does not know a device of that name.
        """
        device = one_device(device)
        library = _import_pynvml() if device.type == "cuda" else None
        if library is None:
            return None
        try:
            library.nvmlInit()
        except Exception:  # no library, no driver, no permission
            return None
        handle = None
        with contextlib.suppress(
            Exception
        ):  # a driver too old for a function, a device that is lost
            handle = find_handle(library, device.index or 0, uuid=_torch_uuid(device))
        if handle is None:
            _shut_down(library)
            return None
        return cls(library, handle)

    def read_processes(self) -> tuple[ProcessMemory, ...] | None:
        """List the processes on the device, the one that holds most first."""
        if self._pid != os.getpid():
            return None
        try:
            listed = list(self._library.nvmlDeviceGetComputeRunningProcesses(self._handle))
        except Exception:
            return None
        with contextlib.suppress(Exception):  # MIG has no graphics
            listed += self._library.nvmlDeviceGetGraphicsRunningProcesses(self._handle)
        used: dict[int, int | None] = {}
        for process in listed:  # one that computes and draws is listed twice
            amounts = (used.get(process.pid), process.usedGpuMemory)
            used[process.pid] = max((a for a in amounts if a is not None), default=None)
        found = [
            ProcessMemory(pid=pid, name=_name_of(pid), used_bytes=amount)
            for pid, amount in used.items()
        ]
        return tuple(sorted(found, key=lambda process: (-(process.used_bytes or 0), process.pid)))

    def close(self) -> None:
        """End the session; harmless the second time."""
        if self._pid == os.getpid():
            _shut_down(self._library)
        self._pid = None

    def __enter__(self) -> Self:
        """Keep the session for a block."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the session."""
        self.close()


def _import_pynvml() -> Any:
    """Import the module, ``None`` without it; an outdated package of the same name may say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            import pynvml  # noqa: PLC0415 - only when somebody asks
        except Exception:
            return None
    return pynvml


def _shut_down(library: Any) -> None:
    with contextlib.suppress(Exception):
        library.nvmlShutdown()


def _torch_uuid(device: torch.device) -> str | None:
    """Return the UUID that CUDA gives, without its prefix; no context is made to ask for it."""
    if not torch.cuda.is_initialized():
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def _name_of(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).name())
    except (psutil.Error, OSError, ValueError):
        return None

"""Find the NVML handle of ``cuda:N``: by UUID where one is known, and never that of another GPU."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Any

from lightning_oom.memory.visible import parse_visible_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["find_handle"]

_OLD_MIG_ID = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/(\d+)/(\d+)")


def find_handle(library: Any, index: int, *, uuid: str | None = None) -> Any:
    """Return the handle of the device that this process calls ``cuda:index``.

    Args:
        library: The module ``pynvml``, initialised.
        index: The index as torch counts.
        uuid: The UUID that CUDA gives for it, without a prefix; ``None`` before CUDA is used.

    Returns:
        The handle of the GPU, or of the MIG instance where the GPU is divided. ``None`` where no
        device is visible under that index, or the order in which CUDA counts is not known.

    Note:
        CUDA counts the fastest device first unless ``CUDA_DEVICE_ORDER`` says ``PCI_BUS_ID``; NVML
        counts by bus. Without a UUID an index counts only where all GPUs are of one model.
    """
    entries = parse_visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if entries is not None and index >= len(entries):
        return None
    entry = str(index) if entries is None else entries[index]
    if entry.startswith("MIG-"):
        return _find_instance(library, entry)
    handle = None if uuid is None else _by_uuid(library, uuid)
    if handle is None and entry.startswith("GPU-"):
        handle = _only([h for h in _gpus(library) if _uuid_of(library, h).startswith(entry)])
    elif handle is None and _counts_by_bus(library):
        handle = library.nvmlDeviceGetHandleByIndex(int(entry))
    return None if handle is None else _first_instance(library, handle)


def _by_uuid(library: Any, uuid: str) -> Any:
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    for prefix in ("GPU-", "MIG-"):
        with contextlib.suppress(library.NVMLError):
            return library.nvmlDeviceGetHandleByUUID(prefix + bare)
    return None


def _gpus(library: Any) -> Iterator[Any]:
    """Walk over the GPUs that this process may see."""
    for index in range(library.nvmlDeviceGetCount()):
        with contextlib.suppress(library.NVMLError):
            yield library.nvmlDeviceGetHandleByIndex(index)


def _instances(library: Any, gpu: Any) -> Iterator[Any]:
    """Walk over the MIG instances of a GPU; none where it is not divided."""
    try:
        if not library.nvmlDeviceGetMigMode(gpu)[0]:
            return
        count = library.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except library.NVMLError:  # a GPU without MIG
        return
    for index in range(count):
        with contextlib.suppress(library.NVMLError):  # positions may be empty
            yield library.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)


def _find_instance(library: Any, entry: str) -> Any:
    """Return the MIG instance with an id, its start, or its old form ``MIG-GPU-.../gi/ci``."""
    old = _OLD_MIG_ID.fullmatch(entry)
    if old is None:
        found = [
            instance
            for gpu in _gpus(library)
            for instance in _instances(library, gpu)
            if _uuid_of(library, instance).startswith(entry)
        ]
        return _only(found)
    gpu_uuid, gpu_instance, compute_instance = old.group(1), int(old.group(2)), int(old.group(3))
    for gpu in _gpus(library):
        if not _uuid_of(library, gpu).startswith(gpu_uuid):
            continue
        for instance in _instances(library, gpu):
            place = (
                library.nvmlDeviceGetGpuInstanceId(instance),
                library.nvmlDeviceGetComputeInstanceId(instance),
            )
            if place == (gpu_instance, compute_instance):
                return instance
    return None


def _first_instance(library: Any, handle: Any) -> Any:
    """Return the instance that CUDA takes of a divided GPU; the handle itself where it is whole."""
    try:
        divided = bool(library.nvmlDeviceGetMigMode(handle)[0])
    except library.NVMLError:
        return handle
    return next(_instances(library, handle), None) if divided else handle


def _counts_by_bus(library: Any) -> bool:
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return True
    return len({str(library.nvmlDeviceGetName(gpu)) for gpu in _gpus(library)}) <= 1


def _uuid_of(library: Any, handle: Any) -> str:
    uuid = library.nvmlDeviceGetUUID(handle)
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


def _only(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else None

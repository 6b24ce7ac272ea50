"""Make the record of an out-of-memory error while everything is still alive."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from lightning_oom.memory import read_memory
from lightning_oom.memory.kinds import MemoryByKind, read_kinds
from lightning_oom.memory.nvml import ProcessMemory, read_processes
from lightning_oom.recovery.batches import count_rows
from lightning_oom.recovery.batches.containers import batch_tensors
from lightning_oom.report.batch import describe_leaves
from lightning_oom.report.frames import code_lines, failed_frames, find_batch, find_module
from lightning_oom.report.live import Census, take_census
from lightning_oom.report.modules import describe_modules, describe_optimizers
from lightning_oom.report.place import find_phase
from lightning_oom.report.record import OOMReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from torch.optim import Optimizer

    from lightning_oom.recovery.classify import OOMCause

__all__ = ["Scene", "allocator_settings", "collect_report", "others_bytes"]

_NUM_TENSORS = 20
_WITHOUT_BACKWARD = ("sanity_check", "validate", "test", "predict")
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What was going on when an error came, as objects that are alive; to be dropped with it.

    Attributes:
        error: The error.
        cause: What it says.
        device: Where the model runs.
        module: The model.
        optimizers: Its optimizers.
        may_go_on: The run may go on after this: look only where it is quick.
    """

    error: BaseException
    cause: OOMCause
    device: torch.device
    module: torch.nn.Module | None = None
    optimizers: Sequence[Optimizer] = ()
    may_go_on: bool = False


def collect_report(scene: Scene, *, include_values: bool = False, **known: Any) -> OOMReport:
    """Write down everything that can be found out now, before anything is freed.

    Args:
        scene: What was going on.
        include_values: Add the first numbers of each tensor of the batch.
        known: Fields of the report that the caller knows; they win.

    Returns:
        The record, without diagnoses. A part that cannot be found out is left out; nothing raises.

    Note:
        Nothing is allocated on the device, and no tensor, frame or error is kept.
    """
    cause, device = scene.cause, scene.device
    facts: dict[str, Any] = {
        "reading": _attempt(lambda: read_memory(device)),
        "device": str(device),
        "lines": _attempt(lambda: code_lines(scene.error)) or (),
        "made_at": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
        "uses_graph": True,
        "torch_version": str(torch.__version__),
        "platform": sys.platform,
        "allocator_settings": allocator_settings(),
        "own_pid": os.getpid(),
    }
    facts["phase"] = find_phase(facts["lines"])
    frames = _attempt(lambda: failed_frames(scene.error)) or []
    found = _attempt(lambda: find_batch(frames))
    batch, facts["batch_index"] = (None, None) if found is None else found
    if batch is not None:
        facts["batch"] = (
            _attempt(lambda: describe_leaves(batch, include_values=include_values)) or ()
        )
        facts["rows"] = _attempt(lambda: count_rows(batch))
    if scene.module is not None:
        facts |= _describe_model(scene, batch, frames, facts["reading"])
    if known.get("stage") in _WITHOUT_BACKWARD:
        facts["uses_graph"] = any(module.saved_bytes for module in facts.get("modules", ()))
    if cause.scope == "device" and device.type != "cpu":
        facts |= _describe_device(device, facts["reading"])
    return OOMReport(cause=cause, **{**facts, **known})


def _describe_model(
    scene: Scene, batch: Any, frames: Sequence[FrameType], reading: Any
) -> dict[str, Any]:
    module, device = scene.module, scene.device
    assert module is not None  # noqa: S101 - the caller has asked
    facts: dict[str, Any] = {
        "module_path": _attempt(lambda: find_module(frames, module)),
        "optimizers": _attempt(lambda: describe_optimizers(scene.optimizers, device)) or (),
    }
    census = _attempt(
        lambda: take_census(
            device,
            module=module,
            optimizers=scene.optimizers,
            batch=batch,
            frames=frames,
            young_only=scene.may_go_on,
        )
    )
    facts["kinds"] = _attempt(lambda: _read_kinds(scene, batch, census, reading))
    if census is not None:
        facts["tensors"] = _attempt(lambda: census.largest(_NUM_TENSORS)) or ()
    saved = [] if census is None else census.saved
    facts["modules"] = (
        _attempt(lambda: describe_modules(module, device, saved, batch=batch_tensors(batch))) or ()
    )
    return facts


def _read_kinds(
    scene: Scene, batch: Any, census: Census | None, reading: Any
) -> MemoryByKind | None:
    if scene.module is None or reading is None or reading.allocated_bytes is None:
        return None
    return read_kinds(
        scene.module,
        scene.optimizers,
        batch,
        saved=cast("Any", census),  # asked for alive() alone
        reading=reading,
        device=scene.device,
    )


def _describe_device(device: torch.device, reading: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"memory_summary": _attempt(lambda: _summarise(device))}
    if device.type == "cuda":
        facts["device_name"] = _attempt(lambda: torch.cuda.get_device_name(device))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        facts["is_mig"] = "MIG" in visible or "MIG" in (facts["device_name"] or "")
    processes = _attempt(lambda: read_processes(device))
    facts["processes"] = processes
    facts["other_processes_bytes"] = others_bytes(
        processes, os.getpid(), None if reading is None else reading.reserved_bytes
    )
    return facts


def others_bytes(
    processes: Sequence[ProcessMemory] | None, own_pid: int, own_bytes: int | None
) -> int | None:
    """Add up what other processes hold; ``None`` where that is not known.

    Args:
        processes: As the driver lists them.
        own_pid: The id of this process.
        own_bytes: What the allocator of this process holds, for a container in which the driver's
            ids are not those of the container: one process is then taken for this one, the one
            that fits it best.
    """
    if processes is None or any(process.used_bytes is None for process in processes):
        return None
    others = [process.used_bytes or 0 for process in processes if process.pid != own_pid]
    if len(others) == len(processes) and own_bytes:
        fitting = [used for used in others if used >= own_bytes]
        if fitting:
            others.remove(min(fitting))
    return sum(others)


def allocator_settings() -> str | None:
    """Return what the environment tells torch's allocator; ``None`` when it tells nothing."""
    return next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), None)


def _summarise(device: torch.device) -> str | None:
    summarise = getattr(getattr(torch, device.type, None), "memory_summary", None)
    return None if summarise is None else str(summarise(device))


def _attempt(look: Callable[[], _T]) -> _T | None:
    """Return what can be found out, ``None`` where looking fails: the error itself matters more."""
    with contextlib.suppress(Exception):
        return look()
    return None

"""What is wrong, or worth knowing, about a machine and its settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_oom.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.report.environment import DeviceFacts, Environment

__all__ = ["Finding", "judge"]

_ALLOCATOR_KEYS = {
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_max_register_threads",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
    "use_async_allocator",
}
"""Keys that torch 2.4 to 2.14 read."""

_LARGEST_UNSPLIT_MB = 20
_SMALL_SHARED_BYTES = GIB
_CROWDED_FRACTION = 0.05
_TESTED_LIGHTNING = ((2, 4), (2, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence about the machine.

    Attributes:
        level: ``"problem"`` costs memory or hides it, ``"note"`` is worth knowing.
        subject: What it is about, in a word or two.
        text: What was found, and what to do.
    """

    level: Literal["problem", "note"]
    subject: str
    text: str


def judge(environment: Environment) -> tuple[Finding, ...]:
    """Say what is wrong with an environment, problems first.

    Example:
        >>> from lightning_oom.report.environment import collect_environment
        >>> found = judge(collect_environment(variables={"CUDA_LAUNCH_BLOCKING": "1"}))
        >>> [finding.subject for finding in found if "BLOCKING" in finding.subject]
        ['CUDA_LAUNCH_BLOCKING']
    """
    found = [
        *_judge_torch(environment),
        *_judge_allocator(environment),
        *_judge_debugging(environment),
        *(finding for device in environment.devices for finding in _judge_device(device)),
        *_judge_host(environment),
        *_judge_lightning(environment),
    ]
    return tuple(sorted(found, key=lambda finding: finding.level != "problem"))


def _problem(subject: str, text: str) -> Finding:
    return Finding(level="problem", subject=subject, text=text)


def _note(subject: str, text: str) -> Finding:
    return Finding(level="note", subject=subject, text=text)


def _judge_torch(environment: Environment) -> Iterator[Finding]:
    if environment.devices or not environment.has_driver:
        return
    hidden = environment.settings.get("CUDA_VISIBLE_DEVICES")
    if environment.cuda_build is None:
        yield _problem(
            "torch", "a GPU driver is installed, but this torch has no CUDA: install a CUDA build"
        )
    elif hidden is not None and hidden.strip() in ("", "-1"):
        yield _note("torch", f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU")
    else:
        yield _problem(
            "torch",
            f"torch for CUDA {environment.cuda_build} sees no GPU: the driver is older than that "
            "CUDA, or CUDA_VISIBLE_DEVICES names none",
        )


def _judge_allocator(environment: Environment) -> Iterator[Finding]:
    texts = {
        name: environment.settings[name]
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        if name in environment.settings
    }
    if len(set(texts.values())) > 1:
        yield _problem(
            "allocator",
            "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF are both set and differ; set one: the "
            "first from torch 2.9 on, the second before",
        )
    for name, text in texts.items():
        yield from _judge_settings(environment, name, text)
    can_expand = environment.system == "Linux" and not any(d.is_mig for d in environment.devices)
    if environment.devices and can_expand and not any("expandable" in t for t in texts.values()):
        yield _note(
            "allocator",
            "expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF (before CUDA starts) avoids most "
            "fragmentation when batches differ in size",
        )


def _judge_settings(environment: Environment, name: str, text: str) -> Iterator[Finding]:
    for part in filter(None, (part.strip() for part in _split_settings(text))):
        key, _, value = (word.strip() for word in part.partition(":"))
        if key not in _ALLOCATOR_KEYS:
            yield _problem(name, f"{key!r} is no setting that torch knows: it stops at the start")
        elif key == "max_split_size_mb" and not _is_above(value, _LARGEST_UNSPLIT_MB):
            yield _problem(name, f"max_split_size_mb must be above 20, got {value!r}")
        elif key == "garbage_collection_threshold" and not _is_fraction(value):
            yield _problem(name, f"garbage_collection_threshold is within (0, 1), got {value!r}")
        elif key == "expandable_segments" and value == "True":
            if any(device.is_mig for device in environment.devices):
                yield _problem(
                    name, "expandable_segments does not work on a MIG slice: leave it out"
                )
            elif environment.system == "Windows":
                yield _problem(name, "expandable_segments does nothing on Windows")
        elif key == "backend" and value == "cudaMallocAsync":
            yield _note(
                name, "with cudaMallocAsync the driver's pool counts: no snapshot, no splits"
            )


def _split_settings(text: str) -> list[str]:
    """Split at commas that are not within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _is_above(value: str, bound: float) -> bool:
    try:
        return float(value) > bound
    except ValueError:
        return False


def _is_fraction(value: str) -> bool:
    return _is_above(value, 0) and not _is_above(value, 1) and float(value) < 1


def _judge_debugging(environment: Environment) -> Iterator[Finding]:
    if environment.settings.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        yield _problem(
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
            "the caching allocator is off: every allocation is slow and memory cannot be measured",
        )
    if environment.settings.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield _note(
            "CUDA_LAUNCH_BLOCKING",
            "every kernel is waited for: right for debugging, slow otherwise",
        )


def _judge_device(device: DeviceFacts) -> Iterator[Finding]:
    if device.processes is None:
        yield _note(
            device.name, "NVML does not tell who else is on it (driver, rights, or no module)"
        )
        return
    others = [p for p in device.processes if p.used_bytes is not None and p.pid != os.getpid()]
    used = sum(process.used_bytes or 0 for process in others)
    if device.limit_bytes is not None and used > _CROWDED_FRACTION * device.limit_bytes:
        first = others[0]
        yield _problem(
            device.name,
            f"processes hold {format_bytes(used)} of {format_bytes(device.limit_bytes)} already, "
            f"most of it pid {first.pid} ({first.name or 'name unknown'})",
        )


def _judge_host(environment: Environment) -> Iterator[Finding]:
    shared = environment.shared_bytes
    if shared is not None and shared < _SMALL_SHARED_BYTES:
        yield _note(
            "shared memory",
            f"{format_bytes(shared)} in /dev/shm: workers of a DataLoader hand batches over through "
            "it and die with 'Bus error' when it is full (docker run --shm-size)",
        )


def _judge_lightning(environment: Environment) -> Iterator[Finding]:
    version = environment.versions.get("lightning")
    if version is not None:
        number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        oldest, newest = _TESTED_LIGHTNING
        if not oldest <= number <= newest:
            yield _note(
                "lightning", f"{version} is not among the releases that were tested, 2.4 to 2.6"
            )
    if environment.missing_names:
        yield _problem(
            "lightning",
            f"OOMRecovery would stand aside: {', '.join(environment.missing_names)} moved in "
            f"lightning {version}",
        )

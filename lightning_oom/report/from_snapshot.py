"""Make a report of a memory snapshot that torch has written, without trusting the file."""

from __future__ import annotations

import io
import pickle
from itertools import islice
from typing import Any, NoReturn

from lightning_oom.memory.reading import MemoryReading
from lightning_oom.recovery.classify import OOMCause
from lightning_oom.report.blocks import line_of_block, python_lines
from lightning_oom.report.place import find_phase, find_stage
from lightning_oom.report.record import LiveTensor, OOMReport
from lightning_oom.units import format_bytes

__all__ = ["load_plain_pickle", "read_snapshot"]

_MAX_BLOCKS = 2_000_000
_NUM_SITES = 20


class _PlainUnpickler(pickle.Unpickler):
    """Builds dictionaries, lists, tuples, sets, texts and numbers, and nothing that has a class."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse: to look a class up is how a pickle runs code."""
        raise pickle.UnpicklingError(f"it wants {module}.{name}, a snapshot needs no classes")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse references to what is not in the file."""
        raise pickle.UnpicklingError("it refers to something outside of the file")


def load_plain_pickle(content: bytes) -> Any:
    """Read a pickle that holds plain containers and values.

    Args:
        content: The file.

    Raises:
        ValueError: It is broken or asks for any class or function. Nothing of it has run.

    Example:
        >>> load_plain_pickle(pickle.dumps({"segments": [1, 2.5, "x", None]}))
        {'segments': [1, 2.5, 'x', None]}
        >>> load_plain_pickle(pickle.dumps(print))
        Traceback (most recent call last):
            ...
        ValueError: this pickle is refused: it wants builtins.print, a snapshot needs no classes
    """
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise ValueError(f"this pickle is refused: {error}") from None


def read_snapshot(content: bytes) -> OOMReport:
    """Read the file of ``torch.cuda.memory._dump_snapshot``, or of a profiler that calls it.

    Args:
        content: The file.

    Returns:
        What it tells, without diagnoses: the last out-of-memory event in its history where there is
        one, what was allocated, and by which lines.

    Raises:
        ValueError: It is no such snapshot, or asks for any class or function.
    """
    snapshot = load_plain_pickle(content)
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
        raise ValueError("this pickle is no memory snapshot: it has no segments")  # noqa: TRY004 - what a file holds
    try:
        return _describe(snapshot)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"this memory snapshot has another form: {error!r:.200}") from None


def _describe(snapshot: dict[str, Any]) -> OOMReport:
    event, index = _last_oom(snapshot)
    segments = [s for s in snapshot["segments"] if index is None or s.get("device", 0) == index]
    index = index if index is not None else min((s.get("device", 0) for s in segments), default=0)
    segments = [s for s in segments if s.get("device", 0) == index]
    reserved = sum(int(s["total_size"]) for s in segments)
    allocated = sum(int(s.get("allocated_size", 0)) for s in segments)
    free = None if event is None else int(event.get("device_free", 0))
    requested = None if event is None else int(event["size"])
    lines = python_lines((event or {}).get("frames", ()))
    settings = snapshot.get("allocator_settings")
    expandable = isinstance(settings, dict) and settings.get("expandable_segments") is True
    device = f"cuda:{index}"
    return OOMReport(
        cause=OOMCause(
            kind="allocator",
            scope="device",
            confidence="certain" if event is not None else "likely",
            message=_message(requested, allocated, reserved),
            error_type="torch memory snapshot",
            requested_bytes=requested,
            limit_bytes=None if free is None else free + reserved,
            free_bytes=free,
            allocated_bytes=allocated,
            reserved_unallocated_bytes=reserved - allocated,
            device=device,
            recoverable=True,
        ),
        device=device,
        lines=lines,
        phase=find_phase(lines),
        stage=find_stage(lines),
        reading=MemoryReading(device=device, allocated_bytes=allocated, reserved_bytes=reserved),
        tensors=_by_site(segments),
        allocator_settings="expandable_segments:True" if expandable else None,
    )


def _message(requested: int | None, allocated: int, reserved: int) -> str:
    held = f"{format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved"
    if requested is None:
        return f"No out-of-memory event in the history of this snapshot; {held}."
    return f"Out of memory: {format_bytes(requested)} were refused; {held}."


def _last_oom(snapshot: dict[str, Any]) -> tuple[dict[str, Any] | None, int | None]:
    """Return the last such event and the device it is of; the latest device where several have one."""
    found: tuple[dict[str, Any] | None, int | None] = (None, None)
    latest = -1
    for index, trace in enumerate(snapshot.get("device_traces") or ()):
        for event in reversed(trace):
            if event.get("action") == "oom":
                if int(event.get("time_us", 0)) > latest:
                    latest = int(event.get("time_us", 0))
                    found = event, index
                break
    return found


def _by_site(segments: list[dict[str, Any]]) -> tuple[LiveTensor, ...]:
    """Add up live blocks by the line that allocated them."""
    sites: dict[str | None, tuple[int, int]] = {}
    blocks = (block for segment in segments for block in segment.get("blocks", ()))
    for block in islice(blocks, _MAX_BLOCKS):
        if block.get("state") == "active_allocated":
            site = line_of_block(block)
            count, num_bytes = sites.get(site, (0, 0))
            sites[site] = count + 1, num_bytes + int(block["size"])
    largest = sorted(sites.items(), key=lambda entry: -entry[1][1])[:_NUM_SITES]
    return tuple(
        LiveTensor(
            owner="1 block" if count == 1 else f"{count} blocks",
            kind="other",
            shape=None,
            dtype=None,
            num_bytes=num_bytes,
            made_at=site,
        )
        for site, (count, num_bytes) in largest
    )

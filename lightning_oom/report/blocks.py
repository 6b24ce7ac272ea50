"""The blocks of an allocator's snapshot, and the lines of Python that allocated them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning_oom.report.record import CodeLine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["line_of_block", "lines_by_address", "python_lines"]

_MAX_FRAMES, _MAX_KEPT = 1000, 60


def lines_by_address(snapshot: Mapping[str, Any] | None) -> dict[int, str]:
    """Return address of a block -> the line that allocated it, for those that are known.

    Args:
        snapshot: As ``torch.cuda.memory._snapshot`` gives it; ``None`` for none.

    Example:
        >>> frame = {"filename": "model.py", "line": 3, "name": "forward"}
        >>> block = {"size": 512, "state": "active_allocated", "frames": [frame]}
        >>> lines_by_address({"segments": [{"address": 4096, "blocks": [block, block]}]})
        {4096: 'model.py:3 in forward', 4608: 'model.py:3 in forward'}
    """
    found = {}
    for segment in (snapshot or {}).get("segments", ()):
        address = segment.get("address", 0)
        for block in segment.get("blocks", ()):
            address = block.get("address", address)
            line = line_of_block(block)
            if line is not None:
                found[address] = line
            address += block.get("size", 0)
    return found


def line_of_block(block: Mapping[str, Any]) -> str | None:
    """Return the innermost line outside of torch that allocated a block.

    Args:
        block: One block of a segment; older releases keep its frames in its ``history``.
    """
    frames = block.get("frames") or [
        frame for past in block.get("history", ())[-1:] for frame in past.get("frames", ())
    ]
    for line in reversed(python_lines(frames)):
        if "/torch/" not in line.path.replace("\\", "/"):
            return str(line)
    return None


def python_lines(frames: Iterable[Mapping[str, Any]]) -> tuple[CodeLine, ...]:
    """Return the lines of Python among the frames of an event, outermost call first.

    Args:
        frames: Innermost first, those of C++ among them.
    """
    lines = [
        CodeLine(path=str(f["filename"]), line=int(f["line"]), function=str(f["name"]))
        for f in islice(frames, _MAX_FRAMES)
        if str(f["filename"]).endswith(".py") or str(f["filename"]).startswith("<")
    ]
    return tuple(reversed(lines[:_MAX_KEPT]))

"""Make a report of what a pasted traceback or a log says."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.report.log_notes import NOTE, read_notes
from lightning_oom.report.place import find_phase, find_stage, parse_traceback
from lightning_oom.report.record import OOMReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.recovery.classify import OOMCause

__all__ = ["read_log"]

_MAX_CHARACTERS = 50_000_000
_LIMITED = re.compile(r"\(memory_limit of [^()\n]+? on (\w+(?::\d+)?), operator ")
_MAX_RECORD_BYTES = 64 * 2**20
_MAX_LINES = 12
_PREFIX = re.compile(
    r"^(?:\[(?:rank ?)?\d+\]:|\(\w+ pid=\d+(?:, ip=[\d.]+)?\)|\d+:)[ \t]?", re.MULTILINE
)
_RANK = re.compile(r"^\[(?:rank ?)?(\d+)\]:", re.MULTILINE)
_ERROR_LINE = re.compile(
    r"^(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|ENOMEM))(?::[ \t]?|$)", re.MULTILINE
)
_MEMORY_WORD = re.compile(
    r"memory|alloc|ENOMEM|shm|CUDNN|CUBLAS|paging file|Killed|Bus error|OUT_OF_RESOURCES|"
    r"EXHAUSTED|aoti_torch",
    re.IGNORECASE,
)
_PROGRESS = re.compile(r"Epoch (\d+):[^\n\r]*?\b(\d+)/(?:\d+|\?|--)")
_TRACEBACK = "Traceback (most recent call last)"
_CLASSES: dict[str, type[BaseException]] = {
    "OutOfMemoryError": OutOfMemoryError,
    "MemoryError": MemoryError,
    "_ArrayMemoryError": MemoryError,
}


def read_log(text: str, *, folder: Path | None = None) -> OOMReport | None:
    r"""Find the last out-of-memory error in a text.

    Args:
        text: A traceback, or a log of any length with one in it; the last 50 million characters are
            read. Lines may carry the rank that they come from.
        folder: Where the log lies. Where the log names the files of a report, its JSON is looked for
            at that path and below this folder; ``None`` looks for none.

    Returns:
        The report that the log names, where it can be read; else what the text tells, with what
        OOMRecovery and OOMReporter have written into it. Without diagnoses. ``None`` when no error in
        it is out of memory.

    Example:
        >>> report = read_log(
        ...     "Epoch 3: 12%|#   | 7/60 [00:01<00:08]\n"
        ...     "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
        ... )
        >>> report.requested_bytes == 2 * 2**30, report.epoch, report.batch_index
        (True, 3, 7)
    """
    raw = text[-_MAX_CHARACTERS:].replace("\r\n", "\n")
    clean = _PREFIX.sub("", raw)
    found = _last_oom(clean)
    if found is None:
        return None
    cause, position = found
    before = clean[: position + 1]
    start = before.rfind(_TRACEBACK)
    lines = parse_traceback(before) if start >= 0 else ()
    progress = _PROGRESS.findall(before)
    epoch, batch = progress[-1] if progress else (None, None)
    ranks = _RANK.findall(raw)
    noted, stem = read_notes(clean, position)
    if stem is not None and folder is not None:
        written = _read_record(stem, folder)
        if written is not None:
            return written
    facts = {
        "phase": find_phase(lines),
        "stage": find_stage(lines),
        "device": limited[1] if (limited := _LIMITED.search(cause.message)) else cause.device,
        "epoch": None if epoch is None else int(epoch),
        "batch_index": None if batch is None else int(batch),
        "rank": int(ranks[-1]) if len(set(ranks)) == 1 else 0,
    }
    return OOMReport(cause=cause, lines=lines, **{**facts, **noted})


def _read_record(stem: str, folder: Path) -> OOMReport | None:
    """Read the report that a log names: where it says, or where it went along with the log."""
    named = Path(f"{stem}.json")
    places = (named, folder / named, folder / named.parent.name / named.name, folder / named.name)
    for path in dict.fromkeys(places):
        with contextlib.suppress(OSError, ValueError):
            if path.stat().st_size <= _MAX_RECORD_BYTES:
                return OOMReport.from_json(path.read_text(encoding="utf-8"))
    return None


def _last_oom(text: str) -> tuple[OOMCause, int] | None:
    """Return the last error that is out of memory, and where it is; real ones before lookalikes."""
    lookalike = None
    for error, position in _candidates(text):
        cause = classify_oom(error)
        if cause is None:
            continue
        if cause.kind != "collective" and cause.confidence == "certain":
            return cause, position
        lookalike = lookalike or (cause, position)
    return lookalike


def _candidates(text: str) -> Iterator[tuple[BaseException, int]]:
    """Give what may be an error, the last one first: lines that name a class, then any others."""
    for match in reversed(list(_ERROR_LINE.finditer(text))):
        message = _message_at(text, match.end())
        if _MEMORY_WORD.search(match[0] + message):
            make = _CLASSES.get(match["name"].rpartition(".")[2], RuntimeError)
            yield make(message), match.start()
    position = len(text)
    for line in reversed(text.split("\n")):
        position -= len(line)
        if len(line) < _MAX_CHARACTERS and _MEMORY_WORD.search(line):
            yield RuntimeError(line.strip()), position
        position -= 1


def _message_at(text: str, start: int) -> str:
    lines = text[start : start + 10_000].split("\n")[:_MAX_LINES]
    message = [lines[0]]
    for line in lines[1:]:
        if not line.strip() or _TRACEBACK in line or _ERROR_LINE.match(line) or NOTE in line:
            break
        message.append(line)
    return "\n".join(message)

"""What lightning_oom itself has written into a log: notes on the error, and lines of the console."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from lightning_oom.report.record import FailedAttempt

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NOTE", "read_notes"]

NOTE = "lightning_oom: "
"""How each note on an error begins; its further lines begin with two blanks."""

_MAX_LINES = 200
_ATTEMPT = re.compile(r"(.+?) \((\w+)\)(?:, |$)")
_ENTRY = re.compile(r"^  ([\w ]+): (.+?)\s*$")
_ROWS = re.compile(r"^(\d+) rows?\b")
_GAVE_UP = "ran out of memory and could not be saved"
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = re.compile(r"During handling of the above|the direct cause of the following")
_ANY_RECOVERY_LINE = re.compile(r"OOMRecovery: [^\n]*out of memory with ")
_RECOVERY_LINE = re.compile(
    r"OOMRecovery: (?:epoch (?P<epoch>\d+), batch (?P<batch>\d+)|\w+), out of memory with [^\n]*"
    r"not recovered"
)
_REPORTER_LINE = re.compile(
    r"OOMReporter: Out of (?![^\n]* - (?:recovered|batch skipped))[^\n]*?"
    r"\((?P<place>[^()\n]*\b(?:phase|epoch|batch) [^()\n]*)\)\.[^\n]*?"
    r"(?:Report: (?P<stem>[^\n]+?)\.\*)?$",
    re.MULTILINE,
)
_NUMBERS = {"epoch": "epoch", "batch": "batch_index", "optimizer step": "step", "rank": "rank"}
_STAGES = {
    "training": "fit",
    "validation": "validate",
    "the sanity check": "sanity_check",
    "the test": "test",
    "prediction": "predict",
}


def read_notes(text: str, position: int) -> tuple[dict[str, Any], str | None]:
    r"""Read what the package has written about the error at a position of a log.

    Args:
        text: The log, without the prefixes of ranks.
        position: Where the error's line begins.

    Returns:
        Fields of an :class:`~lightning_oom.OOMReport` that were found, and the path of the files of
        the report without their ending; ``None`` where the log names none.

    Example:
        >>> facts, stem = read_notes(
        ...     "torch.OutOfMemoryError: CUDA out of memory.\n"
        ...     "lightning_oom: 8 rows of (4,) ran out of memory and could not be saved.\n"
        ...     "  tried: whole (forward), release (backward)\n"
        ...     "  split: the batch has one row\n", 0
        ... )
        >>> facts["rows"], [attempt.what for attempt in facts["attempts"]], facts["declined"]
        (8, ['whole', 'release'], ('split: the batch has one row',))
    """
    facts: dict[str, Any] = {}
    stem = None
    before = text[_end_of_earlier_error(text, position) : position]
    if _ANY_RECOVERY_LINE.search(before):
        facts["has_recovery"] = True
    line = _last(_RECOVERY_LINE, before)
    if line is not None and line["epoch"] is not None:
        facts |= {"epoch": int(line["epoch"]), "batch_index": int(line["batch"])}
    told = _last(_REPORTER_LINE, before)
    if told is not None:
        facts |= _read_place(told["place"])
        stem = told["stem"]
    noted, named = _read_lines(_note_lines(text, position))
    return facts | noted, named or stem


def _end_of_earlier_error(text: str, position: int) -> int:
    """Return where what belongs to this error begins: after the last one that is no cause of it."""
    start = text.rfind(_TRACEBACK, 0, position)
    while start > 0:
        earlier = text.rfind(_TRACEBACK, 0, start)
        if earlier < 0:
            return 0
        if not _CHAINED.search(text, earlier, start):
            return earlier
        start = earlier
    return 0


def _last(form: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in form.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    return found


def _read_place(place: str) -> dict[str, Any]:
    """Read "training, phase forward, epoch 0, batch 3, in model.net"."""
    facts: dict[str, Any] = {}
    for part in place.split(", "):
        name, _, value = part.rpartition(" ")
        if part in _STAGES:
            facts["stage"] = _STAGES[part]
        elif name in _NUMBERS and value.isdigit():
            facts[_NUMBERS[name]] = int(value)
        elif name == "phase":
            facts["phase"] = value
        elif name == "in":
            facts["module_path"] = value
    return facts


def _note_lines(text: str, position: int) -> Iterator[str]:
    """Give the lines of the notes that stand below the error, up to the next traceback."""
    is_note = False
    for number, line in enumerate(text[position : position + 100_000].split("\n")):
        if number > _MAX_LINES or _TRACEBACK in line:
            return
        is_note = line.startswith(NOTE) or (is_note and line.startswith("  "))
        if is_note:
            yield line


def _read_lines(lines: Iterator[str]) -> tuple[dict[str, Any], str | None]:
    facts: dict[str, Any] = {}
    declined: list[str] = []
    stem, is_recovery = None, False
    for line in lines:
        entry = _ENTRY.match(line)
        if line.startswith(NOTE):
            is_recovery = _GAVE_UP in line
            rows = _ROWS.match(line.removeprefix(NOTE))
            if is_recovery:
                facts["has_recovery"] = True
            if is_recovery and rows is not None:
                facts["rows"] = int(rows[1])
        elif entry is None:
            continue
        elif entry[1] == "report":
            stem = entry[2].removesuffix(".*")
        elif is_recovery and entry[1] == "tried":
            attempts = _ATTEMPT.findall(entry[2])
            facts["attempts"] = tuple(FailedAttempt(what=a, phase=phase) for a, phase in attempts)
            facts |= {"phase": attempts[0][1]} if attempts else {}
        elif is_recovery and " " not in entry[1]:
            declined.append(f"{entry[1]}: {entry[2]}")
    if declined:
        facts["declined"] = tuple(declined)
    return facts, stem

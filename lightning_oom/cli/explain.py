"""Say why memory ran out, from a log, a report or a memory snapshot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_oom.report.from_log import read_log
from lightning_oom.report.from_snapshot import read_snapshot
from lightning_oom.report.record import OOMReport
from lightning_oom.report.remedies import with_advice
from lightning_oom.report.text import render_text

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "explain", "run"]

_MAX_BYTES = 4 * 2**30
_PICKLE_START = b"\x80"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options of the verb.

    Args:
        parser: Of the verb.
    """
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a log or traceback, the JSON of an OOMReporter, or a memory snapshot of torch; "
        "'-' reads from standard input",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what the file tells.

    Args:
        arguments: As :func:`add_arguments` describes them.

    Returns:
        0; or 2, with one line on standard error, when the file cannot be read or tells nothing.
    """
    try:
        report = explain(_read(arguments.file), folder=_folder_of(arguments.file))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        print(f"lightning-oom explain: {arguments.file}: {reason}", file=sys.stderr)
        return 2
    if arguments.json:
        print(report.to_json())
    else:
        print(render_text(report, color=sys.stdout.isatty()), end="")
    return 0


def explain(content: bytes, *, folder: Path | None = None) -> OOMReport:
    """Turn a log, a report in JSON or a memory snapshot into a report with its diagnosis.

    Args:
        content: The file.
        folder: Where it lies. A log often names the report that an OOMReporter has written; its JSON
            knows more than the log and is read instead. ``None`` reads the log alone.

    Returns:
        The report. Its diagnoses are those of this release.

    Raises:
        ValueError: There is no out-of-memory error in it, or it has another form. A snapshot is a
            pickle; one that asks for anything but plain values is refused before it runs.

    Example:
        >>> explain(b"MemoryError").diagnoses[0].cause
        'host_memory'
    """
    if content.startswith(_PICKLE_START):
        return with_advice(read_snapshot(content))
    text = content.decode("utf-8", errors="replace").lstrip("\ufeff")
    if _is_report(text):
        return with_advice(OOMReport.from_json(text))
    report = read_log(text, folder=folder)
    if report is None:
        raise ValueError("no out-of-memory error in it")
    return with_advice(report)


def _is_report(text: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "record" in found


def _folder_of(name: str) -> Path:
    return Path.cwd() if name == "-" else Path(name).parent


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read(_MAX_BYTES)
    path = Path(name)
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError("it is larger than 4 GiB")
    return path.read_bytes()

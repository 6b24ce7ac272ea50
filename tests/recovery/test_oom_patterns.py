"""Every row of the table, every recorded message and every known form of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.classify import OOM_PATTERNS, classify_oom, pattern_table

DATA = Path(__file__).parents[1] / "data"


def read_rows(name: str) -> list[dict]:
    """Rows of a file with one JSON object a line."""
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


RECORDED = read_rows("oom_messages.jsonl")
FORMS = read_rows("oom_forms.jsonl")
REAL_CLASSES = {
    "RuntimeError": RuntimeError,
    "ValueError": ValueError,
    "OSError": OSError,
    "torch.OutOfMemoryError": OutOfMemoryError,
    "torch.cuda.OutOfMemoryError": OutOfMemoryError,
    "torch.AcceleratorError": getattr(torch, "AcceleratorError", RuntimeError),
    "torch.distributed.DistBackendError": torch.distributed.DistBackendError,
    "torch.utils.checkpoint.CheckpointError": torch.utils.checkpoint.CheckpointError,
}


def error_of(class_name: str, message: str) -> BaseException:
    """The error as it was raised; a class that is not installed gets a stand-in of its name."""
    known = REAL_CLASSES.get(class_name)
    if known is None:
        module, _, name = class_name.rpartition(".")
        base = MemoryError if name.endswith("MemoryError") else RuntimeError
        known = type(name, (base,), {"__module__": module})
    return known(message)


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["message"][:40])
def test_recorded_message_is_classified(row):
    """Every message of the public file is told apart, whatever class it came as."""
    for error in (
        error_of(row["exception_type"], row["message"]),
        RuntimeError(row["message"]),
    ):
        cause = classify_oom(error)

        assert row["is_oom"] == (cause is not None)
        if cause is not None:
            assert row["scope"] == cause.scope
            assert not cause.recoverable or cause.scope == "device"


@pytest.mark.parametrize("row", OOM_PATTERNS, ids=lambda row: row.example[:40])
def test_example_of_each_table_row_is_matched_by_that_row(row):
    """The example beside a pattern is decided by that pattern, not by one above it."""
    first = next(other for other in OOM_PATTERNS if other.pattern.search(row.example))

    assert first is row
    cause = classify_oom(RuntimeError(row.example))
    if row.kind == "none":
        assert cause is None
    else:
        assert cause is not None
        assert (row.kind, row.scope, row.confidence) == (cause.kind, cause.scope, cause.confidence)
        assert row.recoverable == cause.recoverable


def test_table_is_rendered_row_by_row():
    """The table of the documentation has one line per row of the table in the source."""
    lines = pattern_table().splitlines()

    assert len(OOM_PATTERNS) == len(lines) - 2
    assert all(line.count(" |") >= 5 for line in lines)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["message"][:40])
def test_form_is_classified(form):
    """Backends, releases and libraries word it differently; each wording is known.

    A plain word of a device is certain, what a full device often turns into is likely, and host
    memory is nothing that a smaller batch on a GPU frees.
    """
    cause = classify_oom(RuntimeError(form["message"]))

    assert cause is not None
    assert form["scope"] == cause.scope
    assert form["confidence"] == cause.confidence
    assert form["recoverable"] == cause.recoverable == cause.recoverable_on("cuda")
    assert form["on_cpu"] == cause.recoverable_on("cpu")

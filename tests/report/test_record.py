"""The record is data: it survives JSON, and refuses JSON of another kind."""

from __future__ import annotations

import json

import pytest
from report_cases import cuda_report, steps

from lightning_oom.report.record import BatchLeaf, CodeLine, LiveTensor, OOMReport
from lightning_oom.report.remedies import with_advice


def full_report() -> OOMReport:
    """A report with something in most fields."""
    return with_advice(
        cuda_report(
            timeline=steps([1, 2, 3]),
            lines=(CodeLine(path="a.py", line=3, function="forward"),),
            batch=(BatchLeaf(path="batch", shape=(2, 3), dtype="float32", values=("nan", "1")),),
            tensors=(
                LiveTensor(owner="x", kind="other", shape=(2,), dtype="float32", num_bytes=8),
            ),
        )
    )


def test_json_gives_the_same_record() -> None:
    """Every field comes back with its type, tuples as tuples."""
    report = full_report()

    assert OOMReport.from_json(report.to_json()) == report


def test_fields_of_other_releases_do_no_harm() -> None:
    """What an older release left out takes its default; what a newer one added is passed over."""
    plain = json.loads(full_report().to_json())
    plain["invented"] = 1
    del plain["timeline"]

    assert OOMReport.from_json(json.dumps(plain)).timeline == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "use the release that wrote it"),
        ({"record": "Other"}, "is no OOMReport"),
        ({"rank": "zero"}, "OOMReport.rank cannot be 'zero'"),
        ({"timeline": 5}, "OOMReport.timeline cannot be 5"),
        ({"outcome": "exploded"}, "OOMReport.outcome cannot be"),
        ({"cause": {}}, "OOMReport.cause lacks a field"),
        ({"cause": None}, "OOMReport.cause cannot be None"),
    ],
    ids=["later form", "another record", "text for a number", "number", "choice", "field", "None"],
)
def test_another_form_is_refused(change, message) -> None:
    """The error names the field that does not fit."""
    plain = {**json.loads(full_report().to_json()), **change}

    with pytest.raises(ValueError, match=message):
        OOMReport.from_json(json.dumps(plain))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_what_is_no_json_of_ours_is_refused(text) -> None:
    """Any text ends in a ValueError, never in another error."""
    with pytest.raises(ValueError, match="this"):
        OOMReport.from_json(text)


def test_amounts_come_from_the_reading_or_else_from_the_message() -> None:
    """Without a reading the text of the error still gives all amounts."""
    with_reading = cuda_report()
    without = with_reading.but(reading=None)

    for name in ("requested", "limit", "allocated", "reserved", "unallocated", "free", "missing"):
        assert getattr(without, f"{name}_bytes") == getattr(with_reading, f"{name}_bytes"), name

"""A reading is plain numbers, and what it derives is unknown when a part is."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from lightning_oom.memory import MemoryReading

FULL: dict[str, Any] = {
    "device": "cuda:0",
    "allocated_bytes": 300,
    "peak_allocated_bytes": 600,
    "reserved_bytes": 400,
    "peak_reserved_bytes": 700,
    "limit_bytes": 1000,
    "free_bytes": 600,
    "alloc_retries": 0,
}


def test_derived_quantities() -> None:
    """Used is the peak over the limit, headroom what lies between, fragmentation what lies idle."""
    reading = MemoryReading(**FULL)

    assert reading.used_fraction == 0.6
    assert reading.headroom_bytes == 400
    assert reading.fragmentation_fraction == 0.25


@pytest.mark.parametrize(
    ("unknown", "derived"),
    [
        ("limit_bytes", "used_fraction"),
        ("limit_bytes", "headroom_bytes"),
        ("peak_allocated_bytes", "headroom_bytes"),
        ("reserved_bytes", "fragmentation_fraction"),
        ("allocated_bytes", "fragmentation_fraction"),
    ],
)
def test_what_derives_from_the_unknown_is_unknown(unknown: str, derived: str) -> None:
    """``None`` in, ``None`` out; never 0."""
    assert getattr(MemoryReading(**{**FULL, unknown: None}), derived) is None


def test_without_a_peak_the_present_is_used() -> None:
    """A backend that keeps no peak still has a used fraction."""
    assert MemoryReading(**{**FULL, "peak_allocated_bytes": None}).used_fraction == 0.3
    assert MemoryReading(device="mps:0", limit_bytes=5).used_fraction is None


def test_an_empty_allocator_is_not_fragmented() -> None:
    """Nothing reserved, nothing idle."""
    reading = MemoryReading(**{**FULL, "reserved_bytes": 0, "allocated_bytes": 0})

    assert reading.fragmentation_fraction == 0.0


def test_a_reading_is_a_frozen_record() -> None:
    """It compares by value, is pickled, and is not changed."""
    reading = MemoryReading(**FULL)

    assert pickle.loads(pickle.dumps(reading)) == reading  # noqa: S301 our own bytes
    with pytest.raises(dataclasses.FrozenInstanceError):
        reading.limit_bytes = 1  # type: ignore[misc] # the point of the test

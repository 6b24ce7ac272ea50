"""Bytes inside, GiB outside."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_oom.units import GIB, KIB, MIB, TIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("amount", "num_bytes"),
    [
        ("64 MiB", 64 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        ("  2 tib ", 2 * TIB),
        ("512", 512),
        ("512 B", 512),
        ("0.5 KiB", 512),
        ("0 MiB", 0),
        (0, 0),
        (1.9, 1),
        (KIB, 1024),
    ],
)
def test_amounts_become_bytes(amount: float | str, num_bytes: int) -> None:
    """Numbers are bytes; text has a binary unit; what is below a byte is dropped."""
    assert parse_bytes(amount) == num_bytes


@pytest.mark.parametrize(
    ("amount", "message"),
    [
        ("1 GB", "unknown unit 'GB' in '1 GB': use B, KiB, MiB, GiB or TiB"),
        ("64 M", "unknown unit 'M'"),
        ("much", "cannot read 'much' as an amount of memory"),
        ("-1 MiB", "cannot read '-1 MiB'"),
        ("1e3", "cannot read|unknown unit"),
        ("", "cannot read ''"),
        (-1, "at least 0 and finite, got -1"),
        (float("inf"), "at least 0 and finite, got inf"),
        (float("nan"), "at least 0 and finite, got nan"),
        (True, "cannot read True"),
        (None, "cannot read None"),
        (b"64 MiB", "cannot read b'64 MiB'"),
    ],
)
def test_what_is_no_amount_is_refused(amount: Any, message: str) -> None:
    """The message has the value and what to write."""
    with pytest.raises(ValueError, match=message):
        parse_bytes(amount)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (MIB, "1.00 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (5 * TIB, "5.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit(num_bytes: int, text: str) -> None:
    """At least 1 of the unit, two decimals; the sign stays."""
    assert format_bytes(num_bytes) == text


@given(st.integers(min_value=0, max_value=2**50))
def test_what_is_shown_can_be_read(num_bytes: int) -> None:
    """Reading what was shown gives the number back to within the two decimals."""
    read = parse_bytes(format_bytes(num_bytes))

    assert abs(read - num_bytes) <= max(num_bytes * 0.005, 1)


@given(st.integers(min_value=0, max_value=2**50))
def test_numbers_are_bytes(num_bytes: int) -> None:
    """A whole number is taken as it is."""
    assert parse_bytes(num_bytes) == num_bytes

"""Bytes inside, GiB outside: the only place that knows about units.

Binary prefixes only (``KiB``, ``MiB``, ``GiB``, ``TiB``). ``GB`` is refused rather than guessed at:
half of the field means 10**9 with it and the other half 2**30.
"""

from __future__ import annotations

import re

__all__ = ["GIB", "KIB", "MIB", "TIB", "format_bytes", "parse_bytes"]

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

_FACTORS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(amount: float | str) -> int:
    """Turn an amount of memory into bytes.

    Args:
        amount: Bytes as a number, or text such as ``"64 MiB"`` or ``"1.5GiB"``; at least 0.

    Returns:
        Whole bytes, rounded down.

    Raises:
        ValueError: The text has another form, another unit, or the amount is negative.

    Example:
        >>> parse_bytes("64 MiB"), parse_bytes("1.5GiB"), parse_bytes(512)
        (67108864, 1610612736, 512)
        >>> parse_bytes("1 GB")
        Traceback (most recent call last):
            ...
        ValueError: unknown unit 'GB' in '1 GB': use B, KiB, MiB, GiB or TiB
    """
    if isinstance(amount, (int, float)) and not isinstance(amount, bool):
        if not 0 <= amount < float("inf"):
            raise ValueError(f"an amount of memory is at least 0 and finite, got {amount!r}")
        return int(amount)
    match = _PATTERN.fullmatch(amount) if isinstance(amount, str) else None
    if match is None:
        raise ValueError(f"cannot read {amount!r} as an amount of memory: write '64 MiB' or bytes")
    number, unit = match.groups()
    if unit.upper() not in _FACTORS:
        raise ValueError(f"unknown unit {unit!r} in {amount!r}: use B, KiB, MiB, GiB or TiB")
    return int(float(number) * _FACTORS[unit.upper()])


def format_bytes(num_bytes: int) -> str:
    """Show bytes to a person, with the largest binary unit that leaves a number of at least 1.

    Args:
        num_bytes: Bytes; may be negative (a difference).

    Returns:
        Text such as ``"512 B"`` or ``"1.50 GiB"``, in the form that torch's own messages use.

    Example:
        >>> format_bytes(512), format_bytes(3 * 2**29), format_bytes(-2048)
        ('512 B', '1.50 GiB', '-2.00 KiB')
    """
    size = abs(num_bytes)
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"

"""How dear a remedy is, in the order in which remedies are listed."""

from __future__ import annotations

from typing import TypeAlias, TypedDict

from lightning_oom.report.record import Remedy

__all__ = [
    "CHEAP",
    "FREE",
    "OTHER_RESULT",
    "OTHER_ROUNDING",
    "SLOWER",
    "WORK",
    "Found",
    "Saving",
    "place_in_list",
]

FREE, CHEAP, SLOWER, OTHER_ROUNDING, WORK, OTHER_RESULT = range(6)
"""Costs nothing; little; time in each step; digits; work or machines; the step is another one."""

Found: TypeAlias = tuple[int, Remedy]
"""How dear a remedy is, and the remedy."""


class Saving(TypedDict, total=False):
    """What a remedy frees, as fields of it; empty for unknown."""

    saving_bytes: int | None
    suffices: bool | None


def place_in_list(dearness: int, suffices: bool | None) -> tuple[bool, bool, bool, bool, int]:
    """Return a key to sort by: what changes the step last, what is not enough before it."""
    is_exact = dearness < OTHER_ROUNDING
    return dearness == OTHER_RESULT, suffices is False, not is_exact, suffices is not True, dearness

"""The records of advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Advice", "AdviceList", "Effect"]

Effect = Literal["same numbers", "rounding", "other numbers", "another model"]
"""What a change does to a training: bit-equal; equal up to the order of sums; close; to be trained
and judged anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change that lowers the peak.

    Attributes:
        title: What to do, in a few words.
        place: Which modules, parameters or line it is about; ``""`` for the whole step.
        how: The line to write.
        effect: What it does to the training.
        cost: What it takes, in words; ``""`` for nothing that matters.
        peak_bytes: Peak of the step with this change alone: bytes in storages.
        saved_bytes: How much lower that is than without; above 0.
        basis: ``"dry run"``: the changed step was run on fake tensors. ``"recount"``: the trace of the
            plain step was counted again without what the change does away with.
    """

    title: str
    place: str
    how: str
    effect: Effect
    cost: str
    peak_bytes: int
    saved_bytes: int
    basis: Literal["dry run", "recount"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceList:
    """All advice for one step, ordered: what keeps the numbers first, then by bytes.

    Attributes:
        peak_bytes: Peak of the step as it is, in storages: no rounding, no context.
        peak_phase: Where it is reached.
        entries: The advice.
        substitutions: How many questions about values were answered without knowing them.
    """

    peak_bytes: int
    peak_phase: str | None
    entries: tuple[Advice, ...]
    substitutions: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; amounts in bytes."""
        return asdict(self)

"""What a run has learnt about its memory, kept in checkpoints as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_oom.recovery.holding import HoldingPolicy
from lightning_oom.recovery.rows import RowsPolicy

if TYPE_CHECKING:
    from lightning_oom.recovery.plan import Mode

__all__ = ["Knowledge", "RowsPolicies"]

_VERSION = 1


@dataclass(slots=True, kw_only=True)
class RowsPolicies:
    """One policy per mode, since a chunk and a micro-batch of as many rows hold different things.

    Attributes:
        split: For micro-batches.
        chunk: For chunks.
        preferred: The mode that worked last.
        holding: Which sizes fitted only with a rung that keeps the batch whole.
    """

    split: RowsPolicy
    chunk: RowsPolicy
    preferred: Mode = "split"
    holding: HoldingPolicy = field(default_factory=HoldingPolicy)

    def of(self, mode: Mode) -> RowsPolicy:
        """Return the policy of a mode; whole batches count for both."""
        return self.chunk if mode == "chunk" else self.split


class Knowledge:
    """Policies for training and evaluation, and whether old gradients are to go first.

    Args:
        margin_fraction: Of the device, kept free when rows are predicted; in [0, 1).

    Example:
        >>> knowledge = Knowledge(margin_fraction=0.05)
        >>> knowledge.zero_first = True
        >>> resumed = Knowledge(margin_fraction=0.05)
        >>> resumed.load_state_dict(knowledge.state_dict())
        >>> resumed.zero_first
        True
    """

    def __init__(self, *, margin_fraction: float) -> None:
        self.training = RowsPolicies(
            split=RowsPolicy(margin_fraction=margin_fraction),
            chunk=RowsPolicy(margin_fraction=margin_fraction),
        )
        self.evaluation = RowsPolicies(
            split=RowsPolicy(margin_fraction=margin_fraction),
            chunk=RowsPolicy(margin_fraction=margin_fraction),
        )
        self.zero_first = False

    def state_dict(self) -> dict[str, Any]:
        """Return plain data: numbers, strings, lists and dictionaries."""
        return {
            "version": _VERSION,
            "split": self.training.split.state_dict(),
            "chunk": self.training.chunk.state_dict(),
            "preferred": self.training.preferred,
            "holding": self.training.holding.state_dict(),
            "evaluation": self.evaluation.split.state_dict(),
            "zero_first": self.zero_first,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier run has learnt; data of another version is ignored."""
        if state.get("version") != _VERSION:
            return
        self.training.split.load_state_dict(state["split"])
        self.training.chunk.load_state_dict(state["chunk"])
        self.training.preferred = state["preferred"]
        self.training.holding.load_state_dict(state.get("holding", []))
        self.evaluation.split.load_state_dict(state["evaluation"])
        self.zero_first = state["zero_first"]

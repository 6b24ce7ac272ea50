"""What evaluation did with gradients that it should not, as a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_oom.units import format_bytes

__all__ = ["GradViolation", "Kind"]

Kind = Literal["graph", "grad_mode", "train_mode", "output", "logged", "attribute", "inference"]

_TEXTS: dict[Kind, str] = {
    "graph": "{hook} builds a graph",
    "grad_mode": "grad mode is on {what} {hook}",
    "train_mode": "{what} is in training mode {hook}",
    "output": "the output of {hook} carries a graph",
    "logged": "{what} is logged with its graph in {hook}",
    "attribute": "{what} keeps tensors with a graph after {hook}",
    "inference": "{what} holds inference tensors, which {hook} cannot use",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GradViolation:
    """One thing that builds or keeps a graph in evaluation.

    Attributes:
        kind: What it is; see :class:`~lightning_oom.NoGradEnforcer`.
        hook: The step or hook in which it was seen.
        what: The attribute, module or logged name; empty where the line says all.
        where: ``file:line``; that of the step where no line can be told, ``None`` without one.
        num_bytes: Bytes that were saved or kept when it was seen first; ``None`` for modes.

    Example:
        >>> print(GradViolation(kind="graph", hook="test_step", what="", where="m.py:9", num_bytes=2048))
        test_step builds a graph at m.py:9 (2.00 KiB)
    """

    kind: Kind
    hook: str
    what: str
    where: str | None
    num_bytes: int | None

    def __str__(self) -> str:
        text = _TEXTS[self.kind].format(hook=self.hook, what=self.what)
        place = "" if self.where is None else f" at {self.where}"
        held = "" if self.num_bytes is None else f" ({format_bytes(self.num_bytes)})"
        return f"{text}{place}{held}"

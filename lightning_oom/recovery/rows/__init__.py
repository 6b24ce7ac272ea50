"""How many rows to run together: what was seen to fit and to fail, and what follows from it."""

from __future__ import annotations

from lightning_oom.recovery.rows.policy import (
    RowsPolicy,
)

__all__ = [
    "RowsPolicy",
]

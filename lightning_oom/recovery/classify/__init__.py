"""Tell out-of-memory errors from others: classes, one table of forms, the chain of causes."""

from __future__ import annotations

from lightning_oom.recovery.classify.classification import (
    OOM_PATTERNS,
    OOMCause,
    OOMPattern,
    classify_oom,
    pattern_table,
)

__all__ = [
    "OOM_PATTERNS",
    "OOMCause",
    "OOMPattern",
    "classify_oom",
    "pattern_table",
]

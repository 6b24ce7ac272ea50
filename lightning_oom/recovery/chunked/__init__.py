"""Run the children of a module row-chunk by row-chunk, where that is the same."""

from __future__ import annotations

from lightning_oom.recovery.chunked.chunking import (
    ChunkReport,
    ChunkVerdict,
    chunked_children,
)

__all__ = [
    "ChunkReport",
    "ChunkVerdict",
    "chunked_children",
]

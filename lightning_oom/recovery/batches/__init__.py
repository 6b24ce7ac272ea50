"""Count the rows of a batch, cut it into micro-batches, tell one batch from another."""

from __future__ import annotations

from lightning_oom.recovery.batches.cutting import (
    BatchSignature,
    batch_tensors,
    copy_containers,
    count_rows,
    describe_batch,
    register_splitter,
    split_batch,
    split_sizes,
    take_rows,
)

__all__ = [
    "BatchSignature",
    "batch_tensors",
    "copy_containers",
    "count_rows",
    "describe_batch",
    "register_splitter",
    "split_batch",
    "split_sizes",
    "take_rows",
]

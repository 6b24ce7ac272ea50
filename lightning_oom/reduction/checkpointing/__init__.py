"""Activation checkpointing: blocks keep their input and run again in the backward pass.

:func:`find_blocks` and :func:`match_blocks` say which modules are meant, :func:`install` puts
checkpointing on them and returns the undo.
"""

from __future__ import annotations

from lightning_oom.reduction.checkpointing.blocks import (
    Block,
    block_levels,
    find_blocks,
    match_blocks,
)
from lightning_oom.reduction.checkpointing.forward import CheckpointedForward
from lightning_oom.reduction.checkpointing.installation import install, is_checkpointed
from lightning_oom.reduction.checkpointing.meter import CheckpointMeter

__all__ = [
    "Block",
    "CheckpointMeter",
    "CheckpointedForward",
    "block_levels",
    "find_blocks",
    "install",
    "is_checkpointed",
    "match_blocks",
]

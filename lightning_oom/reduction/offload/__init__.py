"""Keep on the host what the device does not need right now: activations, optimizer state, weights."""

from lightning_oom.reduction.offload.activations import OffloadTally, offload_activations
from lightning_oom.reduction.offload.blocks import BlockOffload, find_blocks
from lightning_oom.reduction.offload.optimizer_state import OptimizerStateOffload

__all__ = [
    "BlockOffload",
    "OffloadTally",
    "OptimizerStateOffload",
    "find_blocks",
    "offload_activations",
]

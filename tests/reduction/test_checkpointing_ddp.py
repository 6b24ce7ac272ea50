"""Two processes train a checkpointed model under DDP as they train the plain one."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from checkpoint_cases import Net, batches, end_of_training, layers
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_oom.reduction.checkpointing import find_blocks, install

OPTIONS = {
    "default": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
}


class Spare(Net):
    """A model one of whose blocks is never called."""

    def __init__(self) -> None:
        super().__init__(
            [layers(norm=lambda: nn.BatchNorm1d(8)) for _ in range(3)],
            nn.Linear(4, 8),
            nn.Linear(8, 2),
        )
        self.spare = layers()


def build(variant: str) -> nn.Module:
    """The model of a variant, always with the same weights."""
    torch.manual_seed(2)
    model = Spare()
    if variant != "unused":
        del model.spare
    return model.train()


def train(rank: int, port: int) -> None:
    """What one process does: every variant, plain and checkpointed."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    data = batches("mlp", 6)[rank::2]
    for variant, options in OPTIONS.items():
        ends = []
        for is_checkpointed in False, True:
            model = build(variant)
            if is_checkpointed:
                install(model, [block.path for block in find_blocks(model)])
            ends.append(end_of_training(DistributedDataParallel(model, **options), data))
        torch.testing.assert_close(
            *ends, rtol=0, atol=0, msg=lambda text, v=variant: f"{v}: {text}"
        )
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ddp_ends_with_the_same_bits() -> None:
    """With unused parameters, a static graph and bucket views too; BatchNorm's buffers included."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train, args=(port,), nprocs=2)

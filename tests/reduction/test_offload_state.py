"""Optimizer state between steps and weights between uses: on the host, with the same bits."""

from __future__ import annotations

import pytest
import torch
from states import compare, plain_copy
from torch import nn

from lightning_oom.reduction.offload import BlockOffload, OptimizerStateOffload, find_blocks
from lightning_oom.testing import SimulatedGPU

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adam, loop": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=3),
}


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    """A simulated GPU without a limit."""
    return SimulatedGPU.enable()


def train(make, gpu, *, offload: bool, min_bytes: int = 0):
    """Five steps, state moved in at the end of the closure and out after the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(gpu)
    optimizer = make(model.parameters())
    mover = OptimizerStateOffload([optimizer], device=gpu, min_bytes=min_bytes)
    x, y = torch.randn(4, 8, device=gpu), torch.randn(4, 1, device=gpu)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        if offload:
            mover.move_in()
        return loss

    for _ in range(5):
        optimizer.step(closure)
        if offload:
            mover.move_out()
    return model, optimizer, mover


def state_devices(optimizer) -> set[str]:
    """Where the state with more than one element is."""
    return {
        value.device.type
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_and_state_are_the_same_to_the_bit(name, gpu) -> None:
    """For state of every form; the state is on the host afterwards."""
    make = OPTIMIZERS[name]
    plain, plain_optimizer, _ = train(make, gpu, offload=False)
    model, optimizer, mover = train(make, gpu, offload=True)

    assert compare(plain_copy(plain.state_dict()), plain_copy(model.state_dict())) == []
    assert (
        compare(plain_copy(plain_optimizer.state_dict()), plain_copy(optimizer.state_dict())) == []
    )
    assert state_devices(optimizer) == {"cpu"}
    assert mover.moved_bytes > 0


def test_the_device_is_free_of_state_between_steps(gpu) -> None:
    """Its bytes are those of the weights and gradients alone."""
    before = torch.simgpu.memory_allocated()
    plain = train(OPTIMIZERS["adam"], gpu, offload=False)
    with_state = torch.simgpu.memory_allocated() - before
    del plain
    moved = train(OPTIMIZERS["adam"], gpu, offload=True)
    without = torch.simgpu.memory_allocated() - before

    assert with_state - without >= moved[2].moved_bytes > 0


def test_small_state_stays(gpu) -> None:
    """Step counters of fused optimizers, and whatever is below the threshold."""
    _, optimizer, mover = train(OPTIMIZERS["adam, fused"], gpu, offload=True, min_bytes=5)

    assert state_devices(optimizer) == {"cpu"}
    assert all(entries["step"].device == gpu for entries in optimizer.state.values())

    _, optimizer, mover = train(OPTIMIZERS["adam"], gpu, offload=True, min_bytes=2**20)
    assert state_devices(optimizer) == {"simgpu"}
    assert mover.moved_bytes == 0


def test_capturable_optimizers_are_told_apart(gpu) -> None:
    """A graph may hold addresses of their state."""
    weight = nn.Parameter(torch.ones(2, device=gpu))
    plain, capturable = torch.optim.Adam([weight]), torch.optim.Adam([weight])
    capturable.param_groups[0]["capturable"] = True

    assert OptimizerStateOffload.reason_not_to_move([plain]) is None
    assert "capturable=False" in OptimizerStateOffload.reason_not_to_move([plain, capturable])


class Tied(nn.Module):
    """Blocks, one weight of which is used outside as well."""

    def __init__(self, *, tie: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 32)
        if tie:
            self.head.weight = self.blocks[0].linear1.weight

    def forward(self, x):
        """Through all of them."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("tie", [False, True])
def test_blocks_come_in_one_at_a_time(tie, gpu) -> None:
    """Equal outputs; the device never holds two blocks; names and objects stay."""
    torch.manual_seed(0)
    model = Tied(tie=tie).eval()
    x = torch.randn(2, 4, 16)
    with torch.no_grad():
        plain = model.to(gpu)(x.to(gpu)).cpu()
    names, objects = [*model.state_dict()], [*model.parameters()]
    model.cpu()
    before = torch.simgpu.memory_allocated()
    blocks = BlockOffload(model, find_blocks(model), device=gpu)
    with blocks.away():
        model.to(gpu)
    undo = blocks.attach()
    torch.simgpu.reset_peak_memory_stats()
    with torch.no_grad():
        output = model(x.to(gpu)).cpu()
    peak = torch.simgpu.max_memory_allocated() - before

    assert torch.equal(output, plain)
    assert [*model.state_dict()] == names
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert {p.device.type for p in model.blocks[1].parameters()} == {"cpu"}
    assert model.head.weight.device == model.stem.weight.device == gpu
    assert peak < blocks.kept_bytes

    undo()
    assert {p.device.type for p in model.blocks[1].parameters()} == {"cpu"}
    assert not model.blocks[1]._forward_pre_hooks
    assert not model.blocks[1]._forward_hooks


class Recurrent(nn.Module):
    """A block that lists its weights a second time, and has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        """As many outputs as inputs."""
        return self.norm(self.lstm(x)[0])


def test_blocks_with_lists_of_weights_and_buffers(gpu) -> None:
    """Buffers stay on the device, and a block that two places hold is one."""
    torch.manual_seed(0)
    block = Recurrent()
    model, x = nn.Sequential(block, Recurrent(), block).eval(), torch.randn(2, 4, 8)
    with torch.no_grad():
        plain = model.to(gpu)(x.to(gpu)).cpu()
    model.cpu()
    blocks = BlockOffload(model, find_blocks(model), device=gpu)
    with blocks.away():
        model.to(gpu)
    undo = blocks.attach()
    with torch.no_grad():
        output = model(x.to(gpu)).cpu()

    assert torch.equal(output, plain)
    assert {buffer.device.type for buffer in model.buffers()} == {"simgpu"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    undo()


def test_a_block_that_fails_leaves_the_device(gpu) -> None:
    """Its weights go out whatever the forward raises."""
    model = Tied().eval()
    blocks = BlockOffload(model, find_blocks(model), device=gpu)
    with blocks.away():
        model.to(gpu)
    undo = blocks.attach()
    with pytest.raises(AssertionError, match="embedding"):
        model.blocks[0](torch.ones(1, 4, 3, device=gpu))

    assert {p.device.type for p in model.parameters()} == {"cpu", "simgpu"}
    assert {p.device.type for p in model.blocks.parameters()} == {"cpu"}
    undo()


def test_blocks_are_the_outermost_repeated_children() -> None:
    """Not the layers inside of them, not single ones, none without weights."""
    model = Tied()
    stages = nn.Sequential(
        nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]), nn.ReLU(), nn.ReLU()
    )

    assert find_blocks(model) == [*model.blocks]
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    assert find_blocks(stages) == [*stages[0]]
    assert find_blocks(nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2)])) == []

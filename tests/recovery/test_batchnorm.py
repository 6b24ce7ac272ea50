"""Running statistics of a split batch equal those of the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo  # the first checkpoint loads it, which sets warnings filters for good
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_oom.errors import NotSeparableError
from lightning_oom.recovery.batchnorm import find_batch_coupled, merged_batchnorm

LAYERS = {
    "1d": (lambda **kw: nn.BatchNorm1d(6, **kw), (24, 6)),
    "1d-sequence": (lambda **kw: nn.BatchNorm1d(6, **kw), (24, 6, 5)),
    "2d": (lambda **kw: nn.BatchNorm2d(6, **kw), (24, 6, 4, 3)),
    "3d": (lambda **kw: nn.BatchNorm3d(6, **kw), (24, 6, 2, 3, 2)),
    "instance-1d": (lambda **kw: nn.InstanceNorm1d(6, track_running_stats=True, **kw), (24, 6, 5)),
    "instance-2d": (
        lambda **kw: nn.InstanceNorm2d(6, track_running_stats=True, **kw),
        (24, 6, 4, 3),
    ),
}


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy all buffers."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def relative_difference(left: nn.Module, right: nn.Module) -> float:
    """Return the largest difference of a buffer, over the largest entry of that buffer."""
    pairs = zip(left.buffers(), right.buffers(), strict=True)
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3))
        for a, b in pairs
    )


def run_split(module: nn.Module, x: torch.Tensor, sizes: list[int]) -> None:
    """Run forward and backward of each part inside the merging block."""
    with merged_batchnorm(module) as merged:
        for part in x.split(sizes):
            merged.begin_micro_batch()
            output = module(part.requires_grad_())
            output.square().mean().backward()


@pytest.mark.parametrize("sizes", [[12, 12], [9, 8, 7], [22, 2]], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_one_update_is_exact_to_the_last_place(kind, sizes):
    """After one step, statistics below 1 differ by at most one unit in the last place (6e-8)."""
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    split, whole = make(), make()
    x = torch.randn(shape) * 0.8
    run_split(split, x, sizes)
    whole(x)

    for a, b in zip(split.buffers(), whole.buffers(), strict=True):
        assert float((a - b).abs().max()) <= 6e-8


@pytest.mark.parametrize("sizes", [[12, 12], [9, 8, 7], [22, 2]], ids=str)
@pytest.mark.parametrize("momentum", [0.1, 1.0, None], ids=lambda m: f"momentum={m}")
@pytest.mark.parametrize("kind", LAYERS)
def test_merged_statistics_equal_those_of_the_whole(kind, momentum, sizes):
    """Mean, variance and counter follow one update per step, over several steps."""
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    split, whole = make(momentum=momentum), make(momentum=momentum)
    for step in range(3):
        x = torch.randn(shape) * 3 + step
        run_split(split, x, sizes)
        whole(x)

    assert relative_difference(split, whole) <= 2.4e-7  # two units in the last place, three updates


def test_a_layer_called_twice_per_forward_is_updated_twice():
    """Calls of one micro-batch stay apart; each is merged with its likes."""
    torch.manual_seed(0)
    split, whole = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = torch.randn(10, 4)
    with merged_batchnorm(split) as merged:
        for part in x.split(4):
            merged.begin_micro_batch()
            split(part)
            split(part * 5)
    whole(x)
    whole(x * 5)

    assert int(split.num_batches_tracked) == 2
    assert relative_difference(split, whole) <= 1.2e-7


def test_checkpointed_layers_are_updated_as_in_the_whole_step():
    """A layer that a backward recomputes is updated twice, split or not."""
    torch.manual_seed(0)
    split, whole = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = torch.randn(10, 4, requires_grad=True)
    with merged_batchnorm(split) as merged:
        for part in x.split(5):
            merged.begin_micro_batch()
            checkpoint(split, part, use_reentrant=False).square().sum().backward()
    checkpoint(whole, x, use_reentrant=False).square().sum().backward()

    assert int(split.num_batches_tracked) == int(whole.num_batches_tracked) == 2
    assert relative_difference(split, whole) <= 1.2e-7


def test_statistics_of_low_precision_inputs_are_those_of_the_kernel():
    """bfloat16 inputs are not rounded again: the layer's own kernel takes the statistics."""
    torch.manual_seed(0)
    split, whole = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    x = (torch.randn(12, 4, 5, 5) * 2 + 1).bfloat16()
    run_split(split, x, [6, 6])
    whole(x)

    assert relative_difference(split, whole) <= 1e-6


def test_an_exception_leaves_everything_as_before():
    """Values, buffer objects, momentum and hooks are those from before the block."""
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    before, objects = buffers_of(net), list(net.buffers())

    def fail(module, args):
        raise RuntimeError("out of memory")

    net[1].register_forward_pre_hook(fail)
    hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in net]
    with pytest.raises(RuntimeError, match="out of memory"):
        run_split(net, torch.randn(8, 4), [8])

    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())
    assert all(a is b for a, b in zip(objects, net.buffers(), strict=True))
    assert [layer.momentum for layer in (net[0], net[2])] == [0.1, 0.1]
    assert hooks == [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in net]


def test_a_failed_call_that_user_code_survives_counts_for_nothing():
    """A forward that raises inside the layer leaves the real buffers in place for the next."""
    torch.manual_seed(0)
    split, whole = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = torch.randn(8, 4)
    with merged_batchnorm(split) as merged:
        for part in x.split(4):
            merged.begin_micro_batch()
            with pytest.raises(ValueError, match="more than 1 value"):
                split(part[:1])
            split(part)
    whole(x)

    assert relative_difference(split, whole) <= 1.2e-7
    assert split.momentum == 0.1


def test_buffers_keep_their_identity_and_state_dict():
    """The update is written into the layer's own buffers."""
    layer = nn.BatchNorm1d(4)
    objects = list(layer.buffers())
    run_split(layer, torch.randn(8, 4), [4, 4])

    assert all(a is b for a, b in zip(objects, layer.buffers(), strict=True))
    assert list(layer.state_dict()) == list(nn.BatchNorm1d(4).state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(4).eval(),
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        lambda: nn.BatchNorm1d(4, track_running_stats=False, affine=False),
        lambda: nn.LayerNorm(4),
    ],
    ids=["eval", "no-statistics", "plain", "layer-norm"],
)
def test_layers_without_statistics_to_move_are_left_alone(make):
    """Eval mode and missing statistics mean that nothing is updated."""
    layer = make()
    before = buffers_of(layer)
    x = torch.randn(8, 4, requires_grad=True)
    run_split(layer, x, [4, 4])

    assert all(torch.equal(before[name], buffer) for name, buffer in layer.named_buffers())


def test_a_layer_without_affine_parameters_is_merged():
    """``affine=False`` changes nothing about statistics."""
    torch.manual_seed(0)
    split, whole = nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, affine=False)
    x = torch.randn(8, 4, requires_grad=True)
    run_split(split, x, [3, 5])
    whole(x)

    assert relative_difference(split, whole) <= 1.2e-7


def test_a_layer_that_is_not_called_is_not_updated():
    """Its counter stays as it was."""
    net = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
    with merged_batchnorm(net) as merged:
        merged.begin_micro_batch()
        net[0](torch.randn(4, 4))

    assert [int(layer.num_batches_tracked) for layer in net] == [1, 0]


def test_frozen_and_thawed_layers_of_one_module():
    """Each layer goes by its own mode."""
    net = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    net[0].eval()
    run_split(net, torch.randn(8, 4, requires_grad=True), [4, 4])

    assert [int(layer.num_batches_tracked) for layer in net] == [0, 1]


def test_synchronised_batch_norm_is_refused():
    """Its statistics belong to all ranks; the error names the layer."""
    net = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))

    with pytest.raises(NotSeparableError, match=r"1 is a SyncBatchNorm"), merged_batchnorm(net):
        pass

    with merged_batchnorm(net.eval()):
        pass


def test_layers_that_couple_rows_are_named():
    """Training mode, or no running statistics in any mode."""
    net = nn.Sequential(
        nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), nn.InstanceNorm1d(4)
    )

    assert find_batch_coupled(net) == ["0", "1"]
    assert find_batch_coupled(copy.deepcopy(net).eval()) == ["1"]

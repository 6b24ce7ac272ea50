"""Private names of torch that look on: graphs, hooks, profilers, histories, identities."""

from __future__ import annotations

import functools

import torch

from lightning_oom import _torch as door


def test_a_compiled_function_is_told_from_others() -> None:
    """Also through a method and a wrapper; what the compiler is told to leave alone is none."""

    def plain() -> int:
        return 1

    compiled = torch.compile(plain, backend="eager")
    assert door.is_compiled(compiled)
    assert door.is_compiled(functools.wraps(compiled)(functools.partial(compiled)))
    assert not door.is_compiled(plain)
    assert not door.is_compiled(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step)


def test_what_a_node_has_saved_is_seen_without_unpacking_it() -> None:
    """The tensor itself, nothing below hooks that pack it, and nothing after the backward pass."""
    y = torch.ones(3, requires_grad=True).exp()
    with torch.autograd.graph.saved_tensors_hooks(lambda _: "packed", lambda _: 1 / 0):
        z = torch.ones(3, requires_grad=True).exp()

    assert [tuple(tensor.shape) for tensor in door.saved_by(y.grad_fn)] == [(3,)]
    assert list(door.saved_by(z.grad_fn)) == []
    y.sum().backward()
    assert list(door.saved_by(y.grad_fn)) == []


def test_no_snapshot_where_no_history_is_recorded() -> None:
    """Also on devices that have none, and without making a context."""
    assert door.cuda_snapshot(torch.device("cpu")) is None
    assert door.cuda_snapshot(torch.device("cuda")) is None


def test_nodes_are_numbered_in_the_order_of_their_making() -> None:
    """Parameters' own nodes have the largest number of all."""
    w = torch.ones(3, requires_grad=True)
    first, second = w.exp(), w.exp()

    earlier, later = (door.graph_node_order(y.grad_fn) for y in (first, second))
    leaf = door.graph_node_order(first.grad_fn.next_functions[0][0])

    assert earlier < later < leaf
    assert door.graph_node_order(object()) is None


def test_a_running_profiler_is_seen() -> None:
    """For the length of it."""
    assert not door.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert door.is_profiling()
    assert not door.is_profiling()


def test_the_switches_of_cuda_s_history_are_there() -> None:
    """Four of them, and nobody has switched it on; memory/test_history.py uses them."""
    switches = door.cuda_history()

    assert set(switches) == {"is_on", "start", "stop", "dump"}
    assert all(callable(switch) for switch in switches.values())
    assert not switches["is_on"]()


def test_identity_of_tells_storages_apart() -> None:
    """Views share it, copies do not."""
    tensor = torch.zeros(4)

    same = door.identity_of(tensor[1:].untyped_storage())

    assert same == door.identity_of(tensor.untyped_storage())
    assert same != door.identity_of(tensor.clone().untyped_storage())


def test_let_hooks_be_disabled_makes_room_for_transforms_and_puts_hooks_back() -> None:
    """Below hooks alone ``torch.func.grad`` refuses to run; afterwards the hooks are on top again."""
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.detach()

    weight = torch.ones(3, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept)
    with hooks:
        undo = door.let_hooks_be_disabled(hooks)
        try:
            gradient = torch.func.grad(lambda x: (x * x).sum())(torch.ones(3))
            (weight * weight).sum()
        finally:
            undo()

    assert torch.equal(gradient, 2 * torch.ones(3))
    assert packed == [weight.shape, weight.shape]

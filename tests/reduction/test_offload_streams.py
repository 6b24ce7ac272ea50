"""The order of copies on a stream of their own, on stand-ins that carry out nothing unless waited for.

What a CUDA device does beside this is in ``tests/gpu/test_offload.py``.
"""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch

from lightning_oom.reduction.offload import OffloadTally, activations, offload_activations, streams
from lightning_oom.testing import SimulatedGPU

COUNT = 1024


class Stream:
    """A queue of copies, each carried out when another stream first has to wait for it."""

    def __init__(self) -> None:
        self.queue: list = []
        self.num_done = 0

    def run(self, until: int) -> None:
        """Carry out what is in the queue up to a place."""
        while self.num_done < until:
            self.queue[self.num_done]()
            self.num_done += 1

    def wait_stream(self, other) -> None:
        """All that the other one has been given comes first."""
        other.run(len(other.queue))

    def wait_event(self, event) -> None:
        """All that came before the event comes first."""
        event.stream.run(event.place)

    def record_event(self) -> SimpleNamespace:
        """The present end of the queue."""
        return SimpleNamespace(stream=self, place=len(self.queue))


@pytest.fixture
def late(monkeypatch) -> SimpleNamespace:
    """Copies on a stream of their own, for the simulated GPU."""
    device, computing, side = SimulatedGPU.enable(), Stream(), Stream()
    current, copy_now = [computing], torch.Tensor.copy_

    @contextlib.contextmanager
    def stream(chosen):
        current.append(chosen)
        yield
        current.pop()

    def copy_(target, source, non_blocking=False):
        if current[-1] is computing:
            return copy_now(target, source)
        ends = [(weakref.ref(x.untyped_storage()), x.shape, x.dtype) for x in (target, source)]

        def carry_out() -> None:
            tensors = []
            for storage, shape, dtype in ends:
                alive = storage()
                assert alive is not None, "freed while it was being copied"
                empty = torch.empty(0, dtype=dtype, device=alive.device)
                tensors.append(empty.set_(alive, 0, shape, (1,)))
            copy_now(*tensors)

        side.queue.append(carry_out)
        return target

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(streams, "_pinned_like", lambda source: torch.empty(source.shape))
    copies = streams.StreamCopies(device)
    monkeypatch.setattr(activations, "copies_for", lambda device: copies)
    return SimpleNamespace(device=device, copies=copies, side=side)


def chain(device, tally=None, length=12):
    """A leaf, and a loss that saves ``length`` results in turn."""
    x = torch.linspace(-1, 1, COUNT).to(device).requires_grad_()
    with offload_activations(min_bytes=0, tally=tally):
        y = x
        for _ in range(length):
            y = y.tanh()
    return x, y


def gradient(x, y) -> torch.Tensor:
    """Of the sum, on the host."""
    return torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0].cpu()


def test_gradients_wait_for_their_copies(late, monkeypatch) -> None:
    """Equal to those of copies that are waited for, twice over one graph."""
    x, y = chain(late.device)
    results = gradient(x, y), gradient(x, y)
    monkeypatch.setattr(activations, "copies_for", lambda device: streams.Copies())
    plain = gradient(*chain(late.device))

    assert all(torch.equal(result, plain) for result in results)


def test_few_sources_are_held_and_none_after_the_forward_pass(late) -> None:
    """The device holds the last results while they leave, and then only the output."""
    before = torch.simgpu.memory_allocated()
    torch.simgpu.reset_peak_memory_stats()
    x, y = chain(late.device)
    one = x.nbytes

    assert torch.simgpu.max_memory_allocated() - before <= (streams._IN_FLIGHT + 4) * one
    assert torch.simgpu.memory_allocated() - before == 2 * one
    assert not late.copies._leaving
    assert y.shape == x.shape


def test_copies_back_begin_ahead_and_few_at_a_time(late) -> None:
    """When a node asks for its tensor, those of the next nodes are under way."""
    x, y = chain(late.device)
    before, ahead = torch.simgpu.memory_allocated(), []
    peaks = []

    def look(_) -> None:
        ahead.append(len(late.side.queue) - late.side.num_done)
        peaks.append(torch.simgpu.memory_allocated() - before)

    node = y.grad_fn
    for _ in range(12):
        node.register_prehook(look)
        node = node.next_functions[0][0]
    gradient(x, y)

    assert max(ahead) == streams._AHEAD
    assert ahead.count(streams._AHEAD) >= 9
    assert max(peaks) <= (streams._AHEAD + 3) * x.nbytes


def test_a_graph_that_is_dropped_with_copies_under_way(late) -> None:
    """Memory that is being written to is not given back before the copy has ended."""
    before = torch.simgpu.memory_allocated()
    x, y = chain(late.device)
    torch.autograd.grad(y, node_input(y, 3), torch.ones_like(y))  # the rest was sent for in vain
    del x, y

    assert late.side.num_done == len(late.side.queue)
    assert torch.simgpu.memory_allocated() == before


def node_input(y, depth):
    """The edge that is ``depth`` nodes below."""
    node = y.grad_fn
    for _ in range(depth):
        node = node.next_functions[0][0]
    return torch.autograd.graph.GradientEdge(node, 0)


def test_what_nobody_comes_for_does_not_pile_up(late) -> None:
    """Copies that were begun ahead are given up once there are several."""
    tally = OffloadTally()
    pairs = [chain(late.device, tally, length=4) for _ in range(6)]
    before = torch.simgpu.memory_allocated()
    for _, y in pairs:  # each sends for what the one before has done with
        torch.autograd.grad(y, node_input(y, 1), torch.ones_like(y), retain_graph=True)

    assert tally.num_to_host == 24
    held = torch.simgpu.memory_allocated() - before
    assert held <= (2 * streams._AHEAD) * pairs[0][0].nbytes

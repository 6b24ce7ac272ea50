"""Modules to chunk, and the comparison of a chunked call with the whole one."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn

from lightning_oom.recovery.chunked import chunked_children

ROWS, WIDTH = 10, 6
Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - the plain kind is what is tested


@dataclass
class Encoded:
    """An output in a dataclass."""

    hidden: torch.Tensor
    pooled: torch.Tensor
    note: str = "kept"


class Body(nn.Module):
    """A block with hidden activations; ``finish`` makes its output."""

    def __init__(self, finish=lambda self, h, x: h) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.finish = finish

    def forward(self, x, *args, **kwargs):
        """Run the block."""
        return self.finish(self, self.down(torch.tanh(self.up(x))), x, *args, **kwargs)


class Net(nn.Module):
    """A module with one child."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body


def leaves(output):
    """Return all tensors of an output."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    elif isinstance(output, Encoded):
        output = [output.hidden, output.pooled]
    return [
        t
        for part in output
        if part is not None and not isinstance(part, (str, int))
        for t in leaves(part)
    ]


def compare(net, *args, chunk=3, call=None, **kwargs):
    """Run whole and chunked; return the report after checking outputs and gradients."""
    call = call or (lambda net, *args, **kwargs: net.body(*args, **kwargs))
    reference = copy.deepcopy(net)

    def run(module):
        output = call(module, *args, **kwargs)
        loss = sum((t.float() ** 2).sum() * (i + 1) for i, t in enumerate(leaves(output)))
        if loss.requires_grad:
            loss.backward()
        return output

    expected = run(reference)
    inputs = [a.grad.clone() for a in args if isinstance(a, torch.Tensor) and a.grad is not None]
    for a in args:
        if isinstance(a, torch.Tensor):
            a.grad = None
    with chunked_children(net, ROWS, chunk) as report:
        output = run(net)

    assert type(output) is type(expected)
    for a, b in zip(leaves(output), leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    again = [a.grad for a in args if isinstance(a, torch.Tensor) and a.grad is not None]
    for a, b in zip(again, inputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert "forward" not in vars(net.body)
    for a, b in zip(net.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    return report


def x(*shape, grad=False):
    """Return random input."""
    return torch.randn(*(shape or (ROWS, WIDTH)), requires_grad=grad)

"""Workspaces of kernels between the events of a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_oom.planning.fake_step import FakeStep
from lightning_oom.planning.target import TARGETS
from lightning_oom.planning.workspaces import TargetTrace, with_workspaces
from lightning_oom.units import MIB

CUDA = replace(TARGETS["cuda"], benchmarks_convolutions=False)


def traced(module: torch.nn.Module, *shape: int, target=CUDA, num_steps: int = 1) -> TargetTrace:
    """Trace a step and give it the workspaces of a target."""
    step = FakeStep(module, torch.zeros(*shape))
    return with_workspaces(step.run(record_operators=True, num_steps=num_steps), target)


def workspaces(trace: TargetTrace) -> list[int]:
    """Return what is taken, in order."""
    return [
        event.num_bytes
        for event in trace.trace.events
        if event.kind == "workspace" and event.num_bytes > 0
    ]


def test_the_first_matrix_product_takes_a_workspace_for_good() -> None:
    """8.125 MiB for cuBLAS; it is not freed."""
    trace = traced(torch.nn.Linear(4, 4), 2, 4, num_steps=2)
    assert workspaces(trace) == [8 * MIB + 128 * 1024]
    assert trace.trace.by_kind(len(trace.trace.events) - 1)["workspace"] == 8 * MIB + 128 * 1024


def test_a_convolution_takes_its_operands_in_each_pass() -> None:
    """Input, weight and result, in float32: forward, gradient of the input, of the weight."""
    module = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1), torch.nn.Conv2d(8, 16, 3, padding=1))
    operands = 4 * (2 * 8 * 10 * 10 + 2 * 16 * 10 * 10 + 16 * 8 * 3 * 3)
    trace = traced(module, 2, 8, 10, 10)
    assert workspaces(trace) == [operands] * 3
    assert "workspace" not in trace.trace.by_kind(len(trace.trace.events) - 1)


def test_a_convolution_on_an_image_takes_twice_as_much() -> None:
    """And no gradient of the image is asked for."""
    operands = 2 * 4 * (2 * 3 * 10 * 10 + 2 * 16 * 8 * 8) + 4 * 16 * 3 * 3 * 3
    assert workspaces(traced(torch.nn.Conv2d(3, 16, 3), 2, 3, 10, 10)) == [operands] * 2


@pytest.mark.parametrize("kernel_size", [3, (1, 5)])
def test_a_depthwise_convolution_takes_none(kernel_size) -> None:
    """Torch has a kernel of its own."""
    module = torch.nn.Conv2d(8, 16, kernel_size, groups=8)
    assert workspaces(traced(module, 2, 8, 10, 10)) == []


def test_the_host_takes_none() -> None:
    """The simulated GPU runs the operators of the CPU."""
    module = torch.nn.Sequential(
        torch.nn.Conv2d(8, 8, 3), torch.nn.Flatten(), torch.nn.Linear(32, 4)
    )
    trace = traced(module, 2, 8, 4, 4, target=TARGETS["host"])
    assert workspaces(trace) == []
    assert trace.releases == frozenset()


def test_trying_out_algorithms_empties_the_cache_once_for_each_shape() -> None:
    """Torch does so after the trials of a convolution that it has not seen before."""
    twice = torch.nn.Conv2d(8, 8, 3, padding=1)
    module = torch.nn.Sequential(twice, twice, torch.nn.Conv2d(8, 8, 5))
    target = replace(CUDA, benchmarks_convolutions=True)
    trace = traced(module, 2, 8, 10, 10, target=target, num_steps=2)
    forward = [p for p in trace.releases if trace.trace.events[p - 1].phase == "forward"]
    assert len(forward) == 2
    assert all(trace.trace.events[p - 1].step == 0 for p in trace.releases)


def test_workspaces_lie_after_the_result_and_before_the_next_operator() -> None:
    """So that operands and result are held beside them."""
    module = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.ReLU())
    events = traced(module, 2, 8, 10, 10).trace.events
    names = [e.operator for e in events if e.phase == "forward" and e.num_bytes > 0]
    assert names[:3] == [
        "aten.convolution.default",
        "aten.convolution.default",
        "aten.relu.default",
    ]


def test_the_order_in_which_autocast_drops_its_weights_does_not_matter() -> None:
    """It goes by address, and would keep two traces from being compared."""
    module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(9)))
    step = FakeStep(module, torch.zeros(4, 8))
    how = {"precision": "bf16-mixed", "record_operators": True, "num_steps": 1}
    traces = [with_workspaces(step.run(rows=rows, **how), CUDA).trace for rows in (4, 8, 16)]
    order = [[event.storage for event in trace.events] for trace in traces]
    assert order[0] == order[1] == order[2]

"""An optimizer that calls its closure while it updates is repeated whole, or raises as before it."""

from __future__ import annotations

import pytest
import torch

from lightning_oom.recovery.classify import classify_oom
from lightning_oom.recovery.interleaved import InterleavedGuard, is_interleaved
from lightning_oom.recovery.snapshot import RandomState, Snapshot
from lightning_oom.testing import fail_at


def _train(*, steps=3, fault=None, at=1, guard=True):
    """Fit four rows by LBFGS; return parameters, state, what was reported and how often it ran."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    rows = torch.randn(8, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=2)
    reports: list[str] = []
    if guard:
        InterleavedGuard(
            optimizer,
            snapshot=Snapshot([RandomState()]),
            classify=classify_oom,
            release=lambda: None,
            report=reports.append,
        ).install()

    def closure():
        optimizer.zero_grad()
        loss = (model(rows) + 0.01 * torch.randn(8, 1)).square().mean()
        loss.backward()
        return loss

    for step in range(steps):
        if fault is not None and step == at:
            with fault:
                optimizer.step(closure)
        else:
            optimizer.step(closure)
    state = optimizer.state[next(iter(optimizer.state))]
    return [p.detach().clone() for p in model.parameters()], state, reports


def _same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        # how often the closure was called is counted by the optimizer itself
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return a == b


@pytest.mark.parametrize("at", [0, 1])
def test_every_allocation_of_a_step_may_fail(at):
    """Parameters and state end bit-equal, random numbers are drawn once."""
    wanted = _train()[:2]
    probe = fail_at(())
    _train(fault=probe, at=at)
    assert probe.count > 50

    for n in range(1, probe.count + 1, 3):
        fault = fail_at(n)
        *got, reports = _train(fault=fault, at=at)
        assert fault.raised == 1
        assert _same(list(wanted), got), f"allocation {n}: {fault.trace[n - 1]}"
        # a fault in the guard's own copies ends in no repetition of the step
        assert len(reports) <= 1


def test_a_step_that_fails_twice_leaves_everything_as_before():
    """Parameters and state are those before the step; the note says so."""
    before = _train(steps=1)[:2]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    rows = torch.randn(8, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=2)
    InterleavedGuard(
        optimizer,
        snapshot=Snapshot([RandomState()]),
        classify=classify_oom,
        release=lambda: None,
        report=lambda text: None,
    ).install()
    calls = []

    def closure():
        calls.append(True)
        if len(calls) > 4 and len(calls) % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        optimizer.zero_grad()
        loss = (model(rows) + 0.01 * torch.randn(8, 1)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    del calls[4:]
    while len(calls) < 4:
        calls.append(True)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        optimizer.step(closure)

    assert any("as before the step" in note for note in raised.value.__notes__)
    state = optimizer.state[next(iter(optimizer.state))]
    assert _same([before[0], before[1]], [[p.detach() for p in model.parameters()], state])


def test_only_such_optimizers_are_meant():
    """LBFGS is, AdamW is not."""
    weight = torch.nn.Parameter(torch.zeros(2))

    assert is_interleaved(torch.optim.LBFGS([weight]))
    assert not is_interleaved(torch.optim.AdamW([weight]))

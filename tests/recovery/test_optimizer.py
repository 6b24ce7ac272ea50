"""An optimizer step that runs out of memory is finished exactly, or raises with nothing moved."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from lightning_oom import errors
from lightning_oom.recovery.optimizer import OptimizerGuard, is_guardable
from lightning_oom.testing import fail_at, memory_limit

CPU = torch.device("cpu")


def _optimizers():
    """Return name -> factory for every kind of torch optimizer that updates in one go."""
    o = torch.optim
    kinds = {
        "sgd": (o.SGD, {"lr": 0.1}),
        "sgd_momentum": (o.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        "sgd_decay": (o.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        "adam": (o.Adam, {"lr": 0.01}),
        "adam_decay": (o.Adam, {"lr": 0.01, "weight_decay": 0.1}),
        "adam_amsgrad": (o.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
        "adamw": (o.AdamW, {"lr": 0.01}),
        "nadam": (o.NAdam, {"lr": 0.01}),
        "radam": (o.RAdam, {"lr": 0.01}),
        "adamax": (o.Adamax, {"lr": 0.01}),
        "adagrad": (o.Adagrad, {"lr": 0.01}),
        "adadelta": (o.Adadelta, {"lr": 0.1}),
        "rmsprop": (o.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
        "rprop": (o.Rprop, {"lr": 0.01}),
        "asgd": (o.ASGD, {"lr": 0.01}),
    }
    made = {}
    for name, (kind, options) in kinds.items():
        for foreach in (False, True):
            made[f"{name}-{'foreach' if foreach else 'single'}"] = (
                kind,
                {**options, "foreach": foreach},
            )
    for name, kind, options in (
        ("adam-fused", o.Adam, {"lr": 0.01, "fused": True}),
        ("adamw-fused", o.AdamW, {"lr": 0.01, "fused": True}),
        ("sgd-fused", o.SGD, {"lr": 0.01, "momentum": 0.9, "fused": True}),
        ("adagrad-fused", o.Adagrad, {"lr": 0.01, "fused": True}),
        ("adafactor", o.Adafactor, {"lr": 0.01}),
    ):
        made[name] = (kind, options)
    return made


OPTIMIZERS = _optimizers()


def _run(kind, options, *, steps, guard=False, groups=1, fail=None):
    """Train three parameters for some steps; return parameters, state and the injected fault."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 3)]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    parts = [params] if groups == 1 else [params[:1], params[1:]]
    optimizer = kind([{"params": p} for p in parts], **options)
    reports: list[str] = []
    fault = None
    if guard:
        OptimizerGuard(optimizer, device=CPU, release=lambda: None, report=reports.append).install()
    for step in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        if fail is not None and step == fail[0]:
            with fail_at(fail[1]) as fault:
                optimizer.step()
        else:
            optimizer.step()
    state = [
        {k: v for k, v in sorted(optimizer.state[p].items())}
        for p in params
        if p in optimizer.state
    ]
    return [p.detach() for p in params], state, fault, reports


def _same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_allocation_of_an_update_may_fail(name, step, groups):
    """Whichever allocation of the update fails, parameters and state end bit-equal."""
    kind, options = OPTIMIZERS[name]
    wanted = (
        _run(kind, options, steps=3)[:2]
        if groups == 1
        else _run(kind, options, steps=3, groups=2)[:2]
    )
    *_, fault, _ = _run(kind, options, steps=3, groups=groups, guard=True, fail=(step, 10_000))
    for n in range(1, fault.count + 1):
        got = _run(kind, options, steps=3, groups=groups, guard=True, fail=(step, n))
        assert got[2].raised == 1
        assert _same(list(wanted), list(got[:2])), f"allocation {n}: {got[2].trace[n - 1]}"
        assert len(got[3]) == 1

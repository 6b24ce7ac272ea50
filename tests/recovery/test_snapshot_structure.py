"""A module that gets other children or parameters while it trains is looked at again."""

from __future__ import annotations

import torch
from torch import nn

from lightning_oom.recovery.snapshot import Structure


def _watched(module: nn.Module) -> tuple[Structure, list[str]]:
    told: list[str] = []
    return Structure(module, [lambda: told.append("changed")]), told


def test_followers_are_told_once_of_a_change_at_any_depth() -> None:
    """A child, a parameter and a parameter's replacement count; a step without a change does not."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    structure, told = _watched(model)

    structure.take()
    assert told == []
    for change in (
        lambda: model[0].append(nn.Linear(2, 2)),
        lambda: model[1].register_parameter("scale", nn.Parameter(torch.ones(1))),
        lambda: setattr(model[0][0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda: model[0].pop(1),
    ):
        told.clear()
        change()
        structure.take()
        structure.take()
        assert told == ["changed"]


def test_a_flag_or_a_value_is_no_change() -> None:
    """Freezing, modes and updates of values leave the tree as it is."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    structure, told = _watched(model)

    model.requires_grad_(False)
    model.eval()
    with torch.no_grad():
        model[0].weight.add_(1)
    structure.take()

    assert told == []


def test_what_an_attempt_makes_or_exchanges_is_undone() -> None:
    """New children go, exchanged parameters come back, in the same order and as the same objects."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    weight, relu = model[0].weight, model[1]
    structure, told = _watched(model)
    saved = structure.take()

    model.extra = nn.Linear(2, 2)
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    model[1] = nn.Tanh()

    assert saved.restore() == ()
    assert [name for name, _ in model.named_children()] == ["0", "1"]
    assert model[0].weight is weight
    assert model[1] is relu
    structure.take()
    assert told == []


def test_a_later_follower_is_told_too() -> None:
    """``follow`` adds one."""
    model = nn.Sequential(nn.Linear(2, 2))
    structure, told = _watched(model)
    structure.follow(lambda: told.append("later"))

    model.append(nn.ReLU())
    structure.take()

    assert told == ["changed", "later"]

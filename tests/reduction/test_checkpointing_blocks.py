"""Which modules are blocks: repeated ones, whole, and those that a user names."""

from __future__ import annotations

import pytest
import torch
from checkpoint_cases import CASES, make
from torch import nn

from lightning_oom.reduction.checkpointing import block_levels, find_blocks, match_blocks


class Part(nn.Module):
    """Something with a child and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Other(Part):
    """The same of another class."""


class Stage(nn.Module):
    """Blocks with something around them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.down = nn.Linear(2, 2)
        self.blocks = nn.Sequential(*blocks)


def conv_block() -> nn.Sequential:
    """As people write them without a class."""
    return nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU())


def paths(blocks) -> list[str]:
    """Their names."""
    return [block.path for block in blocks]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(2, 2), Part(), Part()), ["1", "2"]),
        (
            nn.ModuleDict({"a": nn.ModuleList([Part()]), "b": nn.ModuleList([Part()])}),
            ["a.0", "b.0"],
        ),
        (nn.ModuleList([nn.Sequential(Part()), nn.Sequential(Part(), Other())]), ["0.0", "1.0"]),
        (nn.Sequential(Part(), Other()), []),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []),
        (nn.ModuleList([Stage(Part(), Part()), Stage(Part(), Part())]), ["0", "1"]),
        (Stage(Part(), Other(), Part()), ["blocks.0", "blocks.2"]),
        (nn.ModuleList([conv_block(), conv_block()]), ["0", "1"]),
        (nn.Sequential(nn.Linear(2, 2), conv_block(), conv_block()), ["1", "2"]),
        (nn.Sequential(conv_block(), nn.Linear(2, 2)), []),
    ],
)
def test_repeated_blocks_are_found(model, expected) -> None:
    """Outermost first, in containers side by side or inside one another."""
    assert paths(find_blocks(model)) == expected


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_known_models(case: str) -> None:
    """The layers of each."""
    count = {"t5": 4, "spectral norm": 2, "lstm": 2}.get(case, 3)
    assert len(find_blocks(make(case))) == count


def test_levels_go_from_stages_to_parts() -> None:
    """A level for each depth at which something repeats."""
    model = nn.ModuleList([Stage(Part(), Part()), Stage(Part(), Other())])
    assert [paths(level) for level in block_levels(model)] == [
        ["0", "1"],
        ["0.blocks.0", "0.blocks.1", "1"],
    ]
    assert block_levels(nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["Part"], ["0.blocks.0", "0.blocks.1"]),
        (["P?rt", "1"], ["0.blocks.0", "0.blocks.1", "1"]),
        (["*.blocks.0"], ["0.blocks.0"]),
        (["0.*"], ["0.down", "0.blocks"]),
        ([nn.Linear], ["0.down", "0.blocks.0.linear", "0.blocks.1.linear", "1"]),
        ([nn.Module], ["0", "1"]),
        (["Stage", "Linear"], ["0", "1"]),
    ],
)
def test_named_modules_are_found(patterns, expected) -> None:
    """By class name, path and class; what is inside of a match is part of it."""
    model = nn.ModuleList([Stage(Part(), Part()), nn.Linear(2, 2)])
    assert paths(match_blocks(model, patterns)) == expected


def test_a_list_of_modules_stands_for_its_members() -> None:
    """It is never called itself."""
    model = nn.ModuleDict({"layers": nn.ModuleList([Part(), Other()])})
    assert paths(match_blocks(model, ["layers"])) == ["layers.0", "layers.1"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
def test_compiled_models_are_named_as_plain_ones() -> None:
    """The path may leave out what compilation adds."""
    model = nn.ModuleDict({"net": torch.compile(nn.Sequential(Part(), Part()))})
    assert paths(match_blocks(model, ["net.1"])) == ["net._orig_mod.1"]
    assert paths(find_blocks(model)) == ["net._orig_mod.0", "net._orig_mod.1"]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["part"], "'part'. Near: 'Part'"),
        (["Part", "blocks.9"], "'blocks.9'. Near: 'blocks"),
        ([nn.LSTM], "'LSTM'. Classes with parts of their own: 'Sequential', 'Part'"),
    ],
)
def test_no_match_lists_what_comes_near(patterns, message) -> None:
    """Each pattern must match."""
    with pytest.raises(ValueError, match=message):
        match_blocks(Stage(Part(), Part()), patterns)

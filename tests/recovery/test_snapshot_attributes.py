# ruff: noqa: S311 - generators of user code
"""What user code keeps on modules: put back in place, without keeping alive what a step frees."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pluggy
import pytest
import torch
from torch import nn

from lightning_oom.recovery.snapshot import Attributes, merge_attributes

Pair = namedtuple("Pair", "first second")  # noqa: PYI024 - as user code has it


class AverageMeter:
    """What half of all training scripts define."""

    def __init__(self) -> None:
        self.total, self.count, self.history = 0.0, 0, []

    def update(self, value: float) -> None:
        """Count one value."""
        self.total += value
        self.count += 1
        self.history.append(value)


class Shouts(OrderedDict):
    """A dictionary that forbids its own methods, as some model outputs do."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Forbidden."""
        raise RuntimeError("no update")

    clear = update


class Model(nn.Module):
    """Keeps one of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.counter, self.average, self.stage, self.flag = 3, 0.5, "warm", True
        self.losses, self.window = [1.0], deque([1, 2, 3], maxlen=3)
        self.by_name = {"loss": [1.0], "nested": {"n": 1}}
        self.counts, self.groups = Counter(a=1), defaultdict(list, a=[1])
        self.ordered, self.output = OrderedDict(x=1, y=2), Shouts(a=1)
        self.seen = {1, 2}
        self.raw = bytearray(b"abc")
        self.small = torch.zeros(2)
        self.tensors = [torch.zeros(1)]
        self.pair = Pair(torch.zeros(1), [0])
        self.array = np.zeros(2)
        self.meter = AverageMeter()
        self.space = SimpleNamespace(n=1)
        self.python_rng = random.Random(1)
        self.torch_rng = torch.Generator()
        self.numpy_rng = np.random.default_rng(1)
        self.legacy_rng = np.random.RandomState(1)
        self.forgotten = "soon"


def attempt(model: Model) -> list[float]:
    """Change everything, and return what the generators drew."""
    model.counter += 1
    model.average = 0.9 * model.average
    model.stage, model.flag = "cold", False
    model.losses.append(2.0)
    model.window.append(4)
    model.by_name["loss"].append(2.0)
    model.by_name["nested"]["n"] = 2
    model.by_name["new"] = 1
    model.counts["b"] += 1
    model.groups["b"].append(1)
    model.ordered.move_to_end("x")
    dict.__setitem__(model.output, "a", 2)
    model.seen.add(3)
    model.raw.extend(b"d")
    model.small.add_(1)
    model.tensors[0].add_(1)
    model.pair.first.add_(1)
    model.pair.second.append(1)
    model.array += 1
    model.meter.update(1.0)
    model.space.n = 2
    del model.forgotten
    model.fresh = 1
    model.layer.eval()
    return [
        model.python_rng.random(),
        float(torch.rand((), generator=model.torch_rng)),
        float(model.numpy_rng.random()),
        float(model.legacy_rng.rand()),
    ]


def test_everything_comes_back_in_place() -> None:
    """The same objects hold the same contents, after each of several attempts."""
    model = Model()
    objects = {name: id(value) for name, value in vars(model).items()}
    before = repr({k: v for k, v in vars(model).items() if "rng" not in k and k != "meter"})
    saved = Attributes(model).take()
    drawn = [attempt(model)]

    for _ in range(2):
        assert saved.restore() == ()
        assert {name: id(value) for name, value in vars(model).items()} == objects
        assert before == repr(
            {k: v for k, v in vars(model).items() if "rng" not in k and k != "meter"}
        )
        assert vars(model.meter) == {"total": 0.0, "count": 0, "history": []}
        assert model.layer.training
        drawn.append(attempt(model))
    assert drawn[0] == drawn[1] == drawn[2]


def test_modules_of_a_users_class_count_torchs_own_do_not() -> None:
    """A counter on a child of a user's class is state, one on ``nn.Linear`` is not looked at."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

    model = nn.Sequential(Block(), nn.Linear(1, 1))
    saved = Attributes(model).take()
    model[0].calls += 1

    saved.restore()

    assert model[0].calls == 0


def test_a_graph_dies_when_it_would_without_a_snapshot() -> None:
    """``self.last_loss`` of the step before is freed when the step overwrites it."""
    model = Model()
    weight = torch.ones(2, requires_grad=True)
    model.last_loss = (weight * 2).sum()
    model.outputs = {"loss": model.last_loss}
    node = weakref.ref(model.last_loss)
    attributes = Attributes(model)
    saved = attributes.take()

    model.last_loss = torch.zeros(())
    model.outputs = {}

    gc.collect()
    assert node() is None
    assert saved.restore() == ()
    assert float(model.last_loss.detach()) == 4.0
    assert not model.last_loss.requires_grad
    assert float(model.outputs["loss"]) == 4.0


def test_a_graph_that_lives_is_given_back_itself() -> None:
    """Where the attempt did not overwrite it, the very tensor stays."""
    model = Model()
    model.last_loss = (torch.ones(2, requires_grad=True) * 2).sum()
    before = model.last_loss
    saved = Attributes(model).take()

    saved.restore()

    assert model.last_loss is before
    assert before.grad_fn is not None


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor,
        lambda tensor: [tensor],
        lambda tensor: {"logits": tensor, "n": 1},
        lambda tensor: Pair(tensor, 1),
        lambda tensor: SimpleNamespace(logits=tensor),
        lambda tensor: Shouts(logits=tensor),
        lambda tensor: tensor[0, 0],
    ],
    ids=["tensor", "list", "dict", "named tuple", "object", "dict of its own kind", "view"],
)
def test_a_large_tensor_is_not_kept_alive(keep: Any) -> None:
    """However it is kept: overwritten in the step means freed in the step."""
    model = Model()
    big = torch.zeros(200, 200)
    storage = weakref.ref(big)
    model.kept = keep(big)
    del big
    view = isinstance(model.kept, torch.Tensor) and model.kept.ndim == 0
    watched = weakref.ref(model.kept) if view else storage
    saved = Attributes(model).take()

    model.kept = None

    gc.collect()
    assert watched() is None
    assert bool(saved.restore()) is not view  # the view's own value is small, and was copied


def test_a_large_tensor_that_lives_comes_back() -> None:
    """Held elsewhere, or not overwritten; written to in place it is named."""
    model = Model()
    model.bank = big = torch.zeros(200, 200)
    saved = Attributes(model).take()
    model.bank = torch.ones(1)

    assert saved.restore() == ()
    assert model.bank is big

    model.bank.add_(1)
    assert saved.restore() == ("bank",)


def test_ignored_names_stay_as_the_attempt_left_them() -> None:
    """For attributes that user code overwrites before it reads them."""
    model = Model()
    saved = Attributes(model, ignore=("counter",)).take()
    model.counter = 10

    saved.restore()

    assert model.counter == 10


def test_cycles_end() -> None:
    """Objects and containers may refer to each other."""
    model = Model()
    model.meter.owner = model.meter
    model.ring = []
    model.ring.append(model.ring)
    saved = Attributes(model).take()
    model.meter.count = 9
    model.ring.append(1)

    assert saved.restore() == ()

    assert model.meter.count == 0
    assert len(model.ring) == 1


def test_objects_of_installed_libraries_are_left_alone() -> None:
    """Half of a connection or a tracker's run rolled back would be broken."""
    model = Model()
    model.plugins = pluggy.PluginManager("before")
    saved = Attributes(model).take()
    model.plugins.project_name = "after"

    assert saved.restore() == ()

    assert model.plugins.project_name == "after"


def test_long_containers_get_their_entries_back() -> None:
    """Lists and dictionaries of thousands of entries are copied one level deep."""
    model = Model()
    model.all_losses = [float(i) for i in range(5000)]
    model.vocabulary = {str(i): i for i in range(5000)}
    saved = Attributes(model).take()
    model.all_losses[3] = -1.0
    model.vocabulary["3"] = -1

    saved.restore()

    assert model.all_losses[3] == 3.0
    assert model.vocabulary["3"] == 3


def split_step(model: Any, rows: list[int], step: Any) -> None:
    """Run ``step(rows)`` per micro-batch and merge."""
    saved, counted = Attributes(model).take(), []
    for count in rows:
        step(count)
        counted.append(saved.counters())
    merge_attributes(saved, counted, rows)


@pytest.mark.parametrize("rows", [[2, 2], [3, 2], [1, 1, 1]])
def test_counters_and_lists_are_those_of_one_step(rows: list[int]) -> None:
    """Steps count once, samples count in full, a list gets one joined entry."""
    model = Model()
    model.samples, model.per_sample = 0, []

    def step(count: int) -> None:
        model.counter += 1
        model.by_name["nested"]["n"] += 1
        model.samples += 7 * count
        model.losses.append(float(10 * count + 0.5))
        model.by_name["loss"].append(torch.tensor(1.5))
        model.tensors.append(torch.full((count,), 2.0))

    split_step(model, rows, step)

    total = sum(rows)
    assert model.counter == 4
    assert model.by_name["nested"]["n"] == 2
    assert len(model.losses) == 2
    assert model.losses[1] == pytest.approx(sum(c * (10 * c + 0.5) for c in rows) / total)
    assert len(model.by_name["loss"]) == 2
    assert model.tensors[1].shape == (total,)


def test_counts_of_rows_stay() -> None:
    """A number that grew by the rows of each micro-batch is right already."""
    model = Model()

    def step(count: int) -> None:
        model.counter += count

    split_step(model, [2, 2], step)

    assert model.counter == 7


def test_one_entry_per_row_stays() -> None:
    """A list that grew by every row is right already."""
    model = Model()

    def step(count: int) -> None:
        model.losses.extend([1.0] * count)

    split_step(model, [3, 2], step)

    assert len(model.losses) == 6


def test_a_later_snapshot_invalidates_an_earlier_one() -> None:
    """Its copies are overwritten, so restoring would be silently wrong."""
    attributes = Attributes(Model())
    saved = attributes.take()
    attributes.take()

    with pytest.raises(RuntimeError, match="later snapshot"):
        saved.restore()

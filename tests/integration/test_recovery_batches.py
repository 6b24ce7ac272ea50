"""Oversized batches are split and lose nothing; batches that cannot be cut say so."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from fakes import ListLogger, TinyRegressor, batches_of
from fits import end_state, fit, notes_of, recovery
from states import compare
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from lightning_oom import OOMRecovery
from lightning_oom._torch import OutOfMemoryError
from lightning_oom.errors import BatchSplitError

ROUNDING = 1e-5


def limited() -> TinyRegressor:
    """A model that trains on at most 8 rows at once."""
    return TinyRegressor(fits_rows=8)


@pytest.mark.parametrize("rung", ["chunk", "split"])
def test_rare_oversized_batches_are_split_not_dropped(rung):
    """Three batches of 200 are four times too large; every step and row is trained (PL#8531)."""
    rows = [8] * 200
    for position in (20, 100, 199):
        rows[position] = 32
    guard = recovery(ladder=(rung,))

    expected, _ = fit(TinyRegressor, batches_of(rows))
    actual, model = fit(limited, batches_of(rows), guard)

    assert actual.global_step == 200
    assert compare(end_state(expected), end_state(actual), tolerance=ROUNDING) == []
    assert guard.summary.num_oom >= 1
    assert guard.summary.num_recovered == guard.summary.num_oom
    if rung == "split":
        assert max(model.limit.refused.numbers) == 32
        assert guard.summary.num_failed_attempts <= 3  # 32, 16, and one size between 8 and 16


def test_the_second_oversized_batch_is_split_before_it_fails():
    """What was learned from one failure is used for the next batch of the same kind.

    Where no peaks can be read, one size between what fitted and what failed is tried once.
    """
    guard = recovery(ladder=("split",))

    _, model = fit(limited, batches_of([8, 32, 8, 32, 32, 32]), guard)

    assert guard.summary.num_oom <= 2
    assert max(model.rows_seen.numbers[-4:]) <= 8
    assert model.rows_seen.numbers[:2] == [8, 32]
    assert 32 not in model.rows_seen.numbers[2:]


def test_pieces_are_balanced():
    """Nine rows at most eight together run as five and four."""
    _, model = fit(TinyRegressor, batches_of([9]), recovery(ladder=("split",), max_rows=8))

    assert model.rows_seen.numbers[-2:] == [5, 4]


def test_at_most_max_rows_run_together_from_the_first_step_on():
    """``max_rows`` splits without waiting for a failure, and the result is that of the whole."""
    guard = recovery(ladder=("split",), max_rows=3)

    expected, _ = fit(TinyRegressor, batches_of([8, 8, 7, 2]))
    actual, model = fit(TinyRegressor, batches_of([8, 8, 7, 2]), guard)

    assert compare(end_state(expected), end_state(actual), tolerance=ROUNDING) == []
    assert guard.summary.num_oom == 0
    assert model.rows_seen.numbers[-7:] == [3, 3, 2, 3, 2, 2, 2]


def test_a_single_row_that_does_not_fit_ends_with_the_original_error():
    """A batch of one cannot be made smaller: torch's error, with a note that says what was tried."""
    with pytest.raises(OutOfMemoryError, match="Tried to allocate") as caught:
        fit(lambda: TinyRegressor(fits_rows=0), batches_of([1]), recovery())

    assert "lightning_oom" in notes_of(caught.value)
    assert "release" in notes_of(caught.value)


class Pair(NamedTuple):
    """A named tuple batch."""

    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Example:
    """A dataclass batch."""

    x: Tensor
    y: Tensor
    name: str = "example"


class Encoding(UserDict):
    """A mapping that is no dict, like a tokenizer's output."""


def rows_of(count: int, features: int = 8) -> tuple[Tensor, Tensor]:
    """Features and targets, fixed."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, features, generator=generator)
    return x, x.sum(-1)


def pad(rows: list[Tensor]) -> Tensor:
    """Rows of unequal length as one tensor."""
    return torch.stack([nn.functional.pad(row, (0, 8 - len(row))) for row in rows])


X, Y = rows_of(12)
X2, Y2 = rows_of(2)
X9, Y9 = rows_of(9)

CUTTABLE: dict[str, tuple[Any, Any]] = {
    "tensor": (torch.cat([X, Y[:, None]], 1), lambda b: (b[:, :8], b[:, 8])),
    "pair": ((X, Y), lambda b: b),
    "list": ([X, Y], lambda b: b),
    "dict": ({"x": X, "y": Y}, lambda b: (b["x"], b["y"])),
    "nested": ({"in": {"x": X}, "out": [Y]}, lambda b: (b["in"]["x"], b["out"][0])),
    "namedtuple": (Pair(X, Y), lambda b: (b.x, b.y)),
    "dataclass": (Example(X, Y), lambda b: (b.x, b.y)),
    "userdict": (Encoding(x=X, y=Y), lambda b: (b["x"], b["y"])),
    "strings": ({"x": X, "y": Y, "id": [str(i) for i in range(12)]}, lambda b: (b["x"], b["y"])),
    "one string": ({"x": X, "y": Y, "split": "train"}, lambda b: (b["x"], b["y"])),
    "none": ({"x": X, "y": Y, "mask": None}, lambda b: (b["x"], b["y"])),
    "scalar": (
        {"x": X, "y": Y, "scale": torch.tensor(1.0)},
        lambda b: (b["x"] * b["scale"], b["y"]),
    ),
    "ragged list": (
        ([X[i, : 8 - i % 3] for i in range(12)], Y),
        lambda b: (pad(b[0]), b[1]),
    ),
    "detection": (
        ([X[i, : 8 - i % 3] for i in range(12)], [{"area": Y[i : i + 1]} for i in range(12)]),
        lambda b: (pad(b[0]), torch.cat([target["area"] for target in b[1]])),
    ),
    "two rows as a pair": ((X2, Y2), lambda b: b),
    "nine rows": ((X9, Y9), lambda b: b),
    "packed": (
        (pack_sequence([row[:, None] for row in X]), Y),
        lambda b: (torch.nn.utils.rnn.pad_packed_sequence(b[0], batch_first=True)[0][..., 0], b[1]),
    ),
}


class AnyBatch(TinyRegressor):
    """Reads ``(x, y)`` out of a batch of any shape."""

    def __init__(self, read: Any, fits_rows: int | None = None) -> None:
        super().__init__(fits_rows=fits_rows)
        self.read = read

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Read, then train as usual; the number of rows is that of ``x``."""
        x, y = self.read(batch)
        self.rows_seen.add(len(x))
        loss = self.loss((x, y))
        self.log(
            "train_loss", loss, batch_size=len(x)
        )  # Lightning cannot tell it from all of these
        return loss


@pytest.mark.parametrize("name", CUTTABLE)
def test_a_batch_of_any_shape_is_cut_into_rows(name):
    """Each structure is cut along its rows and gives the step of the whole (MC#833, MC#1906)."""
    batch, read = CUTTABLE[name]
    fits = 1 if name == "two rows as a pair" else 5
    loader = DataLoader([batch] * 2, batch_size=None, collate_fn=lambda b: b)

    expected, _ = fit(lambda: AnyBatch(read), loader)
    guard = recovery(ladder=("split",))
    actual, model = fit(lambda: AnyBatch(read, fits), loader, guard)

    found = compare(
        end_state(expected)["weights"], end_state(actual)["weights"], tolerance=ROUNDING
    )
    assert found == []
    assert guard.summary.num_recovered == guard.summary.num_oom == 1
    assert model.limit.refused.numbers.count(max(model.limit.refused.numbers)) == 1


UNCUTTABLE = {
    "disagree": ({"x": X, "y": Y[:7]}, r"x.*y|y.*x"),
    "shared mask": ({"x": X, "y": Y, "mask": torch.ones(8, 8)}, "mask"),
}


def read_dict(batch: Any) -> tuple[Tensor, Tensor]:
    """As many targets as rows, whatever was given."""
    return batch["x"], batch["y"].sum().expand(len(batch["x"]))


@pytest.mark.parametrize("name", UNCUTTABLE)
def test_a_batch_that_cannot_be_cut_says_where_and_how_to_help(name):
    """The error names the paths and ``split_fn``, and the OOM is its cause (MC#588)."""
    batch, paths = UNCUTTABLE[name]
    loader = DataLoader([batch], batch_size=None)

    with pytest.raises(BatchSplitError, match=paths) as caught:
        fit(lambda: AnyBatch(read_dict, 5), loader, recovery(ladder=("split",)))

    assert "split_fn" in notes_of(caught.value)
    assert isinstance(caught.value.__cause__, OutOfMemoryError)


@pytest.mark.parametrize("name", UNCUTTABLE)
def test_a_batch_that_cannot_be_cut_trains_while_it_fits(name):
    """An unsplittable batch matters only when a split is needed (MC#588)."""
    loader = DataLoader([UNCUTTABLE[name][0]] * 3, batch_size=None)

    expected, _ = fit(lambda: AnyBatch(read_dict), loader)
    actual, _ = fit(lambda: AnyBatch(read_dict), loader, recovery())

    assert compare(end_state(expected), end_state(actual)) == []


def cut_pair(batch: Any, max_rows: int) -> list[Any]:
    """Cut what the package cannot: the mask belongs to every row."""
    starts = range(0, len(batch["x"]), max_rows)
    return [
        {
            "x": batch["x"][s : s + max_rows],
            "y": batch["y"][s : s + max_rows],
            "mask": batch["mask"],
        }
        for s in starts
    ]


class OwnSplit(AnyBatch):
    """A module that cuts its own batches."""

    def split_batch(self, batch: Any, max_rows: int) -> list[Any]:
        """Cut along the rows of ``x``."""
        return cut_pair(batch, max_rows)


@pytest.mark.parametrize(
    ("make", "guard"),
    [
        (
            lambda read, rows=None: AnyBatch(read, rows),
            lambda: recovery(ladder=("split",), split_fn=cut_pair),
        ),
        (lambda read, rows=None: OwnSplit(read, rows), lambda: recovery(ladder=("split",))),
    ],
    ids=["split_fn", "method"],
)
def test_a_user_can_say_how_a_batch_is_cut(make, guard):
    """``split_fn=`` or a ``split_batch`` method cuts what the package would refuse."""
    loader = DataLoader([UNCUTTABLE["shared mask"][0]] * 2, batch_size=None)

    def read(batch: Any) -> tuple[Tensor, Tensor]:
        return batch["x"], batch["y"]

    expected, _ = fit(lambda: make(read), loader)
    actual, _ = fit(lambda: make(read, 6), loader, guard())

    assert (
        compare(end_state(expected)["weights"], end_state(actual)["weights"], tolerance=ROUNDING)
        == []
    )


class Popping(TinyRegressor):
    """Takes its targets out of the batch, as code written for transformers does."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Pop, then train."""
        targets = batch.pop("y")
        return super().training_step((batch["x"], targets), batch_idx)


@pytest.mark.parametrize("ladder", [("release",), ("split",), ("chunk",)])
def test_a_step_that_empties_its_batch_can_be_repeated(ladder):
    """The retry gets the containers as they were before the failed attempt took things out."""

    class FailsOnce(Popping):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            self.limit.rows = 8 if not self.limit.refused.numbers else None
            return super().training_step(batch, batch_idx)

    def loader() -> DataLoader:
        return DataLoader([{"x": X, "y": Y}, {"x": X, "y": Y}], batch_size=None)

    expected, _ = fit(Popping, loader())
    actual, _ = fit(FailsOnce, loader(), recovery(ladder=ladder))

    assert compare(end_state(expected), end_state(actual), tolerance=ROUNDING) == []


def test_a_batch_of_one_is_trained_as_before():
    """Batches of one row pass through, with and without an error to survive."""
    expected, _ = fit(TinyRegressor, batches_of([1, 1, 1]))
    actual, _ = fit(TinyRegressor, batches_of([1, 1, 1]), OOMRecovery(verbose=False))

    assert compare(end_state(expected), end_state(actual)) == []


def test_the_logger_gets_one_row_a_step_with_the_recovery_in_it():
    """``oom/*`` keys reach every logger of the trainer; the user's own rows stay as they are."""
    loggers = [ListLogger(), ListLogger()]

    fit(limited, batches_of([8, 32, 8]), recovery(ladder=("split",)), logger=loggers)

    for logger in loggers:
        assert len(logger.values("train_loss_step")) == 3
        assert logger.values("oom/recovered")[-1] == 1
        assert logger.values("oom/attempts")[0] >= 2
        assert logger.values("oom/rows_per_micro_batch")[0] <= 8
        assert logger.values("oom/wasted_seconds")[0] > 0

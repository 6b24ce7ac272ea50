"""Composition, batches and parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_oom.recovery.snapshot import (
    Attributes,
    BatchContainers,
    Buffers,
    ParameterVersions,
    RandomState,
    Snapshot,
)


class Recorded:
    """A part that writes down when it is taken and put back."""

    def __init__(self, name: str, diary: list[str], error: Exception | None = None) -> None:
        self.name, self.diary, self.error = name, diary, error
        self.held_bytes = 3

    def take(self) -> Recorded:
        """Write it down."""
        self.diary.append(f"take {self.name}")
        return self

    def learn(self, saved: Recorded) -> None:
        """Write it down."""
        self.diary.append(f"learn {self.name}")

    def restore(self) -> tuple[str, ...]:
        """Write it down, or fail."""
        self.diary.append(f"restore {self.name}")
        if self.error is not None:
            raise self.error
        return (f"{self.name} lost",)


def test_parts_are_put_back_in_reverse() -> None:
    """What was taken last is put back first; what is lost is listed."""
    diary: list[str] = []
    snapshot = Snapshot([Recorded("a", diary), Recorded("b", diary)])
    saved = snapshot.take()

    assert saved.restore() == ("b lost", "a lost")

    assert diary == ["take a", "take b", "restore b", "restore a"]
    assert snapshot.held_bytes == 6


def test_a_part_that_fails_does_not_stop_the_others() -> None:
    """It is named with its error."""
    diary: list[str] = []
    saved = Snapshot([Recorded("a", diary), Recorded("b", diary, ValueError("no"))]).take()

    assert saved.restore() == ("Recorded (ValueError: no)", "a lost")


def test_parts_that_can_learn_are_shown_what_changed() -> None:
    """Others are left alone."""
    diary: list[str] = []
    saved = Snapshot([RandomState(), Recorded("a", diary)]).take()

    saved.learn()

    assert diary == ["take a", "learn a"]


def test_the_state_of_one_part_can_be_had() -> None:
    """By the part itself; another part is an error."""
    batch = BatchContainers([torch.zeros(1)])
    saved = Snapshot([RandomState(), batch]).take()

    assert len(saved.of(batch).fresh()) == 1
    with pytest.raises(KeyError, match="RandomState"):
        saved.of(RandomState())


def test_a_step_that_failed_anywhere_starts_again_from_the_same_state() -> None:
    """All parts together, around a training step with randomness and a norm layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model.__class__ = type("Model", (nn.Sequential,), {})
    model.steps = 0
    snapshot = Snapshot(
        [RandomState(), Buffers(model), Attributes(model), ParameterVersions(model)]
    )
    x = torch.randn(8, 3)
    saved = snapshot.take()
    outputs = []
    for _ in range(3):
        model.steps += 1
        outputs.append(model(x) + model.steps)
        assert saved.restore() == ()

    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_a_popped_key_is_there_again() -> None:
    """Containers are copied at any depth, tensors are not."""
    x = torch.zeros(2)
    batch = {"x": x, "more": [{"y": torch.ones(2)}]}
    saved = BatchContainers(batch).take()
    batch.pop("x")
    batch["more"][0].clear()

    first, second = saved.fresh(), saved.fresh()

    assert saved.restore() == ()
    assert first["x"] is x
    assert list(first["more"][0]) == ["y"]
    assert first is not second
    assert first["more"][0] is not second["more"][0]


def test_a_tensor_written_to_in_place_is_lost_unless_kept() -> None:
    """Host copies are made only where they are asked for."""
    batch = {"x": torch.full((2,), 8.0)}
    plain = BatchContainers(batch).take()
    kept = BatchContainers(batch, copy_tensors=True).take()
    batch["x"].div_(2)

    assert plain.moved() == plain.restore() == ("batch tensor 0 (2,)",)
    assert kept.restore() == ()
    assert batch["x"].tolist() == [8.0, 8.0]


def test_parameters_that_were_written_to_or_replaced_are_named() -> None:
    """Nothing is copied, so they cannot be put back."""
    layer = nn.Linear(2, 2)
    saved = ParameterVersions(layer).take()
    assert saved.restore() == ()
    with torch.no_grad():
        layer.weight.mul_(2)
    layer.bias = nn.Parameter(torch.zeros(2))

    assert saved.restore() == ("weight", "bias")

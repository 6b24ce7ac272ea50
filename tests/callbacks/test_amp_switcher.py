"""A switch equals what a user would have written by hand, and a way back leaves finite weights."""

from __future__ import annotations

import math

import pytest
import torch
from amp_cases import (
    ChangesAt,
    NotFinite,
    Watched,
    differences,
    oom_before,
    scaled,
    trained,
)
from fakes import TinyRegressor, batches_of, regression_loader
from fits import AtBatch, fit, quiet, weights

from lightning_oom import AMPSwitcher
from lightning_oom.errors import StepSkippedWarning
from lightning_oom.testing import memory_limit

OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"gradient_clip_val": 0.1}, id="clip by norm"),
    pytest.param(
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, id="clip by value"
    ),
    pytest.param({"accumulate_grad_batches": 2}, id="accumulate"),
    pytest.param(
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, id="accumulate and clip"
    ),
]


def switcher(**options):
    """The callback under test, silent."""
    return AMPSwitcher(verbose=False, **options)


def precisions(model):
    """What each training step was computed in."""
    return [precision for _, precision, _ in model.seen.rows]


# -- from the start
@pytest.mark.parametrize("options", OPTIONS)
def test_from_the_start_is_the_trainers_own_bfloat16(options):
    """Weights, optimizer, logs, validation, loops and random state, bit by bit."""
    _, expected_model, expected = trained(precision="bf16-mixed", **options)
    _, model, actual = trained(switcher(when="start"), **options)

    assert differences(expected, actual) == []
    assert model.seen.rows == expected_model.seen.rows
    assert model.validated.numbers == expected_model.validated.numbers == ["bf16-mixed"]


@pytest.mark.parametrize("options", OPTIONS)
def test_from_the_start_is_the_trainers_own_float16(options):
    """With a loss scaler."""
    _, _, expected = trained(plugins=scaled(), **options)
    _, model, actual = trained(switcher(when="start", precision="16-mixed"), **options)

    assert differences(expected, actual) == []
    assert {dtype for _, _, dtype in model.seen.rows} == {torch.float16}


def test_evaluation_is_in_the_same_precision():
    """As under the trainer's own flag; ``when="oom"`` leaves it alone."""
    for callback, expected in ((switcher(when="start"), "bf16-mixed"), (switcher(), "32-true")):
        model, trainer = Watched(), quiet(callback)
        trainer.validate(model, regression_loader(8), verbose=False)

        assert model.validated.numbers == [expected]
        assert trainer.precision == "32-true"


# -- after an OOM
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.1}])
def test_a_switch_after_an_oom_equals_a_change_by_hand(precision, clip):
    """From the next batch on, with weights and optimizer state in 32 bits as before."""
    make, guard = oom_before(3)
    _, _, expected = trained(ChangesAt(3, precision), **clip)
    callback = switcher(precision=precision)
    trainer, model, actual = trained(guard, callback, make=make, **clip)
    state = trainer.optimizers[0].state.values()

    assert guard.summary.num_recovered == 1
    assert differences(expected["rows"], actual["rows"]) == []
    assert differences(expected["optimizers"], actual["optimizers"]) == []
    assert differences([*expected["weights"].values()], [*actual["weights"].values()]) == []
    assert precisions(model)[:4] == ["32-true"] * 4
    assert set(precisions(model)[4:]) == {precision}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {v.dtype for group in state for v in group.values()} == {torch.float32}
    assert [(c.step, c.precision) for c in callback.changes] == [(3, precision)]
    assert "8 rows" in callback.changes[0].reason


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("failing", [3, 4])
def test_a_switch_waits_for_the_end_of_an_accumulation_window(precision, failing):
    """Gradients with and without a loss scale are never added up."""
    make, guard = oom_before(failing)
    _, _, expected = trained(ChangesAt(4, precision), accumulate_grad_batches=2)
    _, model, actual = trained(
        guard, switcher(precision=precision), make=make, accumulate_grad_batches=2
    )

    assert differences([*expected["weights"].values()], [*actual["weights"].values()]) == []
    assert precisions(model) == ["32-true"] * 5 + [precision] * 4


def test_nothing_happens_without_an_oom():
    """The run is the plain one."""
    _, _, expected = trained()
    callback = switcher()
    _, _, actual = trained(callback)

    assert differences(expected, actual) == []
    assert callback.changes == []


# -- by the used fraction
def wide():
    """Activations outweigh parameters."""
    return TinyRegressor(hidden=128)


@pytest.mark.parametrize(("times_the_peak", "switches"), [(1.25, True), (2.5, False)])
def test_a_peak_near_the_limit_switches(times_the_peak, switches):
    """Once it has passed at the end of a step, and not below it."""
    loader = batches_of([1024] * 4)
    callback = switcher(when=0.7)
    with memory_limit("1 GiB", device="cpu") as plain:
        fit(wide, loader)
    with memory_limit(int(times_the_peak * plain.peak_bytes), device="cpu"):
        fit(wide, loader, callback)

    expected = [(1, "bf16-mixed")] if switches else []
    assert [(change.step, change.precision) for change in callback.changes] == expected
    assert all("passed 70%" in change.reason for change in callback.changes)


# -- back
@pytest.mark.parametrize("where", ["loss", pytest.param("gradient", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_way_back_leaves_out_one_update(where, options):
    """Weights finite; that step changes neither weights nor optimizer; the rest runs in 32-bit."""
    window = options.get("accumulate_grad_batches", 1)
    bad, kept = 2, {}

    def keep(trainer, model):
        kept[trainer.global_step] = weights(model)

    callback = switcher(when="start")
    with pytest.warns(StepSkippedWarning, match="update of step 3 was left out.*rest of the run"):
        _, model, end = trained(
            callback,
            AtBatch(keep),
            make=lambda: NotFinite(bad, where=where),
            batches=12,
            **options,
        )

    assert all(torch.isfinite(value).all() for value in end["weights"].values())
    assert differences(kept[bad], kept[bad + 1]) == []
    assert all(differences(kept[n], kept[n + 1]) for n in kept if n + 1 in kept and n != bad)
    steps = {float(s["step"]) for s in end["optimizers"][0]["state"].values()}
    assert steps == {12 / window - 1}
    assert precisions(model) == ["bf16-mixed"] * 3 * window + ["32-true"] * (12 - 3 * window)
    assert [(c.step, c.precision) for c in callback.changes] == [(0, "bf16-mixed"), (3, "32-true")]


def test_a_way_back_may_last_for_some_steps():
    """Then mixed precision again, and back again when it is bad again."""
    callback = switcher(when="start", back_off_steps=2)
    with pytest.warns(StepSkippedWarning, match="for 2 steps") as told:
        _, model, _ = trained(callback, make=lambda: NotFinite(1, 6), batches=10)

    kinds = "".join("m" if p == "bf16-mixed" else "." for p in precisions(model))
    assert kinds == "mm..mmm..m"
    assert len([line for line in told if line.category is StepSkippedWarning]) == 2
    assert [change.step for change in callback.changes] == [0, 2, 4, 7, 9]


def test_a_scaler_may_leave_updates_out():
    """That is how it finds its scale; the run is that of Lightning's own float16."""
    callback = switcher(when="start", precision="16-mixed")
    _, _, expected = trained(make=lambda: NotFinite(2, 3, 5), plugins=scaled())
    _, model, actual = trained(callback, make=lambda: NotFinite(2, 3, 5))

    assert differences(expected, actual) == []
    assert set(precisions(model)) == {"16-mixed"}


def test_a_scaler_that_finds_no_scale_ends_in_32_bit():
    """After 17 halvings of 65536 the scale is below 1; the first of them is always needed here."""
    callback = switcher(when="start", precision="16-mixed")
    with pytest.warns(StepSkippedWarning, match=r"the loss scale fell to 0\.5"):
        _, model, end = trained(
            callback, make=lambda: NotFinite(1, always=True), batches=22, gradient_clip_val=1.0
        )

    assert precisions(model) == ["16-mixed"] * 17 + ["32-true"] * 5
    assert all(torch.isfinite(value).all() for value in end["weights"].values())


def test_without_a_watch_it_never_goes_back():
    """As under the trainer's own flag."""
    _, model, end = trained(
        switcher(when="start", watch=False), make=lambda: NotFinite(2, where="loss")
    )

    assert set(precisions(model)) == {"bf16-mixed"}
    assert math.isnan(float(next(iter(end["weights"].values())).sum()))


# -- words
def test_one_line_says_what_does_not_shrink(monkeypatch):
    """With the first change."""
    lines: list[str] = []
    monkeypatch.setattr("lightning_oom.callbacks.amp_switcher.rank_zero_info", lines.append)
    callback = AMPSwitcher(when="start", back_off_steps=2)
    with pytest.warns(StepSkippedWarning):
        trained(callback, make=lambda: NotFinite(1), batches=5)

    assert len(lines) == 3
    assert "weights, gradients and optimizer state stay in 32 bits" in lines[0]
    assert not any("stay in 32 bits" in line for line in lines[1:])
    assert "32-true from here on: a loss or gradient was not finite" in lines[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "32"}, "precision is one of 'auto'.*'32'"),
        ({"precision": "bf16-true"}, "precision is one of"),
        ({"when": "end"}, "when is 'oom', 'start' or a fraction.*'end'"),
        ({"when": 0.0}, r"\(0, 1\], got 0\.0"),
        ({"when": 1.5}, r"\(0, 1\], got 1\.5"),
        ({"when": True}, r"\(0, 1\], got True"),
        ({"when": None}, "got None"),
        ({"back_off_steps": 0}, "back_off_steps is at least 1.*got 0"),
        ({"back_off_steps": True}, "got True"),
        ({"back_off_steps": 1.5}, r"got 1\.5"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    """With the range and the value."""
    with pytest.raises(ValueError, match=message):
        AMPSwitcher(**options)

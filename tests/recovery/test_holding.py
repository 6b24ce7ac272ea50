"""Rungs that keep the batch whole: their order, what they add up to, and what is remembered."""

from __future__ import annotations

import contextlib

import pytest
from ladder_cases import oom_cause

from lightning_oom.recovery.batches import BatchSignature
from lightning_oom.recovery.holding import HoldingPolicy, HoldingRung, plan_again
from lightning_oom.recovery.knowledge import Knowledge
from lightning_oom.recovery.ladder import Ladder, ReleaseRung
from lightning_oom.recovery.plan import AttemptPlan, Failure, Trial
from lightning_oom.recovery.separability import Separability

SIGNATURE = BatchSignature(
    structure="tensor", shapes=((4,),), dtypes=("torch.float32",), elements_per_row=4
)


def _trial(rows=8, *, separable=True, **changes):
    verdict = Separability(
        separable=separable,
        largest_relative_difference=0.0,
        parameter=None,
        reason="fine" if separable else "rows depend on each other",
    )
    return Trial(
        rows=rows,
        signature=SIGNATURE,
        separability=lambda: verdict,
        chunk_gain=lambda: None,
        propose=lambda mode: rows,
        shrink=lambda mode, failed: None,
        **changes,
    )


def _fail(trial, plan):
    trial.failures.append(Failure(plan=plan, cause=oom_cause(), phase="forward", seconds=0.0))


def _rungs(**unavailable):
    checkpoint = HoldingRung(
        "checkpoint",
        contextlib.nullcontext,
        unavailable=lambda: unavailable.get("checkpoint"),
    )
    offload = HoldingRung(
        "offload",
        contextlib.nullcontext,
        unavailable=lambda: unavailable.get("offload"),
        before=[checkpoint],
    )
    return checkpoint, offload


def _walk(trial, rungs):
    """Fail every attempt until the ladder has no more; return what was tried, in words."""
    _fail(trial, AttemptPlan())
    ladder, tried = Ladder(rungs), []
    while (plan := ladder.next_plan(trial)) is not None:
        tried.append(plan.describe())
        _fail(trial, plan)
        assert len(tried) < 20
    return tried


def test_each_rung_tries_the_whole_batch_then_halves_and_then_both_together() -> None:
    """Checkpointing alone, with ever fewer rows, then checkpointing and offload in the same way."""
    trial = _trial(rows=4)

    assert _walk(trial, _rungs()) == [
        "checkpoint",
        "checkpoint + split into micro-batches of 2 rows",
        "checkpoint + split into micro-batches of 1 row",
        "checkpoint + offload",
        "checkpoint + offload + split into micro-batches of 2 rows",
        "checkpoint + offload + split into micro-batches of 1 row",
    ]
    assert trial.declined == {"checkpoint": "was not enough", "offload": "was not enough"}


@pytest.mark.parametrize(
    "changes",
    [{"separable": False}, {"split_refused": "no rows agree"}, {"can_split": False}, {"rows": 1}],
)
def test_a_batch_that_may_not_be_split_stays_whole(changes) -> None:
    """Where parts do not add up, or there are none, each rung has one attempt."""
    trial = _trial(**changes)

    assert _walk(trial, _rungs()) == ["checkpoint", "checkpoint + offload"]


def test_a_rung_that_is_not_available_says_why_and_is_left_out_of_later_ones() -> None:
    """Without blocks to checkpoint, offload stands alone."""
    trial = _trial(rows=1)

    assert _walk(trial, _rungs(checkpoint="no block was found")) == ["offload"]
    assert trial.declined["checkpoint"] == "no block was found"


def test_stages_without_a_backward_decline() -> None:
    """Validation holds nothing that checkpointing could give back."""
    trial = _trial(keeps_graph=False)

    assert _walk(trial, _rungs()) == []
    assert trial.declined["offload"] == "this stage keeps nothing for backward"


def test_micro_batches_below_a_rung_do_not_count_as_plain_ones() -> None:
    """What failed under checkpointing says nothing of how many rows fit without; nor in reverse."""
    trial = _trial()
    _fail(trial, _rungs()[0].plan(rows_together=2))

    assert trial.failed_rows("split") is None


def test_one_inexact_rung_makes_the_attempt_inexact() -> None:
    """Autocast after checkpointing is autocast."""
    checkpoint, _ = _rungs()
    amp = HoldingRung(
        "amp",
        contextlib.nullcontext,
        unavailable=lambda: None,
        exact=False,
        before=[checkpoint],
    )

    assert checkpoint.plan().exact
    assert not amp.plan().exact
    assert amp.plan().holding == ("checkpoint", "amp")


def test_what_was_needed_is_used_from_the_start_and_survives_a_checkpoint() -> None:
    """Larger batches start with it, smaller ones do not; a resumed run knows it too."""
    knowledge = Knowledge(margin_fraction=0.05)
    knowledge.training.holding.learn(32, "offload", 2)
    resumed = Knowledge(margin_fraction=0.05)
    resumed.load_state_dict(knowledge.state_dict())
    rungs = [ReleaseRung(), *_rungs()]

    plan = plan_again(resumed.training.holding, rungs, _trial(rows=8))

    assert plan is not None
    assert plan.describe() == "checkpoint + offload + split into micro-batches of 2 rows"
    assert plan_again(resumed.training.holding, rungs, _trial(rows=7)) is None
    assert plan_again(resumed.training.holding, [ReleaseRung()], _trial(rows=8)) is None
    assert plan_again(resumed.training.holding, rungs, _trial(rows=8, keeps_graph=False)) is None


def test_a_state_of_before_these_rungs_loads() -> None:
    """Checkpoints that know nothing of them are read as before."""
    state = Knowledge(margin_fraction=0.05).state_dict()
    del state["holding"]
    knowledge = Knowledge(margin_fraction=0.05)

    knowledge.load_state_dict(state)

    assert knowledge.training.holding.needs == {}


def test_the_plain_step_is_tried_again_ever_more_rarely() -> None:
    """After 100 uses, then after 200 more; when it fits, the need is forgotten."""
    policy = HoldingPolicy()
    policy.learn(8, "checkpoint", None)

    plain = [use for use in range(302) if policy.propose(8) is None]

    assert plain == [100, 301]
    policy.forget(8)
    assert policy.propose(8) is None
    assert policy.needs == {}

"""The ladder tries exact remedies first, and says why it stops."""

from __future__ import annotations

import pytest
from ladder_cases import oom_cause

from lightning_oom.memory import MemoryReading
from lightning_oom.recovery.chunked.chunk_gain import ChunkGain
from lightning_oom.recovery.ladder import ChunkRung, Ladder, ReleaseRung, SplitRung
from lightning_oom.recovery.plan import AttemptPlan, Failure, Trial
from lightning_oom.recovery.separability import Separability


def _verdict(*, separable=True):
    return Separability(
        separable=separable,
        largest_relative_difference=0.0 if separable else 0.5,
        parameter=None,
        reason="fine" if separable else "rows depend on each other",
    )


def _reading(allocated, limit):
    return MemoryReading(
        device="simgpu:0",
        allocated_bytes=allocated,
        peak_allocated_bytes=None,
        reserved_bytes=None,
        peak_reserved_bytes=None,
        limit_bytes=limit,
        free_bytes=None,
        alloc_retries=None,
    )


def _trial(rows=8, *, separable=True, gain=None, **changes):
    return Trial(
        rows=rows,
        signature=None,
        separability=lambda: _verdict(separable=separable),
        chunk_gain=lambda: gain,
        propose=lambda mode: rows or 1,
        shrink=lambda mode, failed: failed // 2 or None,
        **changes,
    )


def _fail(trial, plan=None, *, cause=None, reading=None, garbage=None):
    trial.failures.append(
        Failure(
            plan=plan or AttemptPlan(),
            cause=cause or oom_cause(),
            phase="forward",
            seconds=0.0,
            reading=reading,
            garbage_bytes=garbage,
        )
    )


def _walk(ladder, trial, **first):
    """Return what the ladder tries when everything fails."""
    plans = []
    _fail(trial, **first)
    while (plan := ladder.next_plan(trial)) is not None:
        plans.append((plan.rung, plan.rows_together))
        _fail(trial, plan)
    return plans


def test_rungs_are_tried_in_order_until_a_row_is_left():
    """Release once, chunks of some rows and of one, then micro-batches down to one row."""
    trial = _trial(8)

    plans = _walk(Ladder([ReleaseRung(), ChunkRung(), SplitRung()]), trial)

    assert [p for p in plans if p[0] == "release"] == [("release", None)]
    assert [p for p in plans if p[0] == "chunk"] == [("chunk", 4), ("chunk", 1)]
    assert [p for p in plans if p[0] == "split"] == [("split", 4), ("split", 2), ("split", 1)]
    assert set(trial.declined) == {"release", "chunk", "split"}
    assert trial.declined["split"] == "a single row does not fit"


@pytest.mark.parametrize(("outside", "tried"), [(1, True), (1000, False)])
def test_chunks_are_tried_only_where_they_save_enough(outside, tried):
    """Where the outputs dominate, a chunked attempt would fail like the whole."""
    trial = _trial(8, gain=ChunkGain(inside_bytes=100, outside_bytes=outside))

    plans = _walk(Ladder([ChunkRung()]), trial)

    assert bool(plans) is tried
    assert tried or "would keep 92% of the activations" in trial.declined["chunk"]


def test_an_inseparable_step_is_not_split():
    """The split rung gives the reason of the check."""
    trial = _trial(8, separable=False)

    assert _walk(Ladder([SplitRung()]), trial) == []
    assert trial.declined["split"] == "rows depend on each other"


def test_an_inseparable_step_is_split_on_request_and_said_so():
    """With consent, the plan is marked as not exact and the reason is passed on."""
    said = []
    trial = _trial(8, separable=False)
    _fail(trial)

    plan = SplitRung(split_inseparable=True, on_inseparable=said.append).next_plan(trial)

    assert plan is not None
    assert not plan.exact
    assert said == ["rows depend on each other"]


@pytest.mark.parametrize(
    ("rows", "reason"), [(None, "the batch has no rows"), (1, "the batch has one row")]
)
def test_a_batch_that_cannot_get_smaller_is_not_split(rows, reason):
    """No rows and one row are declined in their own words."""
    trial = _trial(rows)

    assert _walk(Ladder([SplitRung()]), trial) == []
    assert trial.declined["split"] == reason


def test_release_is_skipped_where_it_cannot_help():
    """Nothing freed, nothing to drop, and more asked for than there is: the same would fail."""
    trial = _trial(1)

    plans = _walk(
        Ladder([ReleaseRung()]),
        trial,
        cause=oom_cause(requested=100),
        reading=_reading(950, 1000),
        garbage=0,
    )

    assert plans == []
    assert trial.declined["release"] == "nothing could be freed"


@pytest.mark.parametrize(
    "changes",
    [
        {"garbage": 1},
        {"garbage": None},
        {"garbage": 0, "reading": None},
        {"garbage": 0, "cause": oom_cause(requested=None)},
        {"garbage": 0, "cause": oom_cause(requested=40)},
    ],
    ids=["freed", "unknown", "no_counters", "no_request", "fragmented"],
)
def test_release_is_tried_where_it_may_help(changes):
    """Freed garbage, unknown counters and fragmentation are reasons to try again."""
    first = {"reading": _reading(950, 1000), "cause": oom_cause(requested=100), **changes}

    assert _walk(Ladder([ReleaseRung()]), _trial(1), **first) == [("release", None)]


def test_dropping_old_gradients_is_a_reason_to_try_again():
    """Old gradients alive in the forward are memory that a retry does not need."""
    trial = _trial(1, gradients_droppable=True)

    plans = _walk(
        Ladder([ReleaseRung()]),
        trial,
        cause=oom_cause(requested=100),
        reading=_reading(950, 1000),
        garbage=0,
    )

    assert plans == [("release", None)]


def test_an_ambiguous_error_gets_one_smaller_attempt():
    """A likely OOM is split once; when it comes back, the ladder ends."""
    trial = _trial(8)

    plans = _walk(Ladder([ReleaseRung(), SplitRung()]), trial, cause=oom_cause("likely"))

    assert plans[:1] == [("split", 4)]


def test_an_ambiguous_error_that_comes_back_ends_the_ladder():
    """One more attempt, no second one."""
    trial = _trial(8)
    _fail(trial, cause=oom_cause("likely"))
    ladder = Ladder([ReleaseRung(), SplitRung()])
    plan = ladder.next_plan(trial)
    _fail(trial, plan, cause=oom_cause("likely"))

    assert ladder.next_plan(trial) is None
    assert "ambiguous" in trial.declined["ladder"]


@pytest.mark.parametrize("rungs", [[], [SplitRung(), SplitRung()]], ids=["none", "twice"])
def test_a_ladder_needs_different_rungs(rungs):
    """An empty ladder and one with a rung twice are refused."""
    with pytest.raises(ValueError, match="one or more rungs of different names"):
        Ladder(rungs)

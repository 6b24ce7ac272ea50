"""From the events of a step to what a caching allocator holds."""

from __future__ import annotations

import pytest

from lightning_oom.planning.replay import fits_into, replay_trace
from lightning_oom.planning.trace import MemoryEvent, MemoryTrace
from lightning_oom.planning.workspaces import TargetTrace
from lightning_oom.units import MIB


def target(*events: tuple[int, float, str, str], releases: tuple[int, ...] = ()) -> TargetTrace:
    """Make a trace of (storage, MiB, kind, phase)."""
    made = tuple(
        MemoryEvent(storage, int(mib * MIB), kind, phase, 0, kind, "", -1)
        for storage, mib, kind, phase in events
    )
    trace = MemoryTrace(events=made, marks=(), rows=None, num_steps=1)
    return TargetTrace(trace, frozenset(releases))


STEP = target(
    (0, 30, "parameter", "before"),
    (1, 50, "activation", "forward"),
    (2, 0.25, "activation", "forward"),
    (1, -50, "activation", "backward"),
    (3, 30, "gradient", "backward"),
    (2, -0.25, "activation", "backward"),
)


def test_a_replay_knows_where_the_peak_is_and_what_is_held() -> None:
    """By phase, by kind, by module."""
    replay = replay_trace(STEP)
    assert replay.peak_phase == "forward"
    assert replay.phase_peaks == {
        "before": 30 * MIB,
        "forward": int(80.25 * MIB),
        "backward": int(60.25 * MIB),
    }
    assert list(replay.by_kind.items()) == [
        ("activation", int(50.25 * MIB)),
        ("parameter", 30 * MIB),
    ]
    assert replay.by_module == replay.by_kind
    assert sum(replay.by_kind.values()) == replay.allocated_bytes


def test_freed_memory_stays_reserved() -> None:
    """In segments: 30, 50, and 2 MiB for what is small."""
    assert replay_trace(STEP).reserved_bytes == 82 * MIB


def test_an_emptied_cache_gives_it_back() -> None:
    """The gradient then gets a segment of its own size."""
    emptied = TargetTrace(STEP.trace, frozenset({4}))
    assert replay_trace(emptied).reserved_bytes == 62 * MIB


def test_blocks_are_rounded_up() -> None:
    """A remainder of at most 1 MiB is not split off and counts as allocated."""
    rounded = target(
        (0, 50, "activation", "forward"),
        (0, -50, "activation", "forward"),
        (1, 49.5, "temporary", "backward"),
    )
    replay = replay_trace(rounded)
    assert replay.by_kind == {"activation": 50 * MIB}
    assert replay.phase_peaks["backward"] == 50 * MIB


@pytest.mark.parametrize(("limit_mib", "fits"), [(82, True), (81, False)])
def test_a_step_fits_where_every_request_is_served(limit_mib: int, fits: bool) -> None:
    """Two large segments and a small one are needed at once."""
    assert fits_into(STEP, limit_mib * MIB) is fits


def test_cached_memory_is_given_back_before_a_step_fails() -> None:
    """An unlimited device would reserve 100 MiB; 60 MiB suffice."""
    swapped = target(
        (0, 40, "activation", "forward"),
        (0, -40, "activation", "forward"),
        (1, 60, "temporary", "backward"),
    )
    assert replay_trace(swapped).reserved_bytes == 100 * MIB
    assert fits_into(swapped, 60 * MIB)


def test_expandable_segments_reserve_no_more_than_pages() -> None:
    """40 MiB grow to 60."""
    grown = target(
        (0, 40, "activation", "forward"),
        (0, -40, "activation", "forward"),
        (1, 60, "temporary", "backward"),
    )
    assert replay_trace(grown, expandable_segments=True).reserved_bytes == 60 * MIB


def test_a_step_that_holds_nothing() -> None:
    """No peak, no phase."""
    replay = replay_trace(target())
    assert (replay.allocated_bytes, replay.peak_phase, dict(replay.by_kind)) == (0, None, {})

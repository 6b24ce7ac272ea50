"""Recorded traces of small models against what was measured for them on an A100.

The whole comparison is ``tests/benchmarks/estimate.py``; these are a few of its traces.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from lightning_oom.planning.replay import replay_trace
from lightning_oom.planning.trace import MemoryEvent, MemoryTrace
from lightning_oom.planning.workspaces import TargetTrace
from lightning_oom.units import MIB

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
CONTEXT_MIB = 1717
"""Fitted by the benchmark on other models."""


def replayed(model: str, rows: int) -> int:
    """Return what is reserved at so many rows; each allocation grows on its own line."""
    small, large = RECORDED["traced_rows"]
    recorded = RECORDED["models"][model]
    events = tuple(
        MemoryEvent(
            storage, one + (two - one) * (rows - small) // (large - small), *[""] * 2, 0, "", "", -1
        )
        for storage, one, two in recorded["events"]
    )
    trace = MemoryTrace(events=events, marks=(), rows=rows, num_steps=2)
    return replay_trace(TargetTrace(trace, frozenset(recorded["releases"]))).reserved_bytes


@pytest.mark.parametrize("model", RECORDED["models"])
def test_a_recorded_trace_gives_what_was_measured(model: str) -> None:
    """Within 2.5 % in the middle, within 10 % everywhere."""
    errors = []
    for rows, told in RECORDED["models"][model]["rows"].items():
        reserved = replayed(model, int(rows))
        assert reserved == told["reserved_bytes"]
        estimated = reserved / MIB + told["prefetched_mib"] + CONTEXT_MIB
        errors.append(abs(estimated / told["measured_mib"] - 1))
    assert statistics.median(errors) < 0.025
    assert max(errors) < 0.1

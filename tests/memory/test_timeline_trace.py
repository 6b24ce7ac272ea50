"""The timeline records every allocation and free, in bounded memory."""

from __future__ import annotations

import gc
import json
import tracemalloc

import pytest
import torch
from torch import nn

from lightning_oom.memory.timeline_trace import AllocationTimeline, chrome_trace


def test_live_bytes_are_those_of_the_device(device) -> None:
    """What the records say is alive is what was registered and made, and goes when it goes."""
    module = nn.Linear(64, 64, device=device)
    timeline = AllocationTimeline(device=device)
    assert timeline.register([module, module]) == (64 * 64 + 64) * 4
    with timeline:
        timeline.phase, timeline.step = "forward", 7
        out = module(torch.ones(8, 64, device=device))
        out.sum().backward()
        del out
        module.zero_grad()
    last = timeline.records[-1]
    assert (last.phase, last.step) == ("forward", 7)
    assert last.live_bytes == (64 * 64 + 64) * 4
    assert sum(record.num_bytes for record in timeline.records) == 0
    assert timeline.peak is not None
    assert timeline.peak.live_bytes == max(record.live_bytes for record in timeline.records)
    assert timeline.peak.operator.startswith("aten.")


def test_records_are_a_ring_of_constant_memory() -> None:
    """10,000 allocations leave 100 records, the peak among them or not, and no more host memory."""
    timeline = AllocationTimeline(max_records=100)
    with timeline:
        big = torch.ones(100_000)
        del big
        for _ in range(200):
            torch.ones(4)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10_000):
            torch.ones(4)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert len(timeline.records) == 100
    assert timeline.num_records == 2 + 2 * 10_200
    assert timeline.peak.live_bytes == 400_000
    assert grown < 50_000


def test_a_timeline_keeps_no_tensor_alive() -> None:
    """Storages are freed as without it."""
    timeline = AllocationTimeline()
    with timeline:
        x = torch.ones(1000)
        assert timeline.ledger.live_bytes == 4000
        del x
        assert timeline.ledger.live_bytes == 0


def test_the_trace_is_plain_data_with_a_counter_and_phases() -> None:
    """Perfetto's format: a counter per record, an instant per allocation, a slice per phase."""
    timeline = AllocationTimeline()
    with timeline:
        for phase in ("forward", "backward"):
            timeline.phase = phase
            torch.ones(10)
    events = json.loads(json.dumps(chrome_trace(timeline.records, rank=3)))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert [event["args"]["live_bytes"] for event in counters] == [40, 0, 40, 0]
    assert {event["name"] for event in events if event["ph"] == "X"} == {
        "step 0 forward",
        "step 0 backward",
    }
    assert {event["pid"] for event in events} == {3}


def test_a_ring_of_none_is_refused() -> None:
    """The error names the value."""
    with pytest.raises(ValueError, match="max_records is at least 1, got 0"):
        AllocationTimeline(max_records=0)

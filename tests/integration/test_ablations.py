"""Each part of the snapshot is needed: without it the campaign finds differences."""

from __future__ import annotations

from functools import partial

import pytest
from fault_campaign import Scenario, run_campaign

from lightning_oom import OOMRecovery
from lightning_oom._lightning.results import ResultsPart
from lightning_oom.recovery.snapshot import Attributes, Buffers, Metrics, RandomState

SECOND_STEP = Scenario(name="adam single, second step", batch=1)

PARTS = {
    "random": (RandomState, {"random", "weights"}),
    "buffers": (Buffers, {"buffers"}),
    "metrics": (Metrics, {"metrics"}),
    "attributes": (Attributes, {"attributes"}),
    "results": (ResultsPart, {"logged rows"}),
}


class Forgotten:
    """A saved state that puts nothing back."""

    def restore(self) -> tuple[str, ...]:
        """Claim that all is well."""
        return ()


@pytest.mark.parametrize("name", PARTS)
def test_leaving_out_a_part_is_found(name, monkeypatch):
    """The campaign differs in what the part keeps, so it would notice if the part broke."""
    part, expected = PARTS[name]
    monkeypatch.setattr(part, "take", lambda self: Forgotten())
    if hasattr(part, "learn"):
        monkeypatch.setattr(part, "learn", lambda self, saved: None)

    guard = partial(OOMRecovery, ladder=("release",), verbose=False)
    campaign = run_campaign(SECOND_STEP, guard, max_faults=12, offset=5)
    seen = {
        d.path.split(".")[1].split("[")[0]
        for o in campaign.of_kind("differ")
        for d in o.differences
    }

    assert expected <= seen

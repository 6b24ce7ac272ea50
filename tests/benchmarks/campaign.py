"""Print the table of the fault campaign: one fault at every allocation of a step, then compare.

Run ``python tests/benchmarks/campaign.py`` for all of it (an hour), ``--faults 10`` for a thin
version, ``--only accumulate`` for the scenarios whose name contains a word.

Columns: allocations of the step (K), faults injected, runs equal to the one that never failed, runs
that differ, errors raised with nothing moved (all in the optimizer's update, else ``early`` counts
them), errors raised after something had moved.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from silence import be_quiet  # isort: skip  puts the tests on the path

from fault_campaign import run_campaign
from naive import NaiveRetry
from scenarios import EXACT, ON_SIMULATED_GPU, SEPARABLE

HEADER = f"{'configuration':<66} {'K':>5} {'injected':>8} {'exact':>6} {'differ':>6} {'refused':>7}"


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen part of the campaign; the exit code says whether anything differs."""
    from lightning_oom import OOMRecovery

    parser = argparse.ArgumentParser(description="The table of the fault campaign.")
    parser.add_argument("--faults", type=int, default=None, help="about so many a row, not all")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args(arguments)
    guards = {rung: partial(OOMRecovery, ladder=(rung,), verbose=False) for rung in RUNGS}
    plan = [
        *(("release", guards["release"], scenario) for scenario in [*EXACT, *ON_SIMULATED_GPU]),
        *((rung, guards[rung], scenario) for rung in ("split", "chunk") for scenario in SEPARABLE),
        ("naive retry", NaiveRetry, EXACT[0]),
    ]
    print(f"{HEADER} {'early':>5} {'moved':>5} {'fits/s':>6}")
    wrong = 0
    for rung, guard, scenario in plan:
        if options.only in f"{rung}: {scenario.name}":
            started = time.perf_counter()
            try:
                campaign = run_campaign(scenario, guard, max_faults=options.faults)
            except Exception as error:  # one broken row does not hide the others
                wrong += 1
                print(f"{rung}: {scenario.name}".ljust(66), f"broken: {error!r}", flush=True)
                continue
            rate = (len(campaign.outcomes) + 2) / (time.perf_counter() - started)
            print(f"{rung}: {scenario.name}".ljust(66), campaign.row(), f"{rate:>6.1f}", flush=True)
            explanation = campaign.explain()
            if explanation and guard is not NaiveRetry:
                wrong += 1
                print("    " + explanation.replace("\n", "\n    "), flush=True)
    return int(wrong > 0)


RUNGS = ("release", "chunk", "split")


if __name__ == "__main__":
    be_quiet()
    raise SystemExit(main())

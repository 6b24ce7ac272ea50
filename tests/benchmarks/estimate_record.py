"""Record small traces with what was measured, for ``tests/planning/test_recorded.py``.

In the environment of ``estimate.py``, with the traces in the cache::

    python tests/benchmarks/estimate_record.py CSV CACHE MODEL... > tests/planning/recorded.json
"""

from __future__ import annotations

import csv
import json
import sys
from argparse import Namespace
from pathlib import Path

from estimate import by_rows_of, prefetched_mib
from estimate_traces import ROWS, image_size

from lightning_oom.planning.replay import replay_trace


def main() -> None:
    """Print storages and bytes of every event at both numbers of rows."""
    file, cache, *models = sys.argv[1:]
    lines = list(csv.DictReader(Path(file).read_text().splitlines()))
    recorded = {}
    for model in models:
        at = by_rows_of(model, Namespace(cache=Path(cache), cached=True), "a100")
        small, large = (at(rows) for rows in ROWS)
        events = zip(small.trace.events, large.trace.events, strict=True)
        recorded[model] = {
            "events": [[one.storage, one.num_bytes, two.num_bytes] for one, two in events],
            "releases": sorted(small.releases),
            "rows": {
                line["batch"]: {
                    "measured_mib": int(line["measured_mib"]),
                    "prefetched_mib": prefetched_mib(image_size(model), int(line["batch"])),
                    "reserved_bytes": replay_trace(at(int(line["batch"]))).reserved_bytes,
                }
                for line in lines
                if line["model"] == model
            },
        }
    json.dump({"traced_rows": ROWS, "models": recorded}, sys.stdout, separators=(",", ":"))


if __name__ == "__main__":
    main()

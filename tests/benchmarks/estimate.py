"""Estimates against published measurements of timm models on GPUs, by model family.

In an environment of its own (torchvision comes with a CUDA build of torch, 5.6 GB; no GPU is needed)::

    pip install torch==2.14.1 torchvision==0.29.1 timm -e .
    python tests/benchmarks/estimate.py a100 timm_a100_peak.csv --cache DIR
    python tests/benchmarks/estimate.py brackets timm_rtx3090_fit_brackets.csv --cache DIR

Other CSV files of the same columns are taken as well. Every second model of a family fits what cannot be
derived (the context of the process and the quantiles of the error); the table shows the others. With
``--models N``, only N models are traced, one family after the other; ``--cached`` takes only those whose
traces are in the cache. ``--fit FILE`` and ``--given FILE`` write and read what was fitted, so that
unknown files can be judged without fitting.

Sources: GPUMemNet (A100 40 GB, timm's training script: SGD with momentum, float32, cuDNN benchmark,
one batch prefetched on a side stream; nvidia-smi) and timm's ``results/benchmark-train-amp-*``
(RTX 3090 24 GB, autocast to float16, SGD, no fused attention: torch 1.12).
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from estimate_traces import A100, ROWS, RTX3090, image_size, traces_of

from lightning_oom.errors import LightningOOMError
from lightning_oom.planning.replay import fits_into, replay_trace
from lightning_oom.planning.rows import TraceByRows
from lightning_oom.planning.target import TARGETS
from lightning_oom.planning.workspaces import TargetTrace, with_workspaces
from lightning_oom.units import GIB, MIB

_TARGET = replace(TARGETS["cuda"], benchmarks_convolutions=True)
_PROBABILITIES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


class Row(NamedTuple):
    """One measurement, and what is estimated for it without a context, in MiB."""

    model: str
    rows: int
    measured: float
    reserved: float


def family_of(model: str) -> str:
    """Return the letters that a model's name begins with."""
    found = re.match(r"(?:legacy_|test_|deit3|[a-z]+?v\d(?=[a-z_]|$)|[a-z]+)", model)
    return (found.group(0) if found else model).rstrip("_")


def is_fitting(model: str, models: list[str]) -> bool:
    """Say whether a model is one of those that constants are fitted on: every second of a family."""
    of_family = sorted(other for other in models if family_of(other) == family_of(model))
    return (of_family.index(model) + len(family_of(model))) % 2 == 0


def choose(models: list[str], most: int | None) -> list[str]:
    """Take models from one family after the other."""
    families: dict[str, list[str]] = defaultdict(list)
    for model in dict.fromkeys(models):
        families[family_of(model)].append(model)
    chosen = [
        of_family[turn]
        for turn in range(max(map(len, families.values()), default=0))
        for of_family in families.values()
        if turn < len(of_family)
    ]
    return chosen[:most]


def by_rows_of(model: str, options: argparse.Namespace, kind: str, size: int | None = None):
    """Return ``at(rows)``, which gives what a model does to the target."""
    workload = A100 if kind == "a100" else RTX3090
    if "nhwc" in kind:
        workload = replace(workload, channels_last=True, name=workload.name + "nhwc")
    traces = traces_of(model, workload, options.cache, size, cached=options.cached)
    first, second = (with_workspaces(trace, _TARGET) for trace in traces)
    by_rows = TraceByRows.between(first.trace, second.trace)
    return lambda rows: TargetTrace(by_rows.at(rows), first.releases)


def prefetched_mib(side: int, rows: int) -> float:
    """Return what the loader's stream reserves: two batches in float32 and one in uint8."""
    num_bytes = rows * 3 * side * side
    segments = [4 * num_bytes, 4 * num_bytes, num_bytes]
    if 4 * num_bytes < 10 * MIB:
        return 20.0 * -(-sum(segments) // (20 * MIB))
    return sum(max(20 * MIB, -(-segment // (2 * MIB)) * 2 * MIB) for segment in segments) / MIB


def a100(options: argparse.Namespace) -> int:
    """Print the errors of reserved bytes plus a fitted context."""
    measured: dict[str, dict[int, float]] = defaultdict(dict)
    for line in csv.DictReader(options.file.open()):
        measured[line["model"]][int(line["batch"])] = float(line["measured_mib"])
    estimates: list[Row] = []
    for model in choose(list(measured), options.models):
        try:
            at = by_rows_of(model, options, "a100")
        except (LightningOOMError, FileNotFoundError, RuntimeError) as error:
            print(f"left out: {model}: {error}", file=sys.stderr)
            continue
        side = image_size(model)
        for rows, mib in measured[model].items():
            reserved = replay_trace(at(rows)).reserved_bytes / MIB + prefetched_mib(side, rows)
            estimates.append(Row(model, rows, mib, reserved))
    models = sorted({row.model for row in estimates})
    fitting = [row for row in estimates if is_fitting(row.model, models)]
    judged = [row for row in estimates if not is_fitting(row.model, models)]
    if options.given:
        given = json.loads(options.given.read_text())
        judged = estimates
    else:
        given = fit(fitting)
    if options.fit:
        options.fit.write_text(json.dumps(given, indent=1) + "\n")
    context = given["context_mib"]
    print(f"fitted on {len(fitting)} rows: context {context:.0f} MiB\n")
    print(
        "family                 models  rows   median     p90    worst   bias   in the 90 % interval"
    )
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in judged:
        groups[family_of(row.model)].append(row)
    for family, rows in [*sorted(groups.items()), ("all of them", judged)]:
        errors = sorted(abs((row.reserved + context) / row.measured - 1) for row in rows)
        bias = statistics.median((row.reserved + context) / row.measured - 1 for row in rows)
        inside = [
            given["low"] <= row.measured / (row.reserved + context) <= given["high"] for row in rows
        ]
        print(
            f"{family:22s} {len({row.model for row in rows}):6d} {len(rows):5d}"
            f"   {statistics.median(errors):6.2%}  {quantile(errors, 0.9):6.2%}  {errors[-1]:7.2%}"
            f"  {bias:+6.2%}   {statistics.mean(inside):6.1%}"
        )
    errors = sorted(abs((row.reserved + context) / row.measured - 1) for row in judged)
    return int(statistics.median(errors) > 0.025 or quantile(errors, 0.9) > 0.08)


def fit(rows: list[Row]) -> dict[str, float | list[tuple[float, float]]]:
    """Fit the context, and the quantiles of measured over estimated."""
    middle = round(statistics.median(row.measured - row.reserved for row in rows))
    context = min(
        range(middle - 200, middle + 200, 10),
        key=lambda mib: statistics.median(abs((r.reserved + mib) / r.measured - 1) for r in rows),
    )
    ratios = sorted(row.measured / (row.reserved + context) for row in rows)
    return {
        "context_mib": context,
        "low": quantile(ratios, 0.05),
        "high": quantile(ratios, 0.95),
        "quantiles": [(p, round(quantile(ratios, p), 4)) for p in _PROBABILITIES],
    }


def quantile(values: list[float], p: float) -> float:
    """Return a quantile of sorted values."""
    position = p * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def brackets(options: argparse.Namespace) -> int:
    """Print how often the largest batch lies in the published bracket."""
    lines = [
        line for line in csv.DictReader(options.file.open()) if line["gpu"].startswith("RTX 3090")
    ]
    chosen = choose([line["model"] for line in lines], options.models)
    checks: list[tuple[str, str, int, list[bool]]] = []
    contexts = range(800, 2400, 200)
    for line in lines:
        layout = "nhwc" if "nhwc" in line["source"] else "nchw"
        if line["model"] not in chosen or layout not in options.layouts:
            continue
        try:
            at = by_rows_of(line["model"], options, f"brackets {layout}", int(line["resolution"]))
        except (LightningOOMError, FileNotFoundError, RuntimeError) as error:
            print(f"left out: {line['model']}: {error}", file=sys.stderr)
            continue
        inside = []
        fitting, failing = (
            line[key] and at(int(line[key])) for key in ("fits_batch", "fails_batch")
        )
        for context in contexts:
            room = 24 * GIB - context * MIB
            fits = not fitting or fits_into(fitting, room)
            inside.append(fits and not (failing and fits_into(failing, room)))
        checks.append((line["model"], layout, int(line["fits_batch"] or 0), inside))
    models = sorted({check[0] for check in checks})
    fitted_on = [check for check in checks if is_fitting(check[0], models)]
    best = max(range(len(contexts)), key=lambda i: sum(check[3][i] for check in fitted_on))
    judged = [check for check in checks if not is_fitting(check[0], models)]
    print(
        f"fitted on {len(fitted_on)} rows: {contexts[best]} MiB of 24 GiB are not for the allocator\n"
    )
    groups: dict[str, list[bool]] = defaultdict(list)
    for model, _, _, inside in judged:
        groups[family_of(model)].append(inside[best])
    for family, results in [*sorted(groups.items()), ("all of them", [c[3][best] for c in judged])]:
        print(f"{family:22s} {len(results):5d} rows   {statistics.mean(results):6.1%} inside")
    return int(statistics.mean(c[3][best] for c in judged) < 0.9)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("a100", "brackets"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--models", type=int)
    parser.add_argument("--layouts", nargs="*", default=["nchw", "nhwc"])
    parser.add_argument("--fit", type=Path)
    parser.add_argument("--given", type=Path)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    print(f"traces at {ROWS[0]} and {ROWS[1]} rows, extended to the others\n")
    return {"a100": a100, "brackets": brackets}[options.what](options)


if __name__ == "__main__":
    sys.exit(main())

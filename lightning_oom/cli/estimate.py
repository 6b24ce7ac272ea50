"""Foresee the peak of a training step, without a GPU."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lightning_oom.cli.subject import add_subject_arguments, load_subject
from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.estimate import MemoryEstimate, estimate_peak
from lightning_oom.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]

_MOST_MODULES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options of the verb.

    Args:
        parser: Of the verb.
    """
    add_subject_arguments(parser)
    parser.add_argument("--rows", type=int, help="rows of the batch; default: those of the example")
    parser.add_argument(
        "--device", help="the target: cuda, a100, h100, rtx3090, cpu...; default: a CUDA device"
    )
    parser.add_argument("--limit", metavar="SIZE", help="say whether it fits, such as '24 GiB'")
    parser.add_argument("--json", action="store_true", help="print the estimate as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate.

    Args:
        arguments: As :func:`add_arguments` describes them.

    Returns:
        0; 1 when a limit is given and the step will rather not fit; 2, with one line on standard
        error, when there is nothing to estimate.
    """
    try:
        limit = None if arguments.limit is None else parse_bytes(arguments.limit)
        subject = load_subject(arguments)
        if subject is None:
            raise ValueError("give MODULE:CLASS or --config FILE")  # noqa: TRY301 - one way out
        estimate = estimate_peak(
            subject.module,
            subject.batch,
            precision=subject.precision,
            device=arguments.device,
            rows=arguments.rows,
        )
    except (ValueError, StepNotTracedError) as error:
        print(f"lightning-oom estimate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    probability = None if limit is None else estimate.fits(limit)
    if arguments.json:
        print(json.dumps(_as_json(estimate, limit, probability), indent=2))
    else:
        _show(estimate, limit, probability, Console(highlight=False))
    return int(probability is not None and probability < 0.5)  # noqa: PLR2004 - rather not


def _as_json(
    estimate: MemoryEstimate, limit: int | None, probability: float | None
) -> dict[str, Any]:
    facts = estimate.to_dict()
    if limit is not None:
        facts |= {"limit_bytes": limit, "fits_probability": probability}
        facts |= {"largest_rows": _largest_rows(estimate, limit)}
    return facts


def _largest_rows(estimate: MemoryEstimate, limit: int) -> int | None:
    try:
        return estimate.largest_rows(limit)
    except ValueError:
        return None


def _show(
    estimate: MemoryEstimate, limit: int | None, probability: float | None, console: Console
) -> None:
    lower, upper = estimate.interval()
    rows = "" if estimate.rows is None else f", {estimate.rows} rows"
    console.print(f"Peak of a training step on {estimate.device}, {estimate.precision}{rows}")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_row("allocated", format_bytes(estimate.allocated_bytes), f"in {estimate.peak_phase}")
    table.add_row("reserved", format_bytes(estimate.reserved_bytes), "by the caching allocator")
    if estimate.device_bytes is not None:
        between = f"{format_bytes(lower)} to {format_bytes(upper)} in 9 of 10 cases"
        table.add_row("device", format_bytes(estimate.device_bytes), between)
    if estimate.bytes_per_row is not None:
        table.add_row("a row more", format_bytes(round(estimate.bytes_per_row)))
    for kind, num_bytes in estimate.by_kind.items():
        table.add_row(f"  {kind}", format_bytes(num_bytes))
    console.print(table)
    modules = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for module, num_bytes in list(estimate.by_module.items())[:_MOST_MODULES]:
        modules.add_row(f"  {module or '(the module itself)'}", format_bytes(num_bytes))
    console.print("by module")
    console.print(modules)
    if limit is not None and probability is not None:
        most = _largest_rows(estimate, limit)
        tail = "" if most is None else f"; at most {most} rows"
        console.print(f"fits into {format_bytes(limit)} with probability {probability:.0%}{tail}")
    if estimate.substitutions:
        places = sorted({substitution.place for substitution in estimate.substitutions})
        console.print(f"an upper bound: values are not known at {', '.join(places[:3])}")
    if estimate.tier == "measured":
        console.print("few rows were run for real and extended: fake tensors could not follow")

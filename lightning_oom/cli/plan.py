"""Choose settings with which a training step fits, and print them to paste."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_oom.cli.subject import add_subject_arguments, load_subject
from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.memory_plan import plan_memory
from lightning_oom.planning.plan_remedies import ALWAYS_ALLOWED, REMEDIES
from lightning_oom.report.plan_text import plan_table, plan_yaml

if TYPE_CHECKING:
    import argparse

    from lightning_oom.planning.memory_plan import MemoryPlan

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options of the verb.

    Args:
        parser: Of the verb.
    """
    add_subject_arguments(parser)
    parser.add_argument(
        "--limit", metavar="SIZE", required=True, help="what the device can hold, such as '24 GiB'"
    )
    parser.add_argument(
        "--device", help="the target: cuda, a100, h100, rtx3090, cpu...; default: a CUDA device"
    )
    parser.add_argument(
        "--allow",
        metavar="NAMES",
        default=",".join(ALWAYS_ALLOWED),
        help=f"what the plan may use, separated by commas, out of {', '.join(REMEDIES)}; "
        "default: all but precision",
    )
    parser.add_argument(
        "--coverage", type=float, default=0.9, help="of the interval that has to fit; default 0.9"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan.

    Args:
        arguments: As :func:`add_arguments` describes them.

    Returns:
        0; 1 when nothing fits; 2, with one line on standard error, when no plan can be made.
    """
    try:
        subject = load_subject(arguments)
        if subject is None:
            raise ValueError("give MODULE:CLASS or --config FILE")  # noqa: TRY301 - one way out
        use_data = subject.data is not None and arguments.batch is None
        plan = plan_memory(
            subject.module,
            subject.data if use_data else subject.batch,
            arguments.limit,
            precision=subject.precision,
            device=arguments.device,
            coverage=arguments.coverage,
            allow=[name.strip() for name in arguments.allow.split(",") if name.strip()],
        )
    except (ValueError, StepNotTracedError) as error:
        print(f"lightning-oom plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if arguments.json:
        fragment = plan_yaml(plan) if plan.fits else None
        print(json.dumps(plan.to_dict() | {"yaml": fragment}, indent=2))
    else:
        _show(plan, Console(highlight=False))
    return int(not plan.fits)


def _show(plan: MemoryPlan, console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in plan_table(plan):
        table.add_row(name, escape(value))
    console.print(table)
    fragment = plan_yaml(plan) if plan.fits else ""
    if fragment:
        console.print("\nTo paste into the config:\n")
        print(fragment)

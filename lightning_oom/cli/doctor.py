"""Look at the machine, and at a model if one is named: what costs memory, and what would save some."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_oom.cli.subject import add_subject_arguments, load_subject
from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.advice import advise
from lightning_oom.report.advice_text import render_advice
from lightning_oom.report.environment import Environment, collect_environment
from lightning_oom.report.environment_findings import Finding, judge
from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    import argparse

    from lightning_oom.planning.advice import AdviceList

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options of the verb.

    Args:
        parser: Of the verb.
    """
    add_subject_arguments(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found.

    Args:
        arguments: As :func:`add_arguments` describes them.

    Returns:
        0; 1 when there is a problem with the machine; 2, with one line on standard error, when the
        model or its step cannot be run.
    """
    try:
        advice = _advise(arguments)
    except (ValueError, StepNotTracedError) as error:
        print(f"lightning-oom doctor: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    environment = collect_environment(missing_names=_missing_names())
    findings = judge(environment)
    if arguments.json:
        facts = {**environment.to_dict(), "findings": [asdict(finding) for finding in findings]}
        facts |= {} if advice is None else {"advice": advice.to_dict()}
        print(json.dumps(facts, indent=2))
    else:
        console = Console()
        _show(environment, findings, console)
        if advice is not None:
            print(f"\n{render_advice(advice, width=console.width)}")
    return int(any(finding.level == "problem" for finding in findings))


def _advise(arguments: argparse.Namespace) -> AdviceList | None:
    subject = load_subject(arguments)
    if subject is None:
        return None
    with Console(stderr=True).status("running the step on fake tensors") as status:
        return advise(
            subject.module,
            subject.batch,
            precision=subject.precision,
            progress=lambda title: status.update(f"trying: {title}"),
        )


def _missing_names() -> tuple[str, ...]:
    """Look for the internals that the recovery needs, on a trainer that runs nothing."""
    from lightning.pytorch import Trainer  # noqa: PLC0415 - slow to import, needed by this verb only
    from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: PLC0415

    from lightning_oom._lightning.names import missing_names  # noqa: PLC0415

    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        return tuple(missing_names(trainer, BoringModel()))
    finally:
        logger.setLevel(level)


def _show(environment: Environment, findings: tuple[Finding, ...], console: Console) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("python", f"{environment.python} on {environment.system}")
    for name, version in environment.versions.items():
        table.add_row(name, version or "not installed")
    table.add_row("CUDA of torch", environment.cuda_build or "none (CPU build)")
    for device in environment.devices:
        table.add_row(*_describe_device(device.name, device.limit_bytes, device.free_bytes))
    if not environment.devices:
        table.add_row("devices", "no GPU that torch can use")
    host = environment.host
    table.add_row(*_describe_device("host", host.limit_bytes, host.free_bytes))
    if environment.shared_bytes is not None:
        table.add_row("shared memory", format_bytes(environment.shared_bytes))
    for name, value in environment.settings.items():
        table.add_row(name, Text(value))
    console.print(table)
    console.print()
    for finding in findings:
        color = "red" if finding.level == "problem" else "yellow"
        line = Text.assemble((finding.level, color), f"  {finding.subject}: {finding.text}")
        console.print(line, soft_wrap=True)
    if not findings:
        console.print("nothing to report")


def _describe_device(name: str, limit_bytes: int | None, free_bytes: int | None) -> tuple[str, str]:
    total = "unknown size" if limit_bytes is None else format_bytes(limit_bytes)
    return name, total if free_bytes is None else f"{total}, {format_bytes(free_bytes)} free"

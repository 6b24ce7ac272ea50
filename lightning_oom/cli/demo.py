"""``lightning-oom demo``: one training, three times, and what the limit changed.

Unlimited; with a limit that the long batches pass, where the run dies of the original error; and
with the same limit and :class:`~lightning_oom.OOMRecovery`, where it ends with the same weights.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_oom import OOMRecovery
from lightning_oom.cli.demo_run import DemoRun, choose_device, quiet, train
from lightning_oom.units import format_bytes, parse_bytes

__all__ = ["add_arguments", "run"]

_LIMIT_FRACTION = 0.6
"""Of the unlimited run's peak: one batch in six is too long for it."""

_RUNS = ("unlimited", "limited", "recovered")

_SAME_WEIGHTS = 1e-4
"""The largest difference that rounding explains; the demo fails above it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the demo to ``parser``."""
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps a run (%(default)s)")
    parser.add_argument(
        "--limit", type=_amount, help=f"such as '64 MiB' ({_LIMIT_FRACTION} of the unlimited peak)"
    )
    parser.add_argument(
        "--block-length", type=int, default=2048, help="longest function, in tokens (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (%(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="for TensorBoard logs (%(default)s)"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cuda", "simgpu"],
        default="auto",
        help="auto: CUDA if there is a GPU, else a simulated one",
    )


def run(arguments: argparse.Namespace, *, console: Console | None = None) -> int:
    """Train three times, print one table, and write one TensorBoard run for each.

    Args:
        arguments: As :func:`add_arguments` defines them.
        console: Where to print; ``None`` means standard output.

    Returns:
        0 when the recovered run ended with the weights of the unlimited one, 1 otherwise.

    Raises:
        ValueError: Fewer than one step, TensorBoard is not installed, or the device is too full even
            for the unlimited run.
    """
    if arguments.steps < 1:
        raise ValueError(f"--steps is at least 1, got {arguments.steps}")
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("the demo writes TensorBoard logs: pip install 'lightning-oom[demo]'")
    console = Console() if console is None else console
    with quiet():
        unlimited, died, recovered = _three_runs(arguments, console)
    console.print(_table(unlimited, died, recovered))
    death = died.error or "nothing, no batch passed the limit"
    console.print(f"What the limited run died of: {death}", soft_wrap=True)
    if recovered.error is not None:
        console.print(f"Not recovered: {recovered.error}\n{recovered.notes}", soft_wrap=True)
    console.print(f"Look at the logs: tensorboard --logdir {arguments.output}", soft_wrap=True)
    difference = recovered.weight_difference(unlimited)
    return int(difference is None or difference > _SAME_WEIGHTS)


def _amount(text: str) -> int:
    """Read an amount of memory; argparse shows this error's text, and hides a ValueError's."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _three_runs(
    arguments: argparse.Namespace, console: Console
) -> tuple[DemoRun, DemoRun, DemoRun]:
    device = choose_device(arguments.device)
    begin = functools.partial(
        train,
        device=device,
        steps=arguments.steps,
        seed=arguments.seed,
        block_length=arguments.block_length,
        output=arguments.output,
    )
    for name in _RUNS:
        shutil.rmtree(arguments.output / name, ignore_errors=True)
    console.rule(f"1/3 unlimited, on {device}")
    unlimited = begin(_RUNS[0])
    if unlimited.error is not None:
        raise ValueError(f"{device} is too small or too full for the demo: {unlimited.error}")
    limit = arguments.limit
    if limit is None:
        limit = int(_LIMIT_FRACTION * unlimited.peak_bytes)
    shown = f"limit {format_bytes(limit)}, {limit / unlimited.peak_bytes:.0%} of the peak"
    console.rule(f"2/3 {shown}, without OOMRecovery")
    died = begin(_RUNS[1], limit_bytes=limit)
    console.rule(f"3/3 {shown}, with OOMRecovery")
    recovered = begin(_RUNS[2], limit_bytes=limit, recovery=OOMRecovery())
    return unlimited, died, recovered


def _table(unlimited: DemoRun, *limited: DemoRun) -> Table:
    """One column a run, so that it fits a narrow terminal; a dash where there is nothing to say."""
    table = Table("", title="One training, three times")
    columns = []
    for run_, heading in zip(
        (unlimited, *limited), ("unlimited", "limited", "limited,\nOOMRecovery"), strict=True
    ):
        table.add_column(heading, justify="right")
        columns.append(_column(run_, unlimited))
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _column(one: DemoRun, unlimited: DemoRun) -> dict[str, str]:
    """Say what the table says of one run, by the name of its row."""
    summary = one.summary
    difference = None if one is unlimited else one.weight_difference(unlimited)
    loss = None if one.error is not None else one.loss
    over = one.shapes_over_limit(unlimited)
    return {
        "limit": "none" if one.limit_bytes is None else format_bytes(one.limit_bytes),
        "ended": f"died, step {one.steps + 1}" if one.error else f"step {one.steps}",
        "OOMs met": str(summary.num_oom) if summary else str(int(one.error is not None)),
        "recovered": str(summary.num_recovered) if summary else "-",
        "failures per oversized shape": (
            f"{summary.num_failed_attempts / over:.2f} ({summary.num_failed_attempts} / {over})"
            if summary and over
            else "-"
        ),
        "wasted time": f"{summary.wasted_seconds:.1f} s" if summary else "-",
        "time": f"{one.seconds:.1f} s",
        "final loss": "-" if loss is None else f"{loss:.6f}",
        "largest weight difference": "-" if difference is None else f"{difference:.1e}",
    }

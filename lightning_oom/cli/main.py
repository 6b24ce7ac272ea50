"""The ``lightning-oom`` entry point: find the verb, import its module, run it."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from lightning_oom.errors import LightningOOMError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, str] = {
    "demo": "train a small GPT three times: unlimited, limited, limited with OOMRecovery",
    "doctor": "look at the machine, and say what would lower the peak of a model",
    "estimate": "foresee the peak of a training step, without a GPU",
    "explain": "say why memory ran out, from a log, a report or a memory snapshot",
    "plan": "choose settings with which a training step fits, and print them to paste",
}
"""Verb to one-line help. ``lightning_oom.cli.<verb>`` holds ``add_arguments(parser)`` and
``run(arguments) -> exit status``, and is imported only when its verb is called."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb of the command line.

    Args:
        argv: Arguments without the program's name; ``None`` takes those of the process.

    Returns:
        The exit status: 0 when the verb did what it says, 1 when it could not, 2 when what it was
        given cannot be read.

    Raises:
        SystemExit: The arguments cannot be read (status 2), or help was asked for (status 0).

    Example:
        >>> main([])  # doctest: +ELLIPSIS
        usage: lightning-oom [-h] {demo,doctor,estimate,explain,plan} ...
        <BLANKLINE>
        Survive, foresee and explain CUDA out of memory in PyTorch Lightning.
        ...
        1
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser(arguments)
    parsed = parser.parse_args(arguments)
    if parsed.verb is None:
        parser.print_help()
        return 1
    try:
        return int(importlib.import_module(f"lightning_oom.cli.{parsed.verb}").run(parsed))
    except (LightningOOMError, ModuleNotFoundError, ValueError) as error:
        print(f"lightning-oom {parsed.verb}: {error}", file=sys.stderr)
        return 1


def _build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Know the arguments of the verb that is called, and only the name of the others."""
    parser = argparse.ArgumentParser(
        prog="lightning-oom",
        description="Survive, foresee and explain CUDA out of memory in PyTorch Lightning.",
    )
    verbs = parser.add_subparsers(dest="verb")
    for verb, summary in COMMANDS.items():
        verb_parser = verbs.add_parser(verb, help=summary, description=summary)
        if verb in arguments:
            importlib.import_module(f"lightning_oom.cli.{verb}").add_arguments(verb_parser)
    return parser

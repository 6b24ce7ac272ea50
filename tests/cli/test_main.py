"""The entry point: verbs, help, and errors that a person can read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_oom.cli.main import COMMANDS, main


def test_no_verb_prints_the_verbs(capsys) -> None:
    """Without a verb the help is printed and the status is not success."""
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in COMMANDS)


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_has_help(verb, capsys) -> None:
    """Each verb's module can be imported and describes its options."""
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])

    assert stop.value.code == 0
    assert f"lightning-oom {verb}" in capsys.readouterr().out


def test_unknown_verb_is_refused(capsys) -> None:
    """A verb that does not exist ends with argparse's status 2 and the list of those that do."""
    with pytest.raises(SystemExit) as stop:
        main(["survive"])

    assert stop.value.code == 2
    assert "demo" in capsys.readouterr().err


def test_module_runs_as_a_command() -> None:
    """``python -m lightning_oom`` is the entry point under another name."""
    finished = subprocess.run(  # fixed arguments
        [sys.executable, "-m", "lightning_oom", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert finished.stdout.startswith("usage: lightning-oom")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--steps", "0"], "--steps is at least 1, got 0"),
        (["demo", "--device", "cuda"], "--device cuda: torch sees no CUDA device here"),
    ],
)
def test_bad_values_are_named_without_a_traceback(arguments, message, capsys, monkeypatch) -> None:
    """A value out of range ends with status 1 and one line that names it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert main(arguments) == 1
    assert capsys.readouterr().err == f"lightning-oom demo: {message}\n"


@pytest.mark.parametrize("limit", ["64 MB", "-1", "much"])
def test_a_limit_with_another_unit_is_refused(limit, capsys) -> None:
    """``--limit`` takes what ``parse_bytes`` takes, and nothing else."""
    with pytest.raises(SystemExit) as stop:
        main(["demo", f"--limit={limit}"])

    assert stop.value.code == 2
    assert limit.split()[-1] in capsys.readouterr().err

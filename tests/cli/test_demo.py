"""The main job: three runs, one table, the same weights."""

from __future__ import annotations

import io
from argparse import ArgumentParser, Namespace

import pytest
from rich.console import Console

from lightning_oom.cli import demo
from lightning_oom.cli.demo_run import choose_device, train


def arguments(*argv: str) -> Namespace:
    """Read arguments as the command line does."""
    parser = ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--device", "simgpu", "--block-length", "512", *argv])


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Run a short demo once; give its status, what it printed and where it logged."""
    output = tmp_path_factory.mktemp("demo")
    screen = io.StringIO()
    status = demo.run(
        arguments("--steps", "8", "--output", str(output)),
        console=Console(file=screen, width=100),
    )
    return status, screen.getvalue(), output


def cells(screen: str, label: str) -> list[str]:
    """Give the three cells of a row of the table."""
    (row,) = [line for line in screen.splitlines() if label in line and "│" in line]
    return [cell.strip() for cell in row.split("│")[2:-1]]


def test_the_recovered_run_ends_where_the_unlimited_one_does(shown) -> None:
    """It finishes, with the same loss and weights up to rounding; the status says so."""
    status, screen, _ = shown

    unlimited, _, recovered = cells(screen, "final loss")
    assert status == 0
    assert float(recovered) == pytest.approx(float(unlimited), abs=2e-6)
    assert float(cells(screen, "largest weight difference")[2]) <= 1e-5


def test_the_limited_run_dies_of_the_original_error(shown) -> None:
    """Without the pack the run ends early, with the text that torch's own error has."""
    _, screen, _ = shown

    unlimited, limited, recovered = cells(screen, "ended")
    assert (unlimited, recovered) == ("step 8", "step 8")
    assert limited.startswith("died, step ")
    assert "out of memory. Tried to allocate" in screen


def test_the_table_counts_what_happened(shown) -> None:
    """At least one OOM was met and recovered, and no more attempts failed than OOMs were met."""
    _, screen, _ = shown

    met = int(cells(screen, "OOMs met")[2])
    assert cells(screen, "OOMs met")[:2] == ["0", "1"]
    assert 1 <= int(cells(screen, "recovered")[2]) <= met


def test_each_run_is_in_the_logs(shown) -> None:
    """TensorBoard gets a run for each training, and the screen says how to look at them."""
    _, screen, output = shown

    for name in ("unlimited", "limited", "recovered"):
        assert list((output / name).glob("events.out.tfevents.*")), name
    assert f"tensorboard --logdir {output}" in screen


def test_a_limit_that_no_batch_passes_is_said_plainly(tmp_path) -> None:
    """With room for everything nothing dies, and the table does not pretend otherwise."""
    screen = io.StringIO()

    status = demo.run(
        arguments("--steps", "1", "--limit", "8 GiB", "--output", str(tmp_path)),
        console=Console(file=screen, width=100),
    )

    assert status == 0
    assert cells(screen.getvalue(), "OOMs met") == ["0", "0", "0"]
    assert "no batch passed the limit" in screen.getvalue()


def test_two_runs_are_the_same(tmp_path) -> None:
    """The demo is deterministic: the same seed gives the same weights, another seed others."""
    first, again, other = (
        train(name, device="simgpu:0", steps=2, seed=seed, block_length=256, output=tmp_path)
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )

    assert first.weight_difference(again) == 0
    assert other.weight_difference(first) > 0


def test_auto_takes_the_simulated_gpu_where_there_is_no_other(monkeypatch) -> None:
    """Without CUDA the demo still runs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert choose_device("auto") == "simgpu:0"

"""The verb ``estimate``."""

from __future__ import annotations

import json

from lightning_oom.cli.main import main

LINEAR = ["torch.nn:Linear", "--init", '{"in_features": 256, "out_features": 256}']
BATCH = ["--batch", "float32[64,256]"]


def test_a_table_names_the_parts(capsys):
    """Bytes by kind and module, the limit, and how many rows would fit."""
    assert main(["estimate", *LINEAR, *BATCH, "--device", "cpu", "--limit", "1 GiB"]) == 0

    shown = capsys.readouterr().out
    assert "Peak of a training step on host, 32-true, 64 rows" in shown
    assert "parameter" in shown
    assert "fits into 1.00 GiB with probability 100%; at most " in shown


def test_json_gives_bytes(capsys):
    """For scripts; the exit status says whether it fits."""
    assert main(["estimate", *LINEAR, *BATCH, "--json", "--limit", "1 MiB"]) == 1

    facts = json.loads(capsys.readouterr().out)
    assert facts["reserved_bytes"] >= facts["allocated_bytes"] > 64 * 256 * 4
    assert facts["fits_probability"] < 0.01
    assert facts["largest_rows"] == 0


def test_errors_are_one_line_and_status_two(capsys):
    """Wrong words, and modules that cannot be run."""
    assert main(["estimate", *LINEAR, "--batch", "float32[64,3]"]) == 2
    assert main(["estimate", *LINEAR, *BATCH, "--limit", "24 GB"]) == 2
    assert main(["estimate", *LINEAR, *BATCH, "--device", "toaster"]) == 2
    assert main(["estimate"]) == 2

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("lightning-oom estimate: ") for line in lines)

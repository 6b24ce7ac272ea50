"""The verb ``plan``."""

from __future__ import annotations

import json

import yaml

from lightning_oom.cli.main import main

LINEAR = ["torch.nn:Linear", "--init", '{"in_features": 64, "out_features": 64}']
BATCH = ["--batch", "float32[131072,64]", "--device", "cpu"]


def test_a_table_and_a_fragment_to_paste(capsys):
    """What is planned, and the YAML that does it."""
    assert main(["plan", *LINEAR, *BATCH, "--limit", "80 MiB"]) == 0

    shown = capsys.readouterr().out
    assert "limit        80.00 MiB on host" in shown
    assert "of 131072 rows at a time" in shown
    fragment = yaml.safe_load(shown[shown.index("trainer:") :])
    (callback,) = fragment["trainer"]["callbacks"]
    assert callback["class_path"] == "lightning_oom.OOMRecovery"


def test_json_and_the_status_of_what_does_not_fit(capsys):
    """For scripts."""
    arguments = ["plan", *LINEAR, *BATCH, "--json", "--limit", "30 MiB", "--allow", "zero_grad"]
    assert main(arguments) == 1

    facts = json.loads(capsys.readouterr().out)
    assert (facts["fits"], facts["yaml"]) == (False, None)
    assert facts["smallest_limit_bytes"] > 30 * 2**20


def test_errors_are_one_line_and_status_two(capsys):
    """Wrong words, and modules that cannot be run."""
    assert main(["plan", *LINEAR, *BATCH, "--limit", "24 GB"]) == 2
    assert main(["plan", *LINEAR, *BATCH, "--limit", "1 GiB", "--allow", "luck"]) == 2
    assert main(["plan", *LINEAR, "--batch", "float32[4,3]", "--limit", "1 GiB"]) == 2
    assert main(["plan", "--limit", "1 GiB"]) == 2

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("lightning-oom plan: ") for line in lines)

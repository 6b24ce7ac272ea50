"""Every file in ``configs/`` is built and run by LightningCLI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))

FAST = [
    "--trainer.max_steps=2",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.logger=false",
]
"""On top of every config: two steps, nothing written."""

# What Lightning's CLI asks of jsonargparse is going away there; and what it says about a run that is this short and this small.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(?s).*(only one Jsonargparse|was deprecated in v4):DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*max_epochs. was not set"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


class Blocks(BoringModel):
    """A model with repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1))
            for _ in range(8)
        ]
        self.layer = torch.nn.Sequential(*[Repeated(block) for block in blocks], self.layer)


class Repeated(torch.nn.Module):
    """One of them."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the inner module makes of ``x``."""
        return x + self.inner(x)


def test_there_are_configs() -> None:
    """The tests below run over something."""
    assert {path.name for path in CONFIGS} >= {"demo.yaml", "recover.yaml"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_opens_with_intent_and_command(path) -> None:
    """The first lines say what the config is for and how it is called; no path is absolute."""
    text = path.read_text()
    comment = [line for line in text.splitlines() if line.startswith("#")]

    assert text.startswith("# ")
    assert any(f"--config configs/{path.name}" in line for line in comment)
    assert any(line.startswith("# Effect: ") for line in comment)
    assert not any(str(value).startswith("/") for value in leaves(yaml.safe_load(text)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_builds_and_runs(path, monkeypatch, tmp_path) -> None:
    """LightningCLI builds every callback of the config and trains two steps with them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    config = yaml.safe_load(path.read_text())
    own_model = (
        []
        if "model" in config
        else [
            f"--model={__name__}.Blocks",
            "--trainer.accelerator=cpu",
            "--seed_everything=0",
        ]
    )

    cli = LightningCLI(args=["fit", *own_model, f"--config={path}", *FAST])

    trainer = config["trainer"]
    wanted = [
        entry["class_path"] for entry in trainer.get("callbacks+", trainer.get("callbacks", []))
    ]
    built = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert cli.trainer.global_step == 2
    assert [
        path.rpartition(".")[2] for path in wanted if path.rpartition(".")[2] not in built
    ] == []


def test_the_config_for_a_small_gpu_changes_no_bit(monkeypatch, tmp_path) -> None:
    """On a device with memory of its own: the weights of a plain run."""
    pytest.importorskip("lightning_oom.testing.simgpu")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    options = [f"--model={__name__}.Blocks", "--seed_everything=0", *FAST]
    options += ["--trainer.strategy=simgpu", "--trainer.limit_val_batches=1"]
    config = next(path for path in CONFIGS if path.name == "fit_on_small_gpu.yaml")

    ends = []
    for more in [], [f"--config={config}"]:
        trainer = LightningCLI(args=["fit", *options, *more], save_config_callback=None).trainer
        state = trainer.lightning_module.state_dict()
        ends.append({name: value.cpu() for name, value in state.items()})
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def leaves(tree):
    """Give every value of nested mappings and lists."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, list):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]

"""The callback works from a LightningCLI file, and on the console."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import pytest
from fakes import TinyRegressor, batches_of
from fits import fit
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI

from lightning_oom import OOMRecovery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

CONFIG = """
seed_everything: 3
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_oom.OOMRecovery
      init_args:
        ladder: [release, split]
        max_rows: 6
        on_unrecoverable: skip
        log_merge:
          accuracy: last
        verbose: false
model:
  fits_rows: 8
"""


class Rows(LightningDataModule):
    """Three batches, one of them too large."""

    def train_dataloader(self) -> DataLoader:
        """The batches."""
        return batches_of([4, 16, 4])


def test_a_yaml_file_builds_and_runs_the_callback(tmp_path, monkeypatch):
    """All constructor arguments are plain values that jsonargparse understands."""
    config = tmp_path / "recover.yaml"
    config.write_text(CONFIG)
    monkeypatch.setattr(sys, "argv", ["train"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of LightningCLI itself

    cli = LightningCLI(
        TinyRegressor, Rows, args=["fit", "--config", str(config)], save_config_callback=None
    )
    (guard,) = [c for c in cli.trainer.callbacks if isinstance(c, OOMRecovery)]

    assert guard.verbose is False
    assert cli.trainer.global_step == 3
    assert max(cli.model.rows_seen.numbers) <= 6


class Lines(logging.Handler):
    """Keeps what Lightning's logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append(record.getMessage())


@pytest.fixture
def console() -> Iterator[list[str]]:
    """Lines that a user would see."""
    handler, logger = Lines(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_one_line_an_event_and_a_summary_at_the_end(console):
    """The console says which batch, what was done, and what to write into the config."""
    fit(lambda: TinyRegressor(fits_rows=8), batches_of([8, 32, 8]), OOMRecovery(ladder=("split",)))
    events = [line for line in console if "out of memory with 32 rows" in line]
    summary = "\n".join(console[console.index(events[0]) + 1 :])

    assert len(events) == 1
    assert "split into micro-batches of 8 rows" in events[0]
    assert "max_rows" in summary or "batch" in summary


def test_a_silent_guard_prints_nothing(console, capsys):
    """``verbose=False``."""
    fit(lambda: TinyRegressor(fits_rows=8), batches_of([8, 32]), OOMRecovery(verbose=False))
    captured = capsys.readouterr()

    assert not [line for line in console if "out of memory" in line or "OOM" in line]
    assert "out of memory" not in captured.out + captured.err


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_yaml_callback_serves_every_subcommand(tmp_path, monkeypatch, stage):
    """The same file drives evaluation."""

    class EvalRows(Rows):
        def val_dataloader(self) -> DataLoader:
            return batches_of([4, 16])

        test_dataloader = predict_dataloader = val_dataloader

    config = tmp_path / "recover.yaml"
    config.write_text(CONFIG)
    monkeypatch.setattr(sys, "argv", ["train"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of LightningCLI itself

    cli = LightningCLI(
        TinyRegressor, EvalRows, args=[stage, "--config", str(config)], save_config_callback=None
    )

    assert any(isinstance(c, OOMRecovery) for c in cli.trainer.callbacks)

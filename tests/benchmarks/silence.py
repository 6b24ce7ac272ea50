"""What every benchmark here does first: the tests on the path, one thread, nothing said."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import torch

__all__ = ["be_quiet"]

TESTS = Path(__file__).parents[1]
for folder in (TESTS, TESTS / "integration"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def be_quiet() -> None:
    """Silence Lightning, and keep torch on one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.ERROR)
        logging.getLogger(f"{package}.utilities.rank_zero").setLevel(logging.ERROR)

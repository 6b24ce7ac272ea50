"""The leak guards of ``conftest.py`` find what a test leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest

pytest_plugins = ["pytester"]

LEAKS = {
    "grad mode": "torch.set_grad_enabled(False)",
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "threads": "torch.set_num_threads(2)",
    "warnings filters": "warnings.simplefilter('ignore')",
    "LEFT_BEHIND": "os.environ['LEFT_BEHIND'] = '1'",
    "dispatch modes": "BaseTorchDispatchMode().__enter__()",
}

HEAD = """
import os, warnings
import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode
"""


def test_each_leak_is_reported_by_name(pytester: pytest.Pytester):
    """The test that leaks fails at its end and says what it left; others are not blamed."""
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    tests = [f"def test_{i}():\n    {leak}\n" for i, leak in enumerate(LEAKS.values())]
    pytester.makepyfile("\n".join([HEAD, "def test_clean():\n    pass\n", *tests]))

    result = pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider")

    assert result.parseoutcomes() == {"passed": 1 + len(LEAKS), "errors": len(LEAKS)}
    for name in LEAKS:
        result.stdout.fnmatch_lines_random([f"*left behind: *{name}*"])


def test_random_state_is_seeded():
    """Every test starts from the same seed of torch, whatever ran before.

    Python and NumPy are seeded as well; pytest-randomly, where installed, does it over again.
    """
    first = torch.rand(1).item()

    assert first == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()

"""The pytest plugin: its fixtures work in a user's test, and it costs other sessions nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

pytest_plugins = ["pytester"]


def test_the_plugin_is_found_by_its_entry_point() -> None:
    """Pytest finds it without a line in ``conftest.py``."""
    found = {entry.name: entry.value for entry in entry_points(group="pytest11")}

    assert found["lightning_oom"] == "lightning_oom.testing.plugin"


def test_the_plugin_imports_no_torch() -> None:
    """It is loaded in every session of the environment: it may not make them slower."""
    program = (
        "import sys, lightning_oom.testing.plugin;"
        "heavy = {'torch', 'lightning', 'numpy'} & sys.modules.keys();"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)  # noqa: S603 our own program


def test_testing_needs_no_pytest() -> None:
    """``lightning_oom.testing`` works in a script where pytest is not installed."""
    program = (
        "import sys; sys.modules['pytest'] = None;"
        "from lightning_oom.testing import fail_at, fail_on, memory_limit"
    )
    subprocess.run([sys.executable, "-c", program], check=True)  # noqa: S603 our own program


def test_fixtures_last_until_the_end_of_the_test(pytester: pytest.Pytester) -> None:
    """Limits act from the call on, in that test alone, whether it passes or fails."""
    pytester.makepyfile(
        """
        import pytest
        import torch
        from lightning.pytorch import Trainer

        def test_strategy_is_known():
            trainer = Trainer(strategy="simgpu", logger=False, enable_checkpointing=False)
            assert trainer.strategy.root_device.type == "simgpu"

        def test_limited(memory_limit):
            limit = memory_limit("1 MiB", device="cpu")
            with pytest.raises(RuntimeError, match="out of memory"):
                torch.zeros(1024, 1024)
            assert limit.num_refused == 1

        def test_free():
            assert torch.zeros(1024, 1024).numel() == 2**20

        def test_fails(memory_limit):
            memory_limit("1 MiB", device="cpu")
            torch.zeros(1024, 1024)

        def test_free_after_a_failure():
            assert torch.zeros(1024, 1024).numel() == 2**20

        def test_limited_device(simulated_gpu):
            gpu = simulated_gpu("8 MiB")
            with pytest.raises(RuntimeError, match="out of memory"):
                torch.zeros(4 * 2**20, device=gpu.device)

        def test_free_device(simulated_gpu):
            assert torch.zeros(4 * 2**20, device=simulated_gpu().device).nbytes == 16 * 2**20
        """
    )

    result = pytester.runpytest_subprocess("-p", "no:randomly")

    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["*CUDA out of memory. Tried to allocate 4.00 MiB*"])


def test_the_strategy_has_a_name_outside_pytest() -> None:
    """In a script, the package is imported after Lightning."""
    program = (
        "from lightning.pytorch import Trainer; import sys, lightning_oom.testing;"
        "assert 'lightning_oom.testing.simgpu' not in sys.modules;"
        "Trainer(strategy='simgpu', logger=False, enable_checkpointing=False);"
        "assert 'lightning_oom.testing.simgpu' in sys.modules"
    )
    subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-W", "ignore", "-c", program], check=True
    )


def test_the_fixtures_are_listed_with_what_they_do(pytester: pytest.Pytester) -> None:
    """``pytest --fixtures`` shows each with its first line."""
    result = pytester.runpytest_inprocess("--fixtures")  # imports nothing that is not there

    result.stdout.fnmatch_lines(
        [
            "memory_limit*",
            "*Limit the memory of a device from the call on until the end*",
            "simulated_gpu*",
            "*with a limit that ends with the test*",
        ]
    )

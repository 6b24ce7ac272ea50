"""Leak guards, the ``device`` parameter, and which tests run by default."""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch  # noqa: F401 - its import sets variables and filters, whichever test is first
import numpy as np
import pytest
import sympy  # noqa: F401 - torch imports it late, and it adds a warnings filter
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# Tests import `fakes` and the campaign by plain names, also when one file is run from elsewhere.
for folder in ("", "integration"):
    path = str(Path(__file__).parent / folder)
    if path not in sys.path:
        sys.path.insert(0, path)

torch.set_num_threads(1)

# Set by pytest while a test runs, and by torch when the first optimizer imports its compiler.
_PYTEST_VARIABLES = {"PYTEST_CURRENT_TEST", "PYTEST_VERSION", "TORCHINDUCTOR_CACHE_DIR"}

# Set by Lightning when it seeds or starts processes; removed after each test without complaint.
_LIGHTNING_VARIABLES = {
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "WORLD_SIZE",
}

# Advice of Lightning about runs that are small on purpose.
_EXPECTED_WARNINGS = (
    r"ignore:The '.*' does not have many workers",
    r"ignore:The number of training batches .* is smaller than the logging interval",
    r"ignore:GPU available but not used",
    r"ignore:You defined a `validation_step` but have no `val_dataloader`",
    # what LightningCLI asks of jsonargparse, on import in older releases
    r"ignore:(?s).*(only one Jsonargparse|was deprecated in v4):DeprecationWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    """Silence what Lightning says about each of some thousand tiny runs."""
    for line in _EXPECTED_WARNINGS:
        config.addinivalue_line("filterwarnings", line)
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.ERROR)
        logging.getLogger(f"{package}.utilities.rank_zero").setLevel(logging.ERROR)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and full sweeps unless ``-m`` asks for something."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="full sweep: run with `-m slow`"))


@pytest.fixture(
    params=["cpu", "simgpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the suite runs on: the CPU, the simulated GPU, and a CUDA device if there is one."""
    if request.param == "simgpu":
        pytest.importorskip("lightning_oom.testing.simgpu")
        from lightning_oom.testing import SimulatedGPU

        SimulatedGPU.enable()
    return torch.device(request.param)


def _process_state() -> dict[str, Any]:
    """What a test must leave as it found it, by name."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "dispatch modes": len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "warnings filters": list(warnings.filters),
        **{f"${k}": v for k, v in os.environ.items() if k not in _PYTEST_VARIABLES},
    }


def _put_back(before: dict[str, Any]) -> None:
    torch.set_grad_enabled(before["grad mode"])
    torch.set_default_dtype(before["default dtype"])
    torch.use_deterministic_algorithms(before["deterministic algorithms"])
    torch.set_num_threads(before["threads"])
    variables = {name[1:]: value for name, value in before.items() if name.startswith("$")}
    for name in os.environ.keys() - variables.keys() - _PYTEST_VARIABLES:
        del os.environ[name]
    os.environ.update(variables)


@pytest.fixture(autouse=True)
def _leaves_the_process_as_found() -> Iterator[None]:
    """Seed every random state, put it back afterwards, and fail the test that leaves a trace."""
    random_state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    before = _process_state()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 code under test draws from the global state
    torch.manual_seed(0)

    yield

    for name in _LIGHTNING_VARIABLES:
        if f"${name}" not in before:
            os.environ.pop(name, None)
    after = _process_state()
    random.setstate(random_state[0])
    np.random.set_state(random_state[1])  # noqa: NPY002 as above
    torch.set_rng_state(random_state[2])
    leaked = [
        f"left behind: {name}: {before.get(name)} became {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
    if leaked:
        _put_back(before)
        pytest.fail("\n".join(leaked))

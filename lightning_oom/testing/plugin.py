"""pytest fixtures, found by pytest in every environment that has this package.

``memory_limit``
    Limits the memory of a device until the end of the test::

        def test_handler_survives(memory_limit):
            limit = memory_limit("64 MiB", device="cpu")
            train()
            assert limit.num_refused > 0

``simulated_gpu``
    Makes simulated GPUs, whose limits end with the test::

        def test_batch_does_not_fit(simulated_gpu):
            gpu = simulated_gpu("64 MiB")
            with pytest.raises(torch.OutOfMemoryError):
                model.to(gpu.device)

In tests, ``Trainer(strategy="simgpu")`` works without an import.

Importing this module imports pytest alone; torch is imported when a fixture is used.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from lightning_oom.testing.strategy_name import register_strategy_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_oom.testing.active import MemoryLimit
    from lightning_oom.testing.simgpu import SimulatedGPU

__all__ = ["memory_limit", "pytest_collection_finish", "simulated_gpu"]


def pytest_collection_finish() -> None:
    """Make ``Trainer(strategy="simgpu")`` work in the tests that were collected."""
    register_strategy_name()


@pytest.fixture
def memory_limit() -> Iterator[Callable[..., MemoryLimit]]:
    """Limit the memory of a device from the call on until the end of the test.

    Takes what :func:`lightning_oom.testing.memory_limit` takes, and returns the active limit with
    its ``live_bytes``, ``peak_bytes``, ``num_refused`` and ``register``. May be called several
    times, for several devices.
    """
    from lightning_oom.testing.limit import memory_limit as make_limit  # noqa: PLC0415 - imports torch

    with ExitStack() as limits:
        yield lambda *args, **kwargs: limits.enter_context(make_limit(*args, **kwargs))


@pytest.fixture
def simulated_gpu() -> Iterator[Callable[..., SimulatedGPU]]:
    """Make devices ``simgpu:0``, ``simgpu:1``, ... with a limit that ends with the test.

    Takes what :class:`lightning_oom.testing.SimulatedGPU` takes, and returns it. Skips the test
    where torch cannot be given a device from Python (before 2.10).
    """
    from lightning_oom.errors import UnsupportedTorchError  # noqa: PLC0415 - as light as can be
    from lightning_oom.testing.simgpu import SimulatedGPU  # noqa: PLC0415 - imports torch

    def make(*args: Any, **kwargs: Any) -> SimulatedGPU:
        try:
            return gpus.enter_context(SimulatedGPU(*args, **kwargs))
        except UnsupportedTorchError as error:
            pytest.skip(str(error))

    with ExitStack() as gpus:
        yield make

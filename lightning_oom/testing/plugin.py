"""pytest fixtures, found by pytest in every environment that has this package.

``memory_limit``
    Limits the memory of a device until the end of the test::

        def test_handler_survives(memory_limit):
            limit = memory_limit("64 MiB", device="cpu")
            train()
            assert limit.num_refused > 0

Importing this module imports pytest alone; torch is imported when a fixture is used.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_oom.testing.active import MemoryLimit

__all__ = ["memory_limit"]


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

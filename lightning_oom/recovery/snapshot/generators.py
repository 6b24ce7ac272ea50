"""Random generators that user code keeps for itself."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["generator_access", "is_generator_type"]

_NUMPY_KINDS = ("Generator", "RandomState", "BitGenerator")


def is_generator_type(kind: type) -> bool:
    """Tell whether objects of this type have a random state of their own."""
    if issubclass(kind, (random.Random, torch.Generator)):
        return not issubclass(kind, random.SystemRandom)
    np = sys.modules.get("numpy")
    return np is not None and issubclass(
        kind, tuple(getattr(np.random, name) for name in _NUMPY_KINDS)
    )


def generator_access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the functions that read and write a generator's state."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if hasattr(generator, "get_state"):  # numpy's RandomState
        return generator.get_state, generator.set_state
    bits = getattr(generator, "bit_generator", generator)

    def read() -> Any:
        return bits.state

    def write(state: Any) -> None:
        bits.state = state

    return read, write

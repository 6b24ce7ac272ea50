"""Private names of torch around fake tensors, and around the graph node that is running."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import _disable_current_modes

from lightning_oom.undo import shadow

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lightning_oom.undo import Undo

__all__ = [
    "FAKE_ERRORS",
    "compiled_original",
    "fake_mode",
    "graph_position",
    "is_fake",
    "known_value",
    "quiet_failures",
    "running_node_position",
    "to_fake",
    "without_any_mode",
]

FAKE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What torch raises for an operator that fake tensors cannot follow."""


class _FakeMode(FakeTensorMode):
    """Without the frame that newer releases put around the handler; see ``WatchingMode``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fake_mode() -> Any:
    """Return a new mode, to be entered, in which operators make fake tensors of fixed shapes.

    Real tensors that are met inside are taken for fake ones of the same shape.
    """
    return _FakeMode(allow_non_fake_inputs=True, static_shapes=True)


def to_fake(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return the fake counterpart of ``tensor`` in ``mode``: the same one for the same tensor.

    Tensors that share a storage have counterparts that share one. Nothing is copied.
    """
    with unset_fake_temporarily():
        fake: torch.Tensor = mode.from_tensor(tensor, static_shapes=True)
    return fake


def is_fake(value: object) -> bool:
    """Say whether ``value`` is a tensor without numbers."""
    return isinstance(value, FakeTensor)


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the real tensor where the numbers are known: of a real one, and of a small constant."""
    if not isinstance(tensor, FakeTensor):
        return tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None
    constant: torch.Tensor | None = tensor.constant
    return constant


def without_any_mode() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode is active, so that real numbers can be read."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def graph_position() -> int | None:
    """Return a number that grows with each node that this thread adds to its graphs, if torch tells."""
    look = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return None if look is None else int(look())


def running_node_position() -> int | None:
    """Return the position, as :func:`graph_position` counts, at which the running node was made.

    Returns:
        ``None`` outside of a backward pass, and where torch does not tell.
    """
    look = getattr(torch._C, "_current_autograd_node", None)
    node = None if look is None else look()
    number = getattr(node, "_sequence_nr", None)
    return None if number is None else int(number())


def compiled_original(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that ``torch.compile`` wrapped; ``None`` for one that is not compiled."""
    if type(module).__module__.startswith("torch._dynamo"):
        original: torch.nn.Module | None = module.__dict__["_modules"].get("_orig_mod")
        return original
    return None


def quiet_failures() -> Undo:
    """Let torch not log the traceback of an operator that fails on fake tensors; it raises it too.

    Returns:
        An undo that lets it log again.
    """
    return shadow(logging.getLogger(FakeTensorMode.__module__), "disabled", True)

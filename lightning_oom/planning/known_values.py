"""Follow the integers and booleans of a batch with their real values, beside the fake ones.

Lengths, masks and labels of the example are known, and small. What user code asks of them
(``lengths.max().item()``, ``mask.all()``) is answered as it would be in the run.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_oom._torch import schema_of, tree_leaves, tree_map, written_positions
from lightning_oom._torch.fake import known_value, without_any_mode

__all__ = ["follow", "forget_written", "set_value", "value_of"]

_NAME = "lightning_oom_value"
_MAX_NUMEL = 1 << 18
_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "uniform", "geometric", "dropout")


class _UnknownError(Exception):
    """One of the arguments is not known."""


def set_value(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Let ``fake`` be known to hold what ``real`` holds, if that is whole numbers and small."""
    if real.dtype in _WHOLE and real.numel() <= _MAX_NUMEL:
        setattr(fake, _NAME, real)


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the real tensor on the CPU where the numbers are known; ``None`` where not."""
    value: torch.Tensor | None = getattr(tensor, _NAME, None)
    return known_value(tensor) if value is None else value


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Compute an operator on real values as well, where all of them are known.

    Args:
        func: The operator, which has run on fake tensors.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: What it returned.
    """
    outputs = [out] if isinstance(out, torch.Tensor) else out
    if not isinstance(outputs, (list, tuple)) or not outputs:
        return
    if not all(_is_small(leaf) for leaf in outputs) or _is_random(func):
        return
    try:
        with without_any_mode():
            real = func(*tree_map(_real, args), **tree_map(_real, kwargs))
    except Exception:  # not known, or a form that has no kernel here: then it stays unknown
        forget_written(func, args, kwargs)
        return
    for fake, value in zip(
        outputs, [real] if out is outputs[0] else tree_leaves(real), strict=False
    ):
        if isinstance(value, torch.Tensor) and value.shape == fake.shape:
            set_value(fake, value)


def forget_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forget what was known of the tensors that an operator has written to."""
    for position, name in written_positions(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and hasattr(leaf, _NAME):
                delattr(leaf, _NAME)


def _is_small(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _WHOLE and value.numel() <= _MAX_NUMEL


def _is_random(func: Any) -> bool:
    schema = schema_of(func)
    return schema is None or any(word in schema.name for word in _RANDOM)


def _real(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        real = value_of(value)
        if real is None:
            raise _UnknownError
        return real
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value

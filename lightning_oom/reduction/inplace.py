"""Activation functions that overwrite their input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_oom.reduction.checkpointing import match_blocks
from lightning_oom.undo import Undo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

__all__ = ["find_switchable", "set_inplace"]


def find_switchable(root: nn.Module, patterns: Sequence[str | type[nn.Module]]) -> list[str]:
    """Find the modules that have a switch ``inplace`` which is off.

    Args:
        root: Usually the LightningModule.
        patterns: Class names, paths with wildcards, or classes; a module that holds others stands for
            those of its modules that have the switch.

    Returns:
        Their paths, in the order of ``named_modules``.

    Raises:
        ValueError: A pattern matches no module, or nothing that is matched has the switch.

    Example:
        >>> from torch import nn
        >>> find_switchable(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh()), ["*"])
        ['1']
    """
    switchable = {
        path: type(part).__name__
        for path, part in root.named_modules()
        if path and getattr(part, "inplace", None) is False
    }
    names = ", ".join(dict.fromkeys(switchable.values())) or "no module of this model"
    try:
        blocks = match_blocks(root, patterns)
    except ValueError as error:
        raise ValueError(f"{error}. With a switch 'inplace' that is off: {names}") from error
    above = [block.path for block in blocks]
    found = [
        path
        for path in switchable
        if any(path == block or path.startswith(f"{block}.") for block in above)
    ]
    if not found:
        raise ValueError(
            f"nothing that {list(patterns)} matches has a switch 'inplace' that is off; "
            f"one has: {names}"
        )
    return found


def set_inplace(root: nn.Module, paths: Iterable[str]) -> Undo:
    """Let modules overwrite their input.

    Args:
        root: Usually the LightningModule.
        paths: Of modules with a switch ``inplace``.

    Returns:
        An undo that switches those off again that are still on.
    """
    parts: list[Any] = [root.get_submodule(path) for path in paths]
    for part in parts:
        part.inplace = True

    def put_back() -> None:
        for part in parts:
            if getattr(part, "inplace", None) is True:
                part.inplace = False

    return Undo(put_back)

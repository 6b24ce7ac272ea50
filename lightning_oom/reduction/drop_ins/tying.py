"""One tensor for several parameters of the same shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lightning_oom.undo import Undo

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["tie_weights"]


def tie_weights(module: nn.Module, names: Sequence[str]) -> Undo:
    """Let several parameters of a model be one, the first of them.

    Saves the bytes of the others four times over under Adam: weight, gradient and two moments. Call
    it before the optimizer is made, in the module's constructor or ``configure_model``: an optimizer
    keeps what it was given.

    Args:
        module: The model.
        names: Two or more names as in ``named_parameters()``, of equal shape and dtype, for example
            ``["embedding.weight", "head.weight"]``. The values of the first are kept.

    Returns:
        An undo that gives each name its own parameter again, with the values it had before.

    Raises:
        ValueError: Fewer than two names, a name that is not a parameter, or shapes that differ.

    Note:
        The model is another one: what was learnt for input and output is now shared. Keys of the
        ``state_dict`` stay; a checkpoint of the untied model loads, and the value that is loaded last
        counts for all.

    Example:
        >>> model = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10)})
        >>> undo = tie_weights(model, ["embedding.weight", "head.weight"])
        >>> model["head"].weight is model["embedding"].weight
        True
        >>> undo(); model["head"].weight is model["embedding"].weight
        False

    References:
        Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017.
    """
    if isinstance(names, str) or len(set(names)) < 2:  # noqa: PLR2004 - one has nothing to share
        raise ValueError(f"two or more different names of parameters are tied, got {names!r}")
    owners = [_owner(module, name) for name in names]
    found = [getattr(owner, attribute) for owner, attribute in owners]
    for name, parameter in zip(names, found, strict=True):
        if not isinstance(parameter, nn.Parameter):
            raise ValueError(f"{name!r} is not a parameter of {type(module).__name__}")  # noqa: TRY004 - a wrong name, not a wrong type
        if (parameter.shape, parameter.dtype) != (found[0].shape, found[0].dtype):
            raise ValueError(
                f"{names[0]!r} is {tuple(found[0].shape)} {found[0].dtype}, {name!r} is "
                f"{tuple(parameter.shape)} {parameter.dtype}: only equal ones can be tied"
            )
    for owner, attribute in owners[1:]:
        setattr(owner, attribute, found[0])

    def untie() -> None:
        for (owner, attribute), before in zip(owners[1:], found[1:], strict=True):
            if getattr(owner, attribute, None) is found[0]:
                setattr(owner, attribute, before)

    return Undo(untie)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        owner = None
    if owner is None or not hasattr(owner, attribute):
        raise ValueError(f"{type(module).__name__} has no parameter {name!r}")
    return owner, attribute

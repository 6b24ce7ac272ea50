"""Put checkpointing on chosen modules of a model, and take it off again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_oom.reduction.checkpointing.forward import (
    CheckpointedForward,
    CheckpointedLayerCall,
)
from lightning_oom.undo import Undo, UndoStack, shadow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from lightning_oom.reduction.checkpointing.meter import CheckpointMeter

__all__ = ["install", "is_checkpointed"]

_SWITCH = "gradient_checkpointing"
_FUNCTION = f"_{_SWITCH}_func"


def install(root: nn.Module, paths: Iterable[str], *, meter: CheckpointMeter | None = None) -> Undo:
    """Let modules keep only their input until the backward pass, which runs their forward again.

    Nothing is wrapped: classes, names, ``state_dict`` keys and hooks stay, copies and pickles of
    the model work. Layers of transformers that have a switch for this
    (``GradientCheckpointingLayer``) are switched, together with the models around them, which then
    use no cache while training; other models of transformers get ``config.use_cache = False`` until
    the undo. All else gets a :class:`CheckpointedForward`.

    Args:
        root: Usually the LightningModule.
        paths: Names of the modules below it, as ``named_modules`` gives them. Those that are
            checkpointed by this function already are passed over.
        meter: Measures the recomputations.

    Returns:
        The undo. What somebody else has put in the place of ours in the meantime stays, and ours
        below it does nothing any more.

    Raises:
        AttributeError: There is no module of that name.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        >>> x = torch.ones(2, 4)
        >>> plain = torch.autograd.grad(model(x).sum(), model[1][0].weight)[0]
        >>> undo = install(model, ["1"])
        >>> torch.equal(torch.autograd.grad(model(x).sum(), model[1][0].weight)[0], plain)
        True
        >>> undo()
        >>> "forward" in vars(model[1])
        False
    """
    undo = UndoStack()
    try:
        for path in dict.fromkeys(paths):
            module, around = root.get_submodule(path), list(_around(root, path))
            if not _is_ours(module):
                undo.push(_install_one(module, path, around, meter))
    except BaseException:
        undo()
        raise
    return Undo(undo)


def _install_one(
    module: nn.Module, path: str, around: list[nn.Module], meter: CheckpointMeter | None
) -> Undo:
    undo = UndoStack()
    ours: CheckpointedForward | CheckpointedLayerCall
    if _has_switch(module):
        ours = CheckpointedLayerCall(module, path, meter)
        undo.push(shadow(module, _FUNCTION, ours))
        for switched in (module, *(outer for outer in around if _is_a("PreTrainedModel", outer))):
            if getattr(switched, _SWITCH, None) is False:
                undo.push(_switch_on(switched))
    else:
        ours = CheckpointedForward(module, path, meter)
        undo.push(shadow(module, "forward", ours))
        for outer in around:
            config = getattr(outer, "config", None)
            if _is_a("PreTrainedModel", outer) and getattr(config, "use_cache", False) is True:
                undo.push(_without_cache(config))

    def deactivate() -> None:
        ours.is_active = False

    undo.push(Undo(deactivate))
    return Undo(undo)


def is_checkpointed(module: nn.Module) -> bool:
    """Say whether a module is checkpointed: by :func:`install`, or by its own switch.

    Args:
        module: The module itself, not what is inside or around it.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> undo = install(model, ["0"])
        >>> [is_checkpointed(part) for part in model]
        [True, False]
        >>> undo()
    """
    return _is_ours(module) or (_has_switch(module) and getattr(module, _SWITCH, False) is True)


def _is_ours(module: nn.Module) -> bool:
    own = vars(module)
    return any(
        isinstance(ours, (CheckpointedForward, CheckpointedLayerCall)) and ours.is_active
        for ours in (own.get("forward"), own.get(_FUNCTION))
    )


def _around(root: nn.Module, path: str) -> Iterator[nn.Module]:
    """Give the modules that a module lies in, the root included."""
    module = root
    for name in path.split("."):
        yield module
        module = module.get_submodule(name)


def _has_switch(module: nn.Module) -> bool:
    """Say whether a module is a layer of transformers that checkpoints itself."""
    return _is_a("GradientCheckpointingLayer", module)


def _is_a(class_name: str, module: nn.Module) -> bool:
    """Say whether a class of transformers is among the bases, without importing transformers."""
    return any(kind.__name__ == class_name for kind in type(module).__mro__)


def _switch_on(module: nn.Module) -> Undo:
    before = vars(module).get(_SWITCH)
    setattr(module, _SWITCH, True)

    def put_back() -> None:
        if vars(module).get(_SWITCH) is not True:
            return
        if before is None:  # the class says so
            delattr(module, _SWITCH)
        else:
            setattr(module, _SWITCH, before)

    return Undo(put_back)


def _without_cache(config: Any) -> Undo:
    config.use_cache = False

    def put_back() -> None:
        if config.use_cache is False:
            config.use_cache = True

    return Undo(put_back)

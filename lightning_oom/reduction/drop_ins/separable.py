"""A large convolution as one filter per channel and a mix of channels."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import nn

from lightning_oom.undo import Undo

__all__ = ["replace_with_separable"]

_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def replace_with_separable(
    module: nn.Module,
    name: str,
    *,
    initialize: Literal["approximate", "fresh"] = "approximate",
) -> Undo:
    """Put a depthwise and a pointwise convolution in the place of a named one.

    A convolution of ``out x in x k x k`` weights becomes ``in x k x k + out x in``: 3 x 3 kernels with
    many channels shrink about ninefold, and with them gradient and optimizer state. Activations grow
    by what the depthwise part hands to the pointwise one, so a model whose activations set the peak
    may need *more*; look at an estimate first. Call it before the optimizer is made.

    Args:
        module: The model.
        name: The convolution, as in ``named_modules()``. ``Conv1d``, ``Conv2d`` or ``Conv3d`` with
            ``groups=1`` and a kernel above 1.
        initialize: ``"approximate"`` takes the weights that come closest (least squares) to those of
            the replaced layer, for a trained model. ``"fresh"`` draws them as a new layer would.

    Returns:
        An undo that puts the replaced layer back.

    Raises:
        ValueError: The name is not such a convolution.

    Note:
        Another model: it has to be trained again. Keys of its ``state_dict`` are ``<name>.0.weight``,
        ``<name>.1.weight`` and, where there was one, ``<name>.1.bias``. Random state is untouched by
        ``"approximate"``; ``"fresh"`` draws from torch's generator.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU())
        >>> undo = replace_with_separable(model, "0")
        >>> sum(p.numel() for p in model.parameters()), model(torch.ones(1, 64, 8, 8)).shape
        (8896, torch.Size([1, 128, 8, 8]))
        >>> undo(); sum(p.numel() for p in model.parameters())
        73856

    References:
        Howard et al., "MobileNets", 2017; the closest weights are rank-1 truncations (Eckart and
        Young, 1936).
    """
    if initialize not in ("approximate", "fresh"):
        raise ValueError(f"initialize is 'approximate' or 'fresh', got {initialize!r}")
    convolution = _find(module, name)
    separable = _build(convolution)
    if initialize == "approximate":
        _approximate(convolution, separable)
    else:
        for part in cast("Any", separable):
            part.reset_parameters()
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    setattr(owner, attribute, separable)

    def put_back() -> None:
        if getattr(owner, attribute, None) is separable:
            setattr(owner, attribute, convolution)

    return Undo(put_back)


def _find(module: nn.Module, name: str) -> nn.Conv1d | nn.Conv2d | nn.Conv3d:
    found = dict(module.named_modules()).get(name) if name else None
    if not isinstance(found, _KINDS):
        raise ValueError(  # noqa: TRY004 - a wrong name, not a wrong type
            f"{name!r} is not a convolution of {type(module).__name__}, but {found!r}"
        )
    if found.groups != 1 or max(found.kernel_size) == 1:
        raise ValueError(f"{name!r} has nothing to separate: groups={found.groups}, {found!r}")
    return found


def _build(convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> nn.Sequential:
    kind = next(kind for kind in _KINDS if isinstance(convolution, kind))
    weight = convolution.weight
    depthwise = kind(
        convolution.in_channels,
        convolution.in_channels,
        convolution.kernel_size,  # type: ignore[arg-type]  # of this very kind
        stride=convolution.stride,  # type: ignore[arg-type]
        padding=convolution.padding,  # type: ignore[arg-type]
        dilation=convolution.dilation,  # type: ignore[arg-type]
        groups=convolution.in_channels,
        bias=False,
        padding_mode=convolution.padding_mode,
        device="meta",  # draws no random numbers
        dtype=weight.dtype,
    )
    pointwise = kind(
        convolution.in_channels,
        convolution.out_channels,
        1,
        bias=convolution.bias is not None,
        device="meta",
        dtype=weight.dtype,
    )
    for part in (depthwise, pointwise):
        for attribute, parameter in list(part.named_parameters()):
            place = torch.empty_like(parameter, device=weight.device)
            setattr(part, attribute, nn.Parameter(place))
    separable = nn.Sequential(depthwise, pointwise)
    separable.train(convolution.training)
    for parameter in separable.parameters():
        parameter.requires_grad_(weight.requires_grad)
    return separable


@torch.no_grad()
def _approximate(convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d, separable: nn.Sequential) -> None:
    """Split, for each input channel, the matrix of outputs by kernel positions into its best product."""
    depthwise, pointwise = cast("Any", separable)
    matrices = convolution.weight.detach().flatten(2).transpose(0, 1)  # in, out, positions
    left, size, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    scale = size[:, 0].sqrt()[:, None]
    depthwise.weight.copy_((right[:, 0] * scale).reshape(depthwise.weight.shape))
    pointwise.weight.copy_((left[:, :, 0] * scale).T.reshape(pointwise.weight.shape))
    if convolution.bias is not None:
        pointwise.bias.copy_(convolution.bias)

"""A batch without its memory: types, shapes and small whole numbers."""

from __future__ import annotations

from typing import Any

import torch

from lightning_oom._torch.fake import fake_mode
from lightning_oom.planning.known_values import set_value, value_of
from lightning_oom.planning.skeleton import Skeleton

__all__ = ["light_copy"]

_FAKEABLE = ("cpu", "cuda", "xpu", "mps")


def light_copy(batch: Any, device: torch.device | str = "cpu") -> Any:
    """Return a batch of fake tensors, which holds nothing of a device and can be run dry.

    Whole numbers of tensors that are not large are kept on the host, as a dry run follows them.

    Args:
        batch: Any nesting of tensors.
        device: Where the copies are taken to be; one that torch cannot fake is taken for the CPU.

    Example:
        >>> copy = light_copy({"x": torch.zeros(3, 2), "name": "a"})
        >>> tuple(copy["x"].shape), copy["name"]
        ((3, 2), 'a')
    """
    mode = fake_mode()
    place = torch.device(device)
    if place.type not in _FAKEABLE:
        place = torch.device("cpu")

    def lighten(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        with mode:
            fake = torch.empty_strided(
                tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=place
            )
        real = value_of(tensor)
        if real is not None and not real.is_floating_point():
            set_value(fake, real.detach().to("cpu", copy=True))
        return fake

    return Skeleton(lighten).value(batch)

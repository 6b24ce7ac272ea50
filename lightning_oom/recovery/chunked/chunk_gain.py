"""How much of a step's memory would chunking its children save?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_oom.recovery.chunked.chunk_check import reason_against

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ChunkGain", "estimate_chunk_gain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGain:
    """What a forward keeps for its backward, by where it is kept.

    Attributes:
        inside_bytes: Kept inside the children that may be chunked; lives chunk by chunk then.
        outside_bytes: Kept by everything else (the loss on the outputs, above all); stays.
    """

    inside_bytes: int
    outside_bytes: int

    def kept_fraction(self, rows: int, rows_together: int) -> float:
        """Return which part of it is alive at once in chunks of ``rows_together`` of ``rows`` rows.

        Returns:
            A fraction in (0, 1]; 1 means that chunks save nothing.
        """
        total = self.inside_bytes + self.outside_bytes
        if not total:
            return 1.0
        share = min(1.0, rows_together / max(rows, 1))
        return (self.outside_bytes + self.inside_bytes * share) / total


def estimate_chunk_gain(module: nn.Module, step: Callable[[], Any]) -> ChunkGain:
    """Run ``step`` once, best on a few rows, and count what it keeps for its backward.

    Args:
        module: Its direct children would be chunked.
        step: Runs the forward, and returns what holds the graph.

    Returns:
        Bytes of saved tensors, each storage counted once; parameters and buffers left out.

    Note:
        Children that turn out to run whole count as chunkable here.

    Example:
        >>> net = nn.Module()
        >>> net.body = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
        >>> gain = estimate_chunk_gain(net, lambda: net.body(torch.rand(4, 8)).square().mean())
        >>> gain.inside_bytes > 10 * gain.outside_bytes, gain.kept_fraction(64, 8) < 0.25
        (True, True)
    """
    counter = _Counter(module)
    hooks = []
    for child in module.children():
        if reason_against(child) is None:
            hooks += [
                child.register_forward_pre_hook(counter.enter),
                child.register_forward_hook(counter.leave, always_call=True),
            ]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(counter.pack, _unpack):
            graph = step()
    finally:
        for hook in hooks:
            hook.remove()
    del graph
    return ChunkGain(inside_bytes=counter.inside, outside_bytes=counter.outside)


class _Counter:
    def __init__(self, module: nn.Module) -> None:
        self.inside = self.outside = 0
        self._depth = 0
        self._seen = {
            tensor.untyped_storage().data_ptr()
            for tensor in [*module.parameters(), *module.buffers()]
            if tensor.layout is torch.strided
        }

    def enter(self, *_: Any) -> None:
        self._depth += 1

    def leave(self, *_: Any) -> None:
        self._depth -= 1

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                if self._depth:
                    self.inside += storage.nbytes()
                else:
                    self.outside += storage.nbytes()
        return tensor.detach()  # the tensor itself would keep its own graph alive for ever


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor

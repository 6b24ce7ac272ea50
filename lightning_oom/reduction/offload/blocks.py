"""Weights of whole blocks, on the device only while the block runs: for inference."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import module_buffers, module_members
from lightning_oom.undo import Undo, UndoStack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["BlockOffload", "find_blocks"]


def find_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated blocks of a model: children of its lists and sequences, outermost first.

    Args:
        model: Any module.

    Returns:
        Of each ``ModuleList`` or ``Sequential`` that holds at least two of one class: those that
        have children with weights. A ``Sequential`` counts where no block is found inside of it.
        None of them is inside another.

    Example:
        >>> from torch import nn
        >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> encoder = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
        >>> len(find_blocks(encoder))
        3
    """
    children = list(model.children())
    kinds = [type(child) for child in children]
    is_row = isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential))
    found: list[torch.nn.Module] = []
    for child in children:
        is_block = is_row and kinds.count(type(child)) > 1 and _has_weighted_children(child)
        if is_block and not isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
            found.append(child)
            continue
        inner = find_blocks(child)
        if not inner and is_block and isinstance(child, torch.nn.Sequential):
            inner = [child]
        found += inner
    return list(dict.fromkeys(found))


def _has_weighted_children(module: torch.nn.Module) -> bool:
    return any(True for child in module.children() for _ in child.parameters())


class BlockOffload:
    """Keeps the weights of blocks on the host and brings each block in while it runs.

    For inference only: in training every weight has to be on the device in the optimizer's step.
    The weights themselves stay the same objects with the same names; results are the same bits.
    Weights that something outside of the block uses as well (tied ones) stay on the device, and so
    do buffers, which a forward may write to.

    Args:
        model: The model.
        blocks: Its blocks, none inside another, each called as a module.
        device: Where they run.

    Attributes:
        kept_bytes: Weights that are on the host while no block runs.
        largest_bytes: Those of the largest block.

    Note:
        Cost: the weights of each block are copied to the device at each call, and the copy is waited
        for. Nothing is copied back: the host keeps the original. On CUDA the host memory is pinned.

    Example:
        >>> import torch
        >>> from lightning_oom.testing import SimulatedGPU
        >>> device = SimulatedGPU.enable()
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> offload = BlockOffload(encoder, find_blocks(encoder), device=device)
        >>> with offload.away():
        ...     _ = encoder.to(device)
        >>> undo = offload.attach()
        >>> with torch.no_grad():
        ...     output = encoder(torch.ones(1, 4, 16, device=device))
        >>> next(encoder.parameters()).device
        device(type='cpu')
        >>> undo()
    """

    def __init__(
        self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module], *, device: torch.device
    ) -> None:
        self._model = model
        self._device = device
        inside = {module for block in blocks for module in block.modules()}
        elsewhere = {
            id(parameter)
            for module in model.modules()
            if module not in inside
            for parameter in module_members(module)[1].values()
        }
        uses = [id(parameter) for block in blocks for parameter in set(block.parameters())]
        self._blocks: dict[torch.nn.Module, list[torch.nn.Parameter]] = {
            block: [
                parameter
                for parameter in block.parameters()
                if id(parameter) not in elsewhere and uses.count(id(parameter)) == 1
            ]
            for block in blocks
        }
        sizes = [sum(map(_num_bytes, parameters)) for parameters in self._blocks.values()]
        self.kept_bytes = sum(sizes)
        self.largest_bytes = max(sizes, default=0)
        self._homes: dict[torch.nn.Parameter, torch.Tensor] = {}

    @contextmanager
    def away(self) -> Iterator[None]:
        """Hide the blocks' weights from a ``model.to(device)`` inside the block."""
        hidden = [
            (children, name, child)
            for module in self._model.modules()
            for children in (module_members(module)[0],)
            for name, child in children.items()
            if child in self._blocks
        ]
        for children, name, _ in hidden:
            children[name] = None
        try:
            yield
        finally:
            for children, name, child in hidden:
                children[name] = child
        for block, own in self._blocks.items():
            self._move_the_rest(block, {id(parameter) for parameter in own})

    def _move_the_rest(self, block: torch.nn.Module, own: set[int]) -> None:
        for parameter in block.parameters():
            if id(parameter) not in own:
                parameter.data = parameter.data.to(self._device)
        for module in block.modules():
            buffers = module_buffers(module)
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = buffer.to(self._device)

    def attach(self) -> Undo:
        """Move the blocks' weights to the host and let each block bring its own in.

        Returns:
            The undo: weights stay on the host, where Lightning puts a module at the end of a run.
        """
        undos = UndoStack()
        pins = self._device.type == "cuda"
        for block, parameters in self._blocks.items():
            for parameter in parameters:
                home = parameter.data.to("cpu")
                self._homes[parameter] = home.pin_memory() if pins else home
            self._move_out(parameters)
            before = block.register_forward_pre_hook(self._bring_in, prepend=True)
            after = block.register_forward_hook(self._take_out, always_call=True)
            undos.push(Undo(before.remove))
            undos.push(Undo(after.remove))
        undos.push(Undo(self._homes.clear))
        undos.push(Undo(self._all_out))
        return Undo(undos)

    def _bring_in(self, block: torch.nn.Module, *_: Any) -> None:
        for parameter in self._blocks[block]:
            parameter.data = self._homes[parameter].to(self._device, non_blocking=True)

    def _take_out(self, block: torch.nn.Module, *_: Any) -> None:
        self._move_out(self._blocks[block])

    def _move_out(self, parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data = self._homes[parameter]

    def _all_out(self) -> None:
        for parameters in self._blocks.values():
            self._move_out(parameters)


def _num_bytes(parameter: torch.nn.Parameter) -> int:
    return parameter.numel() * parameter.itemsize

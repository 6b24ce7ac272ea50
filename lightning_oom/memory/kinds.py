"""Who holds the allocated memory, by kind, from the live tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import tree_leaves
from lightning_oom.memory.devices import one_device, read_memory
from lightning_oom.memory.storages import StorageCount

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lightning_oom.memory.reading import MemoryReading
    from lightning_oom.memory.saved_tensors import SavedTensorTracker

__all__ = ["MemoryByKind", "read_kinds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByKind:
    """Allocated bytes by what holds them; each storage counts once, for the first kind that fits.

    Attributes:
        parameters_bytes: Parameters of the module.
        buffers_bytes: Its buffers.
        gradients_bytes: The ``grad`` of its parameters.
        optimizer_bytes: Tensors in the state of the optimizers.
        batch_bytes: The batch.
        activations_bytes: Tensors that autograd has saved for a backward pass.
        other_bytes: Everything else that is allocated: outputs, temporaries, metrics, what user code
            keeps.

    Example:
        >>> kinds = MemoryByKind(
        ...     parameters_bytes=4, buffers_bytes=0, gradients_bytes=4, optimizer_bytes=8,
        ...     batch_bytes=1, activations_bytes=2, other_bytes=1,
        ... )
        >>> kinds.total_bytes
        20
    """

    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    activations_bytes: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum over all kinds: what was allocated."""
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, int]:
        """Return bytes by the name of the kind, without the unit."""
        return {
            field.name.removesuffix("_bytes"): int(getattr(self, field.name))
            for field in fields(self)
        }


def read_kinds(
    module: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    batch: Any = None,
    *,
    saved: SavedTensorTracker | None = None,
    reading: MemoryReading | None = None,
    device: torch.device | str | None = None,
) -> MemoryByKind:
    """Add up what live tensors hold on one device, by kind.

    Args:
        module: The module that is trained.
        optimizers: Its optimizers.
        batch: The batch that is under way, any nesting of tensors; ``None`` for none.
        saved: Knows what autograd has saved; ``None`` counts activations as ``other``.
        reading: What is allocated; ``None`` reads it now.
        device: Which device; ``None`` takes that of ``reading``, or of the first parameter.

    Returns:
        The bytes by kind. On the CPU, where "allocated" is the resident set of the process, ``other``
        is the interpreter, libraries, and whatever else.

    Note:
        Cost: a walk over parameters, optimizer state and saved tensors, some 2 us each. No copy, no
        synchronisation.

    Example:
        >>> import torch
        >>> module = torch.nn.Linear(8, 4)
        >>> kinds = read_kinds(module, [torch.optim.SGD(module.parameters())], torch.zeros(2, 8))
        >>> kinds.parameters_bytes, kinds.gradients_bytes, kinds.batch_bytes
        (144, 0, 64)
    """
    if reading is None:
        reading = read_memory(_device_of(module) if device is None else device)
    parameters = list(module.parameters())
    count = StorageCount(one_device(reading.device if device is None else device))
    found = {
        "parameters_bytes": count.add(parameters),
        "buffers_bytes": count.add(module.buffers()),
        "optimizer_bytes": count.add(_optimizer_tensors(optimizers)),
        "gradients_bytes": count.add(p.grad for p in parameters),
        "batch_bytes": count.add(_batch_tensors(batch)),
        "activations_bytes": 0 if saved is None else count.add(saved.alive()),
    }
    allocated_bytes = reading.allocated_bytes or 0
    return MemoryByKind(**found, other_bytes=max(allocated_bytes - sum(found.values()), 0))


def _device_of(module: torch.nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Any]:
    for optimizer in optimizers:
        for state in list(optimizer.state.values()):
            yield from tree_leaves(state)
        for group in optimizer.param_groups:  # a learning rate may be a tensor
            yield from (value for name, value in group.items() if name != "params")


def _batch_tensors(batch: Any) -> Iterator[Any]:
    """Give the leaves of a batch, and the tensors in the attributes of leaves that are objects."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        else:
            yield from getattr(leaf, "__dict__", {}).values()

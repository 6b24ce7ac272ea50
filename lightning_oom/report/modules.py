"""What each module of the model holds, and what autograd has saved for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_oom.memory.storages import StorageCount
from lightning_oom.report.record import ModuleMemory, OptimizerMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.optim import Optimizer

    from lightning_oom.report.graph import SavedTensor

__all__ = ["describe_modules", "describe_optimizers"]

_MAX_MODULES = 200
_TENSORS_PER_PARAMETER = {
    "Adadelta": 2,
    "Adagrad": 1,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 1,
    "SGD": 0,
    "SparseAdam": 2,
    "Lion": 1,
}
"""State tensors of a parameter's own size that an optimizer keeps for each."""


def describe_modules(
    module: torch.nn.Module,
    device: torch.device,
    saved: Iterable[SavedTensor],
    *,
    batch: Iterable[torch.Tensor] = (),
) -> tuple[ModuleMemory, ...]:
    """List the modules that hold parameters, with what autograd saved after using these.

    Args:
        module: The model.
        device: Only what is there counts.
        saved: What the graph holds.
        batch: Tensors that are no activations although the graph holds them.

    Returns:
        In the model's order; of more than 200, those that hold most.
    """
    count = StorageCount(device)
    count.add(module.parameters())
    count.add(batch)
    by_path: dict[str, int] = {}
    saw_any = False
    for item in saved:
        saw_any = True
        num_bytes = count.add([item.tensor])
        path = (item.parameter or "").rpartition(".")[0]
        while num_bytes:
            by_path[path] = by_path.get(path, 0) + num_bytes
            if not path:
                break
            path = path.rpartition(".")[0]
    found = [
        ModuleMemory(
            path=path,
            type_name=type(child).__name__,
            parameters_bytes=StorageCount(device).add(child.parameters()),
            saved_bytes=by_path.get(path, 0) if saw_any else None,
            is_leaf=next(child.children(), None) is None,
        )
        for path, child in module.named_modules()
        if path in by_path or next(child.parameters(), None) is not None
    ]
    if len(found) > _MAX_MODULES:
        held = sorted(found, key=lambda m: -(m.parameters_bytes + (m.saved_bytes or 0)))
        kept = {m.path for m in held[:_MAX_MODULES]}
        found = [m for m in found if m.path in kept]
    return tuple(found)


def describe_optimizers(
    optimizers: Iterable[Optimizer], device: torch.device
) -> tuple[OptimizerMemory, ...]:
    """Say what each optimizer keeps, and what it will keep after its first step.

    Args:
        optimizers: The optimizers.
        device: Only what is there counts.
    """
    return tuple(_describe_optimizer(optimizer, device) for optimizer in optimizers)


def _describe_optimizer(optimizer: Any, device: torch.device) -> OptimizerMemory:
    own = getattr(optimizer, "optimizer", optimizer)  # a wrapper such as LightningOptimizer
    group = own.param_groups[0] if own.param_groups else {}
    parameters = [p for g in own.param_groups for p in g["params"] if p.requires_grad]
    per_parameter = _TENSORS_PER_PARAMETER.get(type(own).__name__)
    if per_parameter is not None:
        per_parameter += sum(bool(group.get(name)) for name in ("momentum", "amsgrad", "centered"))
    expected = StorageCount(device).add(parameters)
    state = StorageCount(device)
    return OptimizerMemory(
        type_name=type(own).__name__,
        state_bytes=sum(
            state.add(values.values()) for values in own.state.values() if isinstance(values, dict)
        ),
        expected_bytes=None if per_parameter is None else per_parameter * expected,
        foreach=group.get("foreach"),
    )

"""Which tensors are alive on a device, what kind each is and what holds it."""

from __future__ import annotations

import gc
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import cuda_snapshot, tree_leaves
from lightning_oom.memory.storages import strided_parts
from lightning_oom.report.blocks import lines_by_address
from lightning_oom.report.frames import locals_of
from lightning_oom.report.graph import SavedTensor, walk_graph
from lightning_oom.report.record import LiveTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from torch.optim import Optimizer

__all__ = ["Census", "take_census"]

_MAX_DEPTH = 3
_MAX_ITEMS = 2000


class Census:
    """Every storage on one device that was found alive, once; to be dropped with the error.

    Attributes:
        saved: What autograd has saved.
        num_found: Storages.
    """

    def __init__(self, device: torch.device) -> None:
        self.saved: list[SavedTensor] = []
        self._device = device
        self._found: dict[int, tuple[int, str, str, torch.Tensor]] = {}

    @property
    def num_found(self) -> int:
        """Return how many storages were found."""
        return len(self._found)

    def add(self, tensor: Any, kind: str, owner: str) -> None:
        """Note the storage of a tensor, unless it was noted before."""
        for part in strided_parts(tensor):
            if part.device.type != self._device.type or (
                self._device.index is not None
                and part.device.index not in (None, self._device.index)
            ):
                continue
            try:
                storage = part.untyped_storage()
                address, num_bytes = storage.data_ptr(), storage.nbytes()
            except (NotImplementedError, RuntimeError):  # no storage of its own
                continue
            if address and num_bytes:
                self._found.setdefault(address, (num_bytes, kind, owner, part))

    def alive(self) -> Iterator[torch.Tensor]:
        """Give what autograd has saved, as :func:`~lightning_oom.memory.kinds.read_kinds` asks."""
        return (saved.tensor for saved in self.saved)

    def largest(self, count: int) -> tuple[LiveTensor, ...]:
        """Describe the largest storages, largest first."""
        largest = sorted(self._found.items(), key=lambda entry: -entry[1][0])[:count]
        sites = lines_by_address(cuda_snapshot(self._device)) if largest else {}
        return tuple(
            LiveTensor(
                owner=owner,
                kind=kind,
                shape=tuple(int(extent) for extent in tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                num_bytes=num_bytes,
                made_at=sites.get(address),
            )
            for address, (num_bytes, kind, owner, tensor) in largest
        )


def take_census(
    device: torch.device,
    *,
    module: torch.nn.Module,
    optimizers: Sequence[Optimizer] = (),
    batch: Any = None,
    frames: Sequence[FrameType] = (),
    young_only: bool = False,
) -> Census:
    """Find what is alive on a device, and who holds it.

    Args:
        device: Where to look.
        module: The model; names are relative to it.
        optimizers: Its optimizers.
        batch: The batch under way.
        frames: Of the error; their local variables have names.
        young_only: Of tensors that neither the model, the optimizers, the batch, a frame nor the
            graph leads to, find those of the last moments alone.

    Note:
        Cost: some microseconds for each tensor and node of the graph, and 50 to 150 ms for all that
        Python's garbage collector knows, unless ``young_only``. Nothing is computed, allocated on
        the device, or kept but the census itself.
    """
    census = Census(device)
    names = _add_module(census, module)
    _add_optimizers(census, optimizers, names)
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            census.add(parameter.grad, "gradients", f"model.{name}.grad")
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            census.add(leaf, "batch", "the batch")
    in_python = _tensors_in_python(young_only=young_only)
    named = [*_locals(frames), *_attributes(module)]
    roots = [*in_python, *(tensor for _, tensor in named)]
    census.saved = list(walk_graph(_graphs_of(roots), names))
    saved_storages = {_address(saved.tensor) for saved in census.saved}
    for owner, tensor in named:
        kind = "activations" if _address(tensor) in saved_storages else "other"
        census.add(tensor, kind, owner)
    for saved in census.saved:
        census.add(saved.tensor, "activations", _saved_owner(saved))
    for tensor in in_python:
        census.add(tensor, "other", "unknown")
    return census


def _add_module(census: Census, module: torch.nn.Module) -> dict[int, str]:
    names = {}
    for name, parameter in module.named_parameters():
        names[id(parameter)] = name
        census.add(parameter, "parameters", f"model.{name}")
    for name, buffer in module.named_buffers():
        census.add(buffer, "buffers", f"model.{name}")
    return names


def _add_optimizers(
    census: Census, optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> None:
    for number, optimizer in enumerate(optimizers):
        for parameter, state in list(optimizer.state.items()):
            of = names.get(id(parameter), "a parameter")
            for key, value in state.items() if isinstance(state, dict) else ():
                for leaf in tree_leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        census.add(leaf, "optimizer", f"optimizer {number}: {key} of {of}")


def _tensors_in_python(*, young_only: bool) -> list[torch.Tensor]:
    """Give every tensor that has a Python object; types are asked, no object is touched."""
    generations = (0, 1) if young_only else (0, 1, 2)
    found = []
    for generation in generations:
        things = gc.get_objects(generation=generation)
        kinds = {kind for kind in set(map(type, things)) if issubclass(kind, torch.Tensor)}
        found += list(compress(things, map(kinds.__contains__, map(type, things))))
    return found


def _graphs_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    for tensor in tensors:
        try:
            node = tensor.grad_fn
        except RuntimeError:  # a view whose base was changed in a way that cannot be differentiated
            continue
        if node is not None:
            yield node


def _locals(frames: Sequence[FrameType]) -> Iterator[tuple[str, torch.Tensor]]:
    innermost_first = reversed(frames)
    for frame in sorted(innermost_first, key=lambda f: "/torch/" in f.f_code.co_filename):
        code = frame.f_code
        for name, value in locals_of(frame).items():
            for leaf in _shallow_tensors(value, 0):
                yield f"local {name!r} of {code.co_name}", leaf


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Give tensors in plain attributes of the modules: lists that grow, results that were kept."""
    for path, child in module.named_modules():
        own = ".".join(filter(None, ("model", path)))
        for name, value in list(vars(child).items()):
            if not name.startswith("_"):
                for leaf in _shallow_tensors(value, 0):
                    yield f"{own}.{name}", leaf


def _shallow_tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple, dict, set) and depth < _MAX_DEPTH:
        items = list(value.values() if isinstance(value, dict) else value)
        for item in items[:_MAX_ITEMS]:
            yield from _shallow_tensors(item, depth + 1)


def _saved_owner(saved: SavedTensor) -> str:
    after = f" after model.{saved.parameter}" if saved.parameter else ""
    return f"saved by {saved.node_name}{after}"


def _address(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None

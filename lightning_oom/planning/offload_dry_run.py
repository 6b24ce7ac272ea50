"""Offloading of activations in a dry run, where there is no host to copy to."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import identity_of
from lightning_oom.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["DryOffload"]

_IN_FLIGHT = 4  # copies to the host whose source is still held, on CUDA
_AHEAD = 2  # copies back that are begun early, on CUDA
_HOPS = 8


class DryOffload:
    """Does to fake tensors what ``offload_activations`` does to those of a device.

    What autograd saves is let go of in the forward and allocated again in the backward, whole
    storages, each once. Parameters, buffers, the batch, autocast's weights and whatever is smaller
    than ``min_bytes`` stay. On CUDA, copies on their way hold four storages longer and bring two
    back early.

    Args:
        batch: Tensors of the batch. It is known by types and trailing shapes, for a dry run makes
            its own.
        has_streams: Whether copies run beside the computation.
        min_bytes: Storages below this stay.

    Attributes:
        moved_bytes: Copied to the host so far.
        num_forwards: Forward passes so far.

    Example:
        >>> from lightning_oom.planning.fake_step import FakeStep
        >>> layers = [m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
        >>> batch = torch.zeros(8192, 64)
        >>> step = FakeStep(torch.nn.Sequential(*layers), batch)
        >>> dry = DryOffload(batch=[batch])
        >>> step.run(forward_context=dry.around).peak_bytes < step.run().peak_bytes
        True
        >>> dry.moved_bytes // dry.num_forwards == 4 * 8192 * 64 * 4
        True
    """

    def __init__(
        self, *, batch: Iterable[torch.Tensor] = (), has_streams: bool = False, min_bytes: int = MIB
    ) -> None:
        self.moved_bytes = 0
        self.num_forwards = 0
        self._batch_forms = {_form(tensor) for tensor in batch}
        self.has_streams = has_streams
        self.min_bytes = max(min_bytes, 1)

    @contextmanager
    def around(self, module: torch.nn.Module) -> Iterator[None]:
        """Offload what is saved inside; to be entered around a forward.

        Args:
            module: Whose parameters and buffers stay.
        """
        self.num_forwards += 1
        hooks = _Hooks(self, module)
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            yield
        hooks.settle()

    def is_of_batch(self, tensor: torch.Tensor) -> bool:
        """Say whether a saved tensor looks like one of the batch, which the loop holds anyway."""
        return tensor.is_leaf and not tensor.requires_grad and _form(tensor) in self._batch_forms


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape[1:]), tensor.dtype


class _Moved:
    """A storage that is on the host."""

    __slots__ = ("__weakref__", "arrived", "back", "previous", "template")

    def __init__(self, tensor: torch.Tensor, previous: _Moved | None) -> None:
        num_items = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.template = (num_items, tensor.dtype, tensor.device)
        self.previous = None if previous is None else weakref.ref(previous)
        self.arrived: torch.Tensor | None = None
        self.back: weakref.ref[torch.UntypedStorage] | None = None

    def fetch(self) -> torch.Tensor:
        num_items, dtype, device = self.template
        return torch.empty(num_items, dtype=dtype, device=device)

    def is_back(self) -> bool:
        return self.arrived is not None or (self.back is not None and self.back() is not None)


class _Saved:
    """What a graph node keeps: the tensor where it stays, its place in a storage where not."""

    __slots__ = ("layout", "moved", "tensor")

    def __init__(self, tensor: torch.Tensor, moved: _Moved | None) -> None:
        self.moved = moved
        self.tensor = tensor.detach() if moved is None else None
        self.layout = (tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


class _Hooks:
    """Of one forward pass."""

    def __init__(self, owner: DryOffload, module: torch.nn.Module) -> None:
        self._owner = owner
        self._held = {
            identity_of(tensor.untyped_storage())
            for tensor in (*module.parameters(), *module.buffers())
            if tensor.layout is torch.strided
        }
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[_Moved]]] = {}
        self._leaving: deque[torch.UntypedStorage] = deque(maxlen=_IN_FLIGHT)
        self._latest: weakref.ref[_Moved] | None = None

    def settle(self) -> None:
        """Let go of what was on its way."""
        self._leaving.clear()
        self._known.clear()

    def pack(self, tensor: torch.Tensor) -> _Saved:
        if tensor.layout is not torch.strided or not self._is_moved(tensor):
            return _Saved(tensor, None)
        storage = tensor.untyped_storage()
        known = self._known.get(identity_of(storage))
        moved = known[1]() if known is not None and known[0]() is storage else None
        if moved is None:
            latest = None if self._latest is None else self._latest()
            moved = _Moved(tensor, latest)
            self._latest = weakref.ref(moved)
            self._known[identity_of(storage)] = weakref.ref(storage), weakref.ref(moved)
            self._owner.moved_bytes += storage.nbytes()
            if self._owner.has_streams:
                self._leaving.append(storage)
        return _Saved(tensor, moved)

    def _is_moved(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        return (
            num_bytes >= self._owner.min_bytes
            and num_bytes % tensor.itemsize == 0
            and identity_of(storage) not in self._held
            and not _is_made_of_leaf(tensor)
            and not self._owner.is_of_batch(tensor)
        )

    def unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.moved is None:
            assert saved.tensor is not None  # noqa: S101 - one of the two is there
            return saved.tensor
        moved = saved.moved
        storage = None if moved.back is None else moved.back()
        if storage is None:
            arrived, moved.arrived = moved.arrived, None
            arrived = moved.fetch() if arrived is None else arrived
            storage = arrived.untyped_storage()
            moved.back = weakref.ref(storage)
            self._fetch_ahead(moved)
            return arrived.as_strided(*saved.layout)
        _, dtype, device = moved.template
        return torch.empty(0, dtype=dtype, device=device).set_(
            storage, saved.layout[2], saved.layout[0], saved.layout[1]
        )

    def _fetch_ahead(self, moved: _Moved) -> None:
        following = None if moved.previous is None else moved.previous()
        for _ in range(_AHEAD if self._owner.has_streams else 0):
            if following is None:
                break
            if not following.is_back():
                following.arrived = following.fetch()
            following = None if following.previous is None else following.previous()


def _is_made_of_leaf(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a leaf that learns, or autocast's copy of one."""
    if tensor.is_leaf:
        return tensor.requires_grad
    node: Any = tensor.grad_fn
    for _ in range(_HOPS):
        if node is None or hasattr(node, "variable"):
            return node is not None
        if len(node.next_functions) != 1 or not node.name().startswith(_SAME_VALUES):
            return False
        node = node.next_functions[0][0]
    return False


_SAME_VALUES = (
    *("Alias", "AsStrided", "Expand", "Permute", "Reshape", "Squeeze", "TBackward"),
    *("ToCopy", "Transpose", "Unsqueeze", "UnsafeView", "View"),
)
"""Beginnings of the names of nodes that cast or view."""

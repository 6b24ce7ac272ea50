"""What autograd saves in the forward pass, kept on the host until the backward pass asks for it."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import identity_of, let_hooks_be_disabled, read_version
from lightning_oom.reduction.offload.streams import Copies, HostCopy, copies_for
from lightning_oom.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["OffloadTally", "offload_activations"]

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[{kind} {shape}] is at version {now}; expected version {then} instead. Hint: enable anomaly "
    "detection to find the operation that failed to compute its gradient, with "
    "torch.autograd.set_detect_anomaly(True)."
)

_CASTS_AND_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "AsStrided", "Expand", "Permute", "Reshape", "ReshapeAlias", "Squeeze", "T"),
        *("ToCopy", "Transpose", "Unsqueeze", "UnsafeView", "View"),
    )
)
_CHAIN = 8  # of casts and views, before one gives up; two are usual


@dataclass(slots=True)
class OffloadTally:
    """What was moved, added up over every context that was given this tally.

    Attributes:
        to_host_bytes: Copied from the device, in whole storages.
        to_device_bytes: Copied back; may be more (a second backward) or less (a graph that was
            dropped).
        num_to_host: Storages copied.
        num_shared: Saved tensors that needed no copy, because their storage had one.
        num_kept: Saved tensors that stayed on the device.
    """

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    num_to_host: int = 0
    num_shared: int = 0
    num_kept: int = 0


@contextmanager
def offload_activations(
    *,
    min_bytes: int | str = "1 MiB",
    keep: Iterable[Any] = (),
    tally: OffloadTally | None = None,
) -> Iterator[OffloadTally]:
    """Keep saved activations on the host from the forward pass to the backward pass.

    To be entered around a forward pass. The backward pass may run inside or after the block; what
    it asks for is copied back to the device. Gradients, buffers and random numbers are the same bits
    as without, since only copies are made. Each storage is copied once, however many views of it are
    saved.

    These stay where they are: storages of less than ``min_bytes``; those of ``keep``; casts and
    views of leaves that require a gradient, such as autocast's weights; sparse tensors and
    tensor subclasses; everything that is on the host already.

    Args:
        min_bytes: Storages below this stay on the device, in bytes or as text; at least 0.
        keep: Tensors that somebody holds on the device anyway, so that a copy would free nothing:
            parameters, buffers, the batch. Anything but tensors is passed over.
        tally: Where to add up what is moved; ``None`` makes a new one.

    Yields:
        The tally.

    Raises:
        ValueError: ``min_bytes`` is negative or cannot be read.
        RuntimeError: Raised by the backward pass, as without offloading, when a saved tensor was
            modified in place after it had been saved.

    Note:
        Cost: each byte crosses the bus twice. On CUDA this happens on a stream of its own from
        and to pinned memory, and copies back begin two storages ahead; elsewhere copies are waited
        for. Time of the host beside the bytes: 5 us for a saved tensor that stays, 50 us for one
        that goes out and comes back. Blocks without a graph (``no_grad``) cost nothing. Hooks that
        user code enters inside the block (``save_on_cpu``, non-reentrant checkpoints) win over
        these; inputs of checkpointed blocks are moved.

        A write that torch does not count (through ``.data``, or by a custom kernel) between two
        saves of one storage is not seen by the second: both get the first copy.

    Example:
        >>> import torch
        >>> from lightning_oom.testing import SimulatedGPU
        >>> device = SimulatedGPU.enable()
        >>> layer = torch.nn.Linear(64, 64, device=device)
        >>> x = torch.ones(8, 64, device=device)
        >>> with offload_activations(min_bytes="1 KiB", keep=[*layer.parameters(), x]) as tally:
        ...     loss = layer(x).exp().sum()
        >>> loss.backward()
        >>> tally.to_host_bytes == tally.to_device_bytes == 8 * 64 * 4  # the result of exp
        True

    References:
        ``torch.autograd.graph.save_on_cpu``, which copies every saved tensor, weights and views
        included.
    """
    engine = _Hooks(parse_bytes(min_bytes), keep, OffloadTally() if tally is None else tally)
    hooks = torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack)
    try:
        hooks.__enter__()
    except RuntimeError:  # a transform of torch.func has disabled hooks here and now
        yield engine.tally
        return
    undo = let_hooks_be_disabled(hooks)
    try:
        yield engine.tally
    finally:
        undo()
        hooks.__exit__(None, None, None)
        engine.close()


class _Saved:
    """What a graph node gets in place of a tensor.

    ``tensor`` has the version counter of the one that was saved, and its storage only where that
    stays on the device. Never the tensor itself: an output would keep its own graph alive, for ever.
    """

    __slots__ = ("copy", "dtype", "kind", "offset", "shape", "stride", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, copy: HostCopy | None) -> None:
        self.version = None if tensor.is_inference() else read_version(tensor)
        self.tensor = tensor.detach()
        self.copy = copy
        if copy is not None:
            self.kind, self.dtype = tensor.type(), tensor.dtype
            self.shape, self.stride = tensor.shape, tensor.stride()
            self.offset = tensor.storage_offset()
            if self.version is not None:
                self.tensor.data = tensor.new_empty(0)  # drops the storage, not the counter

    def check_version(self) -> None:
        """Raise where the tensor has been written to: torch does not look below hooks."""
        if self.version is None or read_version(self.tensor) == self.version:
            return
        moved = self.copy is not None
        raise RuntimeError(
            _CHANGED.format(
                kind=self.kind if moved else self.tensor.type(),
                shape=list(self.shape if moved else self.tensor.shape),
                now=read_version(self.tensor),
                then=self.version,
            )
        )


class _Hooks:
    """The hooks of one context; graphs refer to them until their backward has run."""

    def __init__(self, min_bytes: int, keep: Iterable[Any], tally: OffloadTally) -> None:
        self.tally = tally
        self._min_bytes = min_bytes
        # The storages themselves, so that no address in here can be used again.
        self._keep = {
            identity_of(storage): storage
            for tensor in keep
            if isinstance(tensor, torch.Tensor) and (storage := _storage_of(tensor)) is not None
        }
        self._known: dict[
            tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], weakref.ref[HostCopy]]
        ] = {}
        self._copies: set[Copies] = set()
        self._held: torch.UntypedStorage | None = None  # came back last, and is wanted again

    def close(self) -> None:
        """Let go of everything but the tally: graphs may live long."""
        for copies in self._copies:
            copies.settle()
        self._keep, self._known, self._copies = {}, {}, set()

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """Take a tensor that is being saved."""
        storage = None if tensor.is_cpu else _storage_of(tensor)
        if storage is None or not self._is_moved(tensor, storage):
            self.tally.num_kept += 1
            return _Saved(tensor, None)
        version = -1 if tensor.is_inference() else read_version(tensor)
        key = identity_of(storage), version
        copy = self._find(key, storage)
        if copy is None:
            copies = copies_for(tensor.device)
            self._copies.add(copies)
            num_items = storage.nbytes() // tensor.itemsize
            copy = copies.to_host(tensor.detach().as_strided((num_items,), (1,), 0))
            self._known[key] = weakref.ref(storage), weakref.ref(copy)
            self.tally.num_to_host += 1
            self.tally.to_host_bytes += storage.nbytes()
        else:
            self.tally.num_shared += 1
        copy.num_waiting += 1
        return _Saved(tensor, copy)

    def _is_moved(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        num_bytes = storage.nbytes()
        return (
            num_bytes >= max(self._min_bytes, 1)
            and num_bytes % tensor.itemsize == 0
            and identity_of(storage) not in self._keep
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not _is_made_of_leaf(tensor)
        )

    def _find(self, key: tuple[int, int], storage: torch.UntypedStorage) -> HostCopy | None:
        """Return the copy of this storage; another one may have had the same address before."""
        known = self._known.get(key)
        return known[1]() if known is not None and known[0]() is storage else None

    def unpack(self, saved: _Saved) -> torch.Tensor:
        """Give a saved tensor to the backward pass."""
        saved.check_version()
        copy = saved.copy
        if copy is None:
            return saved.tensor
        storage = None if copy.back is None else copy.back()
        if self._held is not storage:
            self._held = None  # before there is need of more
        if storage is None:
            storage = copies_for(copy.device).to_device(copy).untyped_storage()
            copy.back = weakref.ref(storage)
            self.tally.to_device_bytes += storage.nbytes()
        copy.num_waiting -= 1
        self._held = storage if copy.num_waiting > 0 else None
        tensor = torch.empty(0, dtype=saved.dtype, device=copy.device)
        return tensor.set_(storage, saved.offset, saved.shape, saved.stride)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a plain tensor, ``None`` for one that wraps others or is not strided."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested
    return tensor.untyped_storage() if is_plain and tensor.layout is torch.strided else None


def _is_made_of_leaf(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a leaf that learns, or nothing but casts and views of one."""
    if tensor.is_leaf:
        return tensor.requires_grad
    node: Any = tensor.grad_fn
    for _ in range(_CHAIN):
        if node is None:
            return False
        if hasattr(node, "variable"):  # where gradients of a leaf are added up
            return True
        if node.name() not in _CASTS_AND_VIEWS:
            return False
        node = node.next_functions[0][0]
    return False

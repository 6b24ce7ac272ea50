"""Watch every allocation that torch makes, on any device, as it happens.

A dispatch mode sees each operator with its result. Most operators return views or change a tensor
in place; those whose schema returns something new allocate. The ledger then tells a storage that
is new from one that is known, and learns by weak reference when it is freed.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version
from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

from lightning_oom._torch import WatchingMode, read_version, sparse_parts
from lightning_oom.memory.operators import PLAIN, ROLES, OperatorRole, desugars, role_of
from lightning_oom.memory.resizing import TensorGeometry, notice_resizes, written_tensors

__all__ = ["AllocationWatcher", "StorageLedger", "storages_in"]

_ENTERED: weakref.WeakSet[AllocationWatcher] = weakref.WeakSet()


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key", "num_bytes")
    key: int
    num_bytes: int


class StorageLedger:
    """The storages that are alive, and how many bytes they hold together.

    Storages are held by weak reference, so that being counted keeps nothing alive. Python sees one
    object per storage for as long as the storage lives, whoever holds it: its ``id`` is the key.

    Attributes:
        live_bytes: Bytes of the counted storages that are alive.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self._refs: dict[int, _StorageRef] = {}

    def add(self, storage: torch.UntypedStorage) -> int:
        """Count ``storage``; return its bytes if it was not known, else 0."""
        key = id(storage)
        known = self._refs.get(key)
        if known is not None:
            if known() is storage:
                return 0
            self._forget(known)  # the id was used again before the callback ran
        num_bytes = storage.nbytes()
        ref = _StorageRef(storage, self._forget)
        ref.key, ref.num_bytes = key, num_bytes
        self._refs[key] = ref
        self.live_bytes += num_bytes
        return num_bytes

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` with the bytes it has now, whether it was known or not."""
        if self.add(storage):
            return
        ref = self._refs[id(storage)]
        num_bytes = storage.nbytes()
        self.live_bytes += num_bytes - ref.num_bytes
        ref.num_bytes = num_bytes

    def _forget(self, ref: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(ref, _StorageRef)  # noqa: S101 - the ledger makes no other references
        if self._refs.get(ref.key) is ref:
            del self._refs[ref.key]
            self.live_bytes -= ref.num_bytes


class AllocationWatcher(WatchingMode):
    """See each new allocation inside a ``with`` block, and refuse it if the subclass says so.

    A subclass overrides :meth:`refuses` and :meth:`make_error`. The refused tensor has been freed
    when the error is made, and neither the error nor its frames keep it or the operator's
    arguments alive.

    What is seen: every operator below autograd on this thread and on the threads of its backward
    passes, also under autocast, checkpointing, foreach optimizers and a compiled model (which then
    runs eagerly). What is not: collectives, memory that an operator allocates and frees within
    itself, other Python threads, and processes forked from this one, in which the watcher sleeps
    (data loader workers inherit it) unless they belong to a process group.

    Args:
        device: Only allocations on this device count; of a device without an index, on all devices
            of that type. ``None`` counts everywhere.
    """

    # Let operators such as flex_attention pass instead of raising.
    supports_higher_order_operators = True

    def __init__(self, *, device: torch.device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch annotates no mode
        self.device = device
        self.ledger = StorageLedger()
        self._forked = False
        self._counted: dict[torch.device, bool] = {}  # to read the type of a device is slow
        self._stop_noticing: Callable[[], None] | None = None

    def refuses(self, operator: Any, num_bytes: int) -> bool:
        """Say whether the allocation that was just counted must not happen."""
        return False

    def make_error(self, operator: Any, num_bytes: int) -> BaseException:
        """Make the error for an allocation that was refused, after it was freed."""
        raise NotImplementedError

    def counts(self, device: torch.device) -> bool:
        """Say whether allocations on ``device`` are watched."""
        counted = self._counted.get(device)
        if counted is None:
            mine = self.device
            counted = self._counted[device] = device.type != "meta" and (
                mine is None or (mine.type == device.type and mine.index in (None, device.index))
            )
        return counted

    def saw_resize(self, storage: torch.UntypedStorage, bytes_before: int) -> bool:
        """Count a storage that was resized in place; say whether it must not be."""
        grown_bytes = storage.nbytes() - bytes_before
        if not grown_bytes or not self.counts(storage.device) or (self._forked and self._sleeps()):
            return False
        self.ledger.resize(storage)
        return grown_bytes > 0 and self.refuses("UntypedStorage.resize_", grown_bytes)

    def __enter__(self) -> Self:
        """Start watching."""
        self._stop_noticing = notice_resizes(self)
        _ENTERED.add(self)
        super().__enter__()  # type: ignore[no-untyped-call] # as above
        return self

    def __exit__(self, *exc_details: object) -> None:
        """Stop watching."""
        super().__exit__(*exc_details)  # type: ignore[no-untyped-call] # as above
        _ENTERED.discard(self)
        if self._stop_noticing is not None:
            self._stop_noticing()
            self._stop_noticing = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then look at what it returned."""
        if types and desugars(types):
            return NotImplemented
        kwargs = kwargs or {}
        role = ROLES.get(func) or role_of(func)
        if role is PLAIN:
            return func(*args, **kwargs)
        if role.bumps_versions:
            return _run_and_bump(func, args, kwargs)
        if self._forked and self._sleeps():
            return func(*args, **kwargs)
        if role.writes:
            return self._run_resizing(func, role, args, kwargs)
        out = func(*args, **kwargs)
        num_bytes = 0
        for storage in storages_in(out, self):
            num_bytes += self.ledger.add(storage)
        if num_bytes and not role.adopts and self.refuses(func, num_bytes):
            # The frames of the error must keep nothing alive.
            del out, args, kwargs, storage
            raise self.make_error(func, num_bytes)
        return out

    def _run_resizing(
        self, func: Any, role: OperatorRole, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator that may give its arguments more storage, such as ``resize_``."""
        written = written_tensors(role.writes, args, kwargs)
        before = [TensorGeometry.of(tensor) for tensor in written]
        out = func(*args, **kwargs)
        num_bytes = sum(self._count_growth(geometry) for geometry in before)
        if role.allocates:
            num_bytes += sum(self.ledger.add(storage) for storage in storages_in(out, self))
        if num_bytes and self.refuses(func, num_bytes):
            while before:
                geometry = before.pop()
                geometry.put_back()
                self.ledger.resize(geometry.storage)
            del out, args, kwargs, written, geometry
            raise self.make_error(func, num_bytes)
        return out

    def _count_growth(self, before: TensorGeometry) -> int:
        grown_bytes = before.storage.nbytes() - before.num_bytes
        if not grown_bytes or not self.counts(before.storage.device):
            return 0
        self.ledger.resize(before.storage)
        return max(grown_bytes, 0)

    def _sleeps(self) -> bool:
        """Say whether this is a forked process, other than one that trains in a group."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return not distributed or get_worker_info() is not None


def storages_in(value: Any, watcher: AllocationWatcher) -> list[torch.UntypedStorage]:
    """List the storages of the tensors in an operator's result that ``watcher`` counts."""
    if type(value) is torch.Tensor and value.layout is torch.strided:
        return [value.untyped_storage()] if watcher.counts(value.device) else []
    if isinstance(value, torch.Tensor):
        return _storages_of(value, watcher) if watcher.counts(value.device) else []
    if isinstance(value, (tuple, list)):
        return [storage for item in value for storage in storages_in(item, watcher)]
    return []


def _storages_of(tensor: torch.Tensor, watcher: AllocationWatcher) -> list[torch.UntypedStorage]:
    if tensor.layout is torch.strided:
        storage = tensor.untyped_storage()  # of a fake tensor: on no device
        return [storage] if watcher.counts(storage.device) else []
    return [part.untyped_storage() for part in sparse_parts(tensor)]


def _run_and_bump(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operator on a list of tensors, and tell autograd that they changed.

    Without a mode torch does so itself; below one the composite kernels do not, and whatever
    compares versions to notice a change would notice none.
    """
    tensors = [tensor for tensor in args[0] if not tensor.is_inference()]
    version = read_version(tensors[0]) if tensors else 0
    out = func(*args, **kwargs)
    if tensors and read_version(tensors[0]) == version:
        for tensor in tensors:
            increment_version(tensor)
    return out


def _fall_asleep_in_child() -> None:
    for watcher in tuple(_ENTERED):
        watcher._forked = True  # noqa: SLF001 - same module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fall_asleep_in_child)

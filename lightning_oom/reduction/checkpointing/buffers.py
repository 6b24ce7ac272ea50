"""Buffers that a forward changes: the recomputation must see the old ones and change none."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from lightning_oom._torch import NormBase, module_buffers, read_version
from lightning_oom._torch.fake import is_fake
from lightning_oom.errors import CheckpointingWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

__all__ = ["BufferGuard", "BufferValues"]


class BufferValues:
    """What some buffers held before a forward.

    Args:
        values: Owner, name and a copy of the value, of each.
    """

    def __init__(self, values: list[tuple[nn.Module, str, Tensor]]) -> None:
        self.values = values

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the modules see these values inside of the block, whose changes are dropped."""
        now = []
        copies: dict[int, Tensor] = {}
        for owner, name, value in self.values:
            buffers = module_buffers(owner)
            now.append((buffers, name, buffers.get(name)))
            # A copy: the graph may be walked twice, and each time the forward changes it.
            buffers[name] = copies.setdefault(id(value), value.clone())
        try:
            yield
        finally:
            for buffers, name, buffer in reversed(now):
                buffers[name] = buffer


class BufferGuard:
    """Learns which buffers below a module are changed by its forward, and copies them before it.

    The first forward in each combination of train and eval modes is watched: all buffers are copied
    before it and compared after it. From then on, only those that changed are copied. One that
    changes later for the first time is found by its version or identity; the recomputation of that
    one call sees the new value, which is said in a
    :class:`~lightning_oom.errors.CheckpointingWarning`, and it is copied from then on.

    Version counters alone do not do: ``native_batch_norm`` raises none for its running statistics.

    Args:
        module: The module whose forward is recomputed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners = [part for part in module.modules() if module_buffers(part)]
        self._changing: dict[tuple[bool, ...], set[tuple[int, str]]] = {}

    def may_change(self) -> bool:
        """Say whether a forward may change buffers: known from earlier ones, or masks only."""
        known = self._changing.get(self._modes())
        if known is not None:
            return bool(known)
        return any(buffer.dtype is not torch.bool for _, _, buffer in self._buffers())

    def watch(self) -> _Watch | None:
        """Copy what the forward that comes next may change; ``None`` where there is no buffer."""
        if not self._owners:
            return None
        return _Watch(self, self._changing.get(self._modes()))

    def learn(self, changed: set[tuple[int, str]]) -> None:
        """Remember buffers that were seen to change in the present train and eval modes."""
        self._changing.setdefault(self._modes(), set()).update(changed)

    def _modes(self) -> tuple[bool, ...]:
        return tuple(owner.training for owner in self._owners)

    def _buffers(self) -> Iterator[tuple[int, str, Tensor]]:
        """Give each buffer with the position of its owner and its name."""
        for position, owner in enumerate(self._owners):
            for name, buffer in module_buffers(owner).items():
                if buffer is not None and not is_lazy(buffer):
                    yield position, name, buffer


class _Watch:
    """One forward that is watched: copies before it, looks after it."""

    def __init__(self, guard: BufferGuard, known: set[tuple[int, str]] | None) -> None:
        self._guard = guard
        self._is_first = known is None
        self._copies: dict[tuple[int, str], Tensor] = {}
        self._before: dict[tuple[int, str], tuple[Tensor, int]] = {}
        copies: dict[int, Tensor] = {}
        with torch.no_grad():
            for position, name, buffer in guard._buffers():  # noqa: SLF001 - same module
                key = position, name
                self._before[key] = buffer, _version(buffer)
                if known is None or key in known:
                    copy = copies.get(id(buffer))
                    if copy is None:
                        copy = copies[id(buffer)] = buffer.detach().clone()
                    self._copies[key] = copy

    def finish(self, values: BufferValues) -> None:
        """Look what the forward has changed; give ``values`` what the recomputation must see."""
        changed, late = set(), set()
        for position, name, buffer in self._guard._buffers():  # noqa: SLF001 - same module
            key = position, name
            was, version = self._before.get(key, (None, 0))
            moved = buffer is not was or _version(buffer) != version
            if key in self._copies:
                if not self._is_first or moved or self._is_changed(key, buffer):
                    changed.add(key)
            elif moved:
                late.add(key)
                with torch.no_grad():
                    self._copies[key] = buffer.detach().clone()
        self._guard.learn(changed | late)
        owners = self._guard._owners  # noqa: SLF001 - same module
        values.values = [
            (owners[position], name, self._copies[position, name])
            for position, name in sorted(changed | late)
        ]
        self._before.clear()
        if late and not self._is_first:
            position, name = min(late)
            warnings.warn(
                f"the buffer {name!r} of a {type(owners[position]).__name__} in a checkpointed block "
                "changed for the first time after the first forward: the recomputation of this one "
                "call sees its new value, those after it are exact",
                CheckpointingWarning,
                stacklevel=4,
            )

    def _is_changed(self, key: tuple[int, str], buffer: Tensor) -> bool:
        owner: Any = self._guard._owners[key[0]]  # noqa: SLF001 - same module
        if isinstance(owner, NormBase) and owner.training:
            return True
        before = self._copies[key]
        if is_fake(before):  # it has no values to compare
            return False
        return before.shape != buffer.shape or not torch.equal(before, buffer)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else int(read_version(tensor))

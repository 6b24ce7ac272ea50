"""Buffers of a module: running statistics, queues, counters, moving averages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from lightning_oom._torch import NormBase, module_buffers, non_persistent_names
from lightning_oom.recovery.snapshot.copies import (
    TensorCopies,
    same_values,
    versions_of,
    write_back,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lightning_oom.recovery.snapshot.part import Saved

__all__ = ["Buffers"]

_Registry = dict[str, "torch.Tensor | None"]


class Buffers:
    """The buffers of a module, copied only where a step changes them in place.

    The first snapshot copies every buffer. :meth:`learn` then compares values - the running
    statistics of normalisation layers move no version counter - and from there on only the buffers
    that changed are copied, and those of normalisation layers always. The others are held by
    reference and their version is watched: one that moves all the same is reported as lost, and
    copied from the next snapshot on.

    Args:
        module: The module whose buffers, and those of all its children, count.

    Note:
        Cost: 140 us for 159 buffers in 53 BatchNorm layers, 4 us for a module of 160 layers
        without buffers. Memory: :attr:`held_bytes`; a copy above 1 MiB lies on the host.

    Example:
        >>> import torch
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> buffers = Buffers(norm)
        >>> saved = buffers.take()
        >>> _ = norm(torch.randn(4, 2))
        >>> saved.restore()
        ()
        >>> norm.running_mean
        tensor([0., 0.])
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._copies = TensorCopies()
        self._moving: set[tuple[str, str]] = set()
        self._learned = False
        self._discover()

    @property
    def held_bytes(self) -> int:
        """Bytes of the copies that are held between snapshots."""
        return self._copies.held_bytes

    def take(self) -> SavedBuffers:
        """Copy what is known to move, refer to the rest."""
        if any(self._empty_registries) or list(map(tuple, self._registries)) != self._keys:
            self._discover()
        contents = list(map(dict.copy, self._registries))
        values = list(chain.from_iterable(map(dict.values, contents)))
        tensors = [t for t in values if t is not None]
        if len(tensors) != len(self._slots):  # one became None, or is one no longer
            self._plan()
        copies = self._copies.store([tensors[i] for i in self._copied])
        return SavedBuffers(
            part=self,
            contents=list(zip(self._owners, contents, strict=True)),
            empty=self._empty,
            tensors=tensors,
            slots=self._slots,
            versions=versions_of(tensors),
            positions=self._copied,
            copies=copies,
            current=self._copies.still_latest(),
        )

    def look_again(self) -> None:
        """List the module's buffers anew, after a child was added or exchanged; learn anew, too."""
        self._learned = False
        self._discover()

    def learn(self, saved: Saved) -> None:
        """See which buffers a step that succeeded has changed.

        The first time every value is compared, which on a device synchronises; later only versions.
        """
        if not isinstance(saved, SavedBuffers) or not saved.current():
            return
        moved = saved.moved()
        if not self._learned:
            moved |= saved.changed()
            self._learned = True
        elif moved <= set(self._copied):
            return
        self._copy_from_now_on(saved, moved)

    def put_back(self, saved: SavedBuffers) -> tuple[str, ...]:
        """Give every buffer the object and the values it had, and drop those that are new.

        Raises:
            RuntimeError: A later snapshot has overwritten the copies.
        """
        if not saved.current():
            raise RuntimeError("these buffers were saved before a later snapshot took their place")
        lost = saved.moved() - set(saved.positions)
        for i, copy in zip(saved.positions, saved.copies, strict=True):
            write_back(saved.tensors[i], copy)
        for owner, content in saved.contents:
            _rebind(owner, content)
        for owner in saved.empty:
            _rebind(owner, {})
        if lost:
            self._copy_from_now_on(saved, lost)
        return tuple(".".join(filter(None, saved.slots[i])) for i in sorted(lost))

    def _copy_from_now_on(self, saved: SavedBuffers, moved: set[int]) -> None:
        self._moving |= {saved.slots[i] for i in moved}
        self._plan()

    def _discover(self) -> None:
        named = list(self._module.named_modules())
        self._names = [name for name, module in named if module_buffers(module)]
        self._owners = [module for _, module in named if module_buffers(module)]
        self._registries = [module_buffers(module) for module in self._owners]
        self._keys = list(map(tuple, self._registries))
        self._empty = [module for _, module in named if not module_buffers(module)]
        self._empty_registries = list(map(module_buffers, self._empty))
        self._plan()

    def _plan(self) -> None:
        """Decide which of the tensors, in the order in which they are listed, are copied."""
        slots: list[tuple[str, str]] = []
        copied: list[int] = []
        for name, owner, registry in zip(self._names, self._owners, self._registries, strict=True):
            norm = isinstance(owner, NormBase)
            for key, value in registry.items():
                if value is None:
                    continue
                slot = (name, key)
                if norm or not self._learned or slot in self._moving:
                    copied.append(len(slots))
                slots.append(slot)
        self._slots, self._copied = slots, copied


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedBuffers:
    """The buffers of a module at one moment."""

    part: Buffers
    contents: list[tuple[torch.nn.Module, _Registry]]
    empty: list[torch.nn.Module]
    tensors: list[torch.Tensor]
    slots: list[tuple[str, str]]
    versions: list[int | None]
    positions: list[int]
    copies: list[torch.Tensor]
    current: Callable[[], bool]

    def moved(self) -> set[int]:
        """Positions whose tensor was written to since, as far as versions tell."""
        now = versions_of(self.tensors)
        return {i for i, (a, b) in enumerate(zip(self.versions, now, strict=True)) if a != b}

    def changed(self) -> set[int]:
        """Positions whose copy differs from the present values."""
        copied = zip(self.positions, self.copies, strict=True)
        return {i for i, copy in copied if not same_values(self.tensors[i], copy)}

    def restore(self) -> tuple[str, ...]:
        return self.part.put_back(self)


def _rebind(owner: torch.nn.Module, content: _Registry) -> None:
    registry = module_buffers(owner)
    if len(registry) == len(content) and all(
        a is b and k == j for (k, a), (j, b) in zip(registry.items(), content.items(), strict=True)
    ):
        return
    non_persistent_names(owner).difference_update(registry.keys() - content.keys())
    registry.clear()
    registry.update(content)

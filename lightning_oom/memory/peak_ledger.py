"""Who wants to know of a peak that is about to be reset.

A backend has one peak counter a device and several readers of it. :func:`fold_peaks` hands the old
peak to all of them before the counter starts again, so that none loses what another one resets.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["PeakKeeper", "Peaks", "fold_peaks", "has_keepers", "keep_peaks"]


class Peaks(NamedTuple):
    """The most that was held at once.

    Attributes:
        allocated_bytes: By live tensors; ``None`` where the backend has no peak.
        reserved_bytes: By the caching allocator; ``None`` where there is none.

    Example:
        >>> Peaks(allocated_bytes=1, reserved_bytes=9).joined(Peaks(allocated_bytes=3))
        Peaks(allocated_bytes=3, reserved_bytes=9)
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    def joined(self, other: Peaks) -> Peaks:
        """Return the higher of each."""
        (one, one_reserved), (two, two_reserved) = self, other
        return Peaks(
            two if one is None or (two is not None and two > one) else one,
            two_reserved
            if one_reserved is None or (two_reserved is not None and two_reserved > one_reserved)
            else one_reserved,
        )


class PeakKeeper(Protocol):
    """Takes note of peaks that end."""

    def fold(self, peaks: Peaks) -> None:
        """Remember ``peaks``, which the counters will not show any more."""


_keepers: dict[torch.device, tuple[weakref.ref[PeakKeeper], ...]] = {}
_lock = threading.RLock()  # a keeper may die, and be forgotten, while another one is added


def keep_peaks(device: torch.device, keeper: PeakKeeper) -> None:
    """Tell ``keeper`` of every peak of ``device`` that ends, for as long as it lives."""

    def forget(reference: weakref.ref[PeakKeeper]) -> None:
        with _lock:
            _keepers[device] = tuple(k for k in _keepers.get(device, ()) if k is not reference)

    with _lock:
        _keepers[device] = (*_keepers.get(device, ()), weakref.ref(keeper, forget))


def has_keepers(device: torch.device) -> bool:
    """Say whether anybody wants to know."""
    return bool(_keepers.get(device))


def fold_peaks(device: torch.device, peaks: Peaks) -> None:
    """Hand ``peaks`` to everyone who keeps those of ``device``."""
    for reference in _keepers.get(device, ()):
        keeper = reference()
        if keeper is not None:
            keeper.fold(peaks)

"""Copies of whole storages between device and host, beside the computation where streams allow it."""

from __future__ import annotations

import functools
import weakref
from collections import deque

import torch

__all__ = ["Copies", "HostCopy", "StreamCopies", "copies_for"]

_IN_FLIGHT = 4
"""Copies to the host whose source is still held. Fewer wait earlier, more hold more of the device."""

_AHEAD = 2
"""Copies to the device that are begun before a backward node asks for them."""


class HostCopy:
    """The bytes of one storage, on the host.

    Attributes:
        data: One dimension, from the storage's first byte on.
        device: Where it came from.
        num_waiting: Saved tensors that have not been asked for yet.
        arrival: The same bytes on their way back to the device, if that was begun.
        back: The storage that came back last, for as long as somebody uses it.
    """

    __slots__ = ("__weakref__", "_previous", "arrival", "back", "data", "device", "num_waiting")

    def __init__(
        self, data: torch.Tensor, device: torch.device, previous: HostCopy | None = None
    ) -> None:
        self.data = data
        self.device = device
        self.num_waiting = 0
        self._previous = None if previous is None else weakref.ref(previous)
        self.arrival: _Arrival | None = None
        self.back: weakref.ref[torch.UntypedStorage] | None = None

    def previous(self) -> HostCopy | None:
        """Return the copy that was made before, if it still lives; it is likely to be wanted next."""
        return None if self._previous is None else self._previous()


class Copies:
    """Copies that have ended when the call returns: for devices without streams of torch's kind."""

    def to_host(self, source: torch.Tensor) -> HostCopy:
        """Copy one storage to the host.

        Args:
            source: One-dimensional and contiguous.
        """
        return HostCopy(source.to("cpu"), source.device)

    def to_device(self, copy: HostCopy) -> torch.Tensor:
        """Copy one storage back; the result may be used on the present stream at once."""
        return copy.data.to(copy.device)

    def settle(self) -> None:
        """Let go of every source that has been copied."""


class StreamCopies(Copies):
    """Copies on a CUDA stream of their own, from and to pinned memory.

    A source is held until the computing stream has been told to wait for its copy; then its memory
    may be used again by what comes later on that stream. A block for a copy back is taken on the
    computing stream, whose earlier work the copy waits for. No stream ever waits for the host.

    Args:
        device: The CUDA device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._leaving: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._ahead: deque[weakref.ref[HostCopy]] = deque()
        self._latest: weakref.ref[HostCopy] | None = None

    def to_host(self, source: torch.Tensor) -> HostCopy:
        """Begin a copy to pinned memory."""
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self._device))
        data = _pinned_like(source)
        with torch.cuda.stream(side):
            data.copy_(source, non_blocking=True)
        self._leaving.append((side.record_event(), source))
        while len(self._leaving) > _IN_FLIGHT:
            self._release_oldest()
        latest = None if self._latest is None else self._latest()
        copy = HostCopy(data, source.device, latest)
        self._latest = weakref.ref(copy)
        return copy

    def _release_oldest(self) -> None:
        event, source = self._leaving.popleft()
        torch.cuda.current_stream(self._device).wait_event(event)
        del source

    def settle(self) -> None:
        """Let the computing stream wait for every copy that has been begun."""
        while self._leaving:
            self._release_oldest()

    def to_device(self, copy: HostCopy) -> torch.Tensor:
        """Return the bytes on the device, and begin the copies that are likely to be wanted next."""
        arrival, copy.arrival = copy.arrival or self._send(copy), None
        following = copy.previous()
        for _ in range(_AHEAD):
            if following is None:
                break
            if following.arrival is None and (following.back is None or following.back() is None):
                following.arrival = self._send(following)
                self._note_ahead(following)
            following = following.previous()
        return arrival.take()

    def _note_ahead(self, copy: HostCopy) -> None:
        self._ahead.append(weakref.ref(copy))
        while len(self._ahead) > 2 * _AHEAD:  # nobody came for it: it would only fill the device
            unused = self._ahead.popleft()()
            if unused is not None:
                unused.arrival = None

    def _send(self, copy: HostCopy) -> _Arrival:
        computing = torch.cuda.current_stream(self._device)
        data = torch.empty(copy.data.shape, dtype=copy.data.dtype, device=self._device)
        self._side.wait_stream(computing)  # earlier work may still use the same block
        with torch.cuda.stream(self._side):
            data.copy_(copy.data, non_blocking=True)
        return _Arrival(data, self._side.record_event(), computing)


def _pinned_like(source: torch.Tensor) -> torch.Tensor:
    """Return host memory that a device can read and write without the host's help."""
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True)


class _Arrival:
    """A copy on its way to the device."""

    __slots__ = ("_computing", "_data", "_event", "_is_awaited")

    def __init__(
        self, data: torch.Tensor, event: torch.cuda.Event, computing: torch.cuda.Stream
    ) -> None:
        self._data = data
        self._event = event
        self._computing = computing
        self._is_awaited = False

    def take(self) -> torch.Tensor:
        """Return the data; what the present stream does from here on sees it complete."""
        present = torch.cuda.current_stream(self._data.device)
        present.wait_event(self._event)
        if present == self._computing:
            self._is_awaited = True
        else:
            self._data.record_stream(present)
        return self._data

    def __del__(self) -> None:
        if not self._is_awaited:  # the block must not be used again while it is written to
            self._computing.wait_event(self._event)


def copies_for(device: torch.device) -> Copies:
    """Return what copies from and to ``device``: one set of copies, and one stream, for each."""
    if device.type != "cuda":
        return _PLAIN
    index = torch.cuda.current_device() if device.index is None else device.index
    return _stream_copies(torch.device("cuda", index))


_PLAIN = Copies()
_stream_copies = functools.cache(StreamCopies)

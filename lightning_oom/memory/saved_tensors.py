"""Which tensors the backward pass waits for: seen as autograd saves them, held by nobody else."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import let_hooks_be_disabled, read_version

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SavedTensorTracker"]

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[{kind} {shape}] is at version {now}; expected version {then} instead. Hint: enable anomaly "
    "detection to find the operation that failed to compute its gradient, with "
    "torch.autograd.set_detect_anomaly(True)."
)


class _Saved:
    """One saved tensor, as autograd keeps it in place of its own."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else read_version(tensor)


class SavedTensorTracker:
    """Knows the tensors that autograd has saved and not yet released.

    Between :meth:`start` and :meth:`stop`, every tensor that an operator saves for its backward is
    noted by a weak reference. The graph gets an alias of it on the same storage, so that peak memory
    stays the same, a graph dies as early as without the tracker, and gradients are the same bits.
    What user code saves with hooks of its own (``save_on_cpu``, checkpoints) is its own business and
    not seen.

    Note:
        Cost: 2 to 4 us for each saved tensor while started, and an alias (no storage) each.
        A saved tensor that is overwritten before the backward raises the same error as without.
        ``torch.func`` transforms that refuse hooks run without them.

    Example:
        >>> import torch
        >>> tracker = SavedTensorTracker()
        >>> tracker.start()
        >>> loss = torch.ones(4, requires_grad=True).exp().sum()
        >>> tracker.stop()
        >>> [tuple(tensor.shape) for tensor in tracker.alive()]
        [(4,)]
        >>> loss.backward()
        >>> list(tracker.alive())
        []
    """

    def __init__(self) -> None:
        self._saved: list[weakref.ref[_Saved]] = []
        self._hooks: Any = None
        self._disabling: Any = None

    def start(self) -> None:
        """Forget what was seen and look from here on; nothing while started."""
        if self._hooks is not None:
            return
        self._saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        try:
            hooks.__enter__()
        except RuntimeError:  # hooks are disabled here and now
            return
        self._hooks = hooks
        self._disabling = let_hooks_be_disabled(hooks)

    def stop(self) -> None:
        """Look no more; what was seen can still be asked for. To be called where start was."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            self._disabling()
            hooks.__exit__(None, None, None)

    def alive(self) -> Iterator[torch.Tensor]:
        """Give each saved tensor that a graph still holds."""
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                yield saved.tensor

    def forget(self) -> None:
        """Drop what was seen."""
        self._saved = []

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        # Never the tensor itself: an output would keep its own graph alive, for ever.
        saved = _Saved(tensor.detach())
        self._saved.append(weakref.ref(saved))
        return saved


def _unpack(saved: _Saved) -> torch.Tensor:
    tensor, then = saved.tensor, saved.version
    if then is not None and read_version(tensor) != then:  # torch does not look below hooks
        raise RuntimeError(
            _CHANGED.format(
                kind=tensor.type(), shape=list(tensor.shape), now=read_version(tensor), then=then
            )
        )
    return tensor

"""torchmetrics: state that an attempt has counted must not be counted again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import MODULE_INTERNALS
from lightning_oom._torchmetrics import CONSTANT_NAMES, Metric, is_metric
from lightning_oom.recovery.snapshot.copies import TensorCopies
from lightning_oom.recovery.snapshot.values import Capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_oom.recovery.snapshot.remembered import Attributes

__all__ = ["Metrics", "SavedMetrics", "find_metrics"]

_CONSTANT = MODULE_INTERNALS | CONSTANT_NAMES
_SKIP_CONTAINER = _CONSTANT - {"_modules"}  # trackers and collections add children
_PLAIN_CONTAINERS = (list, tuple, dict)


class Metrics:
    """The state of every torchmetrics object that a module holds.

    Metrics and collections, wrappers and trackers, registered as modules or kept in a plain list or
    dictionary. Their attributes are the state: tensors updated in place or replaced, lists that
    ``update`` extends and ``forward`` empties, counters, caches, compute groups (metrics that share
    a tensor share its copy). A metric interrupted inside ``forward`` has set its global state
    aside; only the snapshot still has it.

    Args:
        module: The module that holds them.

    Note:
        Cost: 80 us for six metrics, one of them a collection of three. Memory: a copy of every
        state up to 64 KiB; a larger tensor state is copied too, above 1 MiB on the host.

    Example:
        >>> from torchmetrics.aggregation import SumMetric
        >>> holder = torch.nn.ModuleDict({"total": SumMetric()})
        >>> holder["total"].update(2.0)
        >>> saved = Metrics(holder).take()
        >>> holder["total"].update(40.0)
        >>> saved.restore()
        ()
        >>> holder["total"].compute()
        tensor(2.)
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._copies = TensorCopies()
        self.look_again()

    def look_again(self) -> None:
        """List the module's metrics anew, after one was added or exchanged."""
        self._found = [
            (name, metric, _CONSTANT if isinstance(metric, Metric) else _SKIP_CONTAINER)
            for name, metric in find_metrics(self._module)
        ]

    @property
    def held_bytes(self) -> int:
        """Bytes of the copies of tensor states."""
        return self._copies.held_bytes

    def take(self) -> SavedMetrics:
        """Remember every attribute of every metric."""
        capture = Capture(self._copies, small_bytes=None)
        states = [
            (name, metric, capture.attributes(vars(metric), skip=skip))
            for name, metric, skip in self._found
        ]
        capture.seal()
        return SavedMetrics(states, self._copies.still_latest())


class SavedMetrics:
    """The metrics of a module at one moment."""

    __slots__ = ("_current", "_states")

    def __init__(
        self,
        states: list[tuple[str, torch.nn.Module, Attributes]],
        current: Callable[[], bool],
    ) -> None:
        self._states, self._current = states, current

    def restore(self) -> tuple[str, ...]:
        """Put every metric back.

        Raises:
            RuntimeError: A later snapshot has overwritten the copies.
        """
        if not self._current():
            raise RuntimeError("these metrics were saved before a later snapshot was taken")
        lost: list[str] = []
        for prefix, metric, state in self._states:
            state.restore(vars(metric), prefix, lost)
        return tuple(lost)


def find_metrics(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every torchmetrics object that ``module`` holds, with its path ending in a dot."""
    seen: set[int] = set()
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        candidates = [(prefix, child)]
        if not is_metric(child):
            candidates += _kept_plainly(prefix, vars(child))
        for path, candidate in candidates:
            if is_metric(candidate) and id(candidate) not in seen:
                seen.add(id(candidate))
                yield path, candidate


def _kept_plainly(prefix: str, namespace: dict[str, Any]) -> list[tuple[str, torch.nn.Module]]:
    """Metrics in lists and dictionaries that torch does not register, with their children."""
    found: list[tuple[str, torch.nn.Module]] = []
    for name, value in namespace.items():
        if name in MODULE_INTERNALS or not isinstance(value, _PLAIN_CONTAINERS):
            continue
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            if isinstance(entry, torch.nn.Module) and is_metric(entry):
                path = f"{prefix}{name}[{key!r}]"
                found += [
                    (f"{path}.{inner}." if inner else f"{path}.", part)
                    for inner, part in entry.named_modules()
                ]
    return found

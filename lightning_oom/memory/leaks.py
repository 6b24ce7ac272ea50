"""Name what grows from step to step: kept graphs, kept outputs, metric states, caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_oom.memory.leaks_census import take_census
from lightning_oom.memory.leaks_growth import AllocatedTrend, Growth, Sample
from lightning_oom.memory.leaks_scan import ObjectScan
from lightning_oom.memory.leaks_text import advice_for, kind_of_leak
from lightning_oom.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_oom.memory.leaks_census import Holding
    from lightning_oom.memory.leaks_scan import Pile

__all__ = ["Leak", "LeakFinder"]

_DENSE_STEPS = 16
_BURST_EVERY = 64
_BURST = 4
_SCAN_AFTER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Something that holds more with each step.

    Attributes:
        path: The attribute, as in ``"model.val_outputs"`` or ``"callbacks[0].seen"``; for what no
            attribute leads to, the name of a global or the container that refers to it.
        num_tensors: Tensors in it now.
        num_bytes: What they hold, with what their graphs keep for a backward.
        bytes_per_step: Mean growth of the tensors themselves.
        holds_graph: They have a ``grad_fn``, so that the steps which made them stay alive.
        kind: ``"graph"``, ``"outputs"``, ``"metric_state"``, ``"cache"`` or ``"unnamed"``.
        advice: What to change, one sentence.
    """

    path: str
    num_tensors: int
    num_bytes: int
    bytes_per_step: float
    holds_graph: bool
    kind: str
    advice: str

    def line(self) -> str:
        """Return the finding as one line of text."""
        graph = ", with their graphs" if self.holds_graph else ""
        return (
            f"{self.path} holds {self.num_tensors} tensors ({format_bytes(self.num_bytes)}{graph}), "
            f"{format_bytes(round(self.bytes_per_step))} more with each step: {self.advice}"
        )


class LeakFinder:
    """Finds the attributes that hold more and more tensors from step to step.

    A graph that grows over eight steps is a leak at once. Tensors without a graph are one when their
    growth outlives the epoch, or the run: lists that are cleared and metrics that are reset at the end
    of an epoch are none. What stays the same (parameters, copies of them, optimizer state, the last
    output), fluctuates or saturates is never one.

    Where the memory of the device rises and no attribute explains it, the objects of the process are
    compared twice and what has piled up is named by who refers to it.

    Note:
        Cost: a comparison of numbers per step. On 16 steps of each epoch and on 4 of every 64 later
        ones the attributes of all modules are looked at (2 to 4 us a module). A comparison of
        all objects takes 0.2 to 0.5 s; it is made on suspicion alone, and ever more rarely. Nothing
        that is looked at is kept.

        Not seen: growth in attributes with ``__slots__``, in local variables of a running function,
        and in objects of installed libraries, unless the memory of the device shows it.

    Example:
        >>> import torch
        >>> module = torch.nn.Linear(2, 2)
        >>> module.losses, finder = [], LeakFinder()
        >>> for step in range(12):
        ...     module.losses.append(module(torch.ones(1, 2)).sum())
        ...     finder.observe(step, {"model": module})
        >>> [(leak.path, leak.num_tensors, leak.holds_graph) for leak in finder.leaks()]
        [('model.losses', 12, True)]
    """

    def __init__(self) -> None:
        self._clocks: dict[str, _Clock] = {}
        self._growths: dict[tuple[str, str], Growth] = {}
        self._ended: set[str] = set()
        self._saved_bytes: dict[str, int] = {}
        self._trend = AllocatedTrend()
        self._scan = ObjectScan()
        self._next_scan = 0
        self._num_scans = 0
        self._observed = 0
        self._piles: list[Pile] = []

    def observe(
        self,
        step: int,
        roots: Mapping[str, object],
        *,
        stage: str = "train",
        allocated_bytes: int | None = None,
    ) -> None:
        """Look at what there is after a step. To be called after every batch.

        Args:
            step: Optimizer steps so far, or batches in evaluation. A second call with the same number
                is passed over: under gradient accumulation, only complete steps count.
            roots: Name -> the objects to look through, the module first: an object that two of them
                reach is named by the first.
            stage: Which loop this is; each has its own history.
            allocated_bytes: What tensors hold on the device; ``None`` where the backend cannot tell
                (the resident set of a process on the CPU is no such number).
        """
        clock = self._clocks.setdefault(stage, _Clock())
        if not clock.tick(step):
            return
        self._observed += 1
        if allocated_bytes is not None and stage == "train":
            self._trend.add(clock.count, allocated_bytes)
        if self._ended:
            self._close(roots, is_last=False)
        if clock.is_due():
            self._look(stage, clock.count, roots)
            self._search(stage)

    def end_epoch(self, stage: str = "train") -> None:
        """Say that an epoch of a stage is over; what it left is judged once others have cleared it.

        Args:
            stage: As given to :meth:`observe`.
        """
        if stage in self._clocks:
            self._clocks[stage].restart()
            self._ended.add(stage)

    def finish(self, roots: Mapping[str, object]) -> None:
        """Judge what is left at the end of the run. To be called from ``teardown``."""
        self._ended = set(self._clocks)
        self._close(roots, is_last=True)

    def leaks(self) -> list[Leak]:
        """Return what has been found to leak so far, most bytes first."""
        return self._list(only_sure=True)

    def suspects(self) -> list[Leak]:
        """Return the leaks, and what grows in this epoch but may yet be cleared at its end.

        At an out-of-memory error in the middle of an epoch these are what has filled the device.
        """
        return self._list(only_sure=False)

    # -- looking
    def _look(self, stage: str, count: int, roots: Mapping[str, object]) -> None:
        census = take_census(roots)
        for path, holding in census.items():
            growth = self._growths.setdefault((stage, path), Growth())
            growth.add(Sample(count, holding))
        for (of_stage, path), growth in self._growths.items():
            if of_stage == stage and path not in census:
                growth.empty()
        self._measure_graphs(roots)

    def _measure_graphs(self, roots: Mapping[str, object]) -> None:
        """Add up once, for each new finding, what its graph keeps."""
        new = {
            path
            for (_, path), growth in self._growths.items()
            if growth.grows_graph and path not in self._saved_bytes
        }
        if new:
            census = take_census(roots, measure=new)
            for path in new:
                holding = census.get(path)
                self._saved_bytes[path] = (holding.saved_bytes or 0) if holding else 0

    def _close(self, roots: Mapping[str, object], *, is_last: bool) -> None:
        census = take_census(roots)
        for (stage, path), growth in self._growths.items():
            if stage in self._ended:
                holding = census.get(path)
                count = self._clocks[stage].count
                growth.close(Sample(count, holding) if holding else None, is_last=is_last)
        self._ended = set()

    def _search(self, stage: str) -> None:
        """Compare the objects of the process where the device fills up for no known reason."""
        rate = self._trend.bytes_per_step() if stage == "train" else None
        if rate is None or self._observed < self._next_scan:
            return
        known = sum(
            growth.bytes_per_step() for growth in self._growths.values() if growth.is_growing()
        )
        graphs = any(growth.grows_graph for growth in self._growths.values())
        if graphs or known >= rate / 2 or rate * _BURST_EVERY < MIB:
            return
        self._piles = self._scan.compare() or self._piles
        self._num_scans += 1
        self._next_scan = self._observed + _SCAN_AFTER * 4 ** (self._num_scans // 2)

    # -- telling
    def _list(self, *, only_sure: bool) -> list[Leak]:
        found: dict[str, Leak] = {}
        for (_, path), growth in self._growths.items():
            holding = growth.latest
            if holding is None or (holding.kind == "bounded" and not growth.grows_graph):
                continue
            if growth.has_leaked or growth.grows_graph or (not only_sure and growth.is_growing()):
                leak = self._leak(path, growth, holding)
                if path not in found or found[path].num_bytes < leak.num_bytes:
                    found[path] = leak
        leaks = [*found.values(), *(_leak_of_pile(pile) for pile in self._piles)]
        return sorted(leaks, key=lambda leak: -leak.num_bytes)

    def _leak(self, path: str, growth: Growth, holding: Holding) -> Leak:
        kind = kind_of_leak(holding, grows_graph=growth.grows_graph)
        return Leak(
            path=path,
            num_tensors=holding.num_tensors,
            num_bytes=holding.num_bytes + self._saved_bytes.get(path, 0),
            bytes_per_step=growth.bytes_per_step(),
            holds_graph=holding.num_with_graph > 0,
            kind=kind,
            advice=advice_for(kind, holding, name=path.rpartition(".")[2]),
        )


class _Clock:
    """Counts the steps of a stage, over all of its epochs and in the present one."""

    def __init__(self) -> None:
        self.count = 0
        self._in_epoch = 0
        self._step: int | None = None

    def tick(self, step: int) -> bool:
        """Count a step; say whether it is a new one."""
        if step == self._step:
            return False
        self._step = step
        self.count += 1
        self._in_epoch += 1
        return True

    def is_due(self) -> bool:
        """Whether to look now: at the first steps of an epoch, then in short bursts."""
        return self._in_epoch <= _DENSE_STEPS or self._in_epoch % _BURST_EVERY < _BURST

    def restart(self) -> None:
        """Begin another epoch."""
        self._in_epoch = 0
        self._step = None


def _leak_of_pile(pile: Pile) -> Leak:
    return Leak(
        path=pile.place,
        num_tensors=pile.num_tensors,
        num_bytes=pile.num_tensors * pile.tensor_bytes,
        bytes_per_step=pile.num_more * pile.tensor_bytes / _SCAN_AFTER,
        holds_graph=pile.holds_graph,
        kind="unnamed",
        advice=advice_for("unnamed", None, name=pile.place),
    )

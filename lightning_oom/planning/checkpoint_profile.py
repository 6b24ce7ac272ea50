"""From two traced steps to the peak of any choice of checkpointed blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from lightning_oom.planning.trace import MemoryTrace, OperatorCall

__all__ = ["BlockCall", "StepProfile", "profile_step", "recomputation_costs"]

_FLOPS_PER_BYTE = 32
"""What a device computes in 32-bit while it moves one byte: 10 to 60 on GPUs of today."""


@dataclass(frozen=True, kw_only=True)
class BlockCall:
    """One call of a block in the forward, with the part of the backward that belongs to it.

    Attributes:
        block: Position of the block among the candidates.
        kept_bytes: Held from this forward to its backward only if the block is not checkpointed.
        plain_bytes: The most that was held during the call when nothing was checkpointed, less
            what the calls before it keep.
        checkpointed_bytes: The same when everything was.
    """

    block: int
    kept_bytes: int
    plain_bytes: int
    checkpointed_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Which blocks a step calls in which order, and what it holds meanwhile.

    A checkpointed block computes again while all that the blocks before it keep is still there: the
    peak depends on where in the model a block stands, not only on what it keeps.

    Attributes:
        calls: In the order of the forward.
        between_bytes: One more than calls: the most that was held outside of blocks before each
            call and after the last one, forward and backward, less what the calls before keep.
        fixed_bytes: The most that was held where no call keeps anything: the optimizer's step.
    """

    calls: tuple[BlockCall, ...]
    between_bytes: tuple[int, ...]
    fixed_bytes: int

    def peak_bytes(self, chosen: Collection[int]) -> int:
        """Return the peak of a step in which these blocks are checkpointed.

        Args:
            chosen: Positions of the blocks among the candidates.
        """
        peak, kept = self.fixed_bytes, 0
        for between, call in zip(self.between_bytes, self.calls, strict=False):
            is_chosen = call.block in chosen
            inside = call.checkpointed_bytes if is_chosen else call.plain_bytes
            peak = max(peak, kept + between, kept + inside)
            kept += 0 if is_chosen else call.kept_bytes
        return max(peak, kept + self.between_bytes[-1])


@dataclass
class _Segment:
    """Consecutive allocations in one phase that belong to one block, or to none."""

    phase: str
    block: int | None
    start_bytes: int
    peak_bytes: int


@dataclass
class _Walk:
    """A traced step in segments, sorted by the call that they belong to."""

    labels: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    between: list[int] = field(default_factory=lambda: [0])
    fixed: int = 0


def profile_step(
    plain: MemoryTrace, checkpointed: MemoryTrace, paths: Sequence[str]
) -> StepProfile | None:
    """Learn what each block keeps and needs from a plain run and one with every block checkpointed.

    Args:
        plain: Traced without checkpointing.
        checkpointed: Traced with all ``paths`` checkpointed.
        paths: The candidates, none inside another.

    Returns:
        ``None`` where the two runs do not call the same blocks in the same order.
    """
    zero, one = _walk(plain, paths), _walk(checkpointed, paths)
    if zero.labels != one.labels or not zero.labels:
        return None
    calls, before = [], 0
    between = [max(zero.between[0], one.between[0])]
    for index, block in enumerate(zero.labels):
        kept = (zero.ends[index] - zero.starts[index]) - (one.ends[index] - one.starts[index])
        calls.append(
            BlockCall(
                block=block,
                kept_bytes=max(kept, 0),
                plain_bytes=zero.inside[index] - before,
                checkpointed_bytes=one.inside[index],
            )
        )
        before += max(kept, 0)
        between.append(max(zero.between[index + 1] - before, one.between[index + 1]))
    return StepProfile(
        calls=tuple(calls),
        between_bytes=tuple(between),
        fixed_bytes=max(zero.fixed, one.fixed),
    )


def recomputation_costs(
    plain: MemoryTrace, paths: Sequence[str]
) -> tuple[tuple[float, ...], float]:
    """Return what the forward of each block costs, and what a whole step costs without any.

    An operator costs its floating-point operations or, if that is more, 32 for each byte that it
    reads and writes; views cost nothing. The unit is the floating-point operation.

    Args:
        plain: Traced without checkpointing, with operators recorded.
        paths: The candidates.
    """
    find = _finder(paths)
    costs, total = [0.0] * len(paths), 0.0
    last_step = plain.num_steps - 1
    for call in plain.operators:
        if call.step != last_step:
            continue
        cost = _cost(call)
        total += cost
        block = find(call.module) if call.phase == "forward" else None
        if block is not None:
            costs[block] += cost
    return tuple(costs), total


def _walk(trace: MemoryTrace, paths: Sequence[str]) -> _Walk:
    """Sort the segments of the last step; micro-batches that call the same blocks count as one."""
    passes: list[list[_Segment]] = [[]]
    for segment in _segments(trace, paths):
        if segment.phase == "forward" and passes[-1] and passes[-1][-1].phase != "forward":
            passes.append([])
        passes[-1].append(segment)
    first, *others = map(_walk_once, passes)
    for other in others:
        if other.labels != first.labels:
            return _Walk()
        first.inside = [*map(max, zip(first.inside, other.inside, strict=True))]
        first.between = [*map(max, zip(first.between, other.between, strict=True))]
        first.fixed = max(first.fixed, other.fixed)
    return first


def _walk_once(segments: list[_Segment]) -> _Walk:
    walk = _Walk()
    position = 0
    calls_of: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        if segment.phase not in ("forward", "backward"):
            walk.fixed = max(walk.fixed, segment.peak_bytes)
        elif segment.block is None or (
            segment.phase == "backward" and segment.block not in calls_of
        ):
            walk.between[position] = max(walk.between[position], segment.peak_bytes)
        elif segment.phase == "forward":
            calls_of.setdefault(segment.block, []).append(position)
            following = segments[min(index + 1, len(segments) - 1)]
            walk.labels.append(segment.block)
            walk.starts.append(segment.start_bytes)
            walk.ends.append(following.start_bytes)
            walk.inside.append(segment.peak_bytes)
            walk.between.append(0)
            position += 1
        else:
            calls = calls_of[segment.block]
            position = calls.pop() if len(calls) > 1 else calls[0]
            walk.inside[position] = max(walk.inside[position], segment.peak_bytes)
    return walk


def _segments(trace: MemoryTrace, paths: Sequence[str]) -> list[_Segment]:
    """Cut the last step at every change of phase or block."""
    find = _finder(paths)
    segments: list[_Segment] = []
    last_step = trace.num_steps - 1
    live_bytes = 0
    for event in trace.events:
        before, live_bytes = live_bytes, live_bytes + event.num_bytes
        if event.step != last_step or event.num_bytes <= 0 or event.phase == "before":
            continue
        block = find(event.module)
        if not segments or (segments[-1].phase, segments[-1].block) != (event.phase, block):
            segments.append(_Segment(event.phase, block, before, live_bytes))
        segments[-1].peak_bytes = max(segments[-1].peak_bytes, live_bytes)
    return segments


def _finder(paths: Sequence[str]) -> Callable[[str], int | None]:
    """Return what finds the candidate that a module is, or lies in."""
    positions = {path: index for index, path in enumerate(paths)}
    known: dict[str, int | None] = {}

    def find(module: str) -> int | None:
        if module not in known:
            path = module
            while path and path not in positions:
                path = path.rpartition(".")[0]
            known[module] = positions.get(path)
        return known[module]

    return find


def _cost(call: OperatorCall) -> float:
    inputs = {spec.storage for spec in call.inputs}
    is_view = bool(call.outputs) and all(spec.storage in inputs for spec in call.outputs)
    if is_view and not call.name.split(".")[1].endswith("_"):
        return 0.0
    moved = sum(
        math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
        for spec in (*call.inputs, *call.outputs)
    )
    return float(max(call.flops or 0, _FLOPS_PER_BYTE * moved))

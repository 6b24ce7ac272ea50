"""Run the children of a module row-chunk by row-chunk, while its caller sees the whole batch.

Only what the children keep for their backward shrinks; losses, metrics, logs and everything else
that the step does with the outputs stay as they are, whatever they are.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from lightning_oom.recovery.batches import split_sizes
from lightning_oom.recovery.chunked.chunk_check import ChunkVerdict, check_call, reason_against
from lightning_oom.recovery.chunked.row_calls import (
    Joint,
    cut_call,
    describe_call,
    find_joint,
    join,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

    from torch import nn

__all__ = ["ChunkReport", "ChunkVerdict", "chunked_children"]

_MAX_DEPTH = 3


@dataclass(slots=True)
class ChunkReport:
    """What happened to the children of a module inside :func:`chunked_children`.

    Attributes:
        chunked: Name -> calls that ran in chunks; 0 where the first one did not come to its end.
        whole: Name -> why the child, or its last call, ran whole.
    """

    chunked: dict[str, int] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


@contextmanager
def chunked_children(
    module: nn.Module,
    rows: int,
    max_rows: int,
    *,
    verify: bool = True,
    verdicts: MutableMapping[str, Any] | None = None,
) -> Iterator[ChunkReport]:
    """Let every direct child that may run row-chunk by row-chunk do so, under checkpointing.

    A call of a child is chunked when gradients are enabled and an argument has ``rows`` rows. Each
    chunk runs under :func:`torch.utils.checkpoint.checkpoint` (not re-entrant), so that its
    activations live only while its own backward runs; outputs are joined again. The forward *and*
    the backward belong inside the block.

    Before its first chunked call a child is tried on a slice of up to four rows: its output must
    be that of the parts of the slice put together, and it must leave no trace (buffers,
    attributes, its input). A child that fails this runs whole, as do metrics, modules without
    parameters, single layers (they keep nothing that chunks could save) and anything with batch
    normalisation in training mode; the report says why. Where only the output is at fault (a model
    that computes its own loss), the children of that child are tried instead.

    Args:
        module: Its direct children are chunked; the module itself is not.
        rows: Rows of the batch, at least 1.
        max_rows: Upper bound on rows per chunk, at least 1; chunks are balanced.
        verify: ``False`` trusts every child to treat its rows one by one.
        verdicts: Kept by the caller so that each child is tried once per run, not once per step;
            entries are made here.

    Yields:
        The report, filled in as calls are made.

    Raises:
        ValueError: ``rows`` or ``max_rows`` is below 1.

    Note:
        Costs one more forward of what is chunked. Dropout masks are drawn chunk by chunk: the
        distribution is the same, the numbers are not. Peak memory falls by what the children keep
        inside, not by their outputs; see
        :func:`~lightning_oom.recovery.chunked.chunk_gain.estimate_chunk_gain`.

    Example:
        >>> from torch import nn
        >>> net = nn.Module()
        >>> net.body = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> with chunked_children(net, rows=8, max_rows=3) as report:
        ...     net.body(torch.arange(32.0).reshape(8, 4)).mean().backward()
        >>> report.chunked
        {'body': 1}
    """
    if rows < 1 or max_rows < 1:
        raise ValueError(f"rows and max_rows must be at least 1, got {rows} and {max_rows}")
    chunking = _Chunking(
        rows, max_rows, verify=verify, verdicts={} if verdicts is None else verdicts
    )
    try:
        chunking.cover_children(module, prefix="", depth=1)
        yield chunking.report
    finally:
        chunking.uncover()


class _Chunking:
    """The shadows over ``forward`` of the covered modules."""

    def __init__(
        self, rows: int, max_rows: int, *, verify: bool, verdicts: MutableMapping[str, Any]
    ) -> None:
        self.report = ChunkReport()
        self._rows = rows
        self._sizes = split_sizes(rows, max_rows)
        self._ranges = _ranges(self._sizes)
        self._verify = verify
        self._verdicts = verdicts
        self._covered: dict[nn.Module, tuple[bool, Any]] = {}
        self._inside = 0

    def cover_children(self, module: nn.Module, *, prefix: str, depth: int) -> None:
        for name, child in module.named_children():
            if child in self._covered:
                continue
            reason = reason_against(child)
            if reason is not None:
                self.report.whole[prefix + name] = reason
                continue
            own = vars(child)
            self._covered[child] = ("forward" in own, own.get("forward"))
            own["forward"] = self._shadow(child, prefix + name, child.forward, depth)

    def uncover(self) -> None:
        for child, (had_own, own) in self._covered.items():
            if had_own:
                vars(child)["forward"] = own
            else:
                vars(child).pop("forward", None)
        self._covered.clear()

    def _shadow(
        self, child: nn.Module, name: str, forward: Callable[..., Any], depth: int
    ) -> Callable[..., Any]:
        def chunked_forward(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            pieces = cut_call((args, kwargs), self._rows, self._ranges)
            if pieces is None or len(pieces) < 2:  # noqa: PLR2004 - one piece is the whole
                return forward(*args, **kwargs)
            calls = self.report.chunked.setdefault(name, 0)
            verdict = self._judge(child, name, forward, args, kwargs)
            if verdict.reason:
                self._runs_whole(name, verdict.reason)
                if verdict.ask_children and depth < _MAX_DEPTH:
                    self.cover_children(child, prefix=f"{name}.", depth=depth + 1)
                return forward(*args, **kwargs)
            outputs = [self._run(forward, *piece) for piece in pieces]
            try:
                joined = join(verdict.joint or self._guess_joint(outputs), outputs)
            except ValueError as error:
                self._runs_whole(name, str(error))
                return forward(*args, **kwargs)
            self.report.chunked[name] = calls + 1
            return joined

        return chunked_forward

    def _runs_whole(self, name: str, reason: str) -> None:
        self.report.whole[name] = reason
        if not self.report.chunked.get(name):
            self.report.chunked.pop(name, None)

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1  # also while the backward recomputes
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside -= 1

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def _judge(
        self,
        child: nn.Module,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> ChunkVerdict:
        if not self._verify:
            return ChunkVerdict(joint=None)
        modes = "".join(str(int(inner.training)) for inner in child.modules())
        key = f"{name} {type(child).__qualname__} {hash(modes)} {describe_call((args, kwargs))}"
        verdict = self._verdicts.get(key)
        if verdict is None:
            self._inside += 1
            try:
                verdict = check_call(child, forward, args, kwargs, self._rows)
            finally:
                self._inside -= 1
            if verdict.conclusive:
                self._verdicts[key] = verdict
        return verdict

    def _guess_joint(self, outputs: list[Any]) -> Joint:
        joint = find_joint(outputs[0], outputs[:1], self._sizes[:1])
        if isinstance(joint, str):
            raise ValueError(joint)  # noqa: TRY004 - the value, not its type, is at fault
        return joint


def _ranges(sizes: list[int]) -> list[tuple[int, int]]:
    ranges, start = [], 0
    for size in sizes:
        ranges.append((start, start + size))
        start += size
    return ranges

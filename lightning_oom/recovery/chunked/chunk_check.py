"""May this module run row-chunk by row-chunk? Tried on a small slice of a real call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_oom._torch import read_version
from lightning_oom.recovery.batches import batch_tensors
from lightning_oom.recovery.batches.batch_types import batch_type
from lightning_oom.recovery.batchnorm import find_batch_coupled
from lightning_oom.recovery.chunked.module_state import ModuleState
from lightning_oom.recovery.chunked.row_calls import Joint, cut_call, find_joint
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.recovery.randomness import fixed_randomness
from lightning_oom.recovery.slices import choose_windows

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ChunkVerdict", "check_call", "reason_against"]

_SLICE_ROWS = 4
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkVerdict:
    """Whether a module may be chunked.

    Attributes:
        joint: How outputs of chunks are joined; ``None`` when the module runs whole.
        reason: Why it runs whole, for people; empty when it does not.
        conclusive: Whether the slice could tell.
        ask_children: Whether the children of the module may still be chunked with some gain.
    """

    joint: Joint | None
    reason: str = ""
    conclusive: bool = True
    ask_children: bool = False


def reason_against(module: nn.Module) -> str | None:
    """Say why ``module`` is not even tried, or return ``None``."""
    is_layer = type(module).__module__.startswith("torch.nn.modules.")
    is_leaf = next(module.children(), None) is None and not isinstance(module, nn.RNNBase)
    reasons = {
        "it is a metric": isinstance(module, (Metric, MetricCollection)),
        "it has no parameters": next(module.parameters(), None) is None,
        "it holds a metric": any(isinstance(inner, Metric) for inner in module.modules()),
        "it is a script module": isinstance(module, torch.jit.ScriptModule),
        "a hook inside it would run once per chunk": any(
            _has_foreign_hooks(inner) for inner in module.modules() if inner is not module
        ),
        "its class replaces __call__": type(module).__call__ is not nn.Module.__call__,
        "a single layer keeps nothing that chunks could save": is_layer and is_leaf,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _has_foreign_hooks(module: nn.Module) -> bool:
    """Whether a hook is registered that does not come from torch itself (as weight norm's does)."""
    hooks = [hook for kind in _HOOKS for hook in vars(module).get(kind, {}).values()]
    return any(not (hook.__module__ or "").startswith("torch.") for hook in map(_typed, hooks))


def _typed(hook: Any) -> Any:
    return hook if hasattr(hook, "__module__") else type(hook)


def check_call(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rows: int,
) -> ChunkVerdict:
    """Run ``forward`` on a slice of at most four rows, whole and in parts, and compare.

    Runs without gradients, with fixed randomness, on copies of the rows; buffers and attributes of
    the module are put back.

    Args:
        module: The module that ``forward`` belongs to.
        forward: Its forward.
        args: Positional arguments of the call at hand.
        kwargs: Its keyword arguments.
        rows: Rows of its tensors, at least 2.

    Raises:
        torch.OutOfMemoryError: Not even a few rows fit.
    """
    coupled = find_batch_coupled(module)
    if coupled:
        names = ", ".join(filter(None, coupled[:3])) or type(module).__name__
        return ChunkVerdict(joint=None, reason=f"batch normalisation in training mode ({names})")
    num_rows = min(rows, _SLICE_ROWS)
    tensors = batch_tensors([args, kwargs])
    starts = choose_windows(tensors, rows, num_rows)
    if not starts:
        reason = "the rows of its input are all equal, so that nothing can be compared"
        return ChunkVerdict(joint=None, reason=reason, conclusive=False)
    edges = [starts[0], starts[0] + 1, starts[0] + num_rows]
    ranges = [(edges[0], edges[2]), (edges[0], edges[1]), (edges[1], edges[2])]
    with torch.no_grad():
        pieces = cut_call((args, kwargs), rows, ranges)
    if pieces is None:
        return ChunkVerdict(joint=None, reason="nothing that it is given has the batch's rows")
    return _Check(module, forward, {tensor.device for tensor in tensors}).compare(
        pieces, [stop - start for start, stop in ranges[1:]]
    )


class _Check:
    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], devices: set[torch.device]
    ) -> None:
        self._forward = forward
        self._devices = devices
        self._state = ModuleState(module)
        self._touches_input = False

    def compare(self, pieces: list[Any], sizes: list[int]) -> ChunkVerdict:
        try:
            with torch.no_grad():
                return self._compare(pieces, sizes)
        except Exception as error:
            if classify_oom(error) is not None:
                raise
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return ChunkVerdict(joint=None, reason=f"it fails on a few rows ({text})")
        finally:
            self._state.restore()
            torch.clear_autocast_cache()  # weights were cast without gradients

    def _compare(self, pieces: list[Any], sizes: list[int]) -> ChunkVerdict:
        outputs, marks = [], []
        for piece in pieces:
            outputs.append(self._run(piece))
            moved = self._state.moved_tensor()
            if moved is not None:
                return ChunkVerdict(joint=None, reason=f"its forward changes {moved}")
            marks.append(self._state.attributes())
        if self._touches_input:
            return ChunkVerdict(joint=None, reason="its forward changes its input in place")
        moved = self._state.moved_attribute(marks)
        if moved is None and self._state.moved_attribute([self._state.first, marks[0]]):
            # set on first use: then it must not depend on which rows came first
            self._state.restore()
            self._run(pieces[-1])
            moved = self._state.moved_attribute([marks[0], self._state.attributes()])
        if moved is not None:
            return ChunkVerdict(joint=None, reason=f"its forward leaves something in {moved}")
        joint = find_joint(outputs[0], outputs[1:], sizes)
        if isinstance(joint, str):
            return ChunkVerdict(joint=None, reason=joint, ask_children=True)
        return ChunkVerdict(joint=joint)

    def _run(self, piece: Any) -> Any:
        args, kwargs = _copy_tensors(piece)
        copies = batch_tensors([args, kwargs])
        versions = [read_version(tensor) for tensor in copies]
        with fixed_randomness(devices=self._devices):
            output = self._forward(*args, **kwargs)
        self._touches_input |= versions != [read_version(tensor) for tensor in copies]
        return output


def _copy_tensors(node: Any) -> Any:
    if isinstance(node, Tensor):
        return node.detach().clone()
    kind = batch_type(node)
    if kind.role in ("fields", "items"):
        return kind.rebuild(node, [_copy_tensors(child) for _, child in kind.children(node)])
    return node

"""Cut the arguments of a call into rows, and join what several calls returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_oom.recovery.batches import tensor_types as _tensor_types  # noqa: F401 - enters its types
from lightning_oom.recovery.batches.batch_types import batch_type

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Joint", "cut_call", "describe_call", "find_joint", "join"]

_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TOLERANCE = 1e-4
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def cut_call(node: Any, rows: int, ranges: Sequence[tuple[int, int]]) -> list[Any] | None:
    """Cut everything in ``node`` that has ``rows`` rows, and share the rest.

    Args:
        node: Arguments of a call: any nesting of containers.
        rows: Rows to look for.
        ranges: ``(start, stop)`` of each piece.

    Returns:
        One node per range, with views of the tensors; ``None`` when nothing has ``rows`` rows.

    Example:
        >>> pieces = cut_call([torch.arange(4), "mean"], 4, [(0, 1), (1, 4)])
        >>> pieces
        [[tensor([0]), 'mean'], [tensor([1, 2, 3]), 'mean']]
    """
    kind = batch_type(node)
    if kind.role in ("rows", "shared"):
        return _cut_leaf(node, rows, ranges)
    children = [child for _, child in kind.children(node)]
    cut = [cut_call(child, rows, ranges) for child in children]
    if any(pieces is not None for pieces in cut):
        filled = [
            [child] * len(ranges) if pieces is None else pieces
            for child, pieces in zip(children, cut, strict=True)
        ]
        return [kind.rebuild(node, list(piece)) for piece in zip(*filled, strict=True)]
    if kind.role == "items" and len(children) == rows:
        return [kind.rebuild(node, children[start:stop]) for start, stop in ranges]
    return None


def _cut_leaf(node: Any, rows: int, ranges: Sequence[tuple[int, int]]) -> list[Any] | None:
    kind = batch_type(node)
    if kind.role == "shared" or kind.rows(node) != rows:
        return None
    is_partition = [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), rows]
    if isinstance(node, Tensor) and node.layout is torch.strided and is_partition:
        # one node in the graph, whatever the number of pieces
        return list(node.split([stop - start for start, stop in ranges]))
    return [kind.take(node, start, stop) for start, stop in ranges]


def describe_call(node: Any) -> str:
    """Describe what decides how a call behaves, but not its sizes: text, equal for equal kinds."""
    if isinstance(node, Tensor):
        return f"{str(node.dtype).removeprefix('torch.')}[{node.ndim}]"
    kind = batch_type(node)
    if kind.role == "items":  # one item per row: their number is a size
        kinds = dict.fromkeys(describe_call(child) for _, child in kind.children(node))
        return f"{type(node).__name__}({', '.join(kinds)})"
    if kind.role == "fields":
        parts = [f"{name}: {describe_call(child)}" for name, child in kind.children(node)]
        return f"{type(node).__name__}({', '.join(parts)})"
    return repr(node) if isinstance(node, (bool, str)) else type(node).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """How outputs of several calls become the output of one.

    Attributes:
        action: ``"cat"`` tensors along ``dim``; take the ``"first"``; ``"sum"`` row counts;
            ``"concat"`` sequences with an item per row; join ``"each"`` child by its own joint.
        dim: For ``"cat"``.
        children: For ``"each"``.
    """

    action: Literal["cat", "first", "sum", "concat", "each"]
    dim: int = 0
    children: tuple[Joint, ...] = ()


def find_joint(
    whole: Any, parts: Sequence[Any], sizes: Sequence[int], path: str = "its output"
) -> Joint | str:
    """Find out how the outputs of calls on parts give the output of the call on the whole.

    Args:
        whole: Output of the call on ``sum(sizes)`` rows.
        parts: Outputs of the calls on its parts.
        sizes: Rows of each part.
        path: What the output is called in the answer.

    Returns:
        The joint, or why there is none.
    """
    kind = batch_type(whole)
    if any(type(part) is not type(whole) for part in parts):
        return f"{path} changes its type with the rows"
    if isinstance(whole, Tensor):
        return _find_tensor_joint(whole, parts, sizes, path)
    if kind.role == "rows" or kind.opaque:
        return f"{path} is a {type(whole).__name__}"
    if kind.role == "shared":
        return _find_plain_joint(whole, parts, sizes, path)
    return _find_container_joint(whole, parts, sizes, path)


def _find_container_joint(
    whole: Any, parts: Sequence[Any], sizes: Sequence[int], path: str
) -> Joint | str:
    kind = batch_type(whole)
    named = kind.children(whole)
    others = [[child for _, child in kind.children(part)] for part in parts]
    lengths = [len(children) for children in others]
    if kind.role == "items" and len(named) == sum(sizes) and lengths == list(sizes):
        return _find_item_joint([child for _, child in named], others, path)
    if any(length != len(named) for length in lengths):
        return f"{path} changes its length with the rows"
    joints = []
    for index, (name, child) in enumerate(named):
        joint = find_joint(child, [o[index] for o in others], sizes, path + name)
        if isinstance(joint, str):
            return joint
        joints.append(joint)
    return Joint(action="each", children=tuple(joints))


def join(joint: Joint, outputs: Sequence[Any]) -> Any:
    """Join outputs as ``joint`` says.

    Raises:
        ValueError: Shapes or lengths do not allow it.
    """
    first = outputs[0]
    if joint.action == "first":
        return first
    if joint.action == "sum":
        return sum(outputs)
    if joint.action == "cat":
        shapes = {output.shape[: joint.dim] + output.shape[joint.dim + 1 :] for output in outputs}
        if len(shapes) > 1:
            raise ValueError(
                f"outputs of chunks have different shapes: {sorted(map(list, shapes))}"
            )
        return torch.cat(list(outputs), joint.dim)
    kind = batch_type(first)
    children = [[child for _, child in kind.children(output)] for output in outputs]
    if joint.action == "concat":
        return kind.rebuild(first, [child for items in children for child in items])
    if any(len(items) != len(joint.children) for items in children):
        raise ValueError(f"outputs of chunks have different lengths: {[len(c) for c in children]}")
    joined = [
        join(j, parts) for j, parts in zip(joint.children, zip(*children, strict=True), strict=True)
    ]
    return kind.rebuild(first, joined)


def _find_tensor_joint(
    whole: Tensor, parts: Sequence[Tensor], sizes: Sequence[int], path: str
) -> Joint | str:
    if whole.layout is not torch.strided or any(part.ndim != whole.ndim for part in parts):
        return f"{path} is not a tensor with rows"
    for dim in range(whole.ndim):
        if whole.shape[dim] == sum(sizes) and _differ_only_in(dim, whole, parts, sizes):
            if not _are_close(torch.cat(list(parts), dim), whole):
                return f"rows of {path} depend on each other"
            return Joint(action="cat", dim=dim)
    is_constant = all(part.shape == whole.shape and torch.equal(part, whole) for part in parts)
    if is_constant and whole.numel() and bool((whole != 0).any()):
        return Joint(action="first")
    return f"{path} has no rows (shape {tuple(whole.shape)} for {sum(sizes)} rows)"


def _differ_only_in(dim: int, whole: Tensor, parts: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    expected = [[*whole.shape[:dim], size, *whole.shape[dim + 1 :]] for size in sizes]
    return expected == [list(part.shape) for part in parts]


def _find_plain_joint(
    whole: Any, parts: Sequence[Any], sizes: Sequence[int], path: str
) -> Joint | str:
    if isinstance(whole, _PLAIN) and all(part == whole for part in parts):
        return Joint(action="first")
    is_count = type(whole) is int and whole == sum(sizes) and list(parts) == list(sizes)
    if is_count:
        return Joint(action="sum")
    if all(part is whole for part in parts):
        return Joint(action="first")
    return f"{path} ({whole!r}) depends on the rows"


def _find_item_joint(items: list[Any], others: list[list[Any]], path: str) -> Joint | str:
    flat = [item for part in others for item in part]
    if all(map(_same, items, flat)):
        return Joint(action="concat")
    return f"rows of {path} depend on each other"


def _same(left: Any, right: Any) -> bool:
    """Whether two outputs hold the same numbers, up to rounding."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.shape == right.shape and _are_close(left, right)
    kind = batch_type(left)
    if kind.role in ("fields", "items"):
        a, b = ([child for _, child in kind.children(node)] for node in (left, right))
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(left, _PLAIN) and bool(left == right)


def _are_close(left: Tensor, right: Tensor) -> bool:
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    tolerance = _TOLERANCES.get(left.dtype, _TOLERANCE)
    wide = torch.complex128 if left.is_complex() else torch.float64
    a, b = (tensor.detach().to("cpu").to(wide) for tensor in (left, right))
    scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)

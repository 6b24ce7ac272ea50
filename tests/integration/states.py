"""Copy the visible state of a run, and say where two of them differ."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fakes import ListLogger

__all__ = ["Difference", "compare", "plain_copy", "user_rows", "without_own_keys"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two runs differ."""

    path: str
    detail: str


def plain_copy(value: Any) -> Any:
    """A copy on the CPU that shares nothing with the run."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: plain_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_copy(item) for item in value]
    return copy.copy(value)


def compare(
    expected: Any, actual: Any, *, tolerance: float = 0.0, path: str = ""
) -> list[Difference]:
    """Every place where two states differ; ``tolerance`` is relative to the largest element."""
    if isinstance(expected, Tensor):
        return _compare_tensors(expected, actual, tolerance, path)
    if type(expected) is not type(actual):
        return [Difference(path, f"{expected!r} became {actual!r}")]
    if isinstance(expected, dict):
        if expected.keys() != actual.keys():
            return [Difference(path, f"keys {sorted(map(str, expected.keys() ^ actual.keys()))}")]
        pairs = [(f"{path}.{key}", expected[key], actual[key]) for key in expected]
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            return [Difference(path, f"{len(expected)} items became {len(actual)}")]
        pairs = [
            (f"{path}[{i}]", *items) for i, items in enumerate(zip(expected, actual, strict=True))
        ]
    else:
        same = expected == actual or (expected != expected and actual != actual)  # noqa: PLR0124 NaN
        if isinstance(expected, float) and tolerance:
            same = same or abs(expected - actual) <= tolerance * max(1.0, abs(expected))
        return [] if same else [Difference(path, f"{expected!r} became {actual!r}")]
    return [
        difference
        for where, a, b in pairs
        for difference in compare(a, b, tolerance=tolerance, path=where)
    ]


def _compare_tensors(
    expected: Tensor, actual: Any, tolerance: float, path: str
) -> list[Difference]:
    if not isinstance(actual, Tensor) or expected.shape != actual.shape:
        shape = tuple(getattr(actual, "shape", ()))
        return [Difference(path, f"shape {tuple(expected.shape)} became {shape}")]
    if expected.dtype != actual.dtype:
        return [Difference(path, f"{expected.dtype} became {actual.dtype}")]
    if not expected.is_floating_point():
        return [] if torch.equal(expected, actual) else [Difference(path, "other values")]
    if torch.equal(torch.isnan(expected), torch.isnan(actual)):
        a, b = expected.double().nan_to_num(), actual.double().nan_to_num()
        if torch.equal(a, b):
            return []
        off = float((a - b).abs().max() / a.abs().max().clamp_min(1e-3))
        return [] if off <= tolerance else [Difference(path, f"off by {off:.1e}")]
    return [Difference(path, "NaN in other places")]


def without_own_keys(row: dict[str, Any]) -> dict[str, Any]:
    """What was logged by the user and by Lightning, not by this package."""
    return {key: value for key, value in row.items() if not key.startswith("oom/")}


def user_rows(logger: ListLogger) -> list[tuple[int | None, dict[str, Any]]]:
    """The rows of a logger as they would be without this package."""
    rows = [(step, without_own_keys(row)) for step, row in logger.rows]
    return [(step, row) for step, row in rows if row]

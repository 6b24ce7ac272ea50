"""How the peak grows with rows and length: a regression over everything that fitted.

The peak above what was allocated before the step is taken to be ``c0 + n (c1 + c2 V + c3 V^2)``, with
``n`` rows together and ``V`` elements per row in the leaves whose shapes vary; no coefficient is
negative. A model of a real network is off by some per cent, so the prediction is corrected by what
was seen at the nearest lengths, and is pessimistic where it has to extrapolate.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_oom.recovery.rows.bounds import Dims

__all__ = ["PeakModel"]

_KEPT = 256
_NEAREST = 5
_REFIT_ERROR = 0.05
_REFIT_SHARE = 0.25
_EXTRAPOLATION_POWER = 2.0
_FEW_OBSERVATIONS = 4
_PROPORTIONAL = [[2]]
_SUBSETS = sorted(
    (list(subset) for size in (1, 2, 3, 4) for subset in itertools.combinations(range(4), size)),
    key=lambda subset: (0 in subset, len(subset)),  # among equals, rather a slope than a constant
)


class PeakModel:
    """Observed peaks of batches of one structure, and predictions for others.

    Args:
        leaf_ndims: Trailing dimensions of each leaf, which say how ``dims`` is to be cut.
    """

    def __init__(self, leaf_ndims: Sequence[int]) -> None:
        self._leaf_ndims = tuple(leaf_ndims)
        self._observed: deque[tuple[Dims, int, float]] = deque(maxlen=_KEPT)
        self._low: Dims | None = None
        self._high: Dims | None = None
        self._fit: _Fit | None = None
        self._stale = True

    def __len__(self) -> int:
        return len(self._observed)

    def observe(self, dims: Dims, rows: int, num_bytes: float) -> None:
        """Add a peak, in bytes above what was allocated before the step."""
        if num_bytes <= 0:
            return
        self._widen(dims)
        self._observed.append((dims, rows, float(num_bytes)))
        if self._fit is None or self._stale:
            self._stale = True
            return
        length = self._length(dims)
        error = abs(self._fit.predict(length, rows) / num_bytes - 1)
        self._fit.add(length, rows, float(num_bytes))
        self._stale = error > _REFIT_ERROR or self._fit.is_outgrown(length)

    def predict(self, dims: Dims, rows: int) -> float | None:
        """Return the expected peak in bytes above the base, or ``None`` without observations."""
        fit = self._current()
        return None if fit is None else fit.predict(self._length(dims), rows)

    def rows_within(self, dims: Dims, num_bytes: float) -> int | None:
        """Return how many rows are expected to stay within ``num_bytes`` above the base.

        Returns:
            Rows, 0 when not even one is expected to fit; ``None`` without observations.
        """
        fit = self._current()
        return None if fit is None else fit.rows_within(self._length(dims), num_bytes)

    def is_familiar(self, dims: Dims) -> bool:
        """Whether lengths around ``dims`` have been seen, so that a prediction is no extrapolation."""
        fit = self._current()
        return fit is not None and fit.is_familiar(self._length(dims))

    def clear(self) -> None:
        """Forget every observation."""
        self._observed.clear()
        self._fit, self._stale = None, True

    def to_plain(self) -> list[Any]:
        """Return lists and numbers."""
        return [[list(dims), rows, num_bytes] for dims, rows, num_bytes in self._observed]

    def load_plain(self, plain: Sequence[Any]) -> None:
        """Observe again what :meth:`to_plain` described."""
        for dims, rows, num_bytes in plain:
            self.observe(tuple(map(int, dims)), int(rows), float(num_bytes))

    def _widen(self, dims: Dims) -> None:
        low = dims if self._low is None else tuple(map(min, self._low, dims))
        high = dims if self._high is None else tuple(map(max, self._high, dims))
        if (low, high) != (self._low, self._high):
            self._low, self._high, self._stale = low, high, True

    def _length(self, dims: Dims) -> float:
        """Return the elements per row of the leaves that vary (of all leaves, when none does)."""
        low, high = self._low or dims, self._high or dims
        varying, total, start = 0, 0, 0
        for ndim in self._leaf_ndims:
            stop = start + ndim
            elements = int(np.prod(dims[start:stop])) if ndim else 1
            total += elements
            if low[start:stop] != high[start:stop] or dims[start:stop] != low[start:stop]:
                varying += elements
            start = stop
        return float(varying or total or 1)

    def _current(self) -> _Fit | None:
        if self._stale and self._observed:
            table = [(self._length(d), rows, num_bytes) for d, rows, num_bytes in self._observed]
            self._fit, self._stale = _Fit(np.array(table)), False
        return self._fit


class _Fit:
    """Coefficients, and the observations that correct them locally."""

    def __init__(self, table: np.ndarray) -> None:
        self._lengths, self._ratios = list(table[:, 0]), []
        self._scale = float(table[:, 0].max())
        self._longest, self._shortest = self._scale, float(table[:, 0].min())
        self._num_fitted, self._num_added = len(table), 0
        design, target = _design(table[:, 0] / self._scale, table[:, 1]), table[:, 2]
        subsets = _SUBSETS if len(table) >= _FEW_OBSERVATIONS else _PROPORTIONAL
        self._coefficients = _fit_nonnegative(design / target[:, None], subsets)
        self._ratios = list(target / np.maximum(design @ self._coefficients, 1e-9))

    def add(self, length: float, rows: int, num_bytes: float) -> None:
        """Use one more observation for corrections, without fitting again."""
        self._num_added += 1
        self._lengths.append(length)
        self._ratios.append(num_bytes / max(self._plain(length, rows), 1e-9))
        if len(self._lengths) > _KEPT:
            del self._lengths[0], self._ratios[0]

    def is_outgrown(self, length: float) -> bool:
        """Whether ``length`` is outside of what was fitted, or much has been seen since."""
        outside = not self._shortest <= length <= self._longest
        return outside or self._num_added >= _REFIT_SHARE * self._num_fitted

    def is_familiar(self, length: float) -> bool:
        """Whether ``length`` is at most 10 % beyond the longest seen, or shorter."""
        return length <= 1.1 * self._longest

    def predict(self, length: float, rows: int) -> float:
        """Return bytes above the base."""
        constant, per_row = self._line(length)
        return constant + per_row * rows

    def rows_within(self, length: float, num_bytes: float) -> int:
        """Return the most rows whose prediction is at most ``num_bytes``."""
        constant, per_row = self._line(length)
        return max(0, int((num_bytes - constant) / max(per_row, 1.0)))

    def _line(self, length: float) -> tuple[float, float]:
        """Return constant and slope over rows at ``length``, corrected and cautious."""
        seen = min(length, self._longest)
        constant, per_row = self._plain_line(seen)
        correction = self._correction(seen)
        if length > self._longest:
            grown, known = self._plain_line(length)[1], max(per_row, 1e-9)
            powered = (length / self._longest) ** _EXTRAPOLATION_POWER
            per_row *= max(grown / known, powered)
        return constant * correction, per_row * correction

    def _plain_line(self, length: float) -> tuple[float, float]:
        x, c = length / self._scale, self._coefficients
        return float(c[0]), float(c[1] + c[2] * x + c[3] * x * x)

    def _plain(self, length: float, rows: int) -> float:
        constant, per_row = self._plain_line(length)
        return constant + per_row * rows

    def _correction(self, length: float) -> float:
        """Return observed over predicted at the nearest lengths: their largest."""
        lengths = np.array(self._lengths)
        nearest = np.argsort(np.abs(lengths - length), kind="stable")[:_NEAREST]
        return float(np.array(self._ratios)[nearest].max())


def _design(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(x), rows, rows * x, rows * x * x], axis=1)


def _fit_nonnegative(design: np.ndarray, subsets: list[list[int]]) -> np.ndarray:
    """Return non-negative ``c`` with the least ``|design c - 1|`` that is non-zero in a subset."""
    gram, moment = design.T @ design, design.sum(axis=0)
    best, best_error = np.zeros(design.shape[1]), float("inf")
    for subset in subsets:
        block = gram[np.ix_(subset, subset)]
        solution = np.linalg.lstsq(block, moment[subset], rcond=1e-12)[0]
        if (solution < 0).any():
            continue
        error = float(solution @ block @ solution - 2 * solution @ moment[subset])
        if error < best_error - 1e-9:
            best, best_error = np.zeros(design.shape[1]), error
            best[subset] = solution
    return best

"""May this step be split? Its gradients on a small slice, whole against the sum of its parts.

Splitting is exact when the loss is a mean over rows (or, with ``weight_fn``, a mean over whatever
that counts): then the gradient of the batch is the weighted sum of the gradients of its parts.
In-batch negatives, batch normalisation in training mode, sums, and token means are not that, and
nothing in the code of a model says so. :func:`check_separable` finds out by trying.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_oom.recovery.batches import batch_tensors, count_rows, take_rows
from lightning_oom.recovery.batches.part_rows import rows_of_parts
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.recovery.randomness import FixedRandomness, fixed_randomness, uses_cuda
from lightning_oom.recovery.slices import choose_windows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    GradientsOf = Callable[[Any], Sequence[Tensor | None]]

__all__ = ["FixedRandomness", "Separability", "check_separable", "fixed_randomness"]

_SLICE_ROWS = 4
_NUM_WINDOWS = 3
_SAMPLED_ELEMENTS = 2**22
_FLOOR = 1e-2
_PARTS = {4: ((1, 1, 2), (2, 2)), 3: ((1, 1, 1), (1, 2)), 2: ((1, 1),)}
_TOLERANCES: dict[torch.dtype | None, float] = {
    None: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Separability:
    """Whether the gradients of the parts of a batch add up to those of the whole.

    Attributes:
        separable: They did, within the tolerance.
        largest_relative_difference: Over all parameters; ``nan`` when nothing could be compared.
        parameter: The name of the parameter with that difference; ``None`` when there is none.
        reason: One sentence for people, without a final full stop.
        conclusive: Whether the slice could tell. ``separable`` is ``False`` when it could not.
    """

    separable: bool
    largest_relative_difference: float
    parameter: str | None
    reason: str
    conclusive: bool = True


def check_separable(
    gradients_of: GradientsOf,
    batch: Any,
    *,
    names: Sequence[str],
    weight_fn: Callable[[Any], float | Tensor] | None = None,
    tolerance: float | None = None,
    take: Callable[[Any, int, int], Any] = take_rows,
    split_fn: Callable[[Any, int], Sequence[Any]] | None = None,
    coupled: Sequence[str] = (),
) -> Separability:
    """Compare gradients of a slice of 2 to 4 rows with the weighted sum of those of its parts.

    Meant for the first split of a run. The rows are those, among the first 64, that differ most
    from each other; the parts are 1 + 1 + 2 rows, so that a weight per part instead of per row
    shows. Where the step fails on a single row, 2 + 2.

    Args:
        gradients_of: Runs the step forward and backward on the batch that it is given and returns
            one gradient per name, unscaled; ``None`` stands for no gradient. It is called four
            to nine times inside :func:`~lightning_oom.recovery.randomness.fixed_randomness`, and
            must leave ``.grad``, buffers, metrics and logs as they were.
        batch: The batch to take the slice from.
        names: Parameter names, in the order of the gradients.
        weight_fn: Weight of a part, for example its number of counted tokens; default its rows. A
            part of weight 0 contributes nothing and is not run.
        tolerance: Largest relative difference that counts as rounding. ``None`` chooses by the
            coarsest dtype that the step computed with: 1e-4, with float16 1e-2, with bfloat16 3e-2.
        take: ``take(batch, start, stop)`` gives rows ``[start, stop)``.
        split_fn: The user's way to cut a batch; the slice is its first piece of up to four rows.
        coupled: Names of layers that are known to mix rows
            (:func:`~lightning_oom.recovery.batchnorm.find_batch_coupled`); a refusal names them.

    Returns:
        The verdict. When something else than the rows would have been the right weights, the
        reason says which.

    Raises:
        torch.OutOfMemoryError: Raised by ``gradients_of``; nothing has been found out then.

    Note:
        Gradients are compared on the host, in float64, one part at a time on the device. What only
        shows in more than four rows, or in other rows, is not seen; neither is a mask whose share
        of counted elements is drawn at random inside the step.

    Example:
        >>> weight = torch.ones(3, requires_grad=True)
        >>> def gradients_of(x, reduce=torch.mean):
        ...     return torch.autograd.grad(reduce((x @ weight) ** 2), [weight])
        >>> x = torch.arange(12.0).reshape(4, 3)
        >>> check_separable(gradients_of, x, names=["weight"]).separable
        True
        >>> check_separable(lambda x: gradients_of(x, torch.sum), x, names=["weight"]).reason
        'the loss is a sum over rows, not a mean: its parts add up without weights'
    """
    devices = {tensor.device for tensor in batch_tensors(batch)}
    trial = _Trial(
        gradients_of, tuple(names), weight_fn, tolerance, devices, coupled=tuple(coupled)
    )
    if split_fn is not None:
        return _check_with(split_fn, batch, trial)
    rows = count_rows(batch)
    if rows is None or rows < min(_PARTS):
        return _unknown(f"the batch has {rows or 'no'} row{'s' if not rows else ''} to compare")
    num_rows = min(rows, _SLICE_ROWS)
    starts = choose_windows(batch_tensors(batch), rows, num_rows)
    if not starts:
        return _unknown("the rows of the batch are all equal, so that nothing can be compared")
    verdict = _unknown("nothing was compared")
    for start in starts[:_NUM_WINDOWS]:
        for sizes in _PARTS[num_rows]:
            verdict = trial.compare(*_cut(batch, start, sizes, take), sizes)
            if not trial.failed_on_part:
                break
        if verdict.conclusive:
            break
    return verdict


def _check_with(
    split_fn: Callable[[Any, int], Sequence[Any]], batch: Any, trial: _Trial
) -> Separability:
    """Compare a slice with its parts where only the user's function knows how to cut."""
    whole = split_fn(batch, _SLICE_ROWS)[0]
    ones = len(split_fn(whole, 1))
    if ones < min(_PARTS):
        return _unknown(f"split_fn gives a slice of {ones} row to compare")
    parts = list(split_fn(whole, max(1, ones - 1)))
    return trial.compare(whole, parts, rows_of_parts(parts, split_fn))


def _unknown(reason: str) -> Separability:
    return Separability(
        separable=False,
        largest_relative_difference=float("nan"),
        parameter=None,
        reason=reason,
        conclusive=False,
    )


def _cut(batch: Any, start: int, sizes: Sequence[int], take: Any) -> tuple[Any, list[Any]]:
    edges = [start + sum(sizes[:index]) for index in range(len(sizes) + 1)]
    parts = [take(batch, a, b) for a, b in itertools.pairwise(edges)]
    return take(batch, edges[0], edges[-1]), parts


class _Trial:
    """One check: runs the step on slices and compares what comes back."""

    def __init__(
        self,
        gradients_of: GradientsOf,
        names: tuple[str, ...],
        weight_fn: Callable[[Any], float | Tensor] | None,
        tolerance: float | None,
        devices: set[torch.device],
        *,
        coupled: tuple[str, ...],
    ) -> None:
        self._coupled = coupled
        self._gradients_of = gradients_of
        self._names = names
        self._weight_fn = weight_fn
        self._tolerance = tolerance
        self._devices = devices
        self._lowest_precision: torch.dtype | None = None
        self.failed_on_part = False

    def compare(self, whole: Any, parts: list[Any], sizes: Sequence[int]) -> Separability:
        """Return the verdict on one slice; ``failed_on_part`` says that a part raised."""
        self.failed_on_part = False
        weights = [float(self._weight_fn(part)) for part in parts] if self._weight_fn else [*sizes]
        if not sum(weights) > 0:
            return _unknown("the weights of the slice add up to nothing")
        try:
            expected = self._run(whole)
        except Exception as error:
            _raise_if_oom(error)
            return _unknown(f"the step fails on a slice of {sum(sizes)} rows: {_words(error)}")
        if len(expected) != len(self._names):
            raise ValueError(
                f"gradients_of returned {len(expected)} gradients for {len(self._names)} names"
            )
        kept = [(part, w) for part, w in zip(parts, weights, strict=True) if w > 0]
        try:
            pieces = [self._run(part) for part, _ in kept]
        except Exception as error:
            _raise_if_oom(error)
            self.failed_on_part = True
            return _refused(f"the step fails on a part of the slice: {_words(error)}")
        shares = np.array([w for _, w in kept]) / sum(weights)
        return self._judge(expected, pieces, shares)

    def _run(self, batch: Any) -> list[np.ndarray]:
        with fixed_randomness(devices=self._devices) as mode:
            gradients = self._gradients_of(batch)
        if self._lowest_precision is not torch.bfloat16:
            self._lowest_precision = mode.lowest_precision or self._lowest_precision
        return [_to_host(gradient) for gradient in gradients]

    def _judge(
        self, expected: list[np.ndarray], pieces: list[list[np.ndarray]], shares: np.ndarray
    ) -> Separability:
        if not _all_finite(expected):
            return _unknown("the gradient of the slice is not finite")
        if not all(map(_all_finite, pieces)):
            return _refused(
                "the gradient of a part is not finite although that of the slice is (rows in which "
                "nothing counts?): a weight_fn that gives such a part 0 leaves it out"
            )
        sums = _Sums(expected, pieces)
        if not sums.scales.any():
            return _unknown("all gradients of the slice are zero")
        tolerance = self._tolerance or _tolerance_for(self._lowest_precision)
        differences = sums.differences(shares)
        index = int(differences.argmax())
        largest, name = float(differences[index]), self._names[index]
        separable = largest <= tolerance
        if separable:
            reason = f"gradients of parts add up to those of the whole (within {largest:.1e})"
        else:
            weighted = self._weight_fn is not None
            weights = None if self._coupled else sums.explain(shares, tolerance, weighted=weighted)
            reason = weights or (
                f"{_what_couples(self._coupled)}: gradients of parts differ from those of the whole "
                f"by {largest:.1e} at {name}"
            )
        return Separability(
            separable=separable,
            largest_relative_difference=largest,
            parameter=name,
            reason=reason,
        )


def _what_couples(layers: Sequence[str]) -> str:
    if not layers:
        return "rows depend on each other"
    named = ", ".join(name or "the module itself" for name in layers[:3])
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""  # noqa: PLR2004 - three fit
    return (
        "rows depend on each other through batch normalisation, which takes its statistics over the "
        f"batch ({named}{more})"
    )


class _Sums:
    """Gradients of a whole and of its parts, as flat arrays per parameter."""

    def __init__(self, expected: list[np.ndarray], pieces: list[list[np.ndarray]]) -> None:
        self._rows = [
            (whole, _stack([piece[index] for piece in pieces], whole))
            for index, whole in enumerate(expected)
        ]
        self._rows = [(w if w.size else np.zeros(p.shape[1]), p) for w, p in self._rows]
        norms = [np.linalg.norm(parts, axis=1) for _, parts in self._rows]
        self._norms = norms
        self.scales = np.array(
            [
                max(np.linalg.norm(whole), n.mean())
                for (whole, _), n in zip(self._rows, norms, strict=True)
            ]
        )

    def differences(self, weights: np.ndarray) -> np.ndarray:
        """Return, per parameter, how far the weighted sum is from the whole.

        Relative to the larger of the whole and the summands, so that rounding does not look large
        where summands cancel, and to at least 1 % of the largest such figure of any parameter.
        """
        scales = np.maximum(self.scales, [float(weights @ n) for n in self._norms])
        scales = np.maximum(scales, _FLOOR * scales.max())
        errors = [np.linalg.norm(whole - weights @ parts) for whole, parts in self._rows]
        return np.asarray(errors / scales)

    def explain(self, shares: np.ndarray, tolerance: float, *, weighted: bool) -> str | None:
        """Say which other weights would have made the parts add up, if any do."""
        if self.differences(np.ones_like(shares)).max() <= tolerance:
            return "the loss is a sum over rows, not a mean: its parts add up without weights"
        gram = sum(parts @ parts.T for _, parts in self._rows)
        moments = sum(parts @ whole for whole, parts in self._rows)
        best = np.linalg.lstsq(gram, moments, rcond=None)[0]
        if self.differences(best).max() > tolerance or (best < -tolerance).any():
            return None
        found, tried = (", ".join(f"{w:.3f}" for w in weights) for weights in (best, shares))
        remedy = "another weight_fn" if weighted else "a weight_fn (its number of counted tokens?)"
        return (
            f"the loss is a mean over something else than rows: parts add up with weights {found} "
            f"instead of {tried}, give each part its weight with {remedy}"
        )


def _stack(pieces: list[np.ndarray], whole: np.ndarray) -> np.ndarray:
    size = max(whole.size, *(piece.size for piece in pieces))
    return np.stack([piece if piece.size else np.zeros(size) for piece in pieces])


def _all_finite(gradients: list[np.ndarray]) -> bool:
    return all(np.isfinite(gradient).all() for gradient in gradients)


def _to_host(gradient: Tensor | None) -> np.ndarray:
    """Return the gradient, or a sample of a very large one, flat; empty for ``None``.

    Sparse gradients are summed over their indexed dimension, which keeps sums of parts comparable.
    """
    if gradient is None:
        return np.zeros(0)
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = torch.sparse.sum(gradient, dim=0)
        gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    step = -(-gradient.numel() // _SAMPLED_ELEMENTS)
    flat = gradient.reshape(-1)[:: max(step, 1)]
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return np.asarray(flat.to("cpu").to(torch.float64).numpy())


def _tolerance_for(dtype: torch.dtype | None) -> float:
    tolerance = _TOLERANCES[dtype]
    uses_tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return 10 * tolerance if dtype is None and uses_tf32 and uses_cuda() else tolerance


def _refused(reason: str) -> Separability:
    return Separability(
        separable=False,
        largest_relative_difference=float("inf"),
        parameter=None,
        reason=reason,
    )


def _raise_if_oom(error: Exception) -> None:
    if classify_oom(error) is not None:
        raise error


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")

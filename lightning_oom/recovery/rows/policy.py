"""How many rows to run together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_oom.recovery.rows.row_groups import Groups, Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_oom.recovery.batches import BatchSignature

__all__ = ["RowsPolicy"]

_VERSION = 1
_READ_EVERY = 16
_MAX_BACKOFF = 10
_STEP_DOWN = 0.98
_SURPRISES = 2
_FEW_PEAKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """One step that tries more than old failures allow."""

    place: Place
    rows: int
    usable_fraction: float


class RowsPolicy:
    """Choose how many rows to run together, from what was seen to fit and to fail.

    Before anything has failed, the answer is the whole batch, at the cost of one comparison.
    Afterwards it is the most rows whose predicted peak stays below the limit by a margin
    (:class:`~lightning_oom.recovery.rows.peak_model.PeakModel`), never as many as are known not to fit,
    and never fewer than are known to fit
    (:class:`~lightning_oom.recovery.rows.bounds.RowBounds`). Where no peaks can be read, the bounds
    alone decide and failures halve.

    Memory that another process takes shows as failures where the prediction was sure of success;
    the usable part of the limit is lowered then. It is raised again by probes: after
    ``grow_after`` successes that were held back, one step tries one micro-batch less. A failed
    probe doubles the number of successes to wait for.

    Args:
        margin_fraction: Part of the limit that predictions keep free, in [0, 1).
        grow_after: Successes in a row that are held back by an old failure before one probe, at
            least 1.

    Raises:
        ValueError: An argument is outside its range.

    Example:
        >>> from lightning_oom.recovery.batches import describe_batch
        >>> import torch
        >>> policy, signature = RowsPolicy(), describe_batch({"x": torch.zeros(32, 100)})
        >>> policy.propose(signature, 32)
        32
        >>> policy.record_failure(signature, 32)
        >>> policy.next_rows(signature, 32)
        16
        >>> policy.record_success(signature, 16)
        >>> policy.propose(signature, 32)
        16
    """

    def __init__(self, *, margin_fraction: float = 0.05, grow_after: int = 100) -> None:
        if not 0 <= margin_fraction < 1:
            raise ValueError(f"margin_fraction must be in [0, 1), got {margin_fraction!r}")
        if grow_after < 1:
            raise ValueError(f"grow_after must be at least 1, got {grow_after!r}")
        self.margin_fraction = margin_fraction
        self.grow_after = grow_after
        self._groups = Groups()
        self._failed = False
        self._usable_fraction = 1.0
        self._num_held_back = 0
        self._largest_fit = 0
        self._held_back = False
        self._backoff = 0
        self._num_surprises = 0
        self._num_successes = 0
        self._probe: _Probe | None = None
        self._last_limit: int | None = None
        self._last_base: int | None = None

    def propose(
        self,
        signature: BatchSignature,
        rows: int,
        *,
        limit_bytes: int | None = None,
        base_bytes: int | None = None,
    ) -> int:
        """Return how many rows of a batch of ``rows`` to run together; ``rows`` means the whole.

        Args:
            signature: What the batch looks like.
            rows: Rows of the batch, at least 1.
            limit_bytes: What the device can hold now; ``None`` for what was last said, if anything.
            base_bytes: Allocated before the step; ``None`` likewise.

        Returns:
            Rows in [1, ``rows``], balanced: the fewest that need that many micro-batches.
        """
        if not self._failed:
            return rows
        place = self._groups.place(signature)
        limit_bytes, base_bytes = self._bases(limit_bytes, base_bytes)
        if self._probe is not None and self._probe.place is place:
            return min(rows, self._probe.rows)
        self._probe = None
        wanted = self._wanted(place, rows, limit_bytes, base_bytes)
        chosen = _balance(rows, self._clip(place, wanted, rows))
        more = self._forgetful(place, rows, limit_bytes, base_bytes)
        self._held_back = more > chosen
        if self._held_back and self._num_held_back >= self._wait():
            fewer_parts = max(1, -(-rows // chosen) - 1)
            chosen = _balance(rows, min(more, -(-rows // fewer_parts)))
            self._probe = _Probe(
                place=place,
                rows=chosen,
                usable_fraction=self._usable_at(place, chosen, limit_bytes, base_bytes),
            )
        return chosen

    def next_rows(
        self,
        signature: BatchSignature,
        failed_rows: int,
        *,
        rows: int | None = None,
        limit_bytes: int | None = None,
        base_bytes: int | None = None,
    ) -> int | None:
        """Return how many rows to try after ``failed_rows`` did not fit, or ``None`` after 1.

        Args:
            signature: What the batch looks like.
            failed_rows: Rows that ran together when memory ran out, at least 1.
            rows: Rows of the batch; with it the answer is balanced.
            limit_bytes: What the device can hold; ``None`` for what was last said.
            base_bytes: Allocated before the step; ``None`` for what was last said.

        Returns:
            At most three quarters of ``failed_rows``; half of it where nothing is known.
        """
        if failed_rows <= 1:
            return None
        place = self._groups.place(signature)
        limit_bytes, base_bytes = self._bases(limit_bytes, base_bytes)
        known = place.group.peaks.predict(place.dims, failed_rows) is not None
        wanted = self._wanted(place, failed_rows, limit_bytes, base_bytes) if known else None
        fewer = failed_rows // 2 if wanted is None else min(wanted, failed_rows * 3 // 4)
        chosen = max(1, min(self._clip(place, fewer, failed_rows), failed_rows - 1))
        return _balance(rows, chosen) if rows is not None else chosen

    def record_success(
        self,
        signature: BatchSignature,
        rows_together: int,
        *,
        peak_bytes: int | None = None,
        base_bytes: int | None = None,
        near_miss: bool = False,
    ) -> None:
        """Note that a step ran with ``rows_together`` rows at a time.

        Args:
            signature: What the batch looks like.
            rows_together: The largest number of rows that ran together.
            peak_bytes: The step's peak of allocated memory; ``None`` for unknown.
            base_bytes: Allocated before the step; ``None`` for unknown.
            near_miss: The allocator had to empty its cache and try again during the step: more
                rows are not tried then, and after three times one row less.
        """
        place = self._groups.place(signature)
        if peak_bytes is not None:
            place.read_rows.add(rows_together)
            base = self._bases(None, base_bytes)[1] or 0
            place.group.peaks.observe(place.dims, rows_together, peak_bytes - base)
            self._largest_fit = max(self._largest_fit, peak_bytes)
        if not self._failed and not near_miss:
            place.largest_whole = max(place.largest_whole, rows_together)
            return
        place.group.bounds.add_safe(place.dims, rows_together)
        if near_miss:
            place.group.bounds.add_tight(place.dims, rows_together)
        self._settle_probe(place, rows_together)

    def record_failure(
        self,
        signature: BatchSignature,
        rows_together: int,
        *,
        limit_bytes: int | None = None,
        base_bytes: int | None = None,
    ) -> None:
        """Note that ``rows_together`` rows at a time ran out of memory.

        Args:
            signature: What the batch looks like.
            rows_together: The number of rows that ran together.
            limit_bytes: What the device can hold; ``None`` for what was last said.
            base_bytes: Allocated before the step; ``None`` for what was last said.
        """
        place = self._groups.place(signature)
        limit_bytes, base_bytes = self._bases(limit_bytes, base_bytes)
        if not self._failed:
            self._groups.remember_whole_batches()
            self._failed = True
        place.group.num_failures += 1
        was_probe = self._probe is not None and self._probe.place is place
        if was_probe:
            self._backoff = min(self._backoff + 1, _MAX_BACKOFF)
        elif limit_bytes is not None:
            self._lower_expectations(place, rows_together, limit_bytes, base_bytes or 0)
        self._probe, self._num_held_back = None, 0
        place.group.bounds.add_bad(place.dims, rows_together)

    def wants_peak(self, signature: BatchSignature, rows_together: int) -> bool:
        """Whether reading the peak of this step would tell something new.

        True for rows and lengths not seen yet, and for every 16th step otherwise. Costs two
        look-ups.
        """
        place = self._groups.place(signature)
        place.num_asked += 1
        return rows_together not in place.read_rows or place.num_asked % _READ_EVERY == 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was learnt, as lists, dicts, strings and numbers."""
        if not self._failed:
            self._groups.remember_whole_batches()
        return {
            "version": _VERSION,
            "failed": self._failed,
            "usable_fraction": self._usable_fraction,
            "largest_fit_bytes": self._largest_fit,
            "backoff": self._backoff,
            "groups": self._groups.to_plain(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over what another policy had learnt.

        Returns:
            Whether the state was used. A state of another version, or one that cannot be read, is
            left alone, and the policy learns anew.
        """
        if state.get("version") != _VERSION:
            return False
        try:
            groups = Groups.from_plain(state["groups"])
            numbers = (
                bool(state["failed"]),
                float(state["usable_fraction"]),
                int(state["largest_fit_bytes"]),
                int(state["backoff"]),
            )
        except (KeyError, TypeError, ValueError):
            return False
        self._groups = groups
        self._failed, self._usable_fraction, self._largest_fit, self._backoff = numbers
        self._probe, self._num_held_back = None, 0
        return True

    def _bases(
        self, limit_bytes: int | None, base_bytes: int | None
    ) -> tuple[int | None, int | None]:
        """Remember what is said, and fill in what is not."""
        self._last_limit = self._last_limit if limit_bytes is None else limit_bytes
        self._last_base = self._last_base if base_bytes is None else base_bytes
        return self._last_limit, self._last_base

    def _target(self, limit_bytes: int | None) -> float | None:
        """Return up to how many bytes a step may be expected to go."""
        if limit_bytes is not None:
            return limit_bytes * (1 - self.margin_fraction) * self._usable_fraction
        return float(self._largest_fit) if self._largest_fit else None

    def _wanted(
        self, place: Place, rows: int, limit_bytes: int | None, base_bytes: int | None
    ) -> int | None:
        """Return what the model would run together, unbalanced; ``None`` where it cannot tell."""
        target, base = self._target(limit_bytes), base_bytes or 0
        if target is None:
            return None
        if not place.group.num_failures:
            expected = place.group.peaks.predict(place.dims, rows)
            if limit_bytes is None or expected is None or expected + base <= limit_bytes:
                return rows
        return place.group.peaks.rows_within(place.dims, target - base)

    def _forgetful(
        self, place: Place, rows: int, limit_bytes: int | None, base_bytes: int | None
    ) -> int:
        """Return what would be proposed if nothing had failed so far."""
        if limit_bytes is None:
            return rows
        target = limit_bytes * (1 - self.margin_fraction)
        more = place.group.peaks.rows_within(place.dims, target - (base_bytes or 0))
        return rows if more is None else max(1, min(rows, more))

    def _usable_at(
        self, place: Place, rows: int, limit_bytes: int | None, base_bytes: int | None
    ) -> float:
        """Return which part of the limit is usable if ``rows`` fit."""
        expected = place.group.peaks.predict(place.dims, rows)
        if limit_bytes is None or expected is None:
            return self._usable_fraction
        return min(1.0, (expected + (base_bytes or 0)) / (limit_bytes * (1 - self.margin_fraction)))

    def _clip(self, place: Place, wanted: int | None, rows: int) -> int:
        """Return ``wanted`` within what is known to fail and known to fit."""
        bounds = place.group.bounds
        cap, safe = bounds.cap(place.dims), bounds.largest_safe(place.dims)
        chosen = rows if wanted is None else min(wanted, rows)
        if cap is not None:
            chosen = min(chosen, cap if wanted is not None or safe else max(1, (cap + 1) // 2))
        return max(1, min(rows, max(chosen, safe)))

    def _settle_probe(self, place: Place, rows_together: int) -> None:
        probe = self._probe
        if probe is None or probe.place is not place:
            self._num_held_back += self._held_back
            self._num_successes += 1
            if self._num_successes % self.grow_after == 0:
                self._num_surprises = 0
            return
        self._probe = None
        if rows_together >= probe.rows:
            self._usable_fraction = max(self._usable_fraction, probe.usable_fraction)
            self._backoff = max(0, self._backoff - 1)
            self._num_held_back = self._wait()  # go on probing until one fails

    def _wait(self) -> int:
        return int(self.grow_after * 2**self._backoff)

    def _lower_expectations(
        self, place: Place, rows: int, limit_bytes: int, base_bytes: int
    ) -> None:
        """Blame the model for a surprising failure where it had to extrapolate.

        Elsewhere one may be noise, and the second is a device that holds less than it says.
        """
        peaks = place.group.peaks
        expected = peaks.predict(place.dims, rows)
        target = self._target(limit_bytes)
        if expected is None or target is None or expected + base_bytes > target:
            return
        if len(peaks) < _FEW_PEAKS or not peaks.is_familiar(place.dims):
            peaks.observe(place.dims, rows, limit_bytes - base_bytes)
            return
        self._num_surprises += 1
        if self._num_surprises >= _SURPRISES:
            self._usable_fraction *= _STEP_DOWN * (expected + base_bytes) / target


def _balance(rows: int, rows_together: int) -> int:
    """Return the fewest rows that need as many micro-batches as ``rows_together``."""
    num_parts = -(-rows // max(1, rows_together))
    return -(-rows // num_parts)

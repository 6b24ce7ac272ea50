"""What is known to fit and what is known not to, and what follows for other batches.

A batch that is at least as long in every trailing dimension needs at least as much memory for the
same number of rows. So what fitted is safe for every shorter batch, and what failed is bad for
every longer one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Dims", "RowBounds"]

Dims = tuple[int, ...]
"""The trailing dimensions of all leaves of a batch, one after the other."""

_MAX_ENTRIES = 128
_TIGHT_REPEATS = 3


def _covers(larger: Dims, smaller: Dims) -> bool:
    return all(a >= b for a, b in zip(larger, smaller, strict=True))


@dataclass(slots=True)
class RowBounds:
    """Known safe and known bad numbers of rows, for batches of one structure.

    New facts win over old ones: a success takes back every failure that it contradicts, and the
    other way round. Each list keeps only what does not follow from its other entries, and the
    most recent 128 of that.

    Attributes:
        safe: ``(dims, rows)`` that fitted.
        bad: ``(dims, rows)`` that did not.
        tight: ``(dims, rows)`` that fitted only just; more rows are not tried.
    """

    safe: list[tuple[Dims, int]] = field(default_factory=list)
    bad: list[tuple[Dims, int]] = field(default_factory=list)
    tight: list[tuple[Dims, int]] = field(default_factory=list)
    _tight_counts: dict[tuple[Dims, int], int] = field(default_factory=dict)

    def largest_safe(self, dims: Dims) -> int:
        """Return the most rows known to fit at ``dims``; 0 when nothing is known."""
        return max((rows for known, rows in self.safe if _covers(known, dims)), default=0)

    def smallest_bad(self, dims: Dims) -> int | None:
        """Return the fewest rows known not to fit at ``dims``, or ``None``."""
        return min((rows for known, rows in self.bad if _covers(dims, known)), default=None)

    def cap(self, dims: Dims) -> int | None:
        """Return the most rows that nothing speaks against, or ``None`` for no bound; at least 1."""
        caps = [rows - 1 for known, rows in self.bad if _covers(dims, known)]
        caps += [rows for known, rows in self.tight if _covers(dims, known)]
        return max(1, min(caps)) if caps else None

    def add_safe(self, dims: Dims, rows: int) -> None:
        """Note that ``rows`` fitted at ``dims``."""
        self.bad = [e for e in self.bad if not (_covers(dims, e[0]) and e[1] <= rows)]
        self.tight = [e for e in self.tight if not (_covers(dims, e[0]) and e[1] < rows)]
        if self.largest_safe(dims) < rows:
            self.safe = [e for e in self.safe if not (_covers(dims, e[0]) and e[1] <= rows)]
            self.safe.append((dims, rows))
            del self.safe[:-_MAX_ENTRIES]

    def add_bad(self, dims: Dims, rows: int) -> None:
        """Note that ``rows`` did not fit at ``dims``."""
        self.safe = [e for e in self.safe if not (_covers(e[0], dims) and e[1] >= rows)]
        known = self.smallest_bad(dims)
        if known is None or known > rows:
            self.bad = [e for e in self.bad if not (_covers(e[0], dims) and e[1] >= rows)]
            self.bad.append((dims, rows))
            del self.bad[:-_MAX_ENTRIES]

    def add_tight(self, dims: Dims, rows: int) -> None:
        """Note that ``rows`` fitted at ``dims`` only after the allocator had to try again.

        The third time, one row less becomes the bound.
        """
        times = self._tight_counts.get((dims, rows), 0) + 1
        self._tight_counts = {**dict(list(self._tight_counts.items())[-_MAX_ENTRIES:])}
        self._tight_counts[dims, rows] = times
        rows = max(1, rows - (times >= _TIGHT_REPEATS))
        self.safe = [e for e in self.safe if not (_covers(e[0], dims) and e[1] > rows)]
        self.tight = [e for e in self.tight if not (_covers(e[0], dims) and e[1] >= rows)]
        self.tight.append((dims, rows))
        del self.tight[:-_MAX_ENTRIES]

    def forget_bad(self, dims: Dims) -> None:
        """Drop every bound from above that applies at ``dims``."""
        self.bad = [e for e in self.bad if not _covers(dims, e[0])]
        self.tight = [e for e in self.tight if not _covers(dims, e[0])]

    def to_plain(self) -> dict[str, Any]:
        """Return lists and integers."""
        return {
            name: [[list(dims), rows] for dims, rows in getattr(self, name)]
            for name in ("safe", "bad", "tight")
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RowBounds:
        """Return the bounds that :meth:`to_plain` described."""

        def read(entries: Sequence[Any]) -> list[tuple[Dims, int]]:
            return [(tuple(map(int, dims)), int(rows)) for dims, rows in entries]

        return cls(safe=read(plain["safe"]), bad=read(plain["bad"]), tight=read(plain["tight"]))

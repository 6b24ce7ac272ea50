"""Failed attempts and micro-batches of four ways to choose how many rows run together.

Run ``python tests/benchmarks/rows_policy.py``; it prints one table and takes about 15 seconds.

600 batches of 32 sequences with log-normal lengths of 16 to 256 meet a limit of a quarter of what
the longest batch needs. The memory curves are those of a transformer (2 blocks of width 32, 4 heads,
vocabulary 100, naive attention, Adam), measured with a byte-counting dispatch mode at 1 to 12 rows
and fitted per length (largest error 0.5 %). A peak comes with one-sided noise. Every policy sees the
same batches.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field
from typing import Protocol

from lightning_oom.recovery.batches import BatchSignature
from lightning_oom.recovery.rows import RowsPolicy

BASE_BYTES = 513_317
BYTES_PER_ROW = {
    16: 95_197,
    32: 207_360,
    48: 335_616,
    64: 480_256,
    96: 861_814,
    128: 1_411_230,
    160: 2_091_717,
    192: 2_903_276,
    224: 3_845_908,
    256: 4_919_611,
}
ROWS, STEPS, LIMIT_SHARE = 32, 600, 0.25
LIMIT_BYTES = BASE_BYTES + BYTES_PER_ROW[256] * ROWS * LIMIT_SHARE


def bytes_per_row(length: int) -> float:
    """Interpolate the measured curve."""
    low = max(known for known in BYTES_PER_ROW if known <= length)
    high = min(known for known in BYTES_PER_ROW if known >= length)
    share = 0.0 if low == high else (length - low) / (high - low)
    return BYTES_PER_ROW[low] * (1 - share) + BYTES_PER_ROW[high] * share


class Policy(Protocol):
    """What the simulation asks."""

    def propose(self, length: int) -> int:
        """Rows to run together at first."""

    def failed(self, length: int, rows: int) -> int:
        """Rows to run together after ``rows`` failed."""

    def fitted(self, length: int, rows: int, peak_bytes: float) -> None:
        """``rows`` fitted."""


class Halving:
    """Halve after each failure and forget."""

    def propose(self, length: int) -> int:
        """The whole batch."""
        return ROWS

    def failed(self, length: int, rows: int) -> int:
        """Half."""
        return max(1, rows // 2)

    def fitted(self, length: int, rows: int, peak_bytes: float) -> None:
        """Nothing is learnt."""


@dataclass
class HalvingWithMemory(Halving):
    """Halve after each failure, and begin where the same length ended last time."""

    known: dict[int, int] = field(default_factory=dict)

    def propose(self, length: int) -> int:
        """What fitted at this length."""
        return self.known.get(length, ROWS)

    def fitted(self, length: int, rows: int, peak_bytes: float) -> None:
        """Remember."""
        self.known[length] = rows


class Ours:
    """:class:`RowsPolicy`; ``reads_peaks=False`` leaves it with failures and successes alone."""

    def __init__(self, *, reads_peaks: bool = True, reads_before_failures: bool = True) -> None:
        self.policy = RowsPolicy()
        self.reads_peaks = reads_peaks
        self.reads_now = reads_peaks and reads_before_failures
        self.facts = {"base_bytes": BASE_BYTES * 9 // 10}
        if reads_peaks:
            self.facts["limit_bytes"] = int(LIMIT_BYTES)

    def propose(self, length: int) -> int:
        """Ask."""
        return self.policy.propose(signature_of(length), ROWS, **self.facts)

    def failed(self, length: int, rows: int) -> int:
        """Tell, and ask again."""
        self.reads_now = self.reads_peaks
        signature = signature_of(length)
        self.policy.record_failure(signature, rows, **self.facts)
        return self.policy.next_rows(signature, rows, rows=ROWS, **self.facts) or 1

    def fitted(self, length: int, rows: int, peak_bytes: float) -> None:
        """Tell, with the peak where it is wanted."""
        signature = signature_of(length)
        wanted = self.reads_now and self.policy.wants_peak(signature, rows)
        self.policy.record_success(
            signature,
            rows,
            peak_bytes=int(peak_bytes) if wanted else None,
            base_bytes=self.facts["base_bytes"],
        )


def signature_of(length: int) -> BatchSignature:
    """Return the signature of a batch of token sequences."""
    return BatchSignature("tensor", ((length,),), ("int64",), length)


def simulate(policy: Policy, *, seed: int, grain: int, noise: float) -> tuple[int, float]:
    """Return failed attempts, and micro-batches over the fewest possible."""
    lengths, noises = random.Random(seed), random.Random(seed + 1)  # noqa: S311 - a simulation
    failures = used = fewest = 0
    for _ in range(STEPS):
        length = min(256, max(16, int(lengths.lognormvariate(4.3, 0.6))))
        length = -(-length // grain) * grain
        slope = bytes_per_row(length)
        best = max(1, int((LIMIT_BYTES - BASE_BYTES) / slope))
        rows = policy.propose(length)
        while True:
            together = -(-ROWS // -(-ROWS // rows))  # micro-batches are balanced
            peak = (BASE_BYTES + slope * together) * (1 + noise * abs(noises.gauss(0, 1)))
            if peak <= LIMIT_BYTES:
                break
            failures += 1
            rows = policy.failed(length, together)
        policy.fitted(length, together, peak)
        used += -(-ROWS // together)
        fewest += -(-ROWS // min(ROWS, best))
    return failures, used / fewest


POLICIES = {
    "halving, no memory": Halving,
    "halving, memory per signature": HalvingWithMemory,
    "ours, no peaks to read": lambda: Ours(reads_peaks=False),
    "ours, peaks read from the first failure on": lambda: Ours(reads_before_failures=False),
    "ours": Ours,
}


def main() -> None:
    """Print the table."""
    print(
        "failed attempts (min - median - max) | micro-batches over fewest possible (mean); 8 seeds"
    )
    settings = [(noise, grain) for noise in (0.01, 0.04) for grain in (1, 16)]
    heads = [
        f"noise {noise:.0%}, " + ("exact" if grain == 1 else "padded to 16")
        for noise, grain in settings
    ]
    print(f"{'policy':44}" + "".join(f"{head:>28}" for head in heads))
    for name, make in POLICIES.items():
        cells = []
        for noise, grain in settings:
            runs = [simulate(make(), seed=seed, grain=grain, noise=noise) for seed in range(10, 18)]
            failures = [run[0] for run in runs]
            spread = f"{min(failures)} - {statistics.median(failures):g} - {max(failures)}"
            cells.append(f"{spread} | {statistics.mean(run[1] for run in runs):.3f}")
        print(f"{name:44}" + "".join(f"{cell:>28}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()

"""How many rows run together: predicted, clipped by what is known, grown back when memory returns."""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path

import pytest

from lightning_oom.recovery.batches import BatchSignature
from lightning_oom.recovery.rows import RowsPolicy
from lightning_oom.recovery.rows.bounds import RowBounds
from lightning_oom.recovery.rows.peak_model import PeakModel

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

MIB = 2**20


def tokens(length: int) -> BatchSignature:
    """Describe a batch of token sequences with labels."""
    return BatchSignature(
        "{x: Tensor, y: Tensor}", ((length,), (length,)), ("int64",) * 2, 2 * length
    )


def images(side: int = 32) -> BatchSignature:
    """Describe a batch of images with classes."""
    return BatchSignature(
        "(Tensor, Tensor)", ((3, side, side), ()), ("float32", "int64"), 3 * side**2 + 1
    )


class Device:
    """A device on which a step of ``rows`` rows needs ``base + rows * cost`` bytes."""

    def __init__(self, limit: float, base: float = 10 * MIB, noise: float = 0.0, seed: int = 0):
        self.limit, self.base = limit, base
        self.usable = limit
        self._noise, self._random = noise, random.Random(seed)  # noqa: S311 - a simulation
        self.failures = 0

    def run(self, policy, signature, rows, cost, *, says=("limit", "base", "peak")) -> int:
        """Run one step under ``policy``; return the rows that ran together in the end."""
        facts = {}
        if "limit" in says:
            facts["limit_bytes"] = int(self.limit)
        if "base" in says:
            facts["base_bytes"] = int(self.base)
        together = policy.propose(signature, rows, **facts)
        while True:
            peak = (self.base + cost * together) * (1 + self._noise * abs(self._random.gauss(0, 1)))
            if peak <= self.usable:
                break
            self.failures += 1
            policy.record_failure(signature, together, **facts)
            together = policy.next_rows(signature, together, rows=rows, **facts)
            assert together is not None
        reads = "peak" in says and policy.wants_peak(signature, together)
        policy.record_success(
            signature,
            together,
            peak_bytes=int(peak) if reads else None,
            base_bytes=facts.get("base_bytes") if reads else None,
        )
        return together


def test_nothing_is_split_before_something_failed():
    """The whole batch is proposed, whatever the peaks say."""
    policy = RowsPolicy()
    policy.record_success(tokens(100), 32, peak_bytes=99 * MIB, base_bytes=MIB)

    assert policy.propose(tokens(200), 32, limit_bytes=100 * MIB, base_bytes=MIB) == 32


@pytest.mark.parametrize("noise", [0.01, 0.04])
@pytest.mark.parametrize("grain", [1, 16])
def test_long_tailed_batches_fail_three_times_at_most(grain, noise):
    """Median of 8 seeds over 600 batches; micro-batches stay near the fewest possible."""
    from rows_policy import Ours, simulate

    runs = [simulate(Ours(), seed=seed, grain=grain, noise=noise) for seed in range(10, 18)]

    assert statistics.median(failures for failures, _ in runs) <= 3
    assert statistics.mean(share for _, share in runs) <= (1.06 if noise == 0.01 else 1.10)


def test_without_peaks_bounds_alone_decide():
    """On a device that tells nothing, failures stay far below those of halving with memory."""
    from rows_policy import HalvingWithMemory, Ours, simulate

    blind = simulate(Ours(reads_peaks=False), seed=10, grain=1, noise=0.01)
    halving = simulate(HalvingWithMemory(), seed=10, grain=1, noise=0.01)

    assert blind[0] <= 16 < halving[0]
    assert blind[1] <= 1.06


@pytest.mark.parametrize("says", [("limit", "base", "peak"), ("limit", "peak"), ()], ids=str)
def test_constant_shapes_fail_only_at_first(says):
    """Images of one shape with differing rows settle after the first batch."""
    device, policy = Device(100 * MIB, noise=0.01), RowsPolicy(grow_after=10**6)
    sizes = [64, 64, 48, 64, 17, 64, 50, 64] * 10
    together = [device.run(policy, images(), rows, 3 * MIB, says=says) for rows in sizes]

    assert device.failures <= 2
    assert max(together) <= 29  # 100 MiB minus the base, over 3 MiB
    assert together[4] == 17
    assert together[-1] >= 16


def test_two_alternating_structures_do_not_disturb_each_other():
    """What fails for one structure says nothing about another."""
    device, policy = Device(100 * MIB), RowsPolicy()
    for _ in range(20):
        heavy = device.run(policy, images(), 64, 3 * MIB)
        light = device.run(policy, tokens(64), 64, MIB)

    assert device.failures <= 2
    assert heavy <= 29
    assert light == 64


def test_a_longer_batch_is_expected_to_need_more():
    """A failure bounds every batch that is at least as long, and no shorter one."""
    policy = RowsPolicy()
    policy.record_failure(tokens(100), 8)
    policy.record_success(tokens(100), 4)

    assert policy.propose(tokens(150), 8) == 4
    assert policy.propose(tokens(50), 8) == 8


def test_a_shorter_batch_is_known_to_fit():
    """What fitted at length 100 is not split at length 80."""
    policy = RowsPolicy()
    policy.record_failure(tokens(60), 32)
    policy.record_success(tokens(100), 32)

    assert policy.propose(tokens(80), 32) == 32


def test_successes_before_the_first_failure_count():
    """They are remembered without cost and bound the first proposals."""
    policy = RowsPolicy()
    policy.record_success(tokens(100), 32)
    policy.record_failure(tokens(400), 32)

    assert policy.propose(tokens(90), 32) == 32
    assert policy.propose(tokens(400), 32) == 16


def test_after_a_failure_there_is_always_less():
    """The next number of rows is at least one and below the failed one; after one row, none."""
    policy = RowsPolicy()
    for failed in range(2, 40):
        following = policy.next_rows(tokens(10), failed)
        assert following is not None
        assert 1 <= following < failed

    assert policy.next_rows(tokens(10), 1) is None


def test_proposals_are_balanced():
    """33 rows of which 32 fit are 17 + 16."""
    policy = RowsPolicy()
    policy.record_failure(tokens(10), 33)
    policy.record_success(tokens(10), 32)

    assert policy.propose(tokens(10), 33) == 17


def test_memory_that_another_process_takes_and_gives_back():
    """Fewer rows while it is gone; all of them again later, at a bounded number of failures."""
    device, policy = Device(200 * MIB, noise=0.005), RowsPolicy(grow_after=20)
    length = random.Random(1)  # noqa: S311 - a simulation
    for _ in range(50):
        device.run(policy, images(length.choice([24, 32])), 64, 4 * MIB)
    before = device.failures
    device.usable = 120 * MIB
    for _ in range(50):
        squeezed = device.run(policy, images(32), 64, 4 * MIB)
    during = device.failures - before
    device.usable = device.limit
    for _ in range(400):
        grown = device.run(policy, images(32), 64, 4 * MIB)

    assert squeezed <= 27
    assert during <= 8
    assert grown == 32  # 47 fit, and 64 rows in two micro-batches are 32
    assert device.failures - before - during <= 2


def test_failed_probes_become_rarer():
    """Memory that never returns costs a logarithmic number of probes."""
    device, policy = Device(100 * MIB), RowsPolicy(grow_after=4)
    for _ in range(1000):
        device.run(policy, images(), 64, 3 * MIB, says=())

    assert 1 <= device.failures <= 14


def test_probing_finds_the_most_that_fits():
    """Without peaks, halving lands at 16 of 64; probes bring it to what fits."""
    device, policy = Device(100 * MIB), RowsPolicy(grow_after=4)
    for _ in range(60):
        together = device.run(policy, images(), 64, 3 * MIB, says=())

    assert together == 22  # 30 fit; in 3 micro-batches 22


def test_near_misses_bound_softly():
    """More rows are not tried, fewer only after the third."""
    policy = RowsPolicy(grow_after=10**6)
    policy.record_failure(tokens(100), 64)
    policy.record_success(tokens(100), 16, near_miss=True)
    first = policy.propose(tokens(100), 64)
    policy.record_success(tokens(100), 16, near_miss=True)
    policy.record_success(tokens(100), 16, near_miss=True)

    assert first == 16
    assert policy.propose(tokens(100), 64) < 16


def test_a_near_miss_before_any_failure_splits_nothing():
    """Allocation retries alone never make a batch smaller."""
    policy = RowsPolicy()
    policy.record_success(tokens(100), 64, near_miss=True)

    assert policy.propose(tokens(100), 64) == 64


def test_state_is_plain_and_complete():
    """A policy restored from JSON proposes the same."""
    device, policy = Device(100 * MIB, noise=0.01), RowsPolicy()
    for length in [50, 80, 120, 40, 200, 90, 130] * 4:
        device.run(policy, tokens(length), 32, length * MIB / 25)
    restored = RowsPolicy()
    used = restored.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    facts = {"limit_bytes": 100 * MIB, "base_bytes": 10 * MIB}

    assert used
    for length in range(30, 260, 10):
        expected = policy.propose(tokens(length), 32, **facts)
        assert restored.propose(tokens(length), 32, **facts) == expected
    assert restored.state_dict() == policy.state_dict()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"version": 99},
        {"version": 1},
        {"version": 1, "groups": 3},
        {"version": 1, "groups": [{}]},
    ],
    ids=str,
)
def test_states_that_cannot_be_read_are_left_alone(state):
    """The policy says so and stays as it was."""
    policy = RowsPolicy()
    policy.record_failure(tokens(10), 8)
    before = policy.state_dict()

    assert not policy.load_state_dict(state)
    assert policy.state_dict() == before


def test_memory_of_the_policy_is_bounded():
    """Thousands of signatures and structures leave a state of bounded size."""
    policy = RowsPolicy()
    policy.record_failure(tokens(9000), 32)
    for index in range(3000):
        policy.record_success(tokens(index + 1), 8, peak_bytes=MIB * (index + 1), base_bytes=0)
        other = BatchSignature(f"structure {index % 100}", ((index,),), ("float32",), index)
        policy.record_success(other, 8, peak_bytes=MIB, base_bytes=0)
    state = policy.state_dict()

    assert len(state["groups"]) <= 16
    assert len(json.dumps(state)) < 500_000


def test_a_peak_is_wanted_where_it_is_news():
    """Once per length and number of rows, and now and then afterwards."""
    policy = RowsPolicy()
    first = policy.wants_peak(tokens(10), 8)
    policy.record_success(tokens(10), 8, peak_bytes=MIB, base_bytes=0)
    later = [policy.wants_peak(tokens(10), 8) for _ in range(32)]

    assert first
    assert sum(later) == 2
    assert policy.wants_peak(tokens(10), 7)
    assert policy.wants_peak(tokens(11), 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"margin_fraction": 1.0}, r"margin_fraction must be in \[0, 1\), got 1.0"),
        ({"margin_fraction": -0.1}, "got -0.1"),
        ({"grow_after": 0}, "grow_after must be at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(options, words):
    """The error names the value and the range."""
    with pytest.raises(ValueError, match=words):
        RowsPolicy(**options)


def test_the_model_finds_linear_and_quadratic_parts():
    """Predictions within 1 % at lengths between those seen, and never below the truth by more."""
    model = PeakModel([1])
    truth = lambda length, rows: 5e6 + rows * (3000 * length + 40 * length**2)  # noqa: E731
    for length, rows in [(16, 32), (40, 32), (80, 8), (120, 4), (200, 2), (256, 2)]:
        model.observe((length,), rows, truth(length, rows))

    for length in (30, 100, 180):
        assert model.predict((length,), 8) == pytest.approx(truth(length, 8), rel=0.01)


def test_the_model_is_pessimistic_beyond_what_it_saw():
    """One observation at length 50 is taken to grow with the square of the length."""
    model = PeakModel([1])
    model.observe((50,), 4, 4e6)

    assert model.predict((100,), 4) >= 1.6e7
    assert model.predict((25,), 4) <= 4e6
    assert not model.is_familiar((100,))
    assert model.rows_within((100,), 4e6) == 1


def test_a_model_without_observations_predicts_nothing():
    """``None``, not 0."""
    model = PeakModel([1])

    assert model.predict((10,), 4) is None
    assert model.rows_within((10,), 1e9) is None


def test_leaves_that_never_vary_do_not_count_as_length():
    """A large constant leaf beside a short varying one does not hide the variation."""
    model = PeakModel([3, 1])
    for length in (10, 20, 40, 80, 160):
        model.observe((3, 224, 224, length), 4, 1e6 + 4 * 1e5 * length)

    assert model.predict((3, 224, 224, 120), 4) == pytest.approx(1e6 + 4 * 1e5 * 120, rel=0.05)


def test_new_bounds_win_over_old_ones():
    """A success takes back the failures that it contradicts, and the other way round."""
    bounds = RowBounds()
    bounds.add_bad((100,), 8)
    bounds.add_safe((120,), 9)
    after_success = bounds.cap((100,))
    bounds.add_bad((110,), 9)

    assert after_success is None
    assert bounds.largest_safe((100,)) == 0
    assert bounds.cap((130,)) == 8


def test_bounds_compare_every_dimension():
    """A wider but shorter batch is not covered."""
    bounds = RowBounds()
    bounds.add_safe((10, 20), 8)

    assert bounds.largest_safe((10, 10)) == 8
    assert bounds.largest_safe((11, 10)) == 0

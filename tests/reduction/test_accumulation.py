"""The arithmetic of accumulation windows: where they close, and that the gradient is the mean."""

from __future__ import annotations

import pytest
import torch

from lightning_oom.reduction.accumulation import (
    AccumulationWindow,
    batches_for,
    scale_gradients,
)


def windows(effective, rows, **options):
    """The rows of each window."""
    window, found = AccumulationWindow(effective, **options), [[]]
    for count in rows:
        window.add(count)
        if window.is_first and found[-1]:
            found.append([])
        found[-1].append(count)
    return found


@pytest.mark.parametrize("rows", [1, 3, 32, 64, 100, 192, 255, 256, 257, 5000])
def test_the_plan_is_the_nearest_number_of_batches(rows) -> None:
    """No other number comes nearer to the effective batch."""
    batches = batches_for(256, rows)

    assert min(abs(256 - n * rows) for n in range(1, 300)) == abs(256 - batches * rows)
    assert windows(256, [rows] * (2 * batches)) == [[rows] * batches] * 2


def test_a_window_follows_the_batch_size() -> None:
    """Fewer batches when they grow, more when they shrink, in the middle of a window too."""
    assert windows(8, [4, 4, 8, 2, 2, 2, 2, 4, 2, 2]) == [[4, 4], [8], [2, 2, 2, 2], [4, 2, 2]]


def test_a_fixed_number_closes_whatever_the_rows_are() -> None:
    """Devices must step together."""
    assert windows(8, [4, 1, 1, 7, 9], num_batches=2) == [[4, 1], [1, 7], [9]]


@pytest.mark.parametrize("rows", [[4, 4], [4, 3, 2], [3, 1, 5], [8], [3], [0, 4, 4]])
def test_weights_and_correction_give_the_mean(rows) -> None:
    """Shares of the plan, corrected once, are rows over all rows; Lightning divides by the plan."""
    window = AccumulationWindow(9)
    weights = []
    for count in rows:
        window.add(count)
        weights.append(window.share / window.planned_batches)
    corrected = [weight * window.correction() for weight in weights]

    assert corrected == pytest.approx([count / sum(rows) for count in rows])


def test_ranks_with_unequal_rows_give_the_mean_over_all() -> None:
    """After DDP's mean over ranks."""
    per_rank = [[4, 2], [1, 5]]
    ranks = [AccumulationWindow(6, num_batches=2) for _ in per_rank]
    weights = []
    for window, rows in zip(ranks, per_rank, strict=True):
        weights.append([])
        for count in rows:
            window.add(count)
            weights[-1].append(window.share / window.planned_batches)
    mean_rows = torch.tensor(sum(window.rows for window in ranks) / 2)
    found = [
        float(weight * window.correction(mean_rows)) / 2
        for window, own in zip(ranks, weights, strict=True)
        for weight in own
    ]

    assert found == pytest.approx([4 / 12, 2 / 12, 1 / 12, 5 / 12])


def test_equal_batches_are_not_touched() -> None:
    """Exactly 1, so that the run is Lightning's own to the bit."""
    window = AccumulationWindow(7)
    for _ in range(2):
        window.add(3)
        assert window.share == 1.0
    assert window.closes
    assert window.correction() == 1.0


def test_a_step_without_a_loss_is_left_out() -> None:
    """Its rows count for nothing, also when the correction had counted them."""
    window = AccumulationWindow(8)
    window.add(4)
    window.add(4)
    first = 0.5 * window.correction()

    assert first * window.drop_last() == pytest.approx(1.0)
    assert window.rows == 4


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)])
def test_gradients_are_scaled_in_place(factor) -> None:
    """The tensors stay the same; parameters without a gradient are passed over."""
    weight, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    weight.grad = gradient = torch.tensor([2.0, 4.0])

    scale_gradients([weight, other], factor)

    assert weight.grad is gradient
    assert gradient.tolist() == [1.0, 2.0]
    assert other.grad is None

"""The distribution of errors."""

from __future__ import annotations

import pytest

from lightning_oom.planning.interval import ERRORS, ErrorDistribution


@pytest.mark.parametrize("probability", [0.02, 0.05, 0.3, 0.5, 0.9])
def test_ratio_and_probability_are_inverse(probability: float) -> None:
    """Within the range of what was seen."""
    assert ERRORS.probability(ERRORS.ratio(probability)) == pytest.approx(probability)


def test_an_unknown_tail_is_not_made_up() -> None:
    """Beyond the last points, the last points."""
    errors = ErrorDistribution([(0.0, 0.9), (1.0, 1.2)])
    assert (errors.probability(0.1), errors.probability(9.0)) == (0.0, 1.0)
    assert (errors.ratio(0.0), errors.ratio(1.0)) == (0.9, 1.2)


@pytest.mark.parametrize("points", [[(0.0, 1.0), (0.0, 1.1)], [(0.0, 1.0), (1.0, 0.9)]])
def test_points_have_to_rise(points) -> None:
    """A fit gone wrong is found at import."""
    with pytest.raises(ValueError, match="have to rise"):
        ErrorDistribution(points)

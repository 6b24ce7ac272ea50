"""Private names of torch that look at gradients, and what the package expects of them."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_oom._torch import gradients as door


def test_the_largest_magnitude_of_each_tensor() -> None:
    """Negative values count by their size; shapes and lengths may differ."""
    found = door.largest_magnitudes([torch.tensor([[1.0, -3.0]]), torch.tensor([2.0])])

    assert [value.item() for value in found] == [3.0, 2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_is_seen(bad, dtype) -> None:
    """Wherever it stands among many."""
    tensor = torch.zeros(1000, dtype=dtype)
    tensor[617] = bad

    first, second = door.largest_magnitudes([tensor, torch.ones(3, dtype=dtype)])

    assert not first.isfinite()
    assert second.isfinite()


def test_large_gradients_are_finite() -> None:
    """Their squares would not be."""
    (found,) = door.largest_magnitudes([torch.full((8,), 3e38)])

    assert found.isfinite()


def test_an_optimizer_that_unscales_is_told_from_others() -> None:
    """Fused ones do; the plain ones leave it to the scaler."""
    weight = [torch.nn.Parameter(torch.zeros(1))]

    assert door.unscales_gradients_itself(torch.optim.Adam(weight, fused=True))
    assert not door.unscales_gradients_itself(torch.optim.Adam(weight))

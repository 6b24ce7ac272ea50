"""What draws random numbers gives constants, and dropout passes through."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from lightning_oom.recovery.randomness import fixed_randomness

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)

IDENTITIES = {
    "dropout": lambda: F.dropout(X, 0.5),
    "dropout-module": lambda: nn.Dropout(0.5)(X),
    "torch.dropout": lambda: torch.dropout(X, 0.5, True),
    "dropout1d": lambda: F.dropout1d(X, 0.5),
    "dropout2d": lambda: F.dropout2d(X[None], 0.5)[0],
    "alpha": lambda: F.alpha_dropout(X, 0.5, training=True),
    "feature-alpha": lambda: F.feature_alpha_dropout(X, 0.5, training=True),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_dropout_passes_through(name):
    """Every kind of dropout is the identity."""
    with fixed_randomness():
        output = IDENTITIES[name]()

    assert torch.equal(output, X)


@pytest.mark.parametrize(
    "draw",
    {
        "rand": torch.rand,
        "rand_like": lambda *shape: torch.rand_like(torch.empty(shape)),
        "randn": lambda *shape: torch.randn(shape),
        "normal_": lambda *shape: torch.empty(shape).normal_(2, 3),
        "uniform_": lambda *shape: torch.empty(shape).uniform_(-1, 1),
        "randint": lambda *shape: torch.randint(3, 9, shape),
        "randint-high": lambda *shape: torch.randint(9, shape),
        "randint_like": lambda *shape: torch.randint_like(torch.empty(shape), 9),
        "random_": lambda *shape: torch.empty(shape).random_(0, 5),
        "bernoulli_": lambda *shape: torch.empty(shape).bernoulli_(0.3),
        "bernoulli": lambda *shape: torch.bernoulli(torch.full(shape, 0.3)),
        "exponential_": lambda *shape: torch.empty(shape).exponential_(),
        "normal-size": lambda *shape: torch.normal(0.0, 1.0, shape),
        "normal-tensors": lambda *shape: torch.normal(torch.zeros(shape), torch.ones(shape)),
        "poisson": lambda *shape: torch.poisson(torch.full(shape, 2.4)),
        "Normal": lambda *shape: torch.distributions.Normal(torch.zeros(shape), 1.0).rsample(),
        "Gamma": lambda *shape: torch.distributions.Gamma(torch.ones(shape), 1.0).rsample(),
        "Categorical": lambda *shape: torch.distributions.Categorical(
            torch.ones(*shape, 3)
        ).sample(),
        "gumbel": lambda *shape: F.gumbel_softmax(torch.ones(*shape, 2), hard=True),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_draw_is_one_constant_whatever_its_shape(draw):
    """The numbers drawn for five rows are those drawn for two."""
    with fixed_randomness():
        few, many = draw[1](2, 3), draw[1](5, 3)

    assert few.shape[0] == 2
    assert torch.equal(few, many[:2])
    assert len(set(many.reshape(5, -1)[:, 0].tolist())) == 1


def test_a_permutation_moves_every_element():
    """It is a permutation without a fixed point."""
    with fixed_randomness():
        order = torch.randperm(6)

    assert sorted(order.tolist()) == list(range(6))
    assert not (order == torch.arange(6)).any()


def test_drawing_into_a_leaf_that_requires_gradients():
    """Factory functions with ``requires_grad`` keep working."""
    with fixed_randomness():
        leaf = torch.randn(3, requires_grad=True)

    assert leaf.is_leaf
    assert leaf.requires_grad


def test_fractional_pooling_and_attention_are_repeatable():
    """Functions that draw inside give the same twice, with dropout out of the way."""
    image, attend = torch.rand(2, 3, 9, 9), nn.MultiheadAttention(4, 2, dropout=0.9)
    pool = nn.FractionalMaxPool2d(2, output_size=3)
    with fixed_randomness():
        pooled, again = pool(image), pool(image)
        attended = attend(X, X, X)[0]
        scaled = F.scaled_dot_product_attention(X, X, X, dropout_p=0.9)

    assert torch.equal(pooled, again)
    assert torch.allclose(attended, attend.eval()(X, X, X)[0], atol=1e-6)
    assert torch.allclose(scaled, F.scaled_dot_product_attention(X, X, X), atol=1e-6)

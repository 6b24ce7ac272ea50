"""Steps whose parts add up are told from those whose parts do not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch._dynamo  # the first checkpoint loads it, which sets warnings filters for good
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.utils.checkpoint import checkpoint

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.separability import check_separable, fixed_randomness

IGNORED = -100


class Transformer(nn.Module):
    """Embedding, two blocks with dropout, and a head."""

    def __init__(self, vocabulary: int = 20, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.3, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        """Return logits."""
        return self.head(self.blocks(self.embed(tokens)))


class Recurrent(nn.Module):
    """A two-layer LSTM with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.cells = nn.LSTM(8, 16, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        """Return logits."""
        return self.head(self.cells(self.embed(tokens))[0])


def mlp(*extra: nn.Module) -> nn.Module:
    """Return a small classifier with ``extra`` layers in the middle."""
    return nn.Sequential(nn.Linear(8, 16), *extra, nn.ReLU(), nn.Linear(16, 5))


def vectors(rows: int = 12):
    """Return inputs and classes."""
    return torch.randn(rows, 8), torch.randint(0, 5, (rows,))


def tokens(rows: int = 12):
    """Return inputs and labels of different lengths."""
    x = torch.randint(1, 20, (rows, 10))
    labels = x.roll(-1, dims=1)
    for row in range(rows):
        labels[row, 2 + (5 * row) % 8 :] = IGNORED
    return x, labels


def mean_loss(model, batch):
    """Mean cross-entropy over rows or counted tokens."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), ignore_index=IGNORED)


def sum_loss(model, batch):
    """Sum of cross-entropies."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def contrastive_loss(model, batch):
    """Each row's negatives are the other rows."""
    embedded = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(embedded @ embedded.T / 0.1, torch.arange(len(embedded)))


def count_tokens(batch):
    """Weigh a micro-batch by its counted tokens."""
    return (batch[1] != IGNORED).sum()


def check(model, batch, loss=mean_loss, **options):
    """Check a step given as model and loss."""
    names, parameters = zip(*model.named_parameters(), strict=True)

    def gradients_of(part):
        return torch.autograd.grad(loss(model, part), parameters, allow_unused=True)

    return check_separable(gradients_of, batch, names=names, **options)


@pytest.mark.parametrize("rows", [2, 3, 4, 12])
@pytest.mark.parametrize(
    "extra",
    [
        (),
        (nn.Dropout(0.5),),
        (nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.2)),
        (nn.LayerNorm(16), nn.GroupNorm(4, 16), nn.RReLU()),
    ],
    ids=["plain", "dropout", "alpha-dropout", "norms"],
)
def test_mean_over_rows_is_separable(extra, rows):
    """A mean loss adds up for any number of rows, dropout or not."""
    verdict = check(mlp(*extra), vectors(rows))

    assert verdict.separable
    assert verdict.conclusive
    assert verdict.largest_relative_difference < 1e-5


@pytest.mark.parametrize("make", [Transformer, Recurrent])
def test_dropout_of_attention_and_recurrent_layers_does_not_look_like_coupling(make):
    """Dropout inside fused functions is taken out as well."""
    x = torch.randint(1, 20, (8, 10))
    verdict = check(make(), (x, x.roll(-1, dims=1)))

    assert verdict.separable
    assert verdict.largest_relative_difference < 1e-5


def test_in_batch_negatives_are_not_separable():
    """InfoNCE is refused, and the reason names a parameter and the difference."""
    model = mlp()
    verdict = check(model, vectors(), contrastive_loss)

    assert not verdict.separable
    assert verdict.conclusive
    assert verdict.largest_relative_difference > 0.1
    assert verdict.parameter in dict(model.named_parameters())
    assert verdict.parameter in verdict.reason


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(16), nn.BatchNorm1d(16, track_running_stats=False)]
)
def test_batch_normalisation_is_not_separable(layer):
    """Training-mode statistics couple rows; a single row cannot even run."""
    verdict = check(mlp(layer), vectors())

    assert not verdict.separable
    assert verdict.conclusive


def test_batch_normalisation_in_eval_mode_is_separable():
    """Frozen statistics treat rows one by one."""
    assert check(mlp(nn.BatchNorm1d(16)).eval(), vectors()).separable


def test_sum_over_rows_is_named():
    """The reason says that the loss is a sum."""
    verdict = check(mlp(), vectors(), sum_loss)

    assert not verdict.separable
    assert "sum over rows" in verdict.reason


def test_token_mean_needs_its_weights():
    """Row weights are refused with the right weights in the reason; token weights pass."""
    model, batch = Transformer(), tokens()

    by_rows = check(model, batch)
    by_tokens = check(model, batch, weight_fn=count_tokens)

    assert not by_rows.separable
    assert "weight_fn" in by_rows.reason
    assert "mean over something else than rows" in by_rows.reason
    assert by_tokens.separable
    assert by_tokens.largest_relative_difference < 1e-5


def test_wrong_weights_are_refused():
    """A weight_fn that does not fit the loss is told so."""
    verdict = check(mlp(), vectors(), weight_fn=lambda batch: len(batch[1]) ** 2)

    assert not verdict.separable
    assert "another weight_fn" in verdict.reason


def test_rows_where_nothing_counts():
    """Row weights do not fit, the reason shows their weight of 0; with it they are left out."""
    x, labels = tokens(4)
    labels[1] = IGNORED

    by_rows = check(Transformer(), (x, labels))
    by_tokens = check(Transformer(), (x, labels), weight_fn=count_tokens)

    assert not by_rows.separable
    assert "0.000" in by_rows.reason
    assert by_tokens.separable


def test_a_part_that_is_not_finite_is_refused():
    """Rows that give NaN by themselves, but not in the whole, may not be split off."""

    def shaky_loss(model, batch):
        x, y = batch
        return model(x).square().sum() / (y > 0).sum()

    x = torch.randn(4, 8)
    verdict = check(mlp(), (x, torch.tensor([1, 0, 1, 1])), shaky_loss)

    assert not verdict.separable
    assert "not finite" in verdict.reason


def test_a_slice_that_is_not_finite_tells_nothing():
    """NaN in the whole slice is inconclusive, not separable."""
    x, y = vectors()
    verdict = check(mlp(), (x * float("nan"), y))

    assert not verdict.separable
    assert not verdict.conclusive
    assert "not finite" in verdict.reason


def test_equal_rows_cannot_hide_coupling():
    """The slice is looked for where rows differ; where none do, nothing is claimed."""
    x, y = vectors(12)
    x[:9], y[:9] = x[0], y[0]
    coupled = check(mlp(), (x, y), contrastive_loss)
    blind = check(mlp(), (x[:9], y[:9]))

    assert coupled.conclusive
    assert not coupled.separable
    assert not blind.conclusive
    assert not blind.separable


def test_mixing_rows_by_a_permutation_is_seen():
    """Mixup's permutation is not fixed to the identity."""

    def mixup_loss(model, batch):
        x, y = batch
        order = torch.randperm(len(x))
        return mean_loss(model, (0.6 * x + 0.4 * x[order], y))

    assert not check(mlp(), vectors(), mixup_loss).separable


def test_drawn_noise_and_times_do_not_look_like_coupling():
    """A diffusion-like step draws per row and is separable all the same."""

    def denoising_loss(model, batch):
        x = batch[0]
        time = torch.randint(0, 100, (len(x), 1)) / 100
        noise = torch.randn_like(x) + torch.empty_like(x).normal_() + torch.rand(x.shape)
        keep = torch.bernoulli(torch.full_like(x, 0.8))
        return (model((1 - time) * x * keep + time * noise)).square().mean()

    assert check(mlp(), vectors(), denoising_loss).separable


def test_one_draw_per_step_from_numpy_and_python_does_not_look_like_coupling():
    """Every run sees the same numbers of the host's generators."""

    def noisy_loss(model, batch):
        return mean_loss(model, batch) * (1 + np.random.rand() + random.random())  # noqa: NPY002, S311

    assert check(mlp(), vectors(), noisy_loss).separable


def test_parameters_without_gradient():
    """Unused and zero-gradient parameters are compared as zeros."""

    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 5), nn.Linear(3, 3)
            self.silent = nn.Parameter(torch.ones(5))

        def forward(self, x):
            return self.used(x) + 0.0 * self.silent

    assert check(Partial(), vectors()).separable


def test_a_gradient_that_only_some_rows_give():
    """``None`` for a part and a tensor for the whole are comparable."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 5), nn.Linear(8, 5)

        def forward(self, x):
            chosen = x[:, 0] > 0
            output = x.new_zeros(len(x), 5)
            if chosen.any():
                output = output.index_put((chosen,), self.a(x[chosen]))
            if (~chosen).any():
                output = output.index_put((~chosen,), self.b(x[~chosen]))
            return output

    assert check(Routed(), vectors()).separable


def test_all_gradients_zero_tells_nothing():
    """Without any gradient there is nothing to compare."""
    verdict = check(mlp(), vectors(), lambda model, batch: 0.0 * mean_loss(model, batch))

    assert not verdict.conclusive


def test_sparse_gradients_are_compared():
    """An embedding with sparse gradients is separable under a mean, not under a sum."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8, sparse=True)
            self.head = nn.Linear(8, 20)

        def forward(self, x):
            return self.head(self.embed(x))

    x = torch.randint(1, 20, (8, 6))
    model = Bag()

    assert check(model, (x, x)).separable
    assert not check(model, (x, x), lambda m, b: mean_loss(m, b) * len(b[0])).separable


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_under_autocast_does_not_look_like_coupling(dtype):
    """Tolerances follow the precision that the step computes in."""

    def autocast_loss(loss):
        def run(model, batch):
            with torch.autocast("cpu", dtype=dtype):
                return loss(model, batch).float()

        return run

    model, batch = mlp(nn.Dropout(0.3)), vectors()

    assert check(model, batch, autocast_loss(mean_loss)).separable
    assert not check(model, batch, autocast_loss(contrastive_loss)).separable


def test_checkpointed_layers_are_recomputed_without_dropout_too():
    """Fixed randomness holds in the recomputation of a backward."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(nn.Dropout(0.5))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    assert check(Checkpointed(), vectors()).separable


def test_a_step_that_fails_on_one_row_is_tried_with_two():
    """``squeeze`` trips over single rows; parts of two rows still show that the loss is a mean."""

    def squeezing_loss(model, batch):
        x, y = batch
        output = model(x).squeeze(0)
        return (
            F.cross_entropy(output.unflatten(0, (len(y), 1)).squeeze(1), y)
            if output.ndim > 1
            else 1 / 0
        )

    assert check(mlp(), vectors(), squeezing_loss).separable


def test_a_step_that_fails_on_the_slice_tells_nothing():
    """The error's words are in the reason; the error itself is not raised."""

    def failing_loss(model, batch):
        raise ValueError("needs at least 8 rows")

    verdict = check(mlp(), vectors(), failing_loss)

    assert not verdict.conclusive
    assert "ValueError: needs at least 8 rows" in verdict.reason


def test_running_out_of_memory_is_raised():
    """An OOM says nothing about the step; the caller has to know of it."""

    def hungry_loss(model, batch):
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(OutOfMemoryError):
        check(mlp(), vectors(), hungry_loss)


def test_one_row_tells_nothing():
    """A single row cannot be cut."""
    verdict = check(mlp(), vectors(1))

    assert not verdict.conclusive
    assert "1 row" in verdict.reason


def test_too_few_gradients_are_an_error():
    """Names and gradients belong together."""
    with pytest.raises(ValueError, match="1 gradients for 2 names"):
        check_separable(lambda batch: [torch.ones(2)], torch.rand(4, 2), names=["a", "b"])


def test_generators_are_as_before():
    """The check leaves no trace in any random state."""
    model, batch = mlp(nn.Dropout(0.5)), vectors(6)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    check(model, batch)

    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert all(
        np.array_equal(a, b)
        for a, b in zip(before[2], np.random.get_state(), strict=True)  # noqa: NPY002
    )


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

"""Steps whose parts add up are told from those whose parts do not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch._dynamo  # the first checkpoint loads it, which sets warnings filters for good
from separable_cases import (
    IGNORED,
    Recurrent,
    Transformer,
    check,
    contrastive_loss,
    count_tokens,
    mean_loss,
    mlp,
    sum_loss,
    tokens,
    vectors,
)
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.utils.checkpoint import checkpoint

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.batchnorm import find_batch_coupled
from lightning_oom.recovery.separability import check_separable


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


def test_a_refusal_names_the_batch_normalisation_layer() -> None:
    """Not only the parameter whose gradient differs most, which may be of another layer."""
    model = mlp(nn.BatchNorm1d(16))
    (layer,) = find_batch_coupled(model)
    verdict = check(model, vectors(), coupled=[layer])

    assert not verdict.separable
    assert "batch normalisation" in verdict.reason
    assert f"({layer})" in verdict.reason
    assert "batch normalisation" not in check(model, vectors()).reason


def test_batch_normalisation_is_not_taken_for_a_matter_of_weights() -> None:
    """With one parameter, some weights always make the parts add up: they mean nothing here."""
    model = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 1, bias=False))
    verdict = check(model, vectors(), loss=lambda m, b: m(b[0]).square().mean(), coupled=["0"])

    assert not verdict.separable
    assert "batch normalisation" in verdict.reason
    assert "weight_fn" not in verdict.reason


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

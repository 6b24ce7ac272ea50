"""How losses of pieces become the loss of the batch, and when they cannot."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fakes import RowLimit, TinyRegressor, batches_of
from fits import end_state, fit, notes_of, recovery, weights
from lightning.pytorch import LightningModule
from states import compare
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.errors import NotSeparableWarning

ROUNDING = 1e-5
IGNORED = -100


def masked_batches() -> DataLoader:
    """Twelve rows of six tokens; whole rows are ignored, unevenly."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for ignored_rows in (5, 0, 6):
        tokens = torch.randint(0, 10, (12, 6), generator=generator)
        targets = tokens.roll(1, dims=1)
        targets[:ignored_rows] = IGNORED
        targets[-1, 2:] = IGNORED
        batches.append({"tokens": tokens, "targets": targets})
    return DataLoader(batches, batch_size=None)


class TokenModel(LightningModule):
    """Cross-entropy over the tokens that count."""

    def __init__(self, fits_rows: int | None = None) -> None:
        super().__init__()
        self.limit = RowLimit(fits_rows)
        self.body = nn.Sequential(nn.Embedding(10, 8), self.limit, nn.Linear(8, 10))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean over tokens that are not ignored."""
        scores = self.body(batch["tokens"])
        loss = functional.cross_entropy(
            scores.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED
        )
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.5)


def count_tokens(batch: dict[str, Tensor]) -> int:
    """Tokens that the loss counts."""
    return int((batch["targets"] != IGNORED).sum())


@pytest.mark.parametrize("fits", [6, 4, 1])
def test_a_token_mean_is_weighted_by_tokens(fits):
    """``weight_fn`` gives gradients and the logged loss of the whole batch (HF#34191)."""
    guard = recovery(ladder=("split",), weight_fn=count_tokens)

    expected, _ = fit(TokenModel, masked_batches())
    actual, _ = fit(lambda: TokenModel(fits), masked_batches(), guard)

    assert guard.summary.num_recovered >= 1
    a, b = end_state(expected), end_state(actual)
    assert compare(a["weights"], b["weights"], tolerance=ROUNDING) == []
    assert compare(a["rows"], b["rows"], tolerance=ROUNDING) == []


def test_a_piece_without_tokens_contributes_nothing():
    """Six of twelve rows are wholly ignored: their NaN loss reaches neither weights nor logs."""
    guard = recovery(ladder=("split",), weight_fn=count_tokens, max_rows=6)

    actual, model = fit(TokenModel, masked_batches(), guard)

    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert all(value == value for _, row in actual.logger.rows for value in row.values())  # noqa: PLR0124 NaN


def test_a_token_mean_weighted_by_rows_is_not_split_silently():
    """Without ``weight_fn`` the parts do not add up, so the OOM is raised and says why (HF#24725)."""
    with pytest.raises(OutOfMemoryError) as caught:
        fit(lambda: TokenModel(6), masked_batches(), recovery(ladder=("split",)))

    assert "weight_fn" in notes_of(caught.value)


class Contrastive(TinyRegressor):
    """In-batch negatives: every row is compared with all others."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """InfoNCE between two noisy views."""
        x, y = batch
        left = self.body[:-1](x)
        right = self.body[:-1](x + 0.1 * y[:, None])
        scores = functional.normalize(left) @ functional.normalize(right).T / 0.1
        loss = functional.cross_entropy(scores, torch.arange(len(x), device=x.device))
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss


class ContrastiveByChild(Contrastive):
    """The same, with the encoder as a child whose forward can be chunked."""

    def __init__(self, fits_rows: int | None = None) -> None:
        super().__init__(fits_rows=fits_rows)
        self.encoder = self.body[:-1]
        del self.body

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """InfoNCE between two noisy views."""
        x, y = batch
        left, right = self.encoder(x), self.encoder(x + 0.1 * y[:, None])
        scores = functional.normalize(left) @ functional.normalize(right).T / 0.1
        loss = functional.cross_entropy(scores, torch.arange(len(x), device=x.device))
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss


def test_in_batch_negatives_are_never_split_silently():
    """The error says that the loss is no mean over rows, and nothing moved (luyug/GradCache#7)."""
    torch.manual_seed(11)
    untouched = weights(Contrastive())

    models: list[Contrastive] = []

    def make() -> Contrastive:
        models.append(Contrastive(fits_rows=8))
        return models[0]

    with pytest.raises(OutOfMemoryError) as caught:
        fit(make, batches_of([16]), recovery(ladder=("split",)))

    assert "rows depend on each other" in notes_of(caught.value)
    assert compare(list(untouched.values()), list(weights(models[0]).values())) == []


def test_in_batch_negatives_can_be_chunked():
    """Chunks keep the batch whole for the loss: equal to the unlimited run (PL#992)."""
    guard = recovery()

    expected, _ = fit(ContrastiveByChild, batches_of([16, 16]))
    actual, _ = fit(lambda: ContrastiveByChild(8), batches_of([16, 16]), guard)

    assert guard.summary.num_recovered >= 1
    assert compare(end_state(expected), end_state(actual), tolerance=ROUNDING) == []


def test_in_batch_negatives_may_be_split_on_request():
    """``on_inseparable="split"`` trains on and warns of the size of the difference."""
    guard = recovery(ladder=("split",), on_inseparable="split")

    with pytest.warns(NotSeparableWarning, match=r"\d"):
        trainer, _ = fit(lambda: Contrastive(fits_rows=8), batches_of([16, 16]), guard)

    assert trainer.global_step == 2


def test_a_separable_loss_is_split_without_a_warning():
    """A mean over rows says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotSeparableWarning)
        fit(lambda: TinyRegressor(fits_rows=8), batches_of([16]), recovery(ladder=("split",)))


class Normalised(TinyRegressor):
    """BatchNorm in training mode couples the rows."""

    def __init__(self, fits_rows: int | None = None) -> None:
        super().__init__(fits_rows=fits_rows)
        self.body.insert(1, nn.BatchNorm1d(16))


def test_batch_norm_in_training_mode_is_not_split_silently():
    """Statistics of micro-batches are others: the OOM is raised with the reason."""
    with pytest.raises(OutOfMemoryError) as caught:
        fit(lambda: Normalised(8), batches_of([16]), recovery(ladder=("split",)))

    assert "batch normalisation, which takes its statistics over the batch (body.1)" in notes_of(
        caught.value
    )


class SummedLoss(TinyRegressor):
    """A sum over rows instead of a mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Sum of squares."""
        x, y = batch
        return (self(x) - y).square().sum() / 100


def test_a_summed_loss_takes_a_constant_weight_or_is_refused():
    """A sum is no mean over rows: never split with row weights."""
    with pytest.raises(OutOfMemoryError):
        fit(lambda: SummedLoss(fits_rows=8), batches_of([16]), recovery(ladder=("split",)))


class OwnBackward(TinyRegressor):
    """Overrides ``backward``."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """As Lightning does, spelled out."""
        loss.backward(*args, **kwargs)


@pytest.mark.parametrize("rung", ["release", "chunk", "split"])
def test_an_overridden_backward_gets_the_right_gradient(rung):
    """Micro-batches are weighted also where ``backward`` is the user's."""
    rows = [8, 16, 8]
    guard = recovery(ladder=(rung,), max_rows=8 if rung == "split" else None)

    expected, _ = fit(OwnBackward, batches_of(rows))
    actual, _ = fit(OwnBackward, batches_of(rows), guard)

    assert compare(end_state(expected), end_state(actual), tolerance=ROUNDING) == []

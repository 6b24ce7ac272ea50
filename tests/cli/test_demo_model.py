"""The demo's model: its loss is a mean over rows, and padding changes nothing."""

from __future__ import annotations

import pytest
import torch

from lightning_oom.cli.demo_model import TinyGPT
from lightning_oom.cli.demo_text import PADDING


@pytest.fixture
def model():
    """Build the same small model, in double precision."""
    torch.manual_seed(0)
    return TinyGPT(num_tokens=32, width=8, num_layers=2, num_heads=2, block_length=16).double()


def loss_of(model: TinyGPT, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the training loss outside of a Trainer."""
    model.log = lambda *args, **kwargs: None
    return model.training_step({"tokens": tokens})


@pytest.fixture
def tokens():
    """Make five rows of unequal length."""
    rows = torch.randint(1, 32, (5, 12), generator=torch.Generator().manual_seed(0))
    for index, length in enumerate((12, 3, 7, 2, 12)):
        rows[index, length:] = PADDING
    return rows


def test_the_loss_is_a_mean_over_rows(model, tokens) -> None:
    """The loss of the batch is the row-weighted mean of the losses of its parts."""
    parts = (3 * loss_of(model, tokens[:3]) + 2 * loss_of(model, tokens[3:])) / 5

    torch.testing.assert_close(loss_of(model, tokens), parts, rtol=1e-12, atol=0)


def test_padding_changes_nothing(model, tokens) -> None:
    """A batch that is padded further has the same loss."""
    padded = torch.nn.functional.pad(tokens, (0, 4), value=PADDING)

    torch.testing.assert_close(loss_of(model, tokens), loss_of(model, padded), rtol=1e-12, atol=0)


def test_no_token_sees_a_later_one(model, tokens) -> None:
    """Changing the last token changes no logit before it."""
    changed = tokens.clone()
    changed[0, -1] = 1 + changed[0, -1] % 31

    torch.testing.assert_close(model(tokens)[0, :-1], model(changed)[0, :-1], rtol=0, atol=0)


def test_width_is_a_multiple_of_heads() -> None:
    """The constructor names both numbers."""
    with pytest.raises(ValueError, match="width is a multiple of num_heads, got 10 and 4"):
        TinyGPT(width=10, num_heads=4)

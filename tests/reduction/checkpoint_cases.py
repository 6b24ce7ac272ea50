"""Small models, and trainings of them with and without checkpointing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["CASES", "Net", "batches", "end_of_training", "layers", "make"]


class Net(nn.Module):
    """A stem, repeated blocks and a head.

    Args:
        blocks: They map ``(rows, ...)`` to the same shape.
        stem: Before them.
        head: After them; its outputs are averaged to the loss.
    """

    def __init__(self, blocks: Iterable[nn.Module], stem: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """One loss for the batch."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def layers(width: int = 8, *, norm: Callable[[], nn.Module] | None = None) -> nn.Module:
    """A small block with dropout; a layer of ``norm`` if given."""
    parts = [nn.Linear(width, width), nn.Dropout(0.3), nn.Tanh()]
    return Residual(nn.Sequential(*parts, *([norm()] if norm is not None else [])))


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Add what the inner module makes of ``x``."""
        return x + self.inner(x)


class Recurrent(nn.Module):
    """An LSTM layer without its states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs."""
        return self.drop(self.lstm(x)[0])


def _mlp() -> nn.Module:
    return Net([layers() for _ in range(3)], nn.Linear(4, 8), nn.Linear(8, 2))


def _cnn(**norm: Any) -> nn.Module:
    def block() -> nn.Module:
        parts = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6, **norm), nn.ReLU()
        return Residual(nn.Sequential(*parts))

    return Net([block() for _ in range(3)], nn.Conv2d(3, 6, 1), nn.Flatten())


def _spectral() -> nn.Module:
    def block() -> nn.Module:
        return Residual(nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh()))

    return Net([block() for _ in range(2)], nn.Linear(4, 8), nn.Linear(8, 2))


def _encoder() -> nn.Module:
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(3)]
    return Net(blocks, nn.Linear(4, 8), nn.Linear(8, 2))


def _lstm() -> nn.Module:
    return Net([Recurrent(8) for _ in range(2)], nn.Linear(4, 8), nn.Linear(8, 2))


class Language(nn.Module):
    """A model of transformers that returns its own loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting the tokens."""
        return self.inner(input_ids=tokens, labels=tokens).loss


def _gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2}
    config = GPT2Config(vocab_size=50, loss_type="ForCausalLM", **sizes, **options)
    return Language(GPT2LMHeadModel(config))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = BertConfig(vocab_size=50, intermediate_size=32, **sizes)
    return Language(BertForMaskedLM(config))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return Language(T5ForConditionalGeneration(config))


class Pictures(nn.Module):
    """An image classifier of transformers with its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Cross-entropy against the first class."""
        logits = self.inner(pixel_values=x).logits
        return functional.cross_entropy(
            logits, torch.zeros(len(x), dtype=torch.long, device=x.device)
        )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return Pictures(ViTForImageClassification(config))


def _floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(1, 50, (4, 12), generator=generator)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "mlp": (_mlp, _floats(6, 4)),
    "cnn": (_cnn, _floats(4, 3, 5, 5)),
    "cnn, cumulative": (lambda: _cnn(momentum=None), _floats(4, 3, 5, 5)),
    "spectral norm": (_spectral, _floats(6, 4)),
    "encoder": (_encoder, _floats(4, 5, 4)),
    "lstm": (_lstm, _floats(4, 5, 4)),
    "vit": (_vit, _floats(4, 3, 8, 8)),
    "gpt2": (lambda: _gpt2(use_cache=False), _tokens),
    "gpt2, cache": (_gpt2, _tokens),
    "bert": (_bert, _tokens),
    "t5": (_t5, _tokens),
}
"""Name to what makes the model and a batch for it."""


def make(case: str) -> nn.Module:
    """Make the model of a case, always with the same weights, in train mode."""
    torch.manual_seed(7)
    return CASES[case][0]().train()


def batches(case: str, count: int) -> list[Tensor]:
    """Make batches for a case, always the same."""
    generator = torch.Generator().manual_seed(3)
    return [CASES[case][1](generator) for _ in range(count)]


def end_of_training(
    model: nn.Module,
    data: Iterable[Tensor],
    *,
    accumulate: int = 1,
    loss: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> dict[str, Any]:
    """Train with AdamW; return losses, weights, buffers, and torch's random state at the end."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for index, batch in enumerate(data):
        value = model(batch) if loss is None else loss(model, batch)
        value.backward()
        losses.append(value.detach().clone())
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {
        "losses": losses,
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "random": torch.get_rng_state(),
    }

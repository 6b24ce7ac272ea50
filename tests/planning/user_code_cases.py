"""Training steps that do what users do, 35 of them: what each is for is in its name."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from user_code_models import (
    GLOBAL_WEIGHTS,
    WIDTH,
    Adversarial,
    AsksStepsAhead,
    AsksTrainer,
    Compiled,
    KnownOperator,
    Logs,
    Normed,
    OwnFunction,
    Recurrent,
    UserModule,
    make_batch,
    unknown,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FOLLOWED", "MEASURED", "PESSIMISTIC", "UserModule", "make_batch"]


class Tied(UserModule):
    """Input and output embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(20, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.body.weight

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return self.body(batch["ids"]).mean(dim=1)


class Frozen(UserModule):
    """Only the head is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)


class Sparse(UserModule):
    """Gradients of an embedding are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(20, WIDTH, sparse=True)

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return self.body(batch["ids"]).mean(dim=1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1)], []


class LineSearch(UserModule):
    """LBFGS calls the closure as often as numbers tell it to."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


class Checkpointed(UserModule):
    """Checkpointing of the kind without re-entry."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return checkpoint(self.body, batch["x"], use_reentrant=False)


class CheckpointedReentrant(UserModule):
    """The older kind."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        return checkpoint(self.body, x, use_reentrant=True)


class GradientPenalty(UserModule):
    """Differentiates twice."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        out = self.body(x).tanh().sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return grad.square().mean() + super().training_step(batch, batch_idx)


class Attention(UserModule):
    """Multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.body = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embedding(batch["ids"])
        return self.body(x, x, x)[0].mean(dim=1)


class Mapped(UserModule):
    """Maps a function over rows."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.vmap(lambda row: self.body.weight @ row)(batch["x"])


class GlobalTensor(UserModule):
    """A real tensor that no module holds."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return self.body(batch["x"]) * GLOBAL_WEIGHTS


class PlainTensors(UserModule):
    """Tensors that are neither parameters nor buffers, and helpers that hold some."""

    class Average:
        """Keeps a running mean."""

        def __init__(self, module: nn.Module) -> None:
            self.mean = torch.zeros(WIDTH)
            self.module = module

        def update(self, features: Tensor) -> None:
            """Move towards the features."""
            self.mean = 0.9 * self.mean + 0.1 * features.detach().mean(dim=0)

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.ones(WIDTH)
        self.kept: list[Tensor] = []
        self.average = self.Average(self.body)
        self.transform = lambda x: self.body(x) * self.plain

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        features = self.transform(batch["x"])
        self.average.update(features)
        self.kept.append(features.detach())
        return features + self.average.mean


class Counted(UserModule):
    """Counts with torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.both = torchmetrics.MetricCollection([torchmetrics.MeanMetric()])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("accuracy", self.accuracy(self.head(self.features(batch)), batch["y"]))
        self.log_dict(self.both(loss))
        return loss


class HoldsLock(UserModule):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        with self.lock:
            return super().features(batch)


class HoldsGenerator(UserModule):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        noise = torch.randn(len(batch["x"]), WIDTH, generator=self.generator)
        return super().features(batch) + noise


class HoldsData(UserModule):
    """Looks rows up in a data set."""

    def __init__(self) -> None:
        super().__init__()
        self.data = TensorDataset(torch.randn(50, WIDTH))

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return super().features(batch) + self.data[7][0]


class GuardsAgainstNaN(UserModule):
    """Skips batches whose loss is not finite."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if torch.isnan(loss).any() or not torch.isfinite(loss) or loss.item() > 1e4:
            return None
        return loss


class PicksRows(UserModule):
    """Takes rows by condition, in all the ways there are."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, y = self.head(self.features(batch)), batch["y"]
        keep = y > 0
        loss = functional.cross_entropy(logits[keep], y[keep], reduction="sum")
        positions = torch.nonzero(keep).flatten()
        chosen = torch.masked_select(logits, keep[:, None]).sum()
        repeated = logits.repeat_interleave(y.clamp(max=1), dim=0).sum()
        return loss + logits[positions].sum() + chosen + repeated + len(y.unique())


class ChecksLabels(UserModule):
    """Asserts what holds for proper data."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert (batch["y"] >= 0).all()
        assert batch["y"].max() < 3
        assert torch.equal(batch["y"], batch["y"])
        if not torch.allclose(batch["x"], batch["x"]):
            raise ValueError("x differs from itself")
        return super().training_step(batch, batch_idx)


class LeavesTorch(UserModule):
    """Computes a weight with numpy."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        weight = float(batch["x"].numpy().std())
        return weight * super().training_step(batch, batch_idx)


class UnknownOperator(UserModule):
    """A custom operator that only computes."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return unknown(self.body(batch["x"]))


class Packed(Recurrent):
    """Packs sequences by length."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        lengths = torch.full((len(batch["ids"]),), 6)
        packed = pack_padded_sequence(self.embedding(batch["ids"]), lengths, batch_first=True)
        return self.body(packed)[1][0][-1]


class SplitsByNumbers(UserModule):
    """Splits a batch at sizes that are numbers of the batch."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        first = batch["lengths"][-1:]
        sizes = torch.cat([first, len(batch["x"]) - first]).tolist()
        return torch.cat([self.body(part) for part in batch["x"].split(sizes)])


def _transformer(kind: str) -> Callable[[], UserModule]:
    def make() -> UserModule:
        import transformers

        small = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if kind == "gpt2":
            config: Any = transformers.GPT2Config(
                n_layer=2, n_embd=WIDTH, n_head=2, n_positions=16, **small
            )
        elif kind == "t5":
            config = transformers.T5Config(
                num_layers=1, d_model=WIDTH, num_heads=2, d_kv=8, d_ff=32,
                decoder_start_token_id=0, **small,
            )  # fmt: skip
        else:
            config = transformers.BertConfig(
                num_hidden_layers=2, hidden_size=WIDTH, num_attention_heads=2,
                intermediate_size=32, max_position_embeddings=16, **small,
            )  # fmt: skip
        auto = {"t5": transformers.AutoModelForSeq2SeqLM, "gpt2": transformers.AutoModelForCausalLM}
        model = auto.get(kind, transformers.AutoModelForMaskedLM).from_config(config).train()
        if kind == "checkpointing":
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)()
        return Language(model)

    return make


class Language(UserModule):
    """A model of transformers with its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.body, self.head = model, nn.Identity()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        mask = torch.ones_like(batch["ids"])
        return self.body(input_ids=batch["ids"], attention_mask=mask, labels=batch["ids"]).loss


PESSIMISTIC: dict[str, Callable[[], UserModule]] = {
    cls.__name__: cls for cls in (LineSearch, GuardsAgainstNaN, PicksRows, ChecksLabels)
}
"""Followed on fake tensors with answers to questions about numbers."""

FOLLOWED: dict[str, Callable[[], UserModule]] = {
    **{
        cls.__name__: cls
        for cls in (
            Logs, AsksTrainer, AsksStepsAhead, OwnFunction, KnownOperator, Compiled, Adversarial,
            Normed, Recurrent, Tied, Frozen, Sparse, Checkpointed, CheckpointedReentrant,
            GradientPenalty, Attention, Mapped, GlobalTensor, PlainTensors, Counted, HoldsLock,
            HoldsGenerator, HoldsData, SplitsByNumbers,
        )
    },
    **{kind: _transformer(kind) for kind in ("bert", "gpt2", "t5", "checkpointing")},
}  # fmt: skip
"""Followed on fake tensors; the peak is the real one."""

MEASURED: dict[str, Callable[[], UserModule]] = {
    cls.__name__: cls for cls in (LeavesTorch, UnknownOperator, Packed)
}
"""Left to two small real runs."""

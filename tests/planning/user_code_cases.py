"""Training steps that do what users do, 35 of them: what each is for is in its name."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FOLLOWED", "MEASURED", "PESSIMISTIC", "UserModule", "make_batch"]

WIDTH = 16
GLOBAL_WEIGHTS = torch.linspace(0.5, 1.5, WIDTH)


def make_batch(rows: int = 4) -> dict[str, Tensor]:
    """Floats, labels, token ids and lengths of so many rows."""
    return {
        "x": torch.randn(rows, WIDTH),
        "y": torch.randint(0, 3, (rows,)),
        "ids": torch.randint(0, 20, (rows, 6)),
        "lengths": torch.tensor([6, 5, 3, 2, 2])[:rows],
    }


class UserModule(LightningModule):
    """A classifier; subclasses change its body, its loss or its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        """Return (rows, WIDTH)."""
        return self.body(batch["x"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        """Return a cross entropy."""
        return functional.cross_entropy(self.head(self.features(batch).relu()), batch["y"])

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters())


class Logs(UserModule):
    """Logs, prints, and returns more than a loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss.detach()})
        return {"loss": loss, "features": self.features(batch)}


class AsksTrainer(UserModule):
    """Reads counters of the trainer."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        warm = min(1.0, (self.trainer.global_step + 1) / 10) + self.current_epoch
        return warm * super().training_step(batch, batch_idx)


class AsksStepsAhead(UserModule):
    """Builds its schedule from the number of steps that are to come."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class OwnFunction(UserModule):
    """Calls a custom autograd function."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return _Square.apply(self.body(batch["x"]))


@torch.library.custom_op("lightning_oom_tests::known", mutates_args=())
def _known(x: Tensor) -> Tensor:
    return x * 2


@_known.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lightning_oom_tests::unknown", mutates_args=())
def _unknown(x: Tensor) -> Tensor:
    return x * 2


for _operator in (_known, _unknown):
    _operator.register_autograd(lambda ctx, grad: 2 * grad)


class KnownOperator(UserModule):
    """A custom operator that says what shape it returns."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return _known(self.body(batch["x"]))


class Compiled(UserModule):
    """A compiled part; below a dispatch mode it runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), backend="eager"
        )


class Adversarial(UserModule):
    """Two optimizers by hand, with toggling and clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters()) for part in (self.body, self.head)]


class Normed(UserModule):
    """Spectral and weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        )


class Recurrent(UserModule):
    """An LSTM keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.body = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return self.body(self.embedding(batch["ids"]))[0][:, -1]


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
        return _unknown(self.body(batch["x"]))


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

"""A Trainer fit on the simulated GPU ends with the weights of the fit on the CPU."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.testing import SimulatedGPU, SimulatedGPUStrategy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLASSES = 5
ROWS = 48

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Classifier(LightningModule):
    """Trains ``net`` on cross entropy, with torchmetrics and both kinds of logging."""

    def __init__(self, net: nn.Module, make_optimizer: Callable[..., Any]) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer = make_optimizer
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.f1 = MulticlassF1Score(CLASSES)
        self.mean = MeanMetric()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        x, y = batch
        scores = self.net(x)
        loss = nn.functional.cross_entropy(scores.float(), y)
        self.accuracy(scores.detach(), y)
        self.f1(scores.detach(), y)
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": self.accuracy, "f1": self.f1, "mean": self.mean}, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the case."""
        return self.make_optimizer(self.parameters())


class Recurrent(nn.Module):
    """A recurrent network and a linear layer on its last output."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.body = kind(8, 16, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Score a batch of sequences."""
        return self.head(self.body(x)[0][:, -1])


class Transformer(nn.Module):
    """Two encoder layers over token embeddings."""

    def __init__(self, dropout: float, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32, sparse=sparse)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Score a batch of token sequences."""
        return self.head(self.body(self.embedding(x)).mean(1))


def mlp() -> nn.Module:
    """Linear layers and dropout."""
    return nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, CLASSES))


def cnn() -> nn.Module:
    """Convolutions, BatchNorm, both kinds of dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.1),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32, CLASSES),
    )


NETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (mlp, "vectors"),
    "cnn": (cnn, "images"),
    "transformer": (lambda: Transformer(0.1), "tokens"),
    "transformer without dropout": (lambda: Transformer(0.0), "tokens"),
    "rnn": (lambda: Recurrent(nn.RNN), "sequences"),
    "lstm": (lambda: Recurrent(nn.LSTM), "sequences"),
    "gru": (lambda: Recurrent(nn.GRU), "sequences"),
    "sparse": (lambda: Transformer(0.1, sparse=True), "tokens"),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    **{
        f"{kind.__name__.lower()}-{name}": lambda p, kind=kind, options=options: kind(
            p, lr=1e-3, **options
        )
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam)
        for name, options in (
            ("single", {"foreach": False}),
            ("foreach", {"foreach": True}),
            ("fused", {"fused": True}),
        )
        if not (kind is torch.optim.NAdam and name == "fused")
    },
}


def make_loader(kind: str) -> DataLoader[Any]:
    """Return shuffled batches of 16."""
    source = torch.Generator().manual_seed(1)
    x = {
        "vectors": lambda: torch.randn(ROWS, 20, generator=source),
        "images": lambda: torch.randn(ROWS, 3, 16, 16, generator=source),
        "tokens": lambda: torch.randint(0, 50, (ROWS, 12), generator=source),
        "sequences": lambda: torch.randn(ROWS, 7, 8, generator=source),
    }[kind]()
    y = torch.randint(0, CLASSES, (ROWS,), generator=source)
    return DataLoader(TensorDataset(x, y), 16, shuffle=True)


def fit(
    net: str, optimizer: str, *, simulated: bool, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train one case and return weights and metrics."""
    torch.manual_seed(3)
    make, kind = NETS[net]
    model = Classifier(make(), OPTIMIZERS[optimizer])
    place: dict[str, Any] = {"strategy": "simgpu"} if simulated else {"accelerator": "cpu"}
    trainer = Trainer(max_epochs=2, **place, **QUIET, **options)
    trainer.fit(model, make_loader(kind))
    metrics = {name: value.cpu() for name, value in trainer.callback_metrics.items()}
    return {**model.state_dict(), "random state": torch.get_rng_state()}, metrics


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two groups of tensors; the keys must be the same."""
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


@pytest.mark.parametrize(
    ("net", "optimizer"),
    [
        *(("mlp", optimizer) for optimizer in OPTIMIZERS),
        ("cnn", "adamw-foreach"),
        ("transformer", "adamw-foreach"),
        ("transformer without dropout", "adamw-foreach"),
        ("sparse", "plain sgd"),
    ],
)
def test_weights_and_metrics_equal_the_cpus(net: str, optimizer: str) -> None:
    """Weights, metrics and random state are equal to the last bit, and the device is empty again."""
    weights, metrics = fit(net, optimizer, simulated=False)
    simulated_weights, simulated_metrics = fit(net, optimizer, simulated=True)

    assert largest_difference(weights, simulated_weights) == 0
    assert largest_difference(metrics, simulated_metrics) == 0
    gc.collect()
    assert torch.simgpu.memory_allocated() == 0


@pytest.mark.parametrize("net", ["rnn", "lstm", "gru"])
def test_recurrent_weights_are_near_the_cpus(net: str) -> None:
    """Off the CPU torch takes fused cells, which round elsewhere: equal to 1e-5."""
    weights, _ = fit(net, "adamw-foreach", simulated=False)
    simulated, _ = fit(net, "adamw-foreach", simulated=True)

    assert largest_difference(weights, simulated) <= 1e-5


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_clip_val": 0.1}, id="clipped by norm"),
        pytest.param(
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, id="clipped by value"
        ),
        pytest.param({"accumulate_grad_batches": 2}, id="accumulated"),
        pytest.param({"precision": "bf16-mixed"}, id="bf16-mixed"),
        pytest.param({"precision": "64-true"}, id="64-true"),
        pytest.param({"precision": "bf16-true"}, id="bf16-true"),
    ],
)
def test_trainer_options_work(options: dict[str, Any]) -> None:
    """What the trainer does around a step gives the CPU's weights too."""
    weights, _ = fit("mlp", "adamw-foreach", simulated=False, **options)
    simulated, _ = fit("mlp", "adamw-foreach", simulated=True, **options)

    assert largest_difference(weights, simulated) == 0


def test_fp16_with_a_scaler_trains() -> None:
    """``16-mixed`` through a plugin for the device scales and steps."""
    strategy = SimulatedGPUStrategy(precision_plugin=MixedPrecision("16-mixed", "simgpu"))
    torch.manual_seed(3)
    model = Classifier(mlp(), OPTIMIZERS["sgd"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = Trainer(max_epochs=1, strategy=strategy, **QUIET)
    trainer.fit(model, make_loader("vectors"))

    assert trainer.precision_plugin.scaler.get_scale() > 0
    assert largest_difference(before, model.state_dict()) > 0
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_a_limit_ends_the_fit() -> None:
    """A model that does not fit raises the device's error out of ``Trainer.fit``."""
    trainer = Trainer(strategy=SimulatedGPUStrategy("2 MiB"), max_steps=1, **QUIET)
    with pytest.raises(OutOfMemoryError, match=r"total capacity of 2\.00 MiB"):
        trainer.fit(Classifier(nn.Linear(2000, 2000), OPTIMIZERS["sgd"]), make_loader("vectors"))
    del trainer
    gc.collect()
    SimulatedGPU()

    assert torch.simgpu.memory_allocated() == 0


def test_the_strategy_trains_on_the_device_it_was_given() -> None:
    """Model and batch are on the chosen device during the fit, and the trainer names its accelerator."""

    class Looks(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((batch.device, self.layer.weight.device, self.device))
            return super().training_step(batch, batch_idx)

    seen: list[tuple[torch.device, ...]] = []
    trainer = Trainer(
        strategy=SimulatedGPUStrategy(device_index=1), max_steps=1, limit_val_batches=0, **QUIET
    )
    trainer.fit(Looks())

    assert seen == [(torch.device("simgpu", 1),) * 3]
    assert trainer.accelerator.name() == "simgpu"
    assert trainer.num_devices == 1


def test_fitting_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """Optimizer state saved on the device comes back on the device."""
    path = tmp_path / "half.ckpt"
    whole = Trainer(strategy="simgpu", max_epochs=2, **QUIET)
    torch.manual_seed(3)
    model = Classifier(cnn(), OPTIMIZERS["adamw-foreach"])
    whole.fit(model, make_loader("images"))
    whole.save_checkpoint(path)
    again = Classifier(cnn(), OPTIMIZERS["adamw-foreach"])
    trainer = Trainer(strategy="simgpu", max_epochs=3, **QUIET)
    trainer.fit(again, make_loader("images"), ckpt_path=path, weights_only=False)

    assert trainer.global_step == 9
    stats = again.state_dict()
    assert all(value.is_cpu for value in stats.values())


@pytest.mark.filterwarnings("ignore")  # jsonargparse warns of how Lightning calls it
def test_yaml_builds_the_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class path and plain arguments make it, as LightningCLI reads them."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "seed_everything: 3\n"
        "trainer:\n"
        "  logger: false\n"
        "  strategy:\n"
        "    class_path: lightning_oom.testing.SimulatedGPUStrategy\n"
        "    init_args:\n"
        "      limit: 64 MiB\n"
        "      expandable_segments: true\n"
    )
    gc.collect()
    monkeypatch.setattr("sys.argv", ["fit", "--config", str(config)])
    cli = LightningCLI(BoringModel, run=False, save_config_callback=None)

    assert isinstance(cli.trainer.strategy, SimulatedGPUStrategy)
    assert cli.trainer.strategy.gpu.limit_bytes == 64 * 2**20
    SimulatedGPU()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_index": -1}, "device_index must be at least 0, got -1"),
        ({"device_index": 1, "num_devices": 1}, r"num_devices must be above device_index=1, got 1"),
        ({"limit": "64 MB"}, "unknown unit 'MB'"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    """The constructor names the value and the range."""
    with pytest.raises(ValueError, match=message):
        SimulatedGPUStrategy(**options)


def test_two_devices_in_one_trainer_are_refused() -> None:
    """The error says where to choose the device."""
    with pytest.raises(Exception, match=r"choose it with `SimulatedGPUStrategy\(device_index"):
        Trainer(strategy=SimulatedGPUStrategy(), devices=2, **QUIET)

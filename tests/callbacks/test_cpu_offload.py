"""Fits with offloading end as fits without, hold less, and leave no trace."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from fakes import TinyRegressor, regression_loader
from fits import end_state, fit, quiet, recovery
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from states import compare, plain_copy
from torch import nn
from torch.utils.data import DataLoader

from lightning_oom import CPUOffload
from lightning_oom.errors import LightningOOMWarning
from lightning_oom.testing import SimulatedGPUStrategy, fail_at

KIB = 2**10


class Pictures(LightningModule):
    """A small CNN with BatchNorm and dropout whose activations outweigh its weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, padding=1)]
        for _ in range(4):
            layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
        self.body = nn.Sequential(*layers, nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def training_step(self, batch, batch_idx):
        """A loss, logged."""
        loss = self.body(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        """With state."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Layers(LightningModule):
    """Stacked encoder layers: blocks to offload."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 64, batch_first=True) for _ in range(4)
        )

    def forward(self, batch):
        """Through the layers."""
        x = self.stem(batch[0]).unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return x

    def validation_step(self, batch, batch_idx) -> None:
        """Log the mean."""
        self.log("mean", self(batch).mean())

    def predict_step(self, batch, batch_idx):
        """Outputs on the host."""
        return self(batch).cpu()


class Manual(TinyRegressor):
    """Manual optimization with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx) -> None:
        """Each optimizer steps once."""
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        """One for each linear layer."""
        return [torch.optim.Adam(layer.parameters()) for layer in (self.body[0], self.body[-1])]


def pictures(count: int = 4, rows: int = 4) -> DataLoader:
    """Batches of random pictures, always the same."""
    generator = torch.Generator().manual_seed(2)
    return DataLoader(torch.randn(count * rows, 3, 16, 16, generator=generator), batch_size=rows)


def simgpu_fit(make, loader, *callbacks, limit=None, **options):
    """A fit on a simulated GPU."""
    options = {"strategy": SimulatedGPUStrategy(limit), "accelerator": "auto", **options}
    return fit(make, loader, *callbacks, **options)


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    """What is printed."""
    printed: list[str] = []
    monkeypatch.setattr("lightning_oom.callbacks.cpu_offload.rank_zero_info", printed.append)
    return printed


def offload(**options) -> CPUOffload:
    """Everything there is to move in a fit, silent."""
    return CPUOffload(**{"optimizer": True, "min_bytes": 0, "verbose": False, **options})


@pytest.mark.parametrize(("make", "accumulate"), [(Pictures, 1), (Pictures, 2), (Manual, 1)])
def test_a_fit_ends_as_without(make, accumulate) -> None:
    """Weights, buffers, optimizer, logs and random numbers are the same bits."""
    loader = pictures() if make is Pictures else regression_loader()
    options = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    plain, _ = simgpu_fit(make, loader, **options)
    callback = offload()
    actual, _ = simgpu_fit(make, loader, callback, **options)

    assert compare(end_state(plain), end_state(actual)) == []
    assert callback.tally.num_to_host > 0


class Peak(Callback):
    """The most that the device held in the fit, and what it holds between steps."""

    def __init__(self) -> None:
        self.at_start = self.between = self.state_on = None

    def on_train_start(self, trainer, pl_module) -> None:
        """Weights are there."""
        self.at_start = torch.simgpu.memory_allocated()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """State is where it stays until the next step."""
        self.between = torch.simgpu.memory_allocated()
        self.state_on = {
            value.device.type
            for entries in trainer.optimizers[0].state.values()
            for name, value in entries.items()
            if name != "step"
        }


def test_peak_and_state_leave_the_device_and_a_line_says_so(lines) -> None:
    """Forward and backward hold less, and so does the time between steps."""
    peaks, between = [], []
    for callback in (offload(activations=False, min_bytes="1 GiB"), offload(verbose=True)):
        look = Peak()
        simgpu_fit(Pictures, pictures(rows=8), callback, look)
        peaks.append(callback.peaks_by_phase)
        between.append(look.between)
        assert look.state_on == ({"cpu"} if callback.activations else {"simgpu"})

    plain, moved = peaks
    assert moved["forward"] - look.at_start < 0.5 * (plain["forward"] - look.at_start)
    assert moved["backward"] < 0.6 * plain["backward"]
    assert between[1] < between[0]
    (line,) = lines
    assert "of activations went to the host in each of 4 batches" in line
    assert "KiB of optimizer state lay there between steps; the peak is" in line


def test_a_step_that_is_out_of_memory_alone_fits_with_it() -> None:
    """Under a limit at which the plain run ends."""
    with pytest.raises(torch.OutOfMemoryError):
        simgpu_fit(Pictures, pictures(1, 1024), limit="60 MiB")
    trainer, _ = simgpu_fit(Pictures, pictures(1, 1024), offload(), limit="60 MiB")

    assert trainer.global_step == 1


def test_beside_a_recovery() -> None:
    """A step that runs out of memory is repeated below the offload."""
    plain, _ = simgpu_fit(Pictures, pictures())
    callbacks = recovery(ladder=["release"]), offload()
    actual, _ = simgpu_fit(Pictures, pictures(), *callbacks, fail_at(20, step=1))

    assert callbacks[0].summary.num_recovered == 1
    assert compare(end_state(plain)["weights"], end_state(actual)["weights"]) == []


class Saves(Callback):
    """Writes a checkpoint after the first epoch."""

    def __init__(self, path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        """While the state is wherever it is."""
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_ends_as_one_without_offload(tmp_path) -> None:
    """Checkpoints hold the same state; a resumed run moves it out before its first step."""
    paths, ends = [tmp_path / "plain.ckpt", tmp_path / "moved.ckpt"], []
    for path, callbacks in zip(paths, ((), (offload(),)), strict=True):
        simgpu_fit(Pictures, pictures(), *callbacks, Saves(path))
        look, strategy = Peak(), SimulatedGPUStrategy()
        trainer = quiet(*callbacks, look, strategy=strategy, accelerator="auto", max_epochs=2)
        torch.manual_seed(12)
        trainer.fit(Pictures(), pictures(), ckpt_path=paths[0])
        ends.append(end_state(trainer))

    saved = [
        plain_copy(torch.load(path, weights_only=False)["optimizer_states"][0]["state"])
        for path in paths
    ]
    assert compare(*saved) == []
    assert compare(*(end["weights"] for end in ends)) == []
    assert (ends[1]["global_step"], look.state_on) == (8, {"cpu"})


class Fails(Pictures):
    """Raises in the third step."""

    def training_step(self, batch, batch_idx):
        """Until then as usual."""
        if batch_idx == 2:
            raise KeyError(batch_idx)
        return super().training_step(batch, batch_idx)


def test_nothing_stays_behind() -> None:
    """After fits, also with one callback, after an error, and with two trainers in turn."""
    callback = offload()
    before = held()
    first, _ = simgpu_fit(Pictures, pictures(), callback)
    assert "training_step" not in vars(first.strategy)
    with pytest.raises(KeyError):
        simgpu_fit(Fails, pictures(), callback)
    second, _ = simgpu_fit(Pictures, pictures(), callback)
    assert compare(end_state(first)["weights"], end_state(second)["weights"]) == []
    second.fit_loop.max_epochs = 2
    second.fit(second.lightning_module, pictures())

    assert "training_step" not in vars(second.strategy)
    assert second.global_step == 8
    del first, second
    assert held() == before


def held() -> int:
    """Bytes on the device once nothing is garbage."""
    SimulatedGPUStrategy()  # collects
    return torch.simgpu.memory_allocated()


class Nested(Callback):
    """Fits another model in the middle of a batch, with the same callback."""

    def __init__(self, callback) -> None:
        self.callback = callback

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        """Once, when there is state."""
        if batch_idx == 2:
            state = torch.get_rng_state()
            simgpu_fit(Pictures, pictures(1), self.callback)
            torch.set_rng_state(state)


def test_the_latest_of_two_trainers_has_it() -> None:
    """The outer one goes on without, and ends the same."""
    plain, _ = simgpu_fit(Pictures, pictures())
    callback = offload()
    outer, _ = simgpu_fit(Pictures, pictures(), callback, Nested(callback))

    assert compare(end_state(plain)["weights"], end_state(outer)["weights"]) == []
    assert "training_step" not in vars(outer.strategy)


def test_a_run_on_the_cpu_is_left_alone(lines) -> None:
    """It says so, once."""
    callback = CPUOffload(optimizer=True, min_bytes=0)
    fit(TinyRegressor, regression_loader(), callback)

    assert lines == ["CPUOffload does nothing: the run is on the CPU."]
    assert callback.tally.num_to_host == 0


def test_strategies_that_place_things_themselves_are_left_alone() -> None:
    """With a warning."""
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    with pytest.warns(LightningOOMWarning, match="stands aside: SimpleNamespace"):
        CPUOffload().setup(SimpleNamespace(strategy=strategy), Pictures(), "fit")


class Capturable(Pictures):
    """An optimizer whose state a graph may address."""

    def configure_optimizers(self):
        """As made for a graph; switched back before it steps, which the CPU cannot do so."""
        optimizer = super().configure_optimizers()
        optimizer.param_groups[0]["capturable"] = True
        return optimizer

    def on_train_batch_start(self, batch, batch_idx) -> None:
        """Switch back."""
        self.optimizers().param_groups[0]["capturable"] = False


def test_capturable_optimizers_keep_their_state() -> None:
    """With a warning that says what to do."""
    look = Peak()
    with pytest.warns(LightningOOMWarning, match="capturable=False"):
        simgpu_fit(Capturable, pictures(), offload(), look)

    assert look.state_on == {"simgpu"}


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_blocks_are_offloaded_in_evaluation(stage, lines) -> None:
    """Same results, less on the device, nothing left behind."""
    results, peaks = [], []
    for callbacks in ((), (CPUOffload(activations=False, parameters=True),)):
        torch.manual_seed(1)
        model, before = Layers(), held()
        trainer = quiet(*callbacks, strategy=SimulatedGPUStrategy(), accelerator="auto")
        torch.simgpu.reset_peak_memory_stats()
        results.append(getattr(trainer, stage)(model, regression_loader(8), **silent(stage)))
        peaks.append(torch.simgpu.max_memory_allocated() - before)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert "model_to_device" not in vars(trainer.strategy)
        assert not any(block._forward_pre_hooks for block in model.blocks)

    if stage == "predict":
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    else:
        assert results[0] == results[1]
    assert peaks[1] < 0.6 * peaks[0]
    assert [line.partition(" with")[0] for line in lines] == ["CPUOffload: 4 blocks"]


def silent(stage):
    """Print no table of results."""
    return {} if stage == "predict" else {"verbose": False}


def test_weights_are_not_offloaded_in_fit() -> None:
    """It says so and trains."""
    with pytest.warns(LightningOOMWarning, match="does not offload weights in fit"):
        trainer, _ = simgpu_fit(Pictures, pictures(), offload(parameters=True))

    assert trainer.global_step == 4


def test_a_model_without_blocks_is_evaluated_as_it_is() -> None:
    """With a warning."""
    trainer = quiet(offload(parameters=True), strategy=SimulatedGPUStrategy(), accelerator="auto")
    with pytest.warns(LightningOOMWarning, match="no repeated blocks in BoringModel"):
        trainer.validate(BoringModel(), verbose=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activations": False}, "all False"),
        ({"min_bytes": "1 GB"}, "min_bytes: unknown unit 'GB'"),
        ({"min_bytes": -1}, "min_bytes: .*at least 0.*-1"),
    ],
)
def test_constructor_errors(options, words) -> None:
    """Each names the argument."""
    with pytest.raises(ValueError, match=words):
        CPUOffload(**options)


@pytest.mark.filterwarnings("ignore:No seed found")
@pytest.mark.filterwarnings(
    "ignore:(?s).*(only one Jsonargparse|was deprecated in v4):DeprecationWarning"
)
def test_it_is_built_from_yaml(tmp_path, monkeypatch) -> None:
    """By LightningCLI, with a number or text for the threshold."""
    config = tmp_path / "offload.yaml"
    config.write_text(
        "trainer:\n  max_steps: 1\n  logger: false\n  enable_checkpointing: false\n"
        "  accelerator: cpu\n  callbacks:\n"
        "  - class_path: lightning_oom.CPUOffload\n    init_args: {optimizer: true, min_bytes: 64 KiB}\n"
    )
    monkeypatch.setattr(sys, "argv", ["train.py"])
    cli = LightningCLI(
        BoringModel, args=["--config", str(config)], run=False, save_config_callback=None
    )

    (callback,) = [item for item in cli.trainer.callbacks if isinstance(item, CPUOffload)]
    assert (callback.optimizer, callback.min_bytes) == (True, 64 * KIB)

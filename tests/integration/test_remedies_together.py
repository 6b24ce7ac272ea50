"""Every exact remedy, alone and together with the others, ends where the plain run ends, bit by bit."""

from __future__ import annotations

import copy
import pickle
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fits import AtBatch, end_state, fit, notes_of, quiet, recovery
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from reduction.checkpoint_cases import batches, make
from states import compare
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_oom import (
    ActivationCheckpointing,
    CPUOffload,
    EarlyZeroGrad,
    GradientAccumulation,
    NoGradEnforcer,
)
from lightning_oom._torch import OutOfMemoryError
from lightning_oom.testing import fail_at

if TYPE_CHECKING:
    from collections.abc import Callable

simgpu = pytest.importorskip("lightning_oom.testing.simgpu")

MODELS = ("mlp", "cnn", "lstm", "vit", "gpt2", "bert")
FEW = [c if c in {"cnn", "gpt2"} else pytest.param(c, marks=pytest.mark.slow) for c in MODELS]
EXACT = ["release", "chunk", "split", "checkpoint", "offload"]
NUM_BATCHES = 4


class Trained(LightningModule):
    """A model that trains and validates, and draws random numbers on the way."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.net = make(case)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Log the loss per step and per epoch, and noise."""
        loss = self.net(batch)
        self.log_dict({"loss": loss, "noise": torch.rand(())}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.net(batch))

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW with a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def loaders(case: str) -> tuple[DataLoader, DataLoader]:
    """For training and validation."""
    data = DataLoader(batches(case, NUM_BATCHES), batch_size=None)
    return data, data


def end_of(case: str, *callbacks: Callback, **options: Any) -> dict[str, Any]:
    """Where two epochs of a case end."""
    options = {"max_epochs": 2, "gradient_clip_val": 0.5, **options}
    trainer, _ = fit(partial(Trained, case), loaders(case), *callbacks, **options)
    return end_state(trainer)


@cache
def plain_end(case: str, *, gpu: bool = False, accumulate: int = 1) -> dict[str, Any]:
    """Where they end without any remedy."""
    return end_of(case, accumulate_grad_batches=accumulate, **(on_gpu() if gpu else {}))


def on_gpu() -> dict[str, Any]:
    """Trainer options for a simulated GPU."""
    strategy = simgpu.SimulatedGPUStrategy(None)
    return {"strategy": strategy, "accelerator": "auto", "devices": "auto"}


def accumulation(case: str, *, num_batches: int = 1) -> GradientAccumulation:
    """Windows of so many batches."""
    rows = num_batches * len(batches(case, 1)[0])
    return GradientAccumulation(effective_batch_size=rows, verbose=False)


ALONE: dict[str, Callable[[str], Callback]] = {
    "early zero_grad": lambda _: EarlyZeroGrad(verbose=False),
    "checkpointing": lambda _: ActivationCheckpointing(verbose=False),
    "offload": lambda _: CPUOffload(optimizer=True, min_bytes=0, verbose=False),
    "accumulation": accumulation,
    "enforcer": lambda _: NoGradEnforcer(verbose=False),
    "recovery": lambda _: recovery(ladder=EXACT),
}
"""Name -> what makes the callback for a case."""


class OOMs(Callback):
    """Notes in which batch each OOM was."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def on_oom(self, trainer, module, error, failure) -> None:
        """What ``OOMRecovery`` calls."""
        self.batches.append(trainer.fit_loop.batch_idx)


def exact(case: str, *without: str) -> list[Callback]:
    """All of them, but for some."""
    return [make_one(case) for name, make_one in ALONE.items() if name not in without]


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_all_together(case):
    """Weights, buffers, optimizer, schedule, logs, loops and random state; nothing runs out of memory."""
    assert compare(plain_end(case), end_of(case, *exact(case))) == []


@pytest.mark.parametrize("case", MODELS)
def test_all_together_with_an_oom_in_the_middle(case):
    """In the third step, in forward or backward: the recovery repeats a step that the others shape."""
    callbacks, fault = exact(case), fail_at(60, step=2)

    end = end_of(case, *callbacks, fault)

    assert fault.raised == callbacks[-1].summary.num_recovered == 1
    assert compare(plain_end(case), end) == []


@pytest.mark.parametrize("case", FEW)
def test_all_together_where_offload_is_real(case):
    """On a device with memory of its own, in the other order, with an OOM."""
    callbacks, fault = exact(case), fail_at(60, step=2)

    end = end_of(case, *reversed(callbacks), fault, **on_gpu())

    assert fault.raised == callbacks[-1].summary.num_recovered == 1
    assert callbacks[2].tally.num_to_host > 0
    assert compare(plain_end(case, gpu=True), end) == []


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("name", ALONE)
def test_each_alone(name, case, gpu):
    """None needs another."""
    end = end_of(case, ALONE[name](case), **(on_gpu() if gpu else {}))
    assert compare(plain_end(case, gpu=gpu), end) == []


@pytest.mark.parametrize("case", ["cnn", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", [0, 1])
def test_accumulation_windows_beside_the_others(case, step):
    """Two batches a step, and an OOM in the second one of a window; gradients go only between windows."""
    others, at = exact(case, "accumulation"), OOMs()
    fault = fail_at({"cnn": 110, "gpt2": 500}[case], step=step)

    end = end_of(case, accumulation(case, num_batches=2), *others, at, fault)

    assert at.batches == [2 * step + 1]
    assert others[-1].summary.num_recovered == 1
    assert compare(plain_end(case, accumulate=2), end) == []


@pytest.mark.parametrize("case", FEW)
def test_the_rung_checkpoint_beside_the_others(case):
    """Blocks are checkpointed for one step, from a failure to its success."""
    guard, fault = recovery(ladder=["checkpoint"]), fail_at(30, step=2)

    end = end_of(case, *exact(case, "checkpointing", "recovery"), guard, fault)

    assert guard.summary.num_recovered == 1
    assert compare(plain_end(case), end) == []


def test_the_rung_offload_beside_the_others():
    """Activations go to the host in one step, out of checkpointed blocks."""
    guard, fault = recovery(ladder=["offload"]), fail_at(30, step=2)

    end = end_of("cnn", *exact("cnn", "offload", "recovery"), guard, fault, **on_gpu())

    assert guard.summary.num_recovered == 1
    assert compare(plain_end("cnn", gpu=True), end) == []


def test_the_rung_checkpoint_around_checkpointed_parts():
    """What is inside the blocks is checkpointed already: both at once, the same bits."""
    parts = ActivationCheckpointing(modules="net.blocks.?.inner", verbose=False)
    guard = recovery(ladder=["checkpoint"])

    end = end_of("cnn", parts, guard, fail_at(30, step=2))

    assert len(parts.paths) == 3
    assert guard.summary.num_recovered == 1
    assert compare(plain_end("cnn"), end) == []


@pytest.mark.parametrize(
    ("case", "callback", "rung", "text"),
    [
        ("mlp", "checkpointing", "checkpoint", "the blocks are checkpointed already"),
        ("mlp", "offload", "offload", "CPUOffload offloads activations already"),
    ],
)
def test_a_rung_that_adds_nothing_says_so(case, callback, rung, text):
    """Not tried: the attempt would fail alike."""
    guard = recovery(ladder=[rung])
    fault = fail_at(30, step=2, times=2)

    with pytest.raises(OutOfMemoryError) as caught:
        end_of(case, ALONE[callback](case), guard, fault, **on_gpu())

    assert f"{rung}: {text}" in notes_of(caught.value)
    assert fault.raised == 1


def test_the_switch_of_transformers_counts_as_checkpointed():
    """As after the user has called ``gradient_checkpointing_enable``."""

    def switched() -> Trained:
        model = Trained("gpt2")
        for part in model.modules():
            if hasattr(part, "gradient_checkpointing"):
                part.gradient_checkpointing = True
                part._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        return model

    guard = recovery(ladder=["checkpoint"])
    with pytest.raises(OutOfMemoryError) as caught:
        fit(switched, loaders("gpt2"), guard, fail_at(60, step=1))
    assert "checkpoint: the blocks are checkpointed already" in notes_of(caught.value)


def test_an_average_of_the_weights_is_the_same():
    """A deepcopy of the module that Lightning swaps in for validation and checkpoints."""

    def averaging() -> EMAWeightAveraging:
        return EMAWeightAveraging(decay=0.5)

    plain = end_of("cnn", averaging())

    assert compare(plain, end_of("cnn", averaging(), *exact("cnn"))) == []
    assert compare(plain, end_of("cnn", *exact("cnn"), averaging())) == []


@pytest.mark.parametrize("case", ["cnn", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_names_copies_and_pickles_in_the_middle_of_a_fit(case):
    """A copy belongs to itself: it trains alike, and leaves the original alone."""
    names, losses = [], []

    def look(_, module):
        names.append(list(module.state_dict()))
        copies = [copy.deepcopy(module.net), pickle.loads(pickle.dumps(module.net))]  # noqa: S301
        for net in copies:
            state = torch.get_rng_state()
            loss = net(batches(case, 1)[0])
            loss.backward()
            losses.append([loss, *(p.grad for p in net.parameters())])
            torch.set_rng_state(state)

    end = end_of(case, *exact(case), AtBatch(look, 1))

    assert names[0] == list(Trained(case).state_dict())
    assert compare(losses[0], losses[1]) == []
    assert compare(plain_end(case), end) == []


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path")
def test_a_checkpoint_of_all_is_one_of_none(tmp_path):
    """State that lies on the host is saved; the file serves a run without the remedies, and the other way."""
    saved, ends = [], []
    for name in "none", "all":
        saving = ModelCheckpoint(tmp_path / name, filename="epoch", every_n_epochs=1)
        callbacks = exact("mlp") if name == "all" else []
        options = {"max_epochs": 1, "enable_checkpointing": True, **on_gpu()}
        end_of("mlp", *callbacks, saving, **options)
        path = tmp_path / name / "epoch.ckpt"
        saved.append(torch.load(path, map_location="cpu", weights_only=False))
    for name in "none", "all":
        trainer = quiet(*(exact("mlp") if name == "none" else []), max_epochs=2, **on_gpu())
        torch.manual_seed(5)
        path = str(tmp_path / name / "epoch.ckpt")
        trainer.fit(Trained("mlp"), *loaders("mlp"), ckpt_path=path, weights_only=False)
        ends.append(end_state(trainer))

    for part in "state_dict", "optimizer_states", "lr_schedulers", "loops":
        assert compare(saved[0][part], saved[1][part]) == []
    assert compare(*ends) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_the_same():
    """Compiled above the remedies; no buffers, which cannot be put back in there."""

    def compiled() -> Trained:
        model = Trained("mlp")
        model.net.compile(backend="aot_eager")
        return model

    ends, guard, fault = [], recovery(ladder=["checkpoint"]), fail_at(20, step=4)
    beside = exact("mlp", "checkpointing", "recovery")
    for callbacks in [], exact("mlp"), [*beside, guard, fault]:
        torch.compiler.reset()
        trainer, _ = fit(compiled, loaders("mlp"), *callbacks, max_epochs=2)
        ends.append(end_state(trainer))
    torch.compiler.reset()

    assert guard.summary.num_recovered == 1
    assert compare(ends[0], ends[1]) == []
    assert compare(ends[0], ends[2]) == []

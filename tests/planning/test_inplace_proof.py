"""In-place activations: what is wrong is refused with its reason, what is right is proven."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_oom import InplaceActivations
from lightning_oom.planning.inplace_proof import InplaceProof, prove_inplace
from lightning_oom.reduction.inplace import find_switchable, set_inplace


class Residual(nn.Module):
    """Adds the input to a function of its activation: in place this is another function."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give ``x + f(act(x))``."""
        return x + self.linear(self.act(x))


def model(*layers: nn.Module) -> nn.Sequential:
    """Make a chain with a linear layer at both ends."""
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 1))


@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.LeakyReLU(), nn.SiLU(), nn.Hardswish(), nn.Mish(), nn.Dropout(0.5)]
)
def test_what_is_right_is_proven(activation) -> None:
    """After a linear layer these are the same bits."""
    proof = prove_inplace(model(activation), torch.randn(4, 8), ["1"])

    assert proof.proven == ("1",)
    assert proof.refused == {}


@pytest.mark.parametrize(
    ("module", "path", "reason"),
    [
        (nn.Sequential(nn.ReLU(), nn.Linear(8, 1)), "0", "it overwrites the batch"),
        (model(Residual()), "1.act", "it changes the loss"),
        (model(nn.Sigmoid(), nn.ReLU()), "2", "one of the variables needed for gradient"),
        (model(nn.Softmax(-1), nn.Dropout(0.5)), "2", "one of the variables needed for gradient"),
    ],
)
def test_what_is_wrong_is_refused_with_its_reason(module, path, reason) -> None:
    """The user's batch, a residual that is read again, results that autograd has kept."""
    proof = prove_inplace(module, torch.randn(4, 8), [path])

    assert proof.proven == ()
    assert proof.refused[path].startswith(reason)


def test_a_wrong_one_does_not_condemn_the_others_and_nothing_is_touched() -> None:
    """Each is judged beside those that are proven; the module and the batch stay."""
    module, batch = model(nn.ReLU(), Residual(), nn.ReLU()), torch.randn(4, 8)
    before = batch.clone()

    proof = prove_inplace(module, batch, ["1", "2.act", "3"])

    assert proof.proven == ("1", "3")
    assert list(proof.refused) == ["2.act"]
    assert torch.equal(batch, before)
    assert not any(getattr(part, "inplace", False) for part in module.modules())


def test_modules_are_found_by_name_and_a_wrong_name_is_an_error() -> None:
    """Those that are on already are not ours; a container stands for what it holds."""
    module = model(nn.ReLU(), nn.ReLU(inplace=True), nn.Sequential(nn.SiLU(), nn.Tanh()))

    assert find_switchable(module, ["*"]) == ["1", "3.0"]
    assert find_switchable(module, ["3"]) == ["3.0"]
    with pytest.raises(ValueError, match="has a switch 'inplace'"):
        find_switchable(module, ["Linear"])
    with pytest.raises(ValueError, match=r"no module matches 'Gelu'.*'inplace' .*: ReLU, SiLU$"):
        find_switchable(module, ["Gelu"])


def test_the_undo_leaves_what_was_on_before() -> None:
    """Only what we switched on goes off."""
    module = model(nn.ReLU(), nn.ReLU(inplace=True))
    undo = set_inplace(module, ["1"])

    assert module[1].inplace
    undo()

    assert [module[1].inplace, module[2].inplace] == [False, True]


class Wide(BoringModel):
    """Dropout after a layer that keeps nothing of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 64), nn.Hardswish(), nn.Linear(64, 2))
        self.during: list[bool] = []

    def training_step(self, batch, batch_idx):
        """Note the switch."""
        self.during.append(self.layer[1].inplace)
        return super().training_step(batch, batch_idx)


def fit(module, *callbacks):
    """Train two batches."""
    trainer = Trainer(
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=0,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)


@pytest.mark.parametrize(("saved_bytes", "is_on"), [(1024, True), (0, False), (None, False)])
def test_the_callback_switches_on_only_what_saves(monkeypatch, saved_bytes, is_on) -> None:
    """And off again when the fit is over."""
    proof = InplaceProof(proven=("layer.1",), saved_bytes=saved_bytes)
    place = "lightning_oom.callbacks.inplace_activations"
    lines: list[str] = []
    monkeypatch.setattr(f"{place}.prove_inplace", lambda *_, **__: proof)
    monkeypatch.setattr(f"{place}.rank_zero_info", lines.append)
    module = Wide()

    fit(module, InplaceActivations(modules=["Hardswish"]))

    assert module.during == [is_on, is_on]
    assert not module.layer[1].inplace
    assert ("left as they are" in lines[0]) is not is_on


def test_an_exception_in_a_step_switches_off(monkeypatch) -> None:
    """No trace is left."""

    class Failing(Wide):
        def on_before_zero_grad(self, optimizer):
            raise RuntimeError("mine")

    proof = InplaceProof(proven=("layer.1",), saved_bytes=1)
    monkeypatch.setattr(
        "lightning_oom.callbacks.inplace_activations.prove_inplace", lambda *_, **__: proof
    )
    module = Failing()

    with pytest.raises(RuntimeError, match="mine"):
        fit(module, InplaceActivations(modules=["Hardswish"]))

    assert not module.layer[1].inplace


def test_the_callback_proves_for_real_and_names_what_it_refused() -> None:
    """End to end, on the module of the user."""
    inplace = InplaceActivations(modules=["layer.*"])

    fit(Wide(), inplace)

    assert inplace.proof.refused == {}
    assert inplace.proof.proven == ("layer.1",)
    with pytest.raises(ValueError, match="list of class names"):
        InplaceActivations(modules="ReLU")

"""Modules that build or keep a graph in evaluation, by mistake or because it is meant."""

from __future__ import annotations

import functools

import torch
from fakes import TinyRegressor, batches_of
from fits import quiet, weights
from torch import nn

from lightning_oom import NoGradEnforcer, allow_grad

__all__ = ["LEGITIMATE", "VIOLATIONS", "Base", "enforcer", "fit", "plain_end"]


class Base(TinyRegressor):
    """Has dropout, so that training mode shows, and a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.outs = []
        self.last = None

    def validation_step(self, batch, batch_idx):
        """Subclasses have ``evaluate``."""
        return self.evaluate(batch)

    test_step = predict_step = validation_step

    def evaluate(self, batch):
        """Well behaved."""
        loss = self.loss(batch)
        if self.trainer.state.fn != "predict":
            self.log("val_loss", loss)
        self.outs.append(loss)
        return {"loss": loss, "rows": len(batch[0])}


class EnableGrad(Base):
    """A block."""

    def evaluate(self, batch):
        """Line of the violation: the next but one."""
        with torch.enable_grad():
            return self.loss(batch)


class Decorated(Base):
    """A decorator."""

    @torch.enable_grad()
    def evaluate(self, batch):
        """As the other."""
        return self.loss(batch)


class SetGrad(Base):
    """Left on."""

    def evaluate(self, batch):
        """Nothing is returned."""
        torch.set_grad_enabled(True)
        self.loss(batch)


class PrivateGrad(Base):
    """By a private function."""

    def evaluate(self, batch):
        """Nothing is returned."""
        torch._C._set_grad_enabled(True)
        self.loss(batch)


class OutOfInference(Base):
    """Out of inference mode and on again."""

    def evaluate(self, batch):
        """Inputs made there can be used after a copy."""
        with torch.inference_mode(False), torch.enable_grad():
            self.loss(tuple(tensor.clone() for tensor in batch))


class LeftOn(Base):
    """Grad mode left on after nothing was computed."""

    def evaluate(self, batch):
        """Only the switch."""
        self.loss(batch)
        torch.set_grad_enabled(True)


class TrainLeft(Base):
    """A module in training mode."""

    def evaluate(self, batch):
        """And left so."""
        self.drop.train()
        return self.drop(batch[0]).sum()


class TrainMode(Base):
    """Training mode from a hook."""

    def on_validation_epoch_start(self) -> None:
        """Everything."""
        self.train()

    def evaluate(self, batch):
        """Well behaved."""
        return self.loss(batch)


class KeepsSum(Base):
    """A graph that saves nothing, in the output."""

    def evaluate(self, batch):
        """Views and sums."""
        with torch.enable_grad():
            return [{"sum": self.body[0].weight + 1.0}]


class KeepsInList(Base):
    """A graph in a list."""

    def evaluate(self, batch):
        """One entry a batch."""
        with torch.enable_grad():
            self.outs.append((batch[1], self.body[0].weight + 1.0))


class KeepsInChild(Base):
    """A graph in an attribute of a child."""

    def evaluate(self, batch):
        """Made anew."""
        with torch.enable_grad():
            self.drop.cache = self.body[0].weight + 1.0


class LogsGraph(Base):
    """A value with a graph, made before, given to ``self.log``."""

    def on_validation_start(self) -> None:
        """Of an earlier training step, say."""
        with torch.enable_grad():
            self.last = (self.body[0].weight + 1.0).sum()

    def evaluate(self, batch):
        """Lightning would cut the graph off itself; the value keeps it until then."""
        self.log("kept", self.last)


class CachesInference(Base):
    """An inference tensor that training meets."""

    def evaluate(self, batch):
        """A cache of the user's own."""
        with torch.inference_mode():
            self.last = torch.ones(3)

    def training_step(self, batch, batch_idx):
        """Uses the cache."""
        loss = super().training_step(batch, batch_idx)
        return loss if self.last is None else loss + (self.last * self.body[3].bias).sum()


class Energy(nn.Module):
    """A force field: forces are a derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        """Forces, with a graph in training."""
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return force


class ForceField(Base):
    """Exempt by the path of a child, or by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()

    def evaluate(self, batch):
        """Forces are logged, returned and kept."""
        forces = self.energy(batch[0])
        self.log("force", forces.norm())
        self.last = forces
        return forces


class Informed(Base):
    """A physics-informed loss: exempt by the name of the hook."""

    def evaluate(self, batch):
        """A residual with second derivatives."""
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope.square().sum(), x)
        return (slope.mean() + bend.mean()).detach()


class GradCAM(Base):
    """Weights of activations: exempt by the decorator."""

    @allow_grad()
    @torch.enable_grad()
    def evaluate(self, batch):
        """Keeps the graph of the last batch for a picture."""
        hidden = self.body[0](batch[0])
        hidden.retain_grad()
        self.body[2](hidden).sum().backward()
        self.last = hidden * hidden.grad


class Attacked(Base):
    """Adversarial evaluation: exempt by the context."""

    def evaluate(self, batch):
        """One step of the fast gradient sign method."""
        x, y = batch
        with allow_grad(), torch.enable_grad():
            x = x.clone().requires_grad_()
            (sign,) = torch.autograd.grad(self.loss((x, y)), x)
        loss = self.loss(((x + 0.1 * sign.sign()).detach(), y))
        self.log("attacked", loss)
        return loss


class Sampled(Base):
    """Dropout as a posterior: exempt by the class of a child."""

    def on_validation_epoch_start(self) -> None:
        """Stays in training mode."""
        self.drop.train()

    def evaluate(self, batch):
        """The mean of two draws."""
        return (self.drop(self(batch[0])) + self.drop(self(batch[0]))).mean() / 2


class Adapts(Base):
    """Trains a copy of a layer at test time, in a hook: exempt by the hook's name."""

    def on_validation_batch_start(self, batch, batch_idx) -> None:
        """One step of descent."""
        with torch.enable_grad():
            probe = nn.Linear(8, 1)
            probe(batch[0]).square().mean().backward()
        self.last = probe.weight.grad


VIOLATIONS = [
    (EnableGrad, "graph", "loss"),
    (EnableGrad, "output", None),
    (Decorated, "graph", "loss"),
    (SetGrad, "graph", "loss"),
    (SetGrad, "grad_mode", None),
    (PrivateGrad, "graph", "loss"),
    (OutOfInference, "graph", "loss"),
    (LeftOn, "grad_mode", None),
    (TrainLeft, "train_mode", None),
    (TrainMode, "train_mode", None),
    (KeepsSum, "output", None),
    (KeepsInList, "attribute", None),
    (KeepsInChild, "attribute", None),
    (LogsGraph, "logged", None),
    (CachesInference, "inference", None),
]


LEGITIMATE = [
    (ForceField, ["energy"]),
    (ForceField, ["ene*"]),
    (ForceField, [Energy]),
    (Informed, ["validation_step"]),
    (GradCAM, []),
    (Attacked, []),
    (Sampled, ["Dropout"]),
    (Adapts, ["on_validation_batch_start"]),
]


def enforcer(on_violation="warn", **options):
    """The callback under test."""
    return NoGradEnforcer(on_violation=on_violation, verbose=False, **options)


def fit(model, *callbacks, **options):
    """Two training batches and a validation of three, after a sanity check."""
    trainer = quiet(*callbacks, **{"num_sanity_val_steps": 1, "max_epochs": 2, **options})
    trainer.fit(model, batches_of([4, 4]), batches_of([4, 4, 4], seed=2))
    return trainer


@functools.cache
def plain_end(make):
    """Weights and metrics of the same fit without the callback."""
    torch.manual_seed(0)
    model = make()
    trainer = fit(model)
    return [weights(model), dict(trainer.callback_metrics)]

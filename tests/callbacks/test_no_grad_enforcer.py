"""Every way to build or keep a graph in evaluation is found, named and fixed."""

from __future__ import annotations

import contextlib
import inspect
import warnings

import grad_cases
import pytest
import torch
from fakes import TinyRegressor, batches_of
from fits import quiet, weights
from grad_cases import (
    VIOLATIONS,
    Base,
    CachesInference,
    EnableGrad,
    KeepsInList,
    SetGrad,
    TrainLeft,
    enforcer,
    fit,
    plain_end,
)
from lightning.pytorch import Callback
from states import compare

from lightning_oom import NoGradEnforcer
from lightning_oom.errors import GradInEvaluationError, GradInEvaluationWarning


@pytest.mark.parametrize(("make", "kind", "method"), VIOLATIONS)
@pytest.mark.filterwarnings("ignore::lightning_oom.errors.GradInEvaluationWarning")
def test_every_violation_is_found_once(make, kind, method) -> None:
    """In warn mode: one of the kind for three batches and two epochs, with file and line."""
    callback = enforcer()
    expected = (
        pytest.raises(RuntimeError, match="Inference tensors")  # torch's own, in training
        if kind == "inference"
        else contextlib.nullcontext()
    )
    with expected:
        fit(make(), callback)
    found = [violation for violation in callback.violations if violation.kind == kind]

    if kind == "train_mode":
        assert {violation.what for violation in found} in ({"drop"}, {"the module itself"})
        assert len({violation.what for violation in found}) == len(found)
        return
    assert len(found) >= 1
    assert len({(v.where, v.what) for v in found}) == len(found)
    if kind == "inference":
        assert found[0].what == "last"
        return
    path, _, line = found[0].where.rpartition(":")
    if method == "loss":
        lines, first = inspect.getsourcelines(TinyRegressor.forward)
        assert path == inspect.getfile(TinyRegressor)
        assert first <= int(line) < first + len(lines)
    else:
        assert path in (grad_cases.__file__, inspect.getfile(TinyRegressor))
    if kind != "grad_mode":
        assert found[0].num_bytes > 0


def test_a_block_left_in_training_mode_is_named_once_for_all_that_is_in_it() -> None:
    """And everything in it is put back."""

    class Blocks(Base):
        def evaluate(self, batch):
            assert not any(part.training for part in self.body.modules())
            self.body.train()
            return self.loss(batch)

    model, callback = Blocks(), enforcer("fix")
    fit(model, callback)

    assert len(list(model.body.modules())) > 1
    found = [v.what for v in callback.violations if v.kind == "train_mode"]
    assert "body" in found
    assert not any(what.startswith("body.") for what in found)


@pytest.mark.parametrize(("make", "kind", "method"), VIOLATIONS)
def test_every_violation_can_raise(make, kind, method) -> None:
    """In raise mode the error names it; the run leaves no trace (the suite's guard looks)."""
    callback = enforcer("raise")
    with pytest.raises(GradInEvaluationError):
        fit(make(), callback)

    assert any(violation.kind == kind for violation in callback.violations) or kind in (
        "grad_mode",
        "output",
    )


STAGES = [
    *((make, "fit") for make in dict.fromkeys(make for make, _, _ in VIOLATIONS)),
    *((make, run) for make in (EnableGrad, KeepsInList) for run in ("test", "predict")),
    (SetGrad, "validate"),
    (TrainLeft, "test"),
]


@pytest.mark.parametrize(("make", "run"), STAGES)
@pytest.mark.filterwarnings("ignore:predict returned None")
def test_every_violation_is_fixed(make, run) -> None:
    """No graph is left in outputs, attributes and modes, in any stage; weights as without."""
    outputs = []

    class Looks(Callback):
        def on_validation_batch_end(self, trainer, pl_module, output, *args) -> None:
            outputs.append(output)
            assert not torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert not pl_module.drop.training

        on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    torch.manual_seed(0)
    model, callback = make(), enforcer("fix")
    if run == "fit":
        fit(model, callback, Looks())
    else:
        trainer = quiet(callback, Looks())
        getattr(trainer, run)(model, batches_of([4, 4, 4]))
    kept = [outputs, model.outs, getattr(model.drop, "cache", None)]

    assert outputs
    assert callback.violations
    assert not any(
        leaf.requires_grad and not leaf.is_leaf
        for leaf in torch.utils._pytree.tree_leaves(kept)
        if isinstance(leaf, torch.Tensor)
    )
    if run == "fit" and make is not CachesInference:  # whose cache is part of the loss
        assert compare(plain_end(Base)[0], weights(model)) == []


def test_graphs_hold_nothing_once_they_are_fixed() -> None:
    """Bytes: what a graph in validation would have kept is free at once."""
    held = {}

    class Counts(EnableGrad):
        def evaluate(self, batch):
            with torch.enable_grad():
                hidden = self.body(batch[0]).exp()
                held[self.mode] = [hidden.grad_fn._raw_saved_result, hidden]

    for mode in ("warn", "fix"):
        model = Counts()
        model.mode = mode
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradInEvaluationWarning)
            fit(model, enforcer(mode))

    assert held["warn"][0].data.tensor.shape == (4, 1)
    assert not isinstance(held["fix"][0].data, torch.Tensor)
    with pytest.raises(GradInEvaluationError, match=r"test_no_grad_enforcer\.py:\d+.*allow_grad"):
        held["fix"][1].sum().backward()


def test_a_validation_that_behaves_is_left_alone() -> None:
    """Nothing found, nothing changed: outputs are the user's own objects."""
    callback, seen = enforcer("raise"), []

    class Looks(Callback):
        def on_validation_batch_end(self, trainer, pl_module, output, *args) -> None:
            seen.append(output)

    class Returns(Base):
        def evaluate(self, batch):
            self.made = super().evaluate(batch)
            return self.made

    model = Returns()
    trainer = fit(model, callback, Looks())
    plain = fit(Base())

    assert callback.violations == []
    assert seen[-1] is model.made
    assert trainer.callback_metrics.keys() == plain.callback_metrics.keys()


@pytest.mark.parametrize("where", ["step", "hook"])
@pytest.mark.parametrize("on_violation", ["fix", "raise"])
def test_nothing_stays_after_an_exception(where, on_violation) -> None:
    """Hooks, modes, shadows and inference mode are as found; grad mode is looked at by the suite."""

    class Breaks(Base):
        def evaluate(self, batch):
            self.drop.train()
            raise ZeroDivisionError

        def on_validation_epoch_end(self) -> None:
            raise ZeroDivisionError

    class BreaksLater(Breaks):
        evaluate = Base.evaluate

    model = Breaks() if where == "step" else BreaksLater()
    trainer = quiet(enforcer(on_violation), num_sanity_val_steps=1)
    strategy, loops = set(vars(trainer.strategy)), [trainer.validate_loop, trainer.test_loop]
    disable = torch.autograd.graph.disable_saved_tensors_hooks
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, batches_of([4]), batches_of([4]))

    assert {"validation_step", "test_step", "predict_step"} & set(vars(trainer.strategy)) == (
        {"validation_step", "test_step", "predict_step"} & strategy
    )
    assert [loop.inference_mode for loop in loops] == [True, True]
    assert torch.autograd.graph.disable_saved_tensors_hooks is disable
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert "log" not in vars(model)
    assert model.drop.training is (where == "step")


def test_modes_are_put_back_after_validation() -> None:
    """A module that was switched to evaluation trains on as before."""
    model, modes = TrainLeft(), []

    class Looks(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            modes.append([module.training for module in pl_module.modules()])

    fit(model, enforcer("fix"), Looks())

    assert all(all(mode) for mode in modes)


def test_evaluation_before_a_fit_leaves_tensors_that_can_be_trained_on() -> None:
    """``validate`` runs without inference mode; what an unguarded one has left is copied."""

    class Caches(CachesInference):
        def evaluate(self, batch):
            self.last = batch[0].mean(0)[:1] + torch.zeros(3)

    for first in (enforcer("fix"), None):
        model = Caches()
        quiet(*filter(None, [first])).validate(model, batches_of([4]), verbose=False)
        assert model.last.is_inference() is (first is None)
        callback = enforcer("fix")
        quiet(callback).fit(model, batches_of([4]))
        assert [violation.what for violation in callback.violations] == (
            ["last"] if first is None else []
        )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_violation": "ignore"}, "on_violation"),
        ({"exempt": "validation_step"}, "exempt"),
        ({"exempt": [3]}, "exempt"),
    ],
)
def test_arguments_are_checked_at_once(options, text) -> None:
    """The constructor names the argument and its range."""
    with pytest.raises(ValueError, match=text):
        NoGradEnforcer(**options)

"""Derivatives in evaluation that are meant are left alone, once they are named."""

from __future__ import annotations

import pytest
import torch
from fits import weights
from grad_cases import (
    LEGITIMATE,
    Adapts,
    Attacked,
    Base,
    ForceField,
    GradCAM,
    Informed,
    Sampled,
    TrainLeft,
    enforcer,
    fit,
    plain_end,
)
from states import compare

from lightning_oom import allow_grad
from lightning_oom.errors import GradInEvaluationError


@pytest.mark.parametrize(("make", "exempt"), LEGITIMATE)
@pytest.mark.parametrize("on_violation", ["fix", "raise"])
def test_what_is_meant_is_left_alone(make, exempt, on_violation) -> None:
    """Six modules that differentiate in evaluation, each with its exemption: no alarm, no change."""
    torch.manual_seed(0)
    model, callback = make(), enforcer(on_violation, exempt=exempt)
    trainer = fit(model, callback)

    assert callback.violations == []
    assert compare(plain_end(make), [weights(model), dict(trainer.callback_metrics)]) == []


def test_an_exempt_step_may_leave_modules_in_training_mode() -> None:
    """Also at the end of the stage."""
    callback = enforcer("raise", exempt=["validation_step"])
    fit(TrainLeft(), callback)

    assert callback.violations == []


@pytest.mark.parametrize("make", [ForceField, Informed, GradCAM, Attacked, Sampled, Adapts])
def test_without_its_exemption_each_is_found(make) -> None:
    """The alarms above can ring: the contexts are taken away too."""
    callback = enforcer("raise")
    if make in (GradCAM, Attacked):
        entered, allow_grad.__enter__ = allow_grad.__enter__, lambda self: self
        left, allow_grad.__exit__ = allow_grad.__exit__, lambda *_: None
    try:
        with pytest.raises(GradInEvaluationError):
            fit(make(), callback)
    finally:
        if make in (GradCAM, Attacked):
            allow_grad.__enter__, allow_grad.__exit__ = entered, left


def test_a_backward_that_is_not_exempt_says_what_to_do() -> None:
    """Fixed graphs hold nothing: the error names the line and the ways out."""
    with pytest.raises(GradInEvaluationError, match=r"grad_cases\.py:\d+.*exempt"):
        fit(ForceField(), enforcer("fix"))


def test_an_exemption_that_fits_nothing_is_an_error() -> None:
    """It lists what it may have meant."""
    with pytest.raises(ValueError, match=r"'Dropuot'.*Dropout"):
        fit(Base(), enforcer(exempt=["Dropuot"]))

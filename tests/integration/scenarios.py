"""The rows of the campaign: every way of training that a recovery must survive."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch.callbacks as lightning_callbacks
from campaign_model import OPTIMIZERS, Recipe
from fault_campaign import Scenario
from lightning.pytorch.callbacks import StochasticWeightAveraging

if TYPE_CHECKING:
    from lightning.pytorch import Callback

__all__ = ["EXACT", "ON_SIMULATED_GPU", "SEPARABLE", "simulated_gpu"]

FIRST, SECOND, LAST = 0, 1, 2
PLACES = {FIRST: "first step", SECOND: "second step", LAST: "epoch's last step"}


def _swa() -> list[Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)]


def _ema() -> list[Callback]:
    averaging: Any = lightning_callbacks.EMAWeightAveraging
    return [averaging(decay=0.9)]


def simulated_gpu() -> Any:
    """The strategy of a simulated GPU that never fills up by itself."""
    from lightning_oom.testing import SimulatedGPUStrategy

    return SimulatedGPUStrategy()


def _on(batch: int, name: str, **options: Any) -> Scenario:
    return Scenario(name=f"{name}, {PLACES[batch]}", batch=batch, **options)


def _optimizers() -> list[Scenario]:
    return [
        _on(batch, name.replace("_", " "), recipe=Recipe(optimizer=name))
        for name in OPTIMIZERS
        for batch in ((FIRST, SECOND, LAST) if name.startswith("adam_") else (FIRST, SECOND))
        if name != "lbfgs"
    ]


def _windows() -> list[Scenario]:
    names = {0: "first of two", 1: "second of two", 2: "short window", 4: "second, next epoch"}
    return [
        Scenario(
            name=f"accumulate 2, {optimizer.replace('_', ' ')}, {names[batch]}",
            recipe=Recipe(optimizer=optimizer),
            batch=batch,
            accumulate=2,
        )
        for optimizer in ("adam_single", "sgd_foreach")
        for batch in names
    ]


def _features() -> list[Scenario]:
    clips = {"norm": (0.1, "norm"), "value": (0.01, "value")}
    rows = [
        _on(batch, f"clip {kind}, {optimizer.replace('_', ' ')}", clip=clip, recipe=recipe)
        for kind, clip in clips.items()
        for batch, optimizer in ((FIRST, "sgd_foreach"), (SECOND, "adam_single"))
        for recipe in [Recipe(optimizer=optimizer)]
    ]
    for batch in (FIRST, SECOND, LAST):
        rows += [
            _on(batch, "bf16-mixed", precision="bf16-mixed"),
            _on(batch, "16-mixed with scaler", precision="16-mixed"),
            _on(batch, "lbfgs", recipe=Recipe(optimizer="lbfgs")),
        ]
    rows += [
        _on(SECOND, "16-mixed with scaler and clip", precision="16-mixed", clip=clips["norm"]),
        Scenario(
            name="16-mixed with scaler, accumulate 2, second of two",
            precision="16-mixed",
            accumulate=2,
        ),
        _on(SECOND, "checkpointed", recipe=Recipe(checkpointed=True)),
        _on(LAST, "schedule per step", recipe=Recipe(scheduled=True)),
        _on(LAST, "stochastic weight averaging", extra_callbacks=_swa),
    ]
    if hasattr(lightning_callbacks, "EMAWeightAveraging"):
        rows.append(_on(SECOND, "moving average of weights", extra_callbacks=_ema))
    return rows


EXACT: list[Scenario] = [*_optimizers(), *_windows(), *_features()]
"""An unsplit retry gives the same bits."""

ON_SIMULATED_GPU: list[Scenario] = [
    replace(scenario, name=f"simgpu, {scenario.name}", strategy=simulated_gpu)
    for scenario in EXACT
    if scenario.precision == "32-true"
    and scenario.recipe.optimizer in {"adam_single", "sgd_foreach"}
]
"""The same on a device with its own allocator and a host to copy from."""


def _separable(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        name=f"separable, {scenario.name}",
        recipe=scenario.recipe.row_separable(),
        tolerance=1e-5,
    )


SEPARABLE: list[Scenario] = [
    _separable(scenario)
    for scenario in EXACT
    if scenario.precision == "32-true" and scenario.recipe.optimizer != "lbfgs"
]
"""Rows do not interact: pieces of the batch give the same up to rounding."""

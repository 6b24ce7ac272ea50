"""The private names of Lightning that the package uses, and the check that they are there.

Checked on Lightning 2.4 to 2.6. The tables serve the self-check at setup and the test suite.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.pytorch import LightningModule, Trainer

__all__ = ["ACCUMULATION_NAMES", "PRECISION_NAMES", "PRIVATE_NAMES", "missing_names"]

PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    # where it is -> name, or "name(parameters)" where the form matters
    "trainer": ("_results", "_logger_connector"),
    "trainer._logger_connector": ("_current_fx", "_first_loop_iter"),
    "trainer.fit_loop.epoch_loop.automatic_optimization": (
        "_make_closure(kwargs, optimizer, batch_idx)",
        "_make_step_fn(kwargs)",
        "output_result_cls",
        "optim_progress.optimizer.zero_grad.total",
        "optim_progress.optimizer.zero_grad.current",
    ),
    "trainer.strategy": (
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
        "batch_to_device(batch, device, dataloader_idx)",
        "backward",
        "precision_plugin",
    ),
    "trainer.precision_plugin": (
        "post_backward(tensor, module)",
        "_after_closure(model, optimizer)",
    ),
    "module": ("_current_fx_name", "_apply_batch_transfer_handler"),
}
"""Every name is looked up on live objects at setup, so that a moved one is noticed before it hurts."""

PRECISION_NAMES: dict[str, tuple[str, ...]] = {
    "trainer.strategy": ("precision_plugin",),
    "trainer.precision_plugin": (
        "pre_backward(tensor, module)",
        "optimizer_step(optimizer, model, closure, kwargs)",
        "_after_closure(model, optimizer)",
    ),
}
"""The same for a switch of precision, which looks at a plain 32-bit plugin."""

ACCUMULATION_NAMES: dict[str, tuple[str, ...]] = {
    "trainer.fit_loop": ("_combined_loader", "setup_data"),
    "trainer.fit_loop.epoch_loop": (
        "_accumulated_batches_reached",
        "_should_accumulate",
        "batch_progress.current.ready",
    ),
    "trainer.fit_loop.epoch_loop.automatic_optimization": (
        "_make_zero_grad_fn(batch_idx, optimizer)",
        "_skip_backward",
    ),
    "trainer.strategy": ("backward", "reduce"),
}
"""The same for accumulation windows."""


def missing_names(
    trainer: Trainer,
    module: LightningModule,
    *,
    table: Mapping[str, tuple[str, ...]] = PRIVATE_NAMES,
) -> list[str]:
    """Return the names that are gone or have another form; empty when the recovery can run.

    Args:
        trainer: The trainer, at any time after its construction.
        module: The module it trains.
        table: Which names to look for, by place.
    """
    roots: dict[str, Any] = {"trainer": trainer, "module": module}
    missing = []
    for place, names in table.items():
        root, _, path = place.partition(".")
        try:
            owner = _follow(roots[root], path)
        except AttributeError:
            missing.append(place)
            continue
        missing += [f"{place}.{name}" for name in names if not _has(owner, name)]
    return missing


def _follow(owner: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        owner = getattr(owner, name)
    return owner


def _has(owner: Any, name: str) -> bool:
    path, _, form = name.partition("(")
    try:
        found = _follow(owner, path)
    except AttributeError:
        return False
    if not form:
        return True
    wanted = [part.strip() for part in form.rstrip(")").split(",")]
    return list(inspect.signature(found).parameters) == wanted

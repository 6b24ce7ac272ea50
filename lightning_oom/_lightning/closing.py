"""Between backward and update: unscaling, ``on_before_optimizer_step``, clipping.

All of it may be repeated as long as no gradient has been written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_oom._lightning.results import ResultsPart
from lightning_oom._lightning.support import overrides
from lightning_oom._torch import read_version
from lightning_oom.errors import add_note
from lightning_oom.recovery.cleanup import clear_frames
from lightning_oom.recovery.scaler import LossScaler
from lightning_oom.recovery.snapshot import Snapshot
from lightning_oom.recovery.taking import take_patiently
from lightning_oom.undo import Undo, UndoStack, shadow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from lightning.pytorch import Trainer

    from lightning_oom.recovery.classify import OOMCause
    from lightning_oom.recovery.snapshot.part import Part

__all__ = ["install_closing_guard"]

_HOOK = "on_before_optimizer_step"


def install_closing_guard(
    trainer: Trainer,
    *,
    parts: Iterable[Part],
    classify: Callable[[Exception], OOMCause | None],
    release: Callable[[], object],
    report: Callable[[str], None],
) -> Undo:
    """Guard what the precision plugin does between backward and update.

    Args:
        trainer: The trainer, in ``on_train_start``.
        parts: What user hooks may change; taken only where such a hook exists.
        classify: Gives the cause of an error that may be recovered from, else ``None``.
        release: Collects garbage and empties caches.
        report: Called with a sentence after a repetition that worked.

    Returns:
        The undo.
    """
    plugin = trainer.precision_plugin
    undos = UndoStack()
    hooked = _has_hooks(trainer)
    guarded = [*parts, ResultsPart(trainer)] if hooked else []

    def run(what: str, work: Callable[[], Any], optimizer: Any, own: list[Part]) -> Any:
        versions = _versions(optimizer)
        saved = take_patiently(Snapshot(own), classify=classify, release=release)
        for attempt in (1, 2):
            try:
                return work()
            except Exception as error:
                if classify(error) is None:
                    raise
                moved = _versions(optimizer) != versions
                if moved or attempt == 2:  # noqa: PLR2004 - the second is the last
                    add_note(error, _note(what, moved=moved))
                    raise
                clear_frames(error)
            saved.restore()
            release()
            report(f"{what} ran out of memory and was repeated with caches empty")
        raise AssertionError("unreachable")  # pragma: no cover

    if hooked or trainer.gradient_clip_val or overrides_clipping(trainer):
        after = plugin._after_closure

        def after_closure(model: Any, optimizer: Any) -> Any:
            return run("clipping", lambda: after(model, optimizer), optimizer, guarded)

        undos.push(shadow(plugin, "_after_closure", after_closure))
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        unscale = scaler.unscale_

        def unscale_(optimizer: Any) -> Any:
            return run("unscaling", lambda: unscale(optimizer), optimizer, [LossScaler(scaler)])

        undos.push(shadow(scaler, "unscale_", unscale_))
    return Undo(undos)


def overrides_clipping(trainer: Trainer) -> bool:
    """Whether the module clips gradients in its own way."""
    return overrides(trainer.lightning_module, "configure_gradient_clipping")


def _has_hooks(trainer: Trainer) -> bool:
    from lightning.pytorch import Callback  # noqa: PLC0415 - the class is only compared against

    plain = getattr(Callback, _HOOK)
    return overrides(trainer.lightning_module, _HOOK) or any(
        getattr(type(callback), _HOOK) is not plain
        for callback in trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    )


def _versions(optimizer: torch.optim.Optimizer) -> list[int]:
    return [
        -1 if parameter.grad is None else read_version(parameter.grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _note(what: str, *, moved: bool) -> str:
    if moved:
        return f"lightning_oom: {what} had already changed gradients; parameters have not moved."
    return f"lightning_oom: {what} failed twice; gradients and parameters have not moved."

"""The rungs of OOMRecovery by their names, tied to the trainer that they act on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lightning_oom._lightning.precision import reason_not_to_switch, within_precision
from lightning_oom.recovery.holding import HoldingRung
from lightning_oom.recovery.ladder import ChunkRung, Ladder, ReleaseRung, Rung, SplitRung
from lightning_oom.reduction.checkpointing import find_blocks, install, is_checkpointed
from lightning_oom.reduction.offload import offload_activations
from lightning_oom.reduction.precision import choose_precision, find_unsafe_losses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lightning.pytorch import Trainer

__all__ = ["DEFAULT_LADDER", "RUNGS", "build_ladder"]

RUNGS = ("release", "chunk", "split", "checkpoint", "offload", "amp")
"""All names, the exact ones first."""

DEFAULT_LADDER = RUNGS[:-1]
"""Those that compute what the plain step computes."""


def build_ladder(
    names: Sequence[str],
    *,
    trainer: Callable[[], Trainer],
    split_inseparable: bool,
    on_inseparable: Callable[[str], None],
) -> Ladder:
    """Make a ladder.

    Args:
        names: Out of :data:`RUNGS`.
        trainer: Gives the trainer whose step is being tried.
        split_inseparable: As for :class:`~lightning_oom.recovery.ladder.SplitRung`.
        on_inseparable: Likewise.

    Raises:
        ValueError: A text instead of a list, no name, an unknown one, or one twice.
    """
    if isinstance(names, str) or not names:
        raise ValueError(f"ladder is a list of rungs out of {list(RUNGS)}, got {names!r}")
    rungs: list[Rung] = []
    for name in names:
        if name not in RUNGS:
            raise ValueError(f"a rung of ladder is one of {list(RUNGS)}, got {name!r}")
        before = [rung for rung in rungs if isinstance(rung, HoldingRung)]
        if name == "release":
            rungs.append(ReleaseRung())
        elif name == "chunk":
            rungs.append(ChunkRung())
        elif name == "split":
            rungs.append(
                SplitRung(split_inseparable=split_inseparable, on_inseparable=on_inseparable)
            )
        else:
            engine = _HOLDING[name](trainer)
            rungs.append(
                HoldingRung(
                    name,
                    engine.open,
                    unavailable=engine.unavailable,
                    exact=engine.is_exact,
                    before=before,
                )
            )
    return Ladder(rungs)


class _Checkpoint:
    """Repeated blocks keep their inputs only."""

    is_exact = True

    def __init__(self, trainer: Callable[[], Trainer]) -> None:
        self._trainer = trainer

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        undo = install(self._trainer().lightning_module, self._paths())
        try:
            yield
        finally:
            undo()

    def unavailable(self) -> str | None:
        blocks = find_blocks(self._trainer().lightning_module)
        if not blocks:
            return "the module has no repeated blocks"
        return None if self._paths() else "the blocks are checkpointed already"

    def _paths(self) -> list[str]:
        blocks = find_blocks(self._trainer().lightning_module)
        return [block.path for block in blocks if not is_checkpointed(block.module)]


class _Offload:
    """Activations wait in host memory."""

    is_exact = True

    def __init__(self, trainer: Callable[[], Trainer]) -> None:
        self._trainer = trainer

    def open(self) -> contextlib.AbstractContextManager[Any]:
        module = self._trainer().lightning_module
        return offload_activations(keep=[*module.parameters(), *module.buffers()])

    def unavailable(self) -> str | None:
        trainer = self._trainer()
        if trainer.strategy.root_device.type == "cpu":
            return "the device is the host itself"
        for callback in trainer.callbacks:  # type: ignore[attr-defined] # set by a connector
            moves = getattr(callback, "moves_activations_of", None)
            if moves is not None and moves(trainer):
                return f"{type(callback).__name__} offloads activations already"
        return None


class _Amp:
    """Forward and loss in bfloat16."""

    is_exact = False

    def __init__(self, trainer: Callable[[], Trainer]) -> None:
        self._trainer = trainer

    def open(self) -> contextlib.AbstractContextManager[None]:
        return within_precision(self._trainer(), "bf16-mixed")

    def unavailable(self) -> str | None:
        trainer = self._trainer()
        module = trainer.lightning_module
        if choose_precision(trainer.strategy.root_device) != "bf16-mixed":
            return "the device has no bfloat16, and a loss scale for float16 outlasts one attempt"
        unsafe = find_unsafe_losses(module)
        if unsafe:
            return f"16 bits do not hold the loss of {', '.join(unsafe)}"
        return reason_not_to_switch(trainer, module, "bf16-mixed")


_HOLDING: dict[str, type[_Checkpoint | _Offload | _Amp]] = {
    "checkpoint": _Checkpoint,
    "offload": _Offload,
    "amp": _Amp,
}

"""The loss scaler's state, which its first use makes and ``unscale_`` moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_oom._torch import SCALER_STATE, scaler_stages

if TYPE_CHECKING:
    import torch

__all__ = ["LossScaler"]


class LossScaler:
    """Scale, growth tracker and per-optimizer stages of a ``torch.amp.GradScaler``.

    An attempt that fails between the two tensors that the scaler makes on its first use would leave
    it half made.

    Args:
        scaler: The scaler; an attempt never writes into its tensors, so references suffice.

    Note:
        Cost: 1 us.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def take(self) -> SavedLossScaler:
        """Remember the tensors and stages as they stand."""
        return SavedLossScaler(self.scaler)


class SavedLossScaler:
    """The scaler at one moment."""

    __slots__ = ("_scaler", "_stages", "_tensors")

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._tensors: dict[str, Any] = {name: vars(scaler)[name] for name in SCALER_STATE}
        self._stages = {key: dict(stage) for key, stage in scaler_stages(scaler).items()}

    def restore(self) -> tuple[str, ...]:
        """Put tensors and stages back; always possible."""
        vars(self._scaler).update(self._tensors)
        stages = scaler_stages(self._scaler)
        stages.clear()
        stages.update({key: dict(stage) for key, stage in self._stages.items()})
        return ()

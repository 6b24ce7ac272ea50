"""What a fit on the simulated GPU takes, phase by phase."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_oom.testing import SimulatedGPUStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FitPeaks", "fit_peaks"]


@dataclass(slots=True)
class FitPeaks:
    """What the device's own counters said.

    Attributes:
        reserved_bytes: ``torch.simgpu.max_memory_reserved`` after the fit.
        phases: ``torch.simgpu.max_memory_allocated`` by phase.
    """

    reserved_bytes: int = 0
    phases: dict[str, int] = field(default_factory=dict)

    @property
    def allocated_bytes(self) -> int:
        """The most in any phase."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """Where the most is allocated."""
        return max(self.phases, key=self.phases.__getitem__)


class _Phases(Callback):
    """Reads the counter whenever a phase ends, and starts it anew."""

    def __init__(self, peaks: FitPeaks) -> None:
        self._peaks = peaks
        self._phase = "before"
        self._handles: list[Any] = []

    def enter(self, phase: str) -> None:
        """End the phase before."""
        highest = torch.simgpu.max_memory_allocated()
        self._peaks.phases[self._phase] = max(self._peaks.phases.get(self._phase, 0), highest)
        torch.simgpu.reset_peak_memory_stats()
        self._phase = phase

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn when optimizers have stepped."""
        for optimizer in trainer.optimizers:
            hook = optimizer.register_step_post_hook(lambda *_: self.enter("forward"))
            self._handles.append(hook)

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin with the forward."""
        self.enter("forward")

    def on_before_backward(self, *_: Any) -> None:
        """Go on."""
        self.enter("backward")

    def on_after_backward(self, *_: Any) -> None:
        """Go back to the forward, where manual optimization may run another."""
        self.enter("forward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Go on."""
        self.enter("optimizer")

    def on_train_end(self, *_: Any) -> None:
        """Read once more."""
        self.enter("before")
        for handle in self._handles:
            handle.remove()


def fit_peaks(
    module: LightningModule,
    batch: Sequence[torch.Tensor],
    *,
    precision: str = "32-true",
    num_steps: int = 3,
    **trainer_kwargs: Any,
) -> FitPeaks:
    """Train a module on a simulated GPU of its own and return what that took.

    Args:
        module: On the host, untrained.
        batch: The tensors of a batch, on the host; each step trains on it.
        precision: As the Trainer takes it.
        num_steps: Batches.
        **trainer_kwargs: For the Trainer.
    """
    gc.collect()
    peaks = FitPeaks()
    strategy = SimulatedGPUStrategy("4 GiB")
    torch.simgpu.empty_cache()
    torch.simgpu.reset_peak_memory_stats()
    data = TensorDataset(*(torch.cat([tensor] * num_steps) for tensor in batch))
    trainer = Trainer(
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        callbacks=[_Phases(peaks)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_kwargs,
    )
    trainer.fit(module, DataLoader(data, batch_size=len(batch[0])))
    peaks.reserved_bytes = torch.simgpu.max_memory_reserved()
    return peaks

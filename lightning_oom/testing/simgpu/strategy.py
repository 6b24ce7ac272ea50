"""Train on a simulated GPU: ``Trainer(strategy="simgpu")``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from lightning_oom.testing.simgpu.accelerator import SimulatedGPUAccelerator
from lightning_oom.testing.simgpu.devices import DEVICE_TYPE
from lightning_oom.testing.simgpu.gpu import SimulatedGPU

if TYPE_CHECKING:
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import CheckpointIO, Precision

__all__ = ["SimulatedGPUStrategy"]


class SimulatedGPUStrategy(SingleDeviceStrategy):
    """Train on one simulated GPU, which runs out of memory like a real one and computes on the CPU.

    The whole run behaves as on CUDA: model, batches and optimizer state live on the device, host and
    device are apart, and past the limit ``torch.OutOfMemoryError`` is raised. Weights and metrics are
    those of a run on the CPU.

    Args:
        limit: What the device can hold, in bytes or as text such as ``"64 MiB"``; above 0. ``None``
            never refuses.
        device_index: Which simulated device to train on, at least 0.
        num_devices: How many simulated devices there are, above ``device_index``. ``None`` makes as
            many as ``device_index`` needs.
        expandable_segments: Model the allocator's ``expandable_segments:True``.
        checkpoint_io: Passed on to Lightning.
        precision_plugin: Passed on to Lightning.

    Raises:
        ValueError: An argument is outside its range.
        UnsupportedTorchError: torch before 2.10; raised when the strategy is made.

    Note:
        The devices are those of the process: a second strategy sets their limits anew.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = Trainer(
        ...     strategy=SimulatedGPUStrategy("64 MiB"), max_steps=2, logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.strategy.root_device
        device(type='simgpu', index=0)

    See Also:
        :class:`SimulatedGPU` for use without Lightning.
    """

    strategy_name = DEVICE_TYPE

    def __init__(
        self,
        limit: int | str | None = None,
        *,
        device_index: int = 0,
        num_devices: int | None = None,
        expandable_segments: bool = False,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if device_index < 0:
            raise ValueError(f"device_index must be at least 0, got {device_index}")
        if num_devices is not None and num_devices <= device_index:
            raise ValueError(f"num_devices must be above {device_index=}, got {num_devices}")
        self.gpu = SimulatedGPU(
            limit,
            num_devices=num_devices or device_index + 1,
            expandable_segments=expandable_segments,
        )
        super().__init__(
            device=self.gpu.devices[device_index],
            accelerator=SimulatedGPUAccelerator(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerator of the simulated GPU, whichever the trainer chose for itself."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        if isinstance(accelerator, SimulatedGPUAccelerator):
            self._accelerator = accelerator

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin; mixed precision that Lightning made for CUDA is made for this device."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if isinstance(precision_plugin, MixedPrecision) and precision_plugin.device != DEVICE_TYPE:
            precision_plugin = _move_precision(precision_plugin)
        self._precision_plugin = precision_plugin

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by its name."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="A simulated GPU with a memory limit"
            )


def _move_precision(plugin: MixedPrecision) -> MixedPrecision:
    if plugin.precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", DEVICE_TYPE)
    return MixedPrecision("16-mixed", DEVICE_TYPE, scaler=torch.amp.GradScaler(DEVICE_TYPE))


SimulatedGPUStrategy.register_strategies(StrategyRegistry)

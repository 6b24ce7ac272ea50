"""Keep activations, optimizer state or weights on the host while the device does not need them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom._torch import tree_leaves
from lightning_oom.errors import LightningOOMWarning
from lightning_oom.memory.phases import PhasePeaks
from lightning_oom.reduction.offload import (
    BlockOffload,
    OffloadTally,
    OptimizerStateOffload,
    find_blocks,
    offload_activations,
)
from lightning_oom.undo import Undo, UndoStack, shadow
from lightning_oom.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["CPUOffload"]


class CPUOffload(Callback):
    """Trade device memory for traffic to the host; weights, buffers and random numbers stay equal.

    With ``activations`` what autograd saves in ``training_step`` goes to the host until the backward
    pass asks for it. Each storage is copied once, however many views of it are saved. Parameters,
    buffers, the batch and autocast's copies of weights are never copied: others hold them anyway.

    With ``optimizer`` the state of the optimizers is on the device from the end of the backward pass
    to the end of the batch only. This lowers the peak where forward or backward sets it.

    With ``parameters`` the weights of repeated blocks (the layers of a transformer, the stages of a
    ResNet) are on the device only while their block runs, in ``validate``, ``test`` and ``predict``.
    In ``fit`` it does nothing and says so: every weight has to be there in the optimizer's step, and
    a graph holds the weights that it has saved; shard them instead (FSDP, DeepSpeed).

    Args:
        activations: Offload saved activations in training.
        optimizer: Offload optimizer state between steps.
        parameters: Offload weights of blocks in evaluation.
        min_bytes: Activations and state tensors whose storage is smaller stay on the device, in
            bytes or as text such as ``"1 MiB"``; at least 0. Small ones cost more time than they
            give memory.
        verbose: Print a line at the end of fit: what was moved, and which phase sets the peak.

    Attributes:
        tally: The activations that were moved, an
            :class:`~lightning_oom.reduction.offload.activations.OffloadTally`.
        peaks_by_phase: Bytes allocated at most in ``"forward"``, ``"backward"`` and ``"optimizer"``
            of the last fit; empty where the backend has no peak.

    Raises:
        ValueError: ``min_bytes`` cannot be read or is negative, or everything is off. Raised by the
            constructor.

    Note:
        Nothing happens in a run on the CPU, which says so, and under strategies other than a single
        device or DDP, which warn. Optimizers with ``capturable=True`` keep their state on the
        device, with a warning.

        Cost: activations cross the bus twice a step, on CUDA beside the computation; optimizer state
        too, and both its copies are waited for. Callbacks that look at optimizer state between
        steps find it on the CPU. Evaluation without ``parameters`` costs nothing.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from lightning_oom.testing import SimulatedGPUStrategy
        >>> offload = CPUOffload(min_bytes=0, verbose=False)
        >>> trainer = Trainer(
        ...     strategy=SimulatedGPUStrategy("64 MiB"), max_epochs=1, limit_train_batches=2,
        ...     limit_val_batches=0, callbacks=[offload], logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(BoringModel())
        >>> offload.tally.num_to_host
        4

    References:
        pytorch/torchtune#1443 (streams); ``torch.autograd.graph.save_on_cpu``, which also copies
        weights.
    """

    def __init__(
        self,
        *,
        activations: bool = True,
        optimizer: bool = False,
        parameters: bool = False,
        min_bytes: int | str = "1 MiB",
        verbose: bool = True,
    ) -> None:
        if not (activations or optimizer or parameters):
            raise ValueError(
                "CPUOffload moves nothing with activations, optimizer and parameters all False: set "
                "one of them to True"
            )
        try:
            self.min_bytes = parse_bytes(min_bytes)
        except ValueError as error:
            raise ValueError(f"min_bytes: {error}") from None
        self.activations = activations
        self.optimizer = optimizer
        self.parameters = parameters
        self.verbose = verbose
        self._trainer: Trainer | None = None
        self._undos = UndoStack()
        self._start_run()

    def _start_run(self) -> None:
        self.tally = OffloadTally()
        self.peaks_by_phase: dict[str, int] = {}
        self._num_steps = 0
        self._peaks: PhasePeaks | None = None
        self._state: OptimizerStateOffload | None = None

    # -- wiring
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take this trainer on, or say why not; keep blocks from the device before they get there."""
        if self._trainer is not None and self._state is not None:
            self._state.move_in()  # another trainer's, which goes on without
        self._close()
        self._start_run()
        if self._declines(trainer):
            return
        self._trainer = trainer
        if self.parameters and stage == "fit":
            self._warn(
                "does not offload weights in fit, where the optimizer's step needs all of them on the "
                "device; they are offloaded in validate, test and predict"
            )
        elif self.parameters:
            self._keep_blocks_away(trainer)

    def _declines(self, trainer: Trainer) -> bool:
        strategy = trainer.strategy
        if strategy.root_device.type == "cpu":
            rank_zero_info("CPUOffload does nothing: the run is on the CPU.")
            return True
        if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            self._warn(
                f"stands aside: {type(strategy).__name__} places weights and state itself; use its "
                "own offloading"
            )
            return True
        return False

    def _keep_blocks_away(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        move_all = strategy.model_to_device

        def move_the_rest() -> None:
            model = trainer.lightning_module
            blocks = find_blocks(model)
            if not blocks:
                self._warn(f"finds no repeated blocks in {type(model).__name__} to offload")
                return move_all()
            offload = BlockOffload(model, blocks, device=strategy.root_device)
            with offload.away():
                move_all()
            self._undos.push(offload.attach())
            if self.verbose:
                rank_zero_info(
                    f"CPUOffload: {len(blocks)} blocks with {format_bytes(offload.kept_bytes)} of "
                    f"weights stay on the host; the largest brings in "
                    f"{format_bytes(offload.largest_bytes)}."
                )
            return None

        self._undos.push(shadow(strategy, "model_to_device", move_the_rest))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the strategy's training step, and move state out that a checkpoint brought."""
        if trainer is not self._trainer:
            return
        device = trainer.strategy.root_device
        self._peaks = PhasePeaks(device)
        if self.activations:
            self._undos.push(self._wrap_step(trainer))
        if self.optimizer:
            reason = OptimizerStateOffload.reason_not_to_move(trainer.optimizers)
            if reason is not None:
                self._warn(f"leaves optimizer state on the device: {reason}")
                return
            self._state = OptimizerStateOffload(
                trainer.optimizers, device=device, min_bytes=self.min_bytes
            )
            self._state.move_out()

    def _wrap_step(self, trainer: Trainer) -> Undo:
        strategy = trainer.strategy
        step = strategy.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            held = _held_by_others(trainer.lightning_module, (args, kwargs))
            with offload_activations(min_bytes=self.min_bytes, keep=held, tally=self.tally):
                del held
                return step(*args, **kwargs)

        return shadow(strategy, "training_step", training_step)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Name the phase."""
        self._enter_phase(trainer, "forward")

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Name the phase."""
        self._enter_phase(trainer, "backward")

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Bring the optimizers' state in: the backward pass has freed its activations."""
        self._enter_phase(trainer, "optimizer")
        if self._state is not None and trainer is self._trainer:
            self._state.move_in()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the optimizers' state out."""
        if trainer is not self._trainer:
            return
        if self._state is not None:
            self._state.move_out()
        self._num_steps += 1
        self._enter_phase(trainer, None)

    def moves_activations_of(self, trainer: Trainer) -> bool:
        """Say whether activations of the steps of a trainer are being offloaded by this callback.

        Args:
            trainer: The trainer that runs them.
        """
        return self.activations and trainer is self._trainer

    def _enter_phase(self, trainer: Trainer, phase: str | None) -> None:
        if self._peaks is not None and trainer is self._trainer:
            self._peaks.enter(phase)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the peaks."""
        if self._peaks is not None and trainer is self._trainer:
            self.peaks_by_phase = {
                phase: peaks.allocated_bytes
                for phase, peaks in self._peaks.take().items()
                if peaks.allocated_bytes is not None
            }

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what was moved and which phase sets the peak."""
        if self.verbose and self._num_steps and trainer is self._trainer:
            rank_zero_info(f"CPUOffload: {self._summarize()}.")

    def _summarize(self) -> str:
        parts = []
        if self.activations:
            moved = self.tally.to_host_bytes // self._num_steps
            back = self.tally.to_device_bytes // self._num_steps
            parts.append(
                f"{format_bytes(moved)} of activations went to the host in each of "
                f"{self._num_steps} batches and {format_bytes(back)} came back"
                if moved
                else f"no activation of {format_bytes(self.min_bytes)} or more was saved"
            )
        if self._state is not None:
            size = format_bytes(self._state.moved_bytes)
            parts.append(f"{size} of optimizer state lay there between steps")
        if self.peaks_by_phase:
            highest = max(self.peaks_by_phase, key=lambda phase: self.peaks_by_phase[phase])
            rest = ", ".join(
                f"{phase} {format_bytes(size)}"
                for phase, size in self.peaks_by_phase.items()
                if phase != highest
            )
            parts.append(
                f"the peak is {format_bytes(self.peaks_by_phase[highest])}, in {highest}"
                + (f" ({rest})" if rest else "")
            )
        return "; ".join(parts)

    # -- undoing
    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put every replaced object back; state is left on the host, where Lightning puts it."""
        if trainer is self._trainer:
            self._close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Put every replaced object back."""
        if trainer is self._trainer:
            self._close()

    def _close(self) -> None:
        self._trainer = self._state = self._peaks = None
        self._undos()

    def _warn(self, text: str) -> None:
        warnings.warn(f"CPUOffload {text}.", LightningOOMWarning, stacklevel=2)


def _held_by_others(module: LightningModule, arguments: Any) -> list[Any]:
    """Return what is on the device in any case: weights, buffers, plain attributes, the batch."""
    return [
        *module.parameters(),
        *module.buffers(),
        *vars(module).values(),
        *tree_leaves(arguments),
    ]

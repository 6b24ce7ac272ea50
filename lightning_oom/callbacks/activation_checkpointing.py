"""Recompute activations in the backward pass instead of keeping them: which, and by how much."""

from __future__ import annotations

import warnings
from collections.abc import Sequence  # noqa: TC003 - jsonargparse reads the annotations
from typing import TYPE_CHECKING, Any, Union

from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_oom.errors import CheckpointingWarning
from lightning_oom.memory.devices import read_memory
from lightning_oom.planning.checkpoint_plan import CheckpointPlan, plan_checkpoints
from lightning_oom.planning.checkpoint_text import checkpoint_report, plan_problem
from lightning_oom.planning.fake_step import FakeStep
from lightning_oom.reduction.checkpointing import (
    CheckpointMeter,
    block_levels,
    install,
    match_blocks,
)
from lightning_oom.units import parse_bytes

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from lightning_oom.undo import Undo

__all__ = ["ActivationCheckpointing"]

_MOST_MICRO_BATCHES = 2


class ActivationCheckpointing(Callback):
    """Keep only the inputs of chosen blocks in the forward, and compute the rest in the backward.

    The blocks are patched from the start of a fit to its end, and not wrapped: names, classes,
    ``state_dict`` keys, hooks, EMA copies and ``torch.compile`` on top stay as they were. Training
    ends with the same bits as without: random state, autocast, BatchNorm statistics and spectral
    norm included. Validation, and whatever runs in eval mode or without gradients, is untouched.
    Layers of Hugging Face transformers are checkpointed by their own switch, which leaves their
    cache unused while training (it rounds differently from a step with a cache) and
    ``config.use_cache`` as it is.

    With a budget, or where blocks lie inside blocks, the first batch is simulated on fake tensors
    before it is run, and the cheapest choice of blocks whose simulated peak is in the budget is
    taken: the step is simulated with it, not estimated from sums. Later batches may be larger: give
    a budget that leaves room, or let the first batch be the largest. Rank 0 decides for all.

    Args:
        modules: ``"auto"`` takes the repeated blocks of the model, whole layers rather than their
            parts. Otherwise class names, paths with wildcards (``"encoder.layers.*"``), or classes.
        budget: The peak to stay under: bytes (``"10 GiB"``), or a fraction of the device in (0, 1].
            ``None`` checkpoints every block that is meant.
        verbose: Print one line per fit with what is saved and paid.

    Attributes:
        plan: What the simulation found, a :class:`~lightning_oom.planning.checkpoint_plan.CheckpointPlan`;
            ``None`` where nothing was simulated.
        paths: The modules that are checkpointed in the present fit, or were in the last one.

    Raises:
        ValueError: An argument is outside its range (by the constructor), or ``modules`` matches
            nothing (when the fit starts; the message lists what comes near).

    Note:
        Cost: one more forward of each checkpointed block, a third of a step if that is all. The
        simulation takes 4 to 8 simulated steps, each about as long as a step on the CPU with one row.
        The first step is measured, which slows its recomputations down. Not for models that are
        scripted or exported while training; under ``torch.compile``, blocks with buffers that may
        change are refused, and with its backend ``"eager"`` the recomputation draws other dropout
        masks, as it does with ``torch.utils.checkpoint``. What a forward changes other than buffers
        (counters, caches, Python's and numpy's random state) is changed twice.

    Example:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        ...         self.encoder = torch.nn.TransformerEncoder(layer, 3)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.encoder(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> checkpointing = ActivationCheckpointing(verbose=False)
        >>> trainer = Trainer(
        ...     max_steps=1, callbacks=[checkpointing], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(4, 5, 8), batch_size=4))
        >>> checkpointing.paths
        ('encoder.layers.0', 'encoder.layers.1', 'encoder.layers.2')

    References:
        Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """

    def __init__(
        self,
        *,
        modules: Union[str, type[nn.Module], Sequence[Union[str, type[nn.Module]]]] = "auto",  # noqa: UP007 - Python 3.10 evaluates it
        budget: Union[float, str, None] = None,  # noqa: UP007 - as above
        verbose: bool = True,
    ) -> None:
        patterns: list[Any] = [modules]
        if isinstance(modules, (list, tuple)):
            patterns = list(modules)
        if not patterns or not all(_is_pattern(pattern) for pattern in patterns):
            raise ValueError(
                "modules is 'auto', or names, paths or classes of modules, one at least, "
                f"got {modules!r}"
            )
        self._patterns = patterns
        self._fraction, self._budget_bytes = _parse_budget(budget)
        self.verbose = verbose
        self.plan: CheckpointPlan | None = None
        self.paths: tuple[str, ...] = ()
        self._undo: Undo | None = None
        self._start_run()

    def _start_run(self) -> None:
        self._levels: list[list[str]] = []
        self._meter: CheckpointMeter | None = None
        self._num_batches = 0
        self._has_reported = not self.verbose

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the blocks; checkpoint them where nothing has to be simulated first."""
        self._take_off()
        self._start_run()
        self.plan, self.paths = None, ()
        self._levels = self._find(pl_module)
        if self._budget_bytes is None and self._fraction is None and len(self._levels) == 1:
            self._put_on(trainer, pl_module, self._levels.pop())

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Simulate the first batch where that is needed, and measure the first two."""
        if self._levels:
            levels, self._levels = self._levels, []
            self._put_on(trainer, pl_module, self._choose(trainer, pl_module, batch, levels))
        if self._meter is not None and self._num_batches == 0:
            self._meter.measure_bytes()
        elif self._meter is not None and self._num_batches == 1:
            self._meter.measure_time()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report as soon as the measurements are there."""
        if self._has_reported:
            return
        self._num_batches += 1
        if self._meter is None:
            self._report()
            return
        self._meter.stop()
        if self._meter.seconds() is not None:
            self._report()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report what could be measured in a fit of one batch, or on a device without clock."""
        if not self._has_reported and self._num_batches:
            self._report()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take checkpointing off."""
        self._take_off()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Take checkpointing off."""
        self._take_off()

    def _find(self, module: LightningModule) -> list[list[str]]:
        if self._patterns != ["auto"]:
            return [[block.path for block in match_blocks(module, self._patterns)]]
        levels = [[block.path for block in level] for level in block_levels(module)]
        if levels:
            return levels
        parts = {type(part).__name__: None for part in module.modules() if part is not module}
        raise ValueError(
            "modules='auto' finds no repeated blocks in this model: name them, by path or by class "
            f"out of {', '.join(parts)}"
        )

    def _choose(
        self, trainer: Trainer, module: LightningModule, batch: Any, levels: list[list[str]]
    ) -> Sequence[str]:
        """Return the paths of the plan that rank 0 makes, or all where none can be made."""
        outcome: CheckpointPlan | str = ""
        if trainer.is_global_zero:
            try:
                outcome = self._simulate(trainer, module, batch, levels)
            except Exception as error:
                outcome = f"{error}"
        outcome = trainer.strategy.broadcast(outcome)
        if isinstance(outcome, str):
            _warn(f"every block is checkpointed, for no choice can be simulated: {outcome}")
            return levels[0]
        self.plan = outcome
        problem = plan_problem(outcome)
        if problem is not None:
            _warn(problem)
        return () if outcome.cannot_help else outcome.paths

    def _simulate(
        self, trainer: Trainer, module: LightningModule, batch: Any, levels: list[list[str]]
    ) -> CheckpointPlan:
        device = trainer.strategy.root_device
        return plan_checkpoints(
            FakeStep(module, batch),
            levels,
            budget_bytes=self._budget_on(device),
            counts_blocks=device.type != "cpu",
            precision=trainer.precision,
            accumulate=min(trainer.accumulate_grad_batches, _MOST_MICRO_BATCHES),
        )

    def _budget_on(self, device: torch.device) -> int | None:
        if self._fraction is None:
            return self._budget_bytes
        limit_bytes = read_memory(device).limit_bytes
        if limit_bytes is None:
            raise ValueError(
                f"budget={self._fraction} is a fraction of the device, and {device} does not tell "
                "what it can hold: give bytes"
            )
        return int(self._fraction * limit_bytes)

    def _put_on(self, trainer: Trainer, module: LightningModule, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        if self.paths and self.verbose:
            self._meter = CheckpointMeter(trainer.strategy.root_device)
        self._undo = install(module, self.paths, meter=self._meter)

    def _take_off(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def _report(self) -> None:
        self._has_reported = True
        text = checkpoint_report(self.paths, self._meter, self.plan)
        rank_zero_info(f"ActivationCheckpointing: {text}")


def _is_pattern(pattern: Any) -> bool:
    if isinstance(pattern, type):
        return issubclass(pattern, nn.Module)
    return isinstance(pattern, str) and bool(pattern)


def _parse_budget(budget: Any) -> tuple[float | None, int | None]:
    """Return the budget as a fraction, or as bytes."""
    if budget is None:
        return None, None
    number = budget
    if isinstance(budget, str):
        try:
            number = float(budget)
        except ValueError:
            number = parse_bytes(budget)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
        raise ValueError(
            "budget is an amount of memory ('10 GiB'), a fraction of the device in (0, 1], or None, "
            f"got {budget!r}"
        )
    return (float(number), None) if number <= 1 else (None, parse_bytes(number))


def _warn(message: str) -> None:
    warnings.warn(f"ActivationCheckpointing: {message}", CheckpointingWarning, stacklevel=3)

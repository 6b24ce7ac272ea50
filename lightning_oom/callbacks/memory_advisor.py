"""Say once per fit what would lower the peak of this model's step, and by how much."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom.errors import LightningOOMWarning, StepNotTracedError
from lightning_oom.planning.advice import AdviceList, advise
from lightning_oom.report.advice_text import render_advice

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["MemoryAdvisor"]


class MemoryAdvisor(Callback):
    """Print what would lower the peak of the training step, each entry with its predicted bytes.

    At the first batch of a fit, before it runs, the step is run on fake tensors, as it is and with
    each change alone: no device memory, no random number, no change to the module. What saves less
    than 1 % of the peak is not shown. What keeps the numbers of the training comes first.

    Tried are: dropping old gradients early, activation checkpointing, key/value caches off, attention
    without a score matrix, fewer rows with accumulation, bfloat16, tied weights, depthwise-separable
    convolutions, copies in user code (with file and line), cross-entropy of a large vocabulary in
    chunks, optimizer state in 8 bits, frozen weights in 16 bits.

    Args:
        most: Entries shown, at least 1.

    Attributes:
        advice: What was found in the last fit, a
            :class:`~lightning_oom.planning.advice.AdviceList`; ``None`` before, or when the step
            cannot be followed on fake tensors.

    Raises:
        ValueError: ``most`` is below 1. Raised by the constructor.

    Note:
        Cost: once per fit and on the first rank only, a second or two for each change that is tried,
        30 s in all for a model such as BERT-base. Advice is for the first batch; a longer one needs
        more. Changes are not applied.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> advisor = MemoryAdvisor()
        >>> trainer = Trainer(
        ...     max_steps=1, callbacks=[advisor], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(BoringModel())
        >>> advisor.advice.peak_bytes > 0
        True
    """

    def __init__(self, *, most: int = 10) -> None:
        if not isinstance(most, int) or most < 1:
            raise ValueError(f"most is a number of entries, at least 1, got {most!r}")
        self.most = most
        self.advice: AdviceList | None = None
        self._is_done = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for a batch."""
        self.advice, self._is_done = None, False

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look at the first batch."""
        if self._is_done or not trainer.is_global_zero:
            return
        self._is_done = True
        started = time.perf_counter()
        try:
            self.advice = advise(
                pl_module,
                batch,
                precision=trainer.precision,
                num_devices=trainer.world_size,
            )
            text = render_advice(self.advice, most=self.most)
        except StepNotTracedError as error:
            rank_zero_info(f"MemoryAdvisor has no advice: {error}")
        except Exception as error:  # advice never ends a training
            warnings.warn(
                f"MemoryAdvisor has no advice: {type(error).__name__}: {error}",
                LightningOOMWarning,
                stacklevel=2,
            )
        else:
            seconds = time.perf_counter() - started
            rank_zero_info(f"MemoryAdvisor ({seconds:.0f} s): {text}")

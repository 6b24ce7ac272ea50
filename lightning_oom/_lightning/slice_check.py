"""What a split would change, found out on a few rows before the first one: gradients and logs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._lightning.log_check import differing_logs
from lightning_oom._lightning.results import LogRecorder
from lightning_oom._lightning.state_check import differing_buffers
from lightning_oom.recovery.batches import count_rows, take_rows
from lightning_oom.recovery.batches.containers import clone_batch
from lightning_oom.recovery.batchnorm import find_batch_coupled
from lightning_oom.recovery.chunked.chunk_gain import ChunkGain, estimate_chunk_gain
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.recovery.cleanup import clear_frames, collect_garbage
from lightning_oom.recovery.separability import check_separable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning.pytorch import Trainer
    from torch import Tensor

    from lightning_oom.recovery.separability import Separability

__all__ = ["SliceCheck"]

_SLICE_ROWS = 4


class SliceCheck:
    """Runs a training step on a slice and on its parts.

    Args:
        trainer: The trainer whose module logs; nothing that the runs log is kept.
        step: Runs the step and returns the loop's result, with ``closure_loss``. It gets copies of
            rows, to which it may write.
        batch: The slice is taken from it.
        weight_fn: Weight of a part, ``None`` for its rows.
        split_fn: The user's way to cut a batch, or ``None``.
    """

    def __init__(
        self,
        trainer: Trainer,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        weight_fn: Callable[[Any], float | Tensor] | None,
        split_fn: Callable[[Any, int], Sequence[Any]] | None,
    ) -> None:
        self.trainer = trainer
        self._step = step
        self.batch = batch
        self.weight_fn = weight_fn
        self.split_fn = split_fn

    def step(self, rows: Any) -> Any:
        """Run the step on a copy of these rows."""
        return self._step(clone_batch(rows))

    def separability(self, *, whole_failed: bool) -> Separability:
        """Compare gradients, or losses where the gradients of a slice do not fit.

        Args:
            whole_failed: The whole batch has just run out of memory; no slice of all its rows is
                tried with gradients then.

        Raises:
            Exception: Not even the losses fit: the out-of-memory error.
        """
        module = self.trainer.lightning_module
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        parameters = [p for _, p in named]
        for batch in self._gradient_batches(whole_failed=whole_failed):
            try:
                with torch.enable_grad():
                    verdict = self._compare(
                        batch,
                        lambda loss: torch.autograd.grad(loss, parameters, allow_unused=True),
                        [name for name, _ in named],
                    )
                if verdict.conclusive or verdict.separable:
                    return verdict
            except Exception as error:
                if classify_oom(error) is None:
                    raise
                clear_frames(error)
            collect_garbage()
        with torch.no_grad():
            return self._compare(self.batch, lambda loss: [loss.detach()], ["loss"])

    def _gradient_batches(self, *, whole_failed: bool) -> list[Any]:
        """Return batches to take slices from: of four rows, then of two, as far as they may fit."""
        rows = count_rows(self.batch) if self.split_fn is None else None
        if rows is None:
            return [self.batch]
        most = rows - 1 if whole_failed and rows <= _SLICE_ROWS else rows
        smaller = [n for n in dict.fromkeys((min(most, _SLICE_ROWS), 2)) if n <= most and n > 1]
        return [self.batch if n == _SLICE_ROWS else take_rows(self.batch, 0, n) for n in smaller]

    def _compare(
        self,
        batch: Any,
        measure: Callable[[Tensor], Sequence[Tensor | None]],
        names: list[str],
    ) -> Separability:
        losses: list[bool] = []

        def measures_of(batch: Any) -> Sequence[Tensor | None]:
            loss = self.step(batch).closure_loss
            losses.append(loss is not None)
            if loss is None or (torch.is_grad_enabled() and not loss.requires_grad):
                return [None] * len(names)
            return measure(loss)

        with LogRecorder(self.trainer, rows=[1]):
            verdict = check_separable(
                measures_of,
                batch,
                names=names,
                weight_fn=self.weight_fn,
                split_fn=self.split_fn,
                coupled=find_batch_coupled(self.trainer.lightning_module),
            )
        if losses and not any(losses):  # this batch trains nothing, whole or in parts
            return replace(verdict, separable=True, conclusive=False, reason="there is no loss")
        return verdict

    def keeping_what_steps_count(
        self, verdict: Separability, *, restore: Callable[[], object]
    ) -> Separability:
        """Return the verdict, or another where a split would leave other values in buffers.

        Args:
            verdict: On the gradients.
            restore: Puts back what a run of the step changes.
        """
        try:
            names = differing_buffers(self.trainer, self.step, self.batch, restore=restore)
        except Exception:  # user code on few rows, which it may not be made for
            return verdict
        if not names:
            return verdict
        reason = (
            f"the step changes {', '.join(names)} in a way that depends on how many micro-batches "
            "it runs as: change it outside of training_step, in on_train_batch_end say"
        )
        return replace(verdict, separable=False, reason=reason)

    def chunk_gain(self) -> ChunkGain | None:
        """Count what a slice keeps inside and outside the module's children."""
        rows = count_rows(self.batch)
        if not rows:
            return None
        part = take_rows(self.batch, 0, min(rows, _SLICE_ROWS))
        module = self.trainer.lightning_module
        with LogRecorder(self.trainer, rows=[1]):
            return estimate_chunk_gain(module, lambda: self.step(part).closure_loss)

    def differing_logs(
        self, log_merge: Mapping[str, str], *, restore: Callable[[], object]
    ) -> tuple[str, ...]:
        """Return the logged names that a split would change; empty when that cannot be found out.

        Args:
            log_merge: The user's rules; names in it are taken to be right.
            restore: Puts back what a run of the step changes.
        """
        try:
            return differing_logs(
                self.trainer,
                self.step,
                self.batch,
                log_merge=log_merge,
                weight_fn=self.weight_fn,
                restore=restore,
            )
        except Exception:  # user code on few rows, which it may not be made for
            return ()

"""One run of the demo: train on a device under a limit, and keep what the table needs."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_oom.cli.demo_model import TinyGPT
from lightning_oom.cli.demo_text import StdlibFunctions
from lightning_oom.memory import read_memory, release_cached, reset_peak
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.testing import SimulatedGPUStrategy, memory_limit
from lightning_oom.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom import OOMRecovery

__all__ = ["DemoRun", "choose_device", "quiet", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """What one training left behind.

    Attributes:
        name: Of the run and its log folder.
        limit_bytes: What the device was allowed to hold; ``None`` for all it has.
        steps: Optimizer steps that were finished.
        seconds: Duration of the fit.
        loss: Loss of the last finished step; ``None`` before the first.
        error: First line of the OOM that ended the run; ``None`` when it finished.
        notes: What OOMRecovery noted on that error; empty without it.
        weights: Parameters at the end, on the host.
        peaks: Largest peak seen for each batch shape (bytes); empty with recovery, which reads peaks
            itself.
        summary: What :class:`~lightning_oom.OOMRecovery` counted; ``None`` without it.
    """

    name: str
    limit_bytes: int | None
    steps: int
    seconds: float
    loss: float | None
    error: str | None
    notes: str
    weights: dict[str, Tensor]
    peaks: dict[tuple[int, ...], int]
    summary: Any | None

    @property
    def peak_bytes(self) -> int:
        """Most that was allocated at once."""
        return max(self.peaks.values())

    def shapes_over_limit(self, unlimited: DemoRun) -> int:
        """Count the batch shapes that needed more than this run's limit in the unlimited run."""
        limit = float("inf") if self.limit_bytes is None else self.limit_bytes
        return sum(peak > limit for peak in unlimited.peaks.values())

    def weight_difference(self, other: DemoRun) -> float | None:
        """Largest absolute difference of any weight; ``None`` when either run died."""
        if self.error is not None or other.error is not None:
            return None
        return max(
            (weight - other.weights[name]).abs().max().item()
            for name, weight in self.weights.items()
        )


def choose_device(name: str) -> str:
    """Turn ``"auto"``, ``"cuda"`` or ``"simgpu"`` into the device to train on.

    Raises:
        ValueError: CUDA is asked for and not there.
    """
    cuda = torch.cuda.is_available()
    if name == "cuda" and not cuda:
        raise ValueError("--device cuda: torch sees no CUDA device here")
    return "cuda:0" if cuda and name != "simgpu" else "simgpu:0"


def train(
    name: str,
    *,
    device: str,
    steps: int,
    seed: int,
    block_length: int,
    output: Path,
    limit_bytes: int | None = None,
    recovery: OOMRecovery | None = None,
) -> DemoRun:
    """Train the small GPT once from the same start.

    Args:
        name: Of the run; its logs go to ``output / name``.
        device: ``"cuda:0"`` or ``"simgpu:0"``.
        steps: Optimizer steps.
        seed: Of the weights and of the order of the batches.
        block_length: Longest row, in tokens.
        output: Folder of all logs.
        limit_bytes: What the device may hold; ``None`` for all it has.
        recovery: The callback under demonstration; ``None`` trains without it.

    Returns:
        What the run left behind. An OOM ends the run and is part of the result.

    Raises:
        Exception: Anything but an OOM that the training raises.
    """
    with torch.random.fork_rng(devices=[]):  # nothing else is random: the data has its own seed
        torch.manual_seed(seed)
        model = TinyGPT(block_length=block_length)
    data = StdlibFunctions(block_length=block_length, seed=seed)
    watch = _PeakOfEachShape(device)
    data.setup("fit")  # tokenizing is no part of the training time
    strategy, limit = _limited(device, limit_bytes)
    error, notes = None, ""
    start = time.perf_counter()
    with limit:
        trainer = Trainer(
            **strategy,
            max_steps=steps,
            max_epochs=1 + steps // len(data.train_dataloader()),
            limit_train_batches=min(steps, len(data.train_dataloader())),
            gradient_clip_val=1.0,
            log_every_n_steps=1,
            callbacks=[_Bar(), watch if recovery is None else recovery],
            logger=TensorBoardLogger(output, name="", version=name),
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(model, data)
        except Exception as caught:
            cause = classify_oom(caught)
            if cause is None:
                raise
            error = cause.message.splitlines()[0]
            notes = "\n".join(getattr(caught, "__notes__", ()))
    seconds = time.perf_counter() - start
    loss = trainer.callback_metrics.get("train/loss")
    return DemoRun(
        name=name,
        limit_bytes=limit_bytes,
        steps=trainer.global_step,
        seconds=seconds,
        loss=None if loss is None else float(loss),
        error=error,
        notes=notes,
        weights=_to_host(model),
        peaks=watch.peaks,
        summary=None if recovery is None else recovery.summary,
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave the screen to the progress bars, the table and what OOMRecovery says of each OOM."""
    notices = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    notices.addFilter(_is_ours)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning\\.(pytorch|fabric)")
            warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
            yield
    finally:
        notices.removeFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    """Say whether a notice comes from lightning_oom: Lightning's own go through the same logger."""
    return Path(record.pathname).is_relative_to(Path(__file__).parents[1])


class _Bar(RichProgressBar):
    """A progress bar without the logger's version, which the heading above it has said."""

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class _PeakOfEachShape(Callback):
    """Read the peak of every batch that finishes."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.peaks: dict[tuple[int, ...], int] = {}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        reset_peak(self.device)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        shape = tuple(batch["tokens"].shape)
        peak = read_memory(self.device).peak_allocated_bytes or 0
        self.peaks[shape] = max(peak, self.peaks.get(shape, 0))


def _limited(
    device: str, limit_bytes: int | None
) -> tuple[dict[str, Any], AbstractContextManager[Any]]:
    """Trainer arguments for the device, and the context that holds it to the limit."""
    gc.collect()
    if device.startswith("simgpu"):
        limit = 64 * GIB if limit_bytes is None else limit_bytes
        return {"strategy": SimulatedGPUStrategy(limit=limit)}, contextlib.nullcontext()
    release_cached(device)
    capped: AbstractContextManager[Any] = (
        contextlib.nullcontext()
        if limit_bytes is None
        else memory_limit(limit_bytes, device=device)
    )
    return {"accelerator": "gpu", "devices": 1}, capped


def _to_host(model: LightningModule) -> dict[str, Tensor]:
    return {name: weight.detach().cpu() for name, weight in model.named_parameters()}

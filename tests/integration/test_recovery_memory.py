"""The guard holds nothing, costs no memory, and lets go of everything."""

from __future__ import annotations

import gc
import weakref
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from fakes import TinyRegressor, batches_of, cuda_oom, failing
from fits import AtBatch, end_state, fit, quiet, recovery
from lightning.pytorch import LightningModule, Trainer
from states import compare
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.testing import memory_limit

KIB = 1024
OUR_WORLD = ("builtins", "collections", "functools", "lightning_oom")


class Wide(TinyRegressor):
    """Wide enough for activations to outweigh everything else."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        inner = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())]
        self.body = nn.Sequential(nn.Linear(8, width), *inner, nn.Linear(width, 1))


def peak_of(rows: list[int], *callbacks: Any, **options: Any) -> int:
    """Most bytes alive at once in a fit."""
    with memory_limit("1 GiB", device="cpu") as limit:
        fit(Wide, batches_of(rows), *callbacks, **options)
    return limit.peak_bytes


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulate", "clip", "bf16-mixed"],
)
def test_an_idle_guard_does_not_raise_the_peak(options):
    """The peak of a fit without an OOM is that of the bare Trainer."""
    rows = [64] * 4

    bare, guarded = peak_of(rows, **options), peak_of(rows, recovery(), **options)

    assert guarded <= bare + KIB  # random states of the generators, a few hundred bytes each


@pytest.mark.parametrize("rung", ["chunk", "split"])
def test_rare_oversized_batches_fit_under_a_byte_limit(rung):
    """Batches four times larger than what fits are trained with the same end (PL#8531)."""
    rows = [64] * 8
    rows[3] = rows[6] = 256
    limit_bytes = (peak_of([64] * 8) + peak_of([256] * 2)) // 2
    guard = recovery(ladder=("release", rung))

    expected, _ = fit(Wide, batches_of(rows))
    with memory_limit(limit_bytes, device="cpu") as limit:
        actual, _ = fit(Wide, batches_of(rows), guard)

    assert limit.num_refused >= 1
    assert limit.peak_bytes <= limit_bytes
    assert guard.summary.num_recovered == guard.summary.num_oom >= 1
    assert actual.global_step == len(rows)
    assert compare(end_state(expected), end_state(actual), tolerance=1e-5) == []


def referents(item: Any) -> list[Any]:
    """What an object holds; of a function its closure and defaults, not its module's globals."""
    if isinstance(item, FunctionType):
        return [cell.cell_contents for cell in item.__closure__ or () if cell_is_full(cell)]
    return gc.get_referents(item)


def cell_is_full(cell: Any) -> bool:
    """A cell of a function that is still being made has nothing in it."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def foreign_tensors(root: Any, allowed: set[int]) -> list[tuple[int, ...]]:
    """Shapes of tensors that can be reached from ``root`` without passing trainer or model.

    A single number without a graph is no memory.
    """
    stops = (Trainer, nn.Module, torch.optim.Optimizer, DataLoader, type, ModuleType)
    seen, stack, found = {id(root)}, [root], []
    while stack:
        for item in referents(stack.pop()):
            kind = type(item)
            if id(item) in seen or issubclass(kind, stops):
                continue
            seen.add(id(item))
            if issubclass(kind, Tensor):
                if id(item) not in allowed and (item.numel() > 1 or item.grad_fn is not None):
                    found.append(tuple(item.shape))
            elif kind.__module__.split(".")[0] in OUR_WORLD:
                stack.append(item)
    return found


@pytest.mark.parametrize("ladder", [("release",), ("chunk",), ("split",)])
def test_the_guard_holds_no_tensor_between_steps(ladder):
    """Neither a batch, nor a gradient, nor a loss stays with us (PL#4556)."""
    guard = recovery(ladder=ladder)
    found: list[Any] = []

    def look(trainer: Trainer, model: LightningModule) -> None:
        states = [state.values() for state in trainer.optimizers[0].state.values()]
        allowed = {id(t) for group in (model.parameters(), model.buffers(), *states) for t in group}
        found.extend(foreign_tensors(vars(guard), allowed))

    fit(failing(1, 3), batches_of([8] * 6), guard, AtBatch(look))

    assert guard.summary.num_recovered >= 1
    assert found == []


class FreshRows(Dataset):
    """Makes each batch when it is asked for, and keeps none."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((8, 8), 0.1 * index)
        return x, x.sum(-1)


class Watched(TinyRegressor):
    """Says at each step what of the step before is still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.previous: dict[str, Any] = {}
        self.alive: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Look, then remember weakly."""
        self.alive += [name for name, reference in self.previous.items() if reference() is not None]
        loss, extra = super().training_step(batch, batch_idx), torch.zeros(8)
        held = {"batch": batch[0], "loss": loss, "extra": extra}
        self.previous = {name: weakref.ref(tensor) for name, tensor in held.items()}
        return {"loss": loss, "extra": extra}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_of_a_step_is_alive_at_the_next(accumulate):
    """Batch, loss and outputs die as in a bare Trainer, without waiting for the collector (PL#9336)."""
    loader = DataLoader(FreshRows(), batch_size=None)
    gc.collect()
    gc.disable()
    try:
        _, bare = fit(Watched, loader, accumulate_grad_batches=accumulate)
        _, guarded = fit(Watched, loader, recovery(), accumulate_grad_batches=accumulate)
    finally:
        gc.enable()

    assert guarded.alive == bare.alive == []


def live_tensors() -> int:
    """Tensors that the collector knows."""
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


class FailsOnEightRows(nn.Module):
    """An identity that never fits eight rows in training."""

    def forward(self, x: Tensor) -> Tensor:
        """Fail on eight rows."""
        if len(x) == 8 and self.training:
            raise cuda_oom()
        return x


@pytest.mark.parametrize("ladder", [("release",), ("chunk",), ("split",)])
def test_nothing_accumulates_over_recoveries(ladder):
    """Twenty recoveries leave as many tensors as two (HF#24050)."""
    counts: list[int] = []
    guard = recovery(ladder=ladder)
    knows_nothing = recovery(ladder=ladder).state_dict()

    def make() -> TinyRegressor:
        model = failing(*range(1, 44, 2))()
        if ladder != ("release",):
            model.body[1] = FailsOnEightRows()
        return model

    def look(trainer: Trainer, model: LightningModule) -> None:
        guard.load_state_dict(knows_nothing)  # or it would never fail again
        counts.append(live_tensors())

    fit(make, batches_of([8] * 22), guard, AtBatch(look))

    assert guard.summary.num_recovered >= 20
    assert counts[2:] == [counts[2]] * len(counts[2:])


def run_and_forget(*, fails: bool) -> list[weakref.ref]:
    """Fit (or break), and keep only weak references."""
    guard = recovery()
    model = (failing() if fails else failing(1))()
    trainer = quiet(guard)
    try:
        trainer.fit(model, batches_of([8, 8]))
    except OutOfMemoryError:
        assert fails
    return [weakref.ref(o) for o in (model, trainer, guard, model.body[0].weight)]


@pytest.mark.parametrize("fails", [False, True], ids=["finished", "broken"])
def test_model_trainer_and_guard_die_after_the_fit(fails):
    """Three runs in one process leave nothing behind, also after an exception (PL#3275)."""
    for _ in range(3):
        references = run_and_forget(fails=fails)
        gc.collect()

        assert [reference() for reference in references] == [None] * 4

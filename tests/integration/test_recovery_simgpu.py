"""What only a device with its own memory shows: transfers, allocator readings, real limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import TinyRegressor, batches_of
from fits import end_state, fit, notes_of, quiet, recovery
from states import compare
from torch import Tensor, nn

from lightning_oom._torch import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

simgpu = pytest.importorskip("lightning_oom.testing.simgpu")

MIB = 2**20


class Wide(TinyRegressor):
    """Activations outweigh parameters."""

    def __init__(self) -> None:
        super().__init__()
        inner = [m for _ in range(3) for m in (nn.Linear(128, 128), nn.Tanh())]
        self.body = nn.Sequential(nn.Linear(8, 128), *inner, nn.Linear(128, 1))


class FewWeights(TinyRegressor):
    """The batch outweighs everything else."""

    def __init__(self) -> None:
        super().__init__(features=2048, hidden=2, learning_rate=1e-5)


def on_gpu(limit: int | None = None) -> dict[str, Any]:
    """Trainer options for a simulated GPU of so many bytes."""
    strategy = simgpu.SimulatedGPUStrategy(limit)
    return {"strategy": strategy, "accelerator": "auto", "devices": "auto"}


def peak_of(make: Callable[[], Any], loader: Any, *callbacks: Any) -> int:
    """Most bytes that the allocator held for live tensors in a fit."""
    options = on_gpu()
    torch.simgpu.reset_peak_memory_stats()
    fit(make, loader, *callbacks, **options)
    return torch.simgpu.max_memory_allocated()


def test_an_idle_guard_does_not_raise_the_peak_of_the_device():
    """The allocator's own peak is that of the bare Trainer, to the byte; by default it is lower."""
    plain, late, early = (
        peak_of(Wide, batches_of([256] * 3), *guards)
        for guards in ([], [recovery(early_zero_grad=False)], [recovery()])
    )

    assert late == plain
    assert early < plain


@pytest.mark.parametrize("rung", ["chunk", "split"])
def test_rare_oversized_batches_fit_on_a_small_device(rung):
    """A real limit in forward or backward, and the end of the unlimited run (PL#8531)."""
    rows = [2048, 2048, 8192, 2048, 8192]
    guard = recovery(ladder=("release", rung))
    small, large = (peak_of(Wide, batches_of([n, n])) for n in (2048, 8192))

    expected, _ = fit(Wide, batches_of(rows), **on_gpu())
    state = end_state(expected)
    actual, _ = fit(Wide, batches_of(rows), guard, **on_gpu((small + 3 * large) // 4))

    assert guard.summary.num_oom >= 1
    assert guard.summary.num_recovered == guard.summary.num_oom
    assert compare(state, end_state(actual), tolerance=1e-5) == []


def test_without_the_guard_the_small_device_fails():
    """The limit of the test above is a real one."""
    small, large = (peak_of(Wide, batches_of([n, n])) for n in (2048, 8192))

    with pytest.raises(OutOfMemoryError, match="Tried to allocate"):
        fit(Wide, batches_of([8192]), **on_gpu((small + 3 * large) // 4))


def test_a_batch_too_large_for_the_device_is_split_on_the_host():
    """The transfer itself runs out of memory: pieces are moved one by one."""
    rows = [256, 4096, 256]
    batch_bytes = 4096 * 2048 * 4
    guard = recovery()

    expected, _ = fit(FewWeights, batches_of(rows, features=2048), **on_gpu())
    state = end_state(expected)
    actual, _ = fit(
        FewWeights, batches_of(rows, features=2048), guard, **on_gpu(batch_bytes * 3 // 4)
    )

    assert guard.summary.num_recovered >= 1
    assert compare(state, end_state(actual), tolerance=1e-4) == []


def test_a_row_too_large_for_the_device_ends_with_the_original_error():
    """Nothing can be done about one row."""
    with pytest.raises(OutOfMemoryError) as caught:
        fit(
            lambda: TinyRegressor(features=MIB, hidden=1),
            batches_of([1], features=MIB),
            recovery(),
            **on_gpu(6 * MIB),
        )

    assert "lightning_oom" in notes_of(caught.value) or "simgpu" in notes_of(caught.value)


def test_memory_comes_back_after_a_recovery():
    """What is allocated after each step is the same before and after recoveries."""
    rows = [2048, 2048, 8192, 2048, 2048]
    small, large = (peak_of(Wide, batches_of([n, n])) for n in (2048, 8192))
    held: list[int] = []

    class Watch(Wide):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            held.append(torch.simgpu.memory_allocated() - sum(x.nbytes for x in batch))

    guard = recovery(ladder=("release", "split"))
    fit(Watch, batches_of(rows), guard, **on_gpu((small + 3 * large) // 4))

    assert guard.summary.num_recovered >= 1
    assert held[4] == held[2]


def test_a_failing_cleanup_does_not_replace_the_error(monkeypatch):
    """``empty_cache`` that raises while cleaning up leaves the first error on top (ComfyUI#12366)."""

    def broken() -> None:
        raise RuntimeError("CUDA error: out of memory in cleanup")

    monkeypatch.setattr(torch.simgpu, "empty_cache", broken)
    trainer = quiet(recovery(), **on_gpu())

    with pytest.raises(OutOfMemoryError, match="Tried to allocate 64"):
        trainer.fit(TinyRegressor(fits_rows=0), batches_of([4]))


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_an_evaluation_is_split_on_the_device(stage):
    """Forward passes that do not fit run in pieces, with the same result."""

    class Evaluating(Wide):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0]).cpu()

    def run(limit: int | None, *callbacks: Any) -> Any:
        torch.manual_seed(5)
        options = {"verbose": False} if stage == "validate" else {}
        trainer = quiet(*callbacks, **on_gpu(limit))
        return getattr(trainer, stage)(Evaluating(), batches_of([1024, 8192]), **options)

    guard = recovery()
    expected = run(None)
    actual = run(10 * MIB, guard)

    assert guard.summary.num_recovered >= 1
    assert compare(expected, actual, tolerance=1e-5) == []

"""Rungs that keep the batch whole, on a device with a limit: equal to the run that had room."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import TinyRegressor, batches_of
from fits import end_state, fit, notes_of, quiet, recovery
from states import compare
from torch import Tensor, nn

from lightning_oom._torch import OutOfMemoryError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_oom.recovery.events import StepOutcome

simgpu = pytest.importorskip("lightning_oom.testing.simgpu")


class Block(nn.Module):
    """A residual block that keeps far more than it hands on."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(32, 32), nn.BatchNorm1d(32) if norm else nn.Tanh(), nn.Sigmoid()]
        self.inner = nn.Sequential(*layers, nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the inner layers' result."""
        return x + self.inner(x)


class Blocks(TinyRegressor):
    """Four blocks, with batch normalisation: its rows depend on each other."""

    norm = True

    def __init__(self) -> None:
        super().__init__()
        blocks = [Block(norm=self.norm) for _ in range(4)]
        self.body = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 1))


class Rows(Blocks):
    """The same without: rows are independent."""

    norm = False


class NoDropout(Rows):
    """Splits draw other masks."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


class OneRow(TinyRegressor):
    """One row is a whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [Block(norm=False) for _ in range(4)]
        self.body = nn.Sequential(nn.Linear(1, 32), *blocks, nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Look at each entry of the row on its own."""
        return self.body(x.unsqueeze(-1)).mean((-1, -2))


def on_gpu(limit: int | None = None) -> dict[str, Any]:
    """Trainer options for a simulated GPU of so many bytes."""
    strategy = simgpu.SimulatedGPUStrategy(limit)
    return {"strategy": strategy, "accelerator": "auto", "devices": "auto"}


def peak_of(make: Any, loader: Any) -> int:
    """Most bytes that the allocator reserved in a fit."""
    options = on_gpu()
    torch.simgpu.empty_cache()
    torch.simgpu.reset_peak_memory_stats()
    fit(make, loader, **options)
    return torch.simgpu.max_memory_reserved()


class Plans:
    """Collects the plans that worked."""

    def __init__(self, guard: Any) -> None:
        self.words: list[str] = []
        self.failures: list[int] = []
        tell = guard._tell_outcome

        def listen(outcome: StepOutcome) -> None:
            self.words.append(outcome.plan.describe() if outcome.plan else "none")
            self.failures.append(len(outcome.failures))
            tell(outcome)

        guard._tell_outcome = listen


def both(make: Any, loader: Any, guard: Any, fraction: float) -> tuple[Trainer, Trainer]:
    """Run with all the room, and with a fraction of what that took."""
    peak = peak_of(make, loader)
    unlimited, _ = fit(make, loader, **on_gpu())
    limited, _ = fit(make, loader, guard, **on_gpu(int(peak * fraction)))
    return unlimited, limited


def test_a_model_with_batch_normalisation_is_saved_whole_and_bit_equal():
    """The default ladder: parts do not add up, checkpointed blocks do; buffers, logs, random state."""
    guard = recovery()
    plans = Plans(guard)
    rows = [1024, 8192, 1024, 8192, 8192]

    expected, actual = both(Blocks, batches_of(rows), guard, 0.6)

    assert compare(end_state(expected), end_state(actual), tolerance=0) == []
    assert set(plans.words) == {"checkpoint"}
    assert len(plans.words) == 1  # the later large batches start with it


def test_without_these_rungs_the_same_run_dies():
    """The limit of the test above is a real one."""
    guard = recovery(ladder=["release", "chunk", "split"])

    with pytest.raises(OutOfMemoryError) as caught:
        both(Blocks, batches_of([8192]), guard, 0.6)

    assert "split" in notes_of(caught.value)


@pytest.mark.parametrize("rung", ["checkpoint", "offload"])
def test_a_batch_of_one_row_is_saved(rung):
    """Nothing can be cut, and one row does not fit."""
    guard = recovery(ladder=["release", "split", rung])
    plans = Plans(guard)

    expected, actual = both(OneRow, batches_of([1, 1], features=8192), guard, 0.6)

    assert compare(end_state(expected), end_state(actual), tolerance=0) == []
    assert plans.words == [rung]


def test_a_rung_and_a_split_together_where_neither_is_enough():
    """Checkpointed halves, quarters... until they fit; equal up to rounding."""
    guard = recovery(ladder=["checkpoint"])
    plans = Plans(guard)

    expected, actual = both(NoDropout, batches_of([8192, 8192]), guard, 0.25)

    assert compare(end_state(expected), end_state(actual), tolerance=1e-5) == []
    assert plans.words[0].startswith("checkpoint + split into micro-batches of ")


def test_autocast_is_used_only_when_it_is_named():
    """The weights stay 32-bit, and the precision of the trainer comes back."""
    guard = recovery(ladder=["amp"])
    plans = Plans(guard)

    _, actual = both(NoDropout, batches_of([8192, 1024]), guard, 0.85)

    assert plans.words == ["amp"]
    assert actual.precision == "32-true"
    assert {p.dtype for p in actual.lightning_module.parameters()} == {torch.float32}
    assert all(torch.isfinite(p).all() for p in actual.lightning_module.parameters())


def test_what_was_needed_is_known_after_a_resume():
    """A new guard with the old one's state starts large batches with the rung: no failure."""
    peak = peak_of(Blocks, batches_of([8192]))
    first, second = recovery(), recovery()
    fit(Blocks, batches_of([8192]), first, **on_gpu(int(peak * 0.6)))
    second.load_state_dict(first.state_dict())

    fit(Blocks, batches_of([1024, 8192]), second, **on_gpu(int(peak * 0.6)))

    assert first.summary.num_oom == 1
    assert second.summary.num_oom == 0


def test_evaluation_has_nothing_to_hold():
    """A validation batch of one row that does not fit raises its own error, with the reason."""
    guard = recovery(ladder=["checkpoint", "offload"])
    trainer = quiet(guard, **on_gpu(8 * 2**20))

    with pytest.raises(OutOfMemoryError) as caught:
        trainer.test(OneRow(), batches_of([1], features=65536), verbose=False)

    assert "checkpoint: this stage keeps nothing for backward" in notes_of(caught.value)


@pytest.mark.parametrize(
    ("ladder", "text"),
    [
        (["rewind"], "a rung of ladder is one of .* got 'rewind'"),
        ("amp", "ladder is a list of rungs"),
        ([], "ladder is a list of rungs"),
        (["amp", "amp"], "different names"),
    ],
)
def test_the_ladder_is_checked_when_it_is_built(ladder, text):
    """A typo is named before anything runs."""
    with pytest.raises(ValueError, match=text):
        recovery(ladder=ladder)


def test_the_callback_can_be_pickled_and_a_copy_has_its_own_trainer():
    """Spawned processes get it by pickle; a deepcopy must not act on the original's trainer."""
    guard = recovery(ladder=["release", "chunk", "split", "checkpoint", "offload", "amp"])
    loaded = pickle.loads(pickle.dumps(guard))  # noqa: S301 - our own
    copied = copy.deepcopy(guard)

    for one in (loaded, copied):
        rungs = one._options.ladder.rungs
        assert [rung.name for rung in rungs][-1] == "amp"
        assert rungs[3].open_context.__self__._trainer.__self__ is one

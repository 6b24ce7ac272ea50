"""Accumulation beside a recovery, after a resume, and on several ranks."""

from __future__ import annotations

import pytest
import torch
from accumulation_cases import CASES, TOLERANCE, accumulate, rows_of, run
from fakes import TinyRegressor
from fits import fit, quiet, recovery, weights
from lightning.pytorch.callbacks import ModelCheckpoint
from states import compare
from torch.utils.data import DataLoader, IterableDataset

from lightning_oom import EarlyZeroGrad
from lightning_oom.testing import fail_at


@pytest.mark.parametrize("first", ["recovery", "accumulation"])
def test_it_goes_with_a_recovery_that_splits(first) -> None:
    """A batch of a window is split, the weights stay those of its rows; in either order."""
    guard = recovery(ladder=["split"])
    callbacks = [guard, accumulate(9)]
    if first == "accumulation":
        callbacks.reverse()
    sizes, _, merged = CASES["ragged"]
    ours = run(sizes, *callbacks, EarlyZeroGrad(), make=lambda: TinyRegressor(fits_rows=3))
    plain = run(merged)

    assert guard.summary.num_recovered > 0
    assert ours.global_step == plain.global_step
    assert (
        compare(
            weights(plain.lightning_module), weights(ours.lightning_module), tolerance=TOLERANCE
        )
        == []
    )


@pytest.mark.parametrize("share", [3, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_failure_anywhere_in_a_window_counts_nothing_twice(share) -> None:
    """Allocations of a corrected window in turn: in forwards, and in a half finished backward."""
    plain = run([9, 6], max_epochs=1)
    counting = fail_at((), step=0)
    run([4, 3, 2, 5, 1], accumulate(9), counting, max_epochs=1)
    for number in range(2, counting.count, max(1, counting.count // share)):
        guard, fault = recovery(ladder=["release"]), fail_at(number, step=0)
        ours = run([4, 3, 2, 5, 1], accumulate(9), guard, fault, max_epochs=1)

        assert fault.raised == 1
        assert (
            compare(
                weights(plain.lightning_module), weights(ours.lightning_module), tolerance=TOLERANCE
            )
            == []
        ), number


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_as_it_was(tmp_path) -> None:
    """From the end of a window: the same weights, steps and rows logged as without the break."""
    sizes = [4, 3, 2, 5, 1, 6, 2]
    whole = run(sizes, accumulate(9))
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    run(sizes, accumulate(9), saver, enable_checkpointing=True, max_steps=1, max_epochs=None)
    model = TinyRegressor()
    trainer = quiet(accumulate(9), max_epochs=2)

    class Resumable(DataLoader):
        """Lightning skips nothing on resume: the loader does, once."""

        skip = 3

        def __iter__(self):
            batches = list(super().__iter__())[self.skip :]
            self.skip = 0
            return iter(batches)

        def state_dict(self):
            return {}

        def load_state_dict(self, state) -> None:
            pass

    loader = Resumable(rows_of(*sizes).dataset, batch_size=None)
    trainer.fit(model, loader, ckpt_path=tmp_path / "step=1.ckpt", weights_only=False)

    assert trainer.global_step == whole.global_step
    assert compare(weights(whole.lightning_module), weights(model), tolerance=TOLERANCE) == []
    assert [step for step, _ in trainer.logger.rows] == [step for step, _ in whole.logger.rows][1:]


class PerRank(IterableDataset):
    """Every rank's own share of the batches: 4, 1, 3 rows in one, 2, 5, 3 in the other."""

    def __iter__(self):
        """In the order of the ranks."""
        batches = list(rows_of(4, 2, 1, 5, 3, 3).dataset)
        return iter(batches[torch.distributed.get_rank() :: 2])


@pytest.mark.filterwarnings("ignore:It is recommended to use .self.log")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_ranks_that_differ_give_the_mean_over_all_rows() -> None:
    """Two processes, batches of unequal length in both: the effective batch in one process."""
    options = {"strategy": "ddp_fork", "devices": 2, "logger": False, "max_epochs": 2}
    loader = DataLoader(PerRank(), batch_size=None)
    ours, _ = fit(TinyRegressor, loader, accumulate(12), **options)
    plain = run([12, 6], logger=False)

    assert plain.global_step == 4
    assert (
        compare(
            weights(plain.lightning_module), weights(ours.lightning_module), tolerance=TOLERANCE
        )
        == []
    )

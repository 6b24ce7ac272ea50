"""``fail_at`` fails where it says, once, and leaves no trace."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import TinyRegressor, regression_loader
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from quiet_runs import fit, quiet_trainer

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.testing import fail_at, fail_on
from lightning_oom.testing.phases import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_oom.testing import AllocationFault


def allocate() -> str:
    """Allocate once; say how it went."""
    try:
        torch.zeros(1)
    except OutOfMemoryError:
        return "oom"
    return "ok"


def counted(*, model: Any = None, step: int | None = 1, **options: Any) -> AllocationFault:
    """Count the allocations of a step."""
    fault = fail_at((), step=step)
    fit(fault, model=model, **options)
    return fault


def test_the_nth_allocation_of_a_block_fails_once() -> None:
    """The numbers count from the start of the block, and the retry succeeds."""
    with fail_at(3) as fault:
        kept = [torch.zeros(4), torch.ones(4)]
        with pytest.raises(OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate 16"):
            kept[0].add(kept[1])
        total = kept[0].add(kept[1])

    assert total.sum() == 4
    assert (fault.count, fault.raised) == (4, 1)
    assert [number for number, _, _ in fault.trace] == [1, 2, 3, 4]
    assert fault.trace[2] == (3, "aten.add.Tensor", 16)


def test_several_allocations_can_fail() -> None:
    """Each number fires once, so a retry can be made to fail as well."""
    with fail_at([1, 2, 4]) as fault:
        outcome = [allocate() for _ in range(6)]

    assert outcome == ["oom", "oom", "ok", "oom", "ok", "ok"]
    assert (fault.count, fault.raised) == (6, 3)


def test_times_fails_allocations_in_a_row() -> None:
    """``times`` repeats the failure for the allocations that follow."""
    with fail_at(2, times=2):
        outcome = [allocate() for _ in range(4)]

    assert outcome == ["ok", "oom", "oom", "ok"]


def test_the_failed_allocation_is_freed_before_the_error() -> None:
    """While the error is handled, neither result nor operands are held by it."""
    with fail_at(2) as fault:
        watcher = fault._watcher
        assert watcher is not None
        with pytest.raises(OutOfMemoryError) as caught:
            torch.zeros(1024).exp()
        assert watcher.ledger.live_bytes == 0
    del caught


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param("CUDA error: out of memory", RuntimeError, id="text"),
        pytest.param(lambda: MemoryError("host"), MemoryError, id="factory"),
        pytest.param(KeyboardInterrupt, KeyboardInterrupt, id="class"),
    ],
)
def test_any_error_can_be_raised(
    error: str | Callable[[], BaseException], expected: type[BaseException]
) -> None:
    """``error`` takes a text or whatever makes an exception."""
    with fail_at(1, error=error), pytest.raises(expected):
        torch.zeros(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "counted from 1, got 0"),
        ({"n": [3, -1]}, "counted from 1, got -1"),
        ({"n": True}, "counted from 1, got True"),
        ({"n": 1, "times": 0}, "times is at least 1, got 0"),
        ({"n": 1, "step": -1}, "step is counted from 0, got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    """The constructor names the value and the range."""
    with pytest.raises(ValueError, match=message):
        fail_at(**arguments)


def test_a_block_is_entered_once_at_a_time() -> None:
    """Entering an active fault is an error."""
    fault = fail_at(())
    with fault, pytest.raises(RuntimeError, match="already active"), fault:
        pass


def test_every_step_has_the_same_number_of_allocations() -> None:
    """Counting is confined to the step, and does not change it."""
    assert counted(step=1).count == counted(step=3).count > 10
    assert counted(step=99).count == 0


def test_without_a_step_all_steps_are_counted() -> None:
    """``step=None`` counts through."""
    first, later = counted(step=0).count, counted(step=1).count

    assert counted(step=None).count == first + 4 * later


def test_each_number_of_a_step_fails_there() -> None:
    """For each allocation of a step, the error comes out of that step and of no other."""
    total = counted().count

    for number in range(1, total + 1):
        fault = fail_at(number, step=1)
        trainer = quiet_trainer(fault)
        with pytest.raises(OutOfMemoryError, match=f"fail_at, allocation {number},"):
            trainer.fit(TinyRegressor(), regression_loader())

        assert (fault.count, fault.raised) == (number, 1)
        assert trainer.global_step == 1


def test_accumulation_counts_all_micro_batches_of_the_step() -> None:
    """Both batches of a window belong to one step."""
    single = counted(step=1)
    double = counted(step=1, accumulate_grad_batches=2)

    assert double.count > 1.5 * single.count


class WithLBFGS(TinyRegressor):
    """Calls the closure several times a step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """LBFGS with three iterations."""
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


def test_all_closures_of_a_step_are_counted() -> None:
    """LBFGS evaluates the closure several times: all of it is the step."""
    assert counted(model=WithLBFGS()).count > 2 * counted().count


class MovesBatches(TinyRegressor):
    """Allocates while the batch is moved to the device."""

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Copy each tensor."""
        return [tensor.clone() for tensor in batch]


def test_the_transfer_is_counted_on_request() -> None:
    """``include_transfer`` puts the moving of the batch in front of the step's own allocations."""
    alone = counted(model=MovesBatches())
    fault = fail_at((), step=1, include_transfer=True)
    trainer = fit(fault, model=MovesBatches())

    assert fault.count == alone.count + 2
    assert [operator for _, operator, _ in fault.trace[:2]] == ["aten.clone.default"] * 2
    assert "batch_to_device" not in vars(trainer.strategy)


def test_a_failed_fit_leaves_no_trace_on_the_strategy() -> None:
    """After the error the mode is off and the strategy's methods are its own."""
    for fault in (
        fail_at(1, step=1, include_transfer=True),
        *(fail_on(step=1, phase=phase) for phase in ("transfer", "forward", "backward")),
    ):
        trainer = quiet_trainer(fault)
        with pytest.raises(OutOfMemoryError):
            trainer.fit(MovesBatches(), regression_loader())

        assert not {*PHASES.values()} & vars(trainer.strategy).keys()
        assert torch.zeros(1).item() == 0


def test_a_step_that_ends_unseen_leaves_no_trace() -> None:
    """Tuners swallow the errors of their trials: the next step, or the teardown, tidies up."""
    fault, trainer, model = fail_at(2, step=0), quiet_trainer(), TinyRegressor()
    fault.on_train_batch_start(trainer, model, None, 0)
    torch.zeros(1)
    fault.on_train_batch_start(trainer, model, None, 0)
    with pytest.raises(OutOfMemoryError):
        torch.zeros(1)
    fault.teardown(trainer, model, "fit")

    torch.zeros(1)

    assert (fault.count, fault.raised) == (2, 1)


def test_counting_changes_no_weight() -> None:
    """A fit with an idle fault ends bit for bit where it ends without one."""
    ends = []
    for callbacks in ((), (fail_at((), include_transfer=True),)):
        torch.manual_seed(3)
        model = TinyRegressor()
        fit(*callbacks, model=model)
        ends.append([weight.detach() for weight in model.parameters()])

    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_faults_are_pickled_for_other_processes() -> None:
    """Strategies that start processes send their callbacks there."""
    fault = pickle.loads(pickle.dumps(fail_at([2, 3], step=4)))  # noqa: S301 our own bytes
    phase = pickle.loads(pickle.dumps(fail_on(step=1, phase="backward")))  # noqa: S301 our own bytes

    assert (fault.step, phase.phase) == (4, "backward")


def test_faults_are_made_from_yaml() -> None:
    """``class_path`` may name the function, as in a file for LightningCLI."""
    parser = ArgumentParser()
    parser.add_argument("--callbacks", type=list[Callback])
    options = {"step": 2, "phase": "backward", "error": "CUDA error: out of memory"}
    config = {
        "callbacks": [
            {"class_path": "lightning_oom.testing.fail_at", "init_args": {"n": [3], "step": 2}},
            {"class_path": "lightning_oom.testing.fail_on", "init_args": options},
        ]
    }

    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    made = instantiate(parser.parse_object(config)).callbacks

    assert [type(callback).__name__ for callback in made] == ["AllocationFault", "PhaseFault"]
    assert [callback.step for callback in made] == [2, 2]

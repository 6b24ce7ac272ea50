"""``fail_at`` and ``fail_on``: they fail where they say, once, and leave no trace."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import TinyRegressor, regression_loader
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, Trainer

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.testing import fail_at, fail_on
from lightning_oom.testing.phases import PHASES
from lightning_oom.testing.shadows import Shadow

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_oom.testing import AllocationFault


def quiet_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """A Trainer on the CPU that writes nothing."""
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": list(callbacks),
            **options,
        }
    )


def allocate() -> str:
    """Allocate once; say how it went."""
    try:
        torch.zeros(1)
    except OutOfMemoryError:
        return "oom"
    return "ok"


def fit(*callbacks: Callback, model: Any = None, **options: Any) -> Trainer:
    """Fit five batches; return the trainer."""
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(TinyRegressor() if model is None else model, regression_loader())
    return trainer


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


class WithAdam(TinyRegressor):
    """Allocates in the update."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, tensor by tensor."""
        return torch.optim.Adam(self.parameters(), foreach=False)


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_phase_of_a_training_step_fails(phase: str) -> None:
    """The error names the phase and comes at its step."""
    fault = fail_on(step=2, phase=phase)
    trainer = quiet_trainer(fault)

    with pytest.raises(OutOfMemoryError, match=f"phase '{phase}'"):
        trainer.fit(WithAdam(), regression_loader())

    assert (fault.count, fault.raised, trainer.global_step) == (1, 1, 2)


def test_the_optimizer_phase_begins_after_the_backward_pass() -> None:
    """When the update fails, the gradients of the step are there and the weights have not moved."""
    model = WithAdam()
    before = [weight.detach().clone() for weight in model.parameters()]
    trainer = quiet_trainer(fail_on(step=0, phase="optimizer"))

    with pytest.raises(OutOfMemoryError):
        trainer.fit(model, regression_loader())

    assert all(weight.grad is not None for weight in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("phase", ["validation", "test", "predict"])
def test_a_batch_of_an_evaluation_fails(phase: str) -> None:
    """Batches are counted from 0; those of the sanity check are not."""
    fault = fail_on(step=1, phase=phase)
    trainer = quiet_trainer(fault, num_sanity_val_steps=2)
    run = {
        "validation": lambda: trainer.fit(
            TinyRegressor(), regression_loader(), regression_loader()
        ),
        "test": lambda: trainer.test(TinyRegressor(), regression_loader(), verbose=False),
        "predict": lambda: trainer.predict(TinyRegressor(), regression_loader()),
    }[phase]

    with pytest.raises(OutOfMemoryError, match=f"phase '{phase}'"):
        run()

    assert fault.raised == 1
    assert trainer.global_step == (5 if phase == "validation" else 0)


def test_a_phase_that_allocates_nothing_does_not_fail() -> None:
    """The transfer of a batch from the CPU to the CPU is free."""
    fault = fail_on(step=1, phase="transfer")
    fit(fault)

    assert (fault.count, fault.raised) == (1, 0)


class RetriesForward(Callback):
    """Calls ``training_step`` again when it runs out of memory, as a recovery would."""

    def __init__(self) -> None:
        self.failures = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Stand in front of the strategy's method."""
        step = trainer.strategy.training_step

        def retry(*args: Any, **kwargs: Any) -> Any:
            while True:
                try:
                    return step(*args, **kwargs)
                except OutOfMemoryError:  # noqa: PERF203 a retry has to be in the loop
                    self.failures += 1

        trainer.strategy.training_step = retry


@pytest.mark.parametrize("times", [1, 3])
def test_a_phase_fails_as_often_as_asked(times: int) -> None:
    """``times`` attempts fail, the next one succeeds."""
    fault, retries = fail_on(step=1, phase="forward", times=times), RetriesForward()
    trainer = fit(fault, retries)

    assert (fault.raised, retries.failures, fault.count) == (times, times, times)
    assert trainer.global_step == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"phase": "zero_grad"}, "unknown phase 'zero_grad': use one of transfer, forward"),
        ({"step": -2}, "step is counted from 0, got -2"),
        ({"times": 0}, "times is at least 1, got 0"),
        ({"allocation": 0}, "allocations are counted from 1, got 0"),
    ],
)
def test_a_phase_out_of_range_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The constructor names the value and the range."""
    with pytest.raises(ValueError, match=message):
        fail_on(**{"step": 0, "phase": "forward", **arguments})


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


class Greeter:
    """Has a method to shadow."""

    def greet(self) -> str:
        """Say hello."""
        return "hello"


def test_shadows_come_off_in_any_order() -> None:
    """A shadow that is no longer in front lets calls pass, and the last one off leaves nothing."""
    greeter = Greeter()
    first = Shadow(greeter, "greet", lambda behind: lambda: behind() + "!")
    second = Shadow(greeter, "greet", lambda behind: lambda: behind() + "?")
    both = greeter.greet()
    first.remove()
    one = greeter.greet()
    second.remove()

    assert (both, one, greeter.greet()) == ("hello!?", "hello?", "hello")

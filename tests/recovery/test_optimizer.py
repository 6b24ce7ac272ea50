"""An optimizer step that runs out of memory is finished exactly, or raises with nothing moved."""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from typing import Any

import pytest
import torch
from optimizer_trainings import OPTIMIZERS, Outcome, Running, Training, same

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.optimizer import OptimizerGuard, is_guardable
from lightning_oom.testing import SimulatedGPU, fail_at

CPU = torch.device("cpu")


def check_every_allocation(training: Training, *, step: int, times: int = 1) -> int:
    """Fail every allocation of a step in turn; return how many there were."""
    wanted = training.run()
    count = training.count(step)
    for n in range(1, count + 1):
        got = training.run(guard=True, fail=(step, n), times=times)
        assert got.fault is not None
        assert got.fault.raised == times or n + times - 1 > count
        assert wanted.is_same(got), f"allocation {n}: {got.fault.trace[n - 1]}"
        assert len(got.reports) == 1
    return count


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_allocation_of_an_update_may_fail(name: str, step: int, groups: int) -> None:
    """Whichever allocation of the update fails, parameters and state end bit-equal."""
    kind, options = OPTIMIZERS[name]
    count = check_every_allocation(Training(kind, options, groups=groups), step=step)
    assert count or "fused" in name or name.startswith(("sgd-", "sgd_momentum-foreach"))


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    "name", ["adamw-single", "adamw-foreach", "adamw-fused", "sgd_all-foreach", "adafactor-single"]
)
def test_an_update_may_fail_twice(name: str, step: int) -> None:
    """When the resumed update fails again at its next allocation, it is resumed again."""
    if name not in OPTIMIZERS:
        pytest.skip("not in this torch")
    kind, options = OPTIMIZERS[name]
    check_every_allocation(Training(kind, options, groups=2), step=step, times=2)


VARIANTS: dict[str, Training] = {
    "bf16": Training(*OPTIMIZERS["adamw-single"], dtype=torch.bfloat16),
    "bf16 lists": Training(*OPTIMIZERS["adamw-foreach"], dtype=torch.bfloat16),
    "fp16": Training(*OPTIMIZERS["sgd_all-single"], dtype=torch.float16),
    "fp16 lists": Training(*OPTIMIZERS["sgd_all-foreach"], dtype=torch.float16),
    "complex": Training(*OPTIMIZERS["adam-single"], dtype=torch.complex64),
    "complex lists": Training(*OPTIMIZERS["adamw-foreach"], dtype=torch.complex64),
    "complex rmsprop": Training(*OPTIMIZERS["rmsprop-foreach"], dtype=torch.complex64),
    "unused": Training(*OPTIMIZERS["adamw-foreach"], unused=1),
    "unused recorded": Training(*OPTIMIZERS["asgd-single"], unused=2),
    "rate as tensor": Training(torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "sparse adam": Training(torch.optim.SparseAdam, {"lr": 0.01}, sparse=True),
    "sparse sgd": Training(*OPTIMIZERS["sgd_momentum-single"], sparse=True),
    "sparse adagrad": Training(*OPTIMIZERS["adagrad-single"], sparse=True),
    "half precision state": Training(*OPTIMIZERS["rprop-foreach"], dtype=torch.bfloat16),
}
VARIANTS["sparse sgd"].options = {"lr": 0.1, "momentum": 0.9}
if hasattr(torch.optim, "Muon"):
    VARIANTS["muon"] = Training(torch.optim.Muon, {"lr": 0.01}, shapes=((3, 4), (4, 2)))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_allocation_may_fail_whatever_the_parameters(name: str, step: int) -> None:
    """Low precision, complex, sparse, without gradient: parameters and state end bit-equal."""
    check_every_allocation(VARIANTS[name], step=step)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    "name",
    ["adamw-single", "adamw-foreach", "sgd_all-foreach", "nadam-foreach", "adafactor-foreach"],
)
def test_every_allocation_may_fail_on_a_gpu(name: str, step: int) -> None:
    """The same where host and device are apart."""
    if name not in OPTIMIZERS:
        pytest.skip("not in this torch")
    kind, options = OPTIMIZERS[name]
    check_every_allocation(
        Training(kind, options, groups=2, device=SimulatedGPU().device), step=step
    )


def test_a_step_with_plenty_of_memory_is_an_ordinary_one() -> None:
    """Nothing is released, reported or recorded once the first step is over."""
    running = Training(*OPTIMIZERS["adamw-foreach"]).start(guard=True)
    for _ in range(40):
        running.make_gradients()
        running.optimizer.step()
    assert (running.releases, running.reports) == (0, [])


def test_a_guarded_step_holds_nothing_afterwards() -> None:
    """Gradients die with ``zero_grad``, the optimizer with its last reference."""
    running = Training(*OPTIMIZERS["asgd-single"]).start(guard=True)
    running.make_gradients()
    running.optimizer.step()
    gradient = weakref.ref(running.parameters[0].grad)
    running.optimizer.zero_grad()
    assert gradient() is None
    optimizer = weakref.ref(running.optimizer)
    assert running.undo is not None
    running.undo()
    del running
    gc.collect()
    assert optimizer() is None


# -- neighbours
def test_hooks_run_once() -> None:
    """The hooks of an optimizer run once before and after, in order, however often it is tried."""
    training = Training(*OPTIMIZERS["adamw-foreach"])
    seen: list[Any] = []

    def hooked(running: Running) -> list[Any]:
        optimizer = running.optimizer
        optimizer.register_step_pre_hook(
            lambda *given: seen.append(("pre", given[0], len(given[1])))
        )
        optimizer.register_step_post_hook(lambda *given: seen.append(("post", given[0], given[2])))
        running.make_gradients()
        with fail_at(9 if running.undo else ()) as fault:
            optimizer.step(lambda: seen.append("closure"))
        assert fault.raised == bool(running.undo)
        noted = [e if isinstance(e, str) else (e[0], e[1] is optimizer, e[2]) for e in seen]
        seen.clear()
        return noted

    guarded = training.start(guard=True)
    assert hooked(guarded) == hooked(training.start())
    assert len(guarded.optimizer._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_schedulers_do_not_mind(when: str) -> None:
    """A scheduler that is made before or after the guard neither warns nor loses its mark."""
    training = Training(*OPTIMIZERS["sgd-single"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running = training.start(guard=when == "after")
        scheduler = torch.optim.lr_scheduler.StepLR(running.optimizer, 1)
        undo = running.undo or running.guard.install()
        if when == "between":
            scheduler = torch.optim.lr_scheduler.StepLR(running.optimizer, 1)
        for _ in range(2):
            running.make_gradients()
            running.optimizer.step()
            scheduler.step()
        undo()
        running.make_gradients()
        running.optimizer.step()
        scheduler.step()
    assert inspect.signature(running.optimizer.step).parameters.keys() >= {"closure"}


def test_the_undo_brings_back_the_very_object() -> None:
    """After the undo the optimizer has the step it had."""
    running = Training(*OPTIMIZERS["sgd-single"]).start()
    torch.optim.lr_scheduler.StepLR(running.optimizer, 1)
    step = vars(running.optimizer)["step"]
    undo = running.guard.install()
    assert vars(running.optimizer)["step"] is not step
    undo()
    assert vars(running.optimizer)["step"] is step


def test_the_scaler_of_a_fused_optimizer_is_kept_through_a_retry() -> None:
    """Scale and the mark of an overflow, which a scaler hands over as attributes, apply once."""
    training = Training(*OPTIMIZERS["adamw-fused"], groups=2)

    def scaled(n: int, *, overflow: float) -> Outcome:
        running = training.start(guard=bool(n))
        for _ in range(2):
            running.make_gradients()
            running.optimizer.grad_scale = torch.tensor(8.0)
            running.optimizer.found_inf = torch.tensor(overflow)
            with fail_at(n or ()):
                running.optimizer.step()
            del running.optimizer.grad_scale, running.optimizer.found_inf
        return running.outcome()

    for overflow in (0.0, 1.0):
        wanted = scaled(0, overflow=overflow)
        for n in range(1, 9):
            assert wanted.is_same(scaled(n, overflow=overflow))


def test_a_mode_that_hides_writes_to_lists_does_no_harm() -> None:
    """Below a dispatch mode that raises no versions, the update is recorded instead."""
    training = Training(*OPTIMIZERS["adamw-foreach"])
    wanted = training.run()

    class Bystander(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal left
            out = func(*args, **(kwargs or {}))
            if "_foreach_sqrt" in str(func) and left:
                left -= 1
                raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            return out

    running = training.start(guard=True)
    for step in range(3):
        running.make_gradients()
        left = int(step == 1)
        with Bystander():
            running.optimizer.step()
    assert wanted.is_same(running.outcome())
    assert len(running.reports) == 1


# -- what is left alone
class MyAdam(torch.optim.Adam):
    """A subclass that leaves the update as it is."""


class Shouting(torch.optim.Adam):
    """A subclass with its own update."""

    def step(self, closure: Any = None) -> Any:
        """Update."""
        return super().step(closure)


def test_only_updates_of_torch_are_guarded() -> None:
    """Subclasses count as long as they leave the update alone; LBFGS and differentiable do not."""
    weight = torch.nn.Parameter(torch.zeros(2))
    assert is_guardable(MyAdam([weight]))
    assert not is_guardable(Shouting([weight]))
    assert not is_guardable(torch.optim.LBFGS([weight]))
    assert not is_guardable(torch.optim.Adam([weight], differentiable=True))


def test_the_error_of_another_update_passes_with_a_note() -> None:
    """What cannot be resumed is not tried again, and the error says what that means."""
    running = Training(Shouting, {"foreach": True}).start(guard=True)
    running.make_gradients()
    with pytest.raises(OutOfMemoryError) as caught, fail_at(1) as fault:
        running.optimizer.step()
    assert fault.count == 1
    assert "The update of Shouting".lower() in caught.value.__notes__[0].lower()


def test_a_compiled_step_is_left_alone() -> None:
    """A step made by ``torch.compile`` is called as it is."""
    running = Training(*OPTIMIZERS["sgd-single"]).start()
    running.optimizer.step = torch.compile(running.optimizer.step, backend="eager")
    guard = OptimizerGuard(
        running.optimizer, device=CPU, release=lambda: None, report=running.reports.append
    )
    assert not guard._is_active


def test_an_error_that_is_no_shortage_passes_unchanged() -> None:
    """An update that fails for another reason is not tried again."""
    running = Training(*OPTIMIZERS["adamw-single"]).start(guard=True)
    running.make_gradients()
    with pytest.raises(ZeroDivisionError) as caught, fail_at(3, error=ZeroDivisionError) as fault:
        running.optimizer.step()
    assert (fault.count, getattr(caught.value, "__notes__", [])) == (3, [])


def test_an_update_that_keeps_failing_raises_the_shortage() -> None:
    """After three more tries the first kind of error is raised, with what it means."""
    running = Training(*OPTIMIZERS["adamw-foreach"]).start(guard=True)
    for _ in range(2):
        running.make_gradients()
        running.optimizer.step()
    with pytest.raises(OutOfMemoryError) as caught, fail_at(2, times=1000):
        running.optimizer.step()
    assert "Continue from the last checkpoint" in caught.value.__notes__[-1]


def test_restored_state_is_a_first_step_again() -> None:
    """After ``load_state_dict`` the state is new tensors, and a failure is still finished exactly."""
    training = Training(*OPTIMIZERS["adamw-foreach"])
    wanted = training.run()
    running = training.start(guard=True)
    for step in range(3):
        running.make_gradients()
        with fail_at(2 if step == 2 else ()) as fault:
            running.optimizer.step()
        if step == 1:
            running.optimizer.load_state_dict(running.optimizer.state_dict())
    assert fault.raised == 1
    assert same(wanted.parameters, running.outcome().parameters)

"""An optimizer step that does not fit is done in portions, or raises with nothing moved."""

from __future__ import annotations

import pytest
import torch
from optimizer_trainings import OPTIMIZERS, Outcome, Running, Training

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.portions import only, portions_of
from lightning_oom.testing import SimulatedGPU, memory_limit

EQUAL_SHAPES = tuple((64, 64) for _ in range(8))
EQUAL_BYTES = 64 * 64 * 4


def run_limited(
    training: Training, spare_copies: float, *, step: int
) -> tuple[Outcome, Outcome, Exception | None, Running]:
    """Train until ``step`` with all memory, then step with ``spare_copies`` of a parameter to spare.

    Returns:
        What was there before the step and after it, the error it ended with, and the training.
    """
    running = training.start(guard=True)
    for _ in range(step):
        running.make_gradients()
        running.optimizer.step()
    running.make_gradients()
    before = running.outcome()
    copy_bytes = running.parameters[0].nbytes
    error = None
    with memory_limit("1 GiB", device=training.device) as free:
        free.register([running.parameters, [p.grad for p in running.parameters], running.optimizer])
        live_bytes = free.live_bytes
    with memory_limit(int(live_bytes + spare_copies * copy_bytes), device=training.device) as limit:
        limit.register(
            [running.parameters, [p.grad for p in running.parameters], running.optimizer]
        )
        running.guard._steps_until_check = 0
        try:
            running.optimizer.step()
        except OutOfMemoryError as caught:
            error = caught.with_traceback(None)
    return before, running.outcome(), error, running


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    "name",
    [
        "sgd_decay-foreach",
        "adam-foreach",
        "adamw-foreach",
        "nadam_decay-foreach",
        "radam-foreach",
        "adamax-foreach",
        "adagrad-foreach",
        "adadelta_decay-foreach",
        "rmsprop-foreach",
        "rprop-foreach",
        "asgd-foreach",
        "adafactor-foreach",
    ],
)
def test_a_step_without_room_for_its_lists_is_done_in_portions(name: str, step: int) -> None:
    """Where temporaries for all parameters do not fit but those of one do, the step ends bit-equal."""
    if name not in OPTIMIZERS:
        pytest.skip("not in this torch")
    kind, options = OPTIMIZERS[name]
    training = Training(kind, options, shapes=EQUAL_SHAPES, steps=step + 1)
    wanted = training.run()
    starting = training.start()
    starting.make_gradients()
    guard, group = starting.guard, starting.optimizer.param_groups[0]
    fresh_bytes = sum(
        guard.kind.state_bytes(p, group) for p in group["params"] if p not in guard.optimizer.state
    )
    fresh = 0 if step else fresh_bytes / EQUAL_BYTES
    _, after, error, running = run_limited(training, fresh + 3.5, step=step)

    assert error is None
    assert after.is_same(wanted)
    assert running.reports == [
        "an optimizer step was done a few parameters at a time for want of memory"
    ]


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    "name", ["adamw-single", "adamw-foreach", "adamw-fused", "sgd_all-foreach", "rmsprop-foreach"]
)
def test_a_step_that_cannot_fit_raises_with_nothing_moved(name: str, step: int) -> None:
    """Parameters and state are bit-equal to what they were before, and the error says so."""
    kind, options = OPTIMIZERS[name]
    if "fused" in name and step:
        pytest.skip("needs no memory")
    training = Training(kind, options, shapes=EQUAL_SHAPES)
    before, after, error, running = run_limited(training, 0.5, step=step)

    assert isinstance(error, OutOfMemoryError)
    assert "were before it" in error.__notes__[-1]
    assert after.is_same(before)
    assert running.reports == []
    running.optimizer.step()  # with memory again, the step can be done
    assert running.outcome().is_same(training_until(training, step + 1))


def training_until(training: Training, steps: int) -> Outcome:
    """Return the outcome of an unguarded training of some steps."""
    return Training(training.kind, training.options, shapes=training.shapes, steps=steps).run()


@pytest.mark.parametrize("step", [0, 1])
def test_a_gpu_without_room_is_stepped_in_portions_or_not_at_all(step: int) -> None:
    """The same on a device with an allocator of its own, whose blocks are larger than asked for."""
    kind, options = OPTIMIZERS["adamw-foreach"]
    gpu = SimulatedGPU("1 GiB").device
    shapes = tuple((1024, 3072) for _ in range(3))
    training = Training(kind, options, shapes=shapes, steps=step + 1, device=gpu)
    wanted = training.run()
    fresh = 0 if step else 6
    _, after, error, running = run_limited(training, fresh + 1.5, step=step)
    assert error is None
    assert after.is_same(wanted)
    assert len(running.reports) == 1

    before, after, error, running = run_limited(training, 0.5, step=step)
    assert isinstance(error, OutOfMemoryError)
    assert after.is_same(before)
    assert running.reports == []


def test_a_portion_is_no_larger_than_the_largest_parameter() -> None:
    """Portions keep the order, stay within their group and lose nothing."""
    weights = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 4, 2, 1, 1, 8, 5)]
    for weight in weights[:-1]:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD([{"params": weights[:3]}, {"params": weights[3:]}])
    portions = portions_of(optimizer)
    sizes = [[len(p) for p in portion.parameters] for portion in portions]
    assert sizes == [[3, 4], [2], [1, 1], [8]]


def test_the_groups_are_put_back_after_a_portion() -> None:
    """The very lists return, also after an error."""
    running = Training(*OPTIMIZERS["sgd-single"], groups=2).start()
    running.make_gradients()
    groups = running.optimizer.param_groups
    lists = [group["params"] for group in groups]

    def fail() -> None:
        with only(running.optimizer, portions_of(running.optimizer)[1]):
            assert [len(group["params"]) for group in groups] == [0, 2]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(group["params"] is before for group, before in zip(groups, lists, strict=True))

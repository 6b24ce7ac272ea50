"""A step on fake tensors: its order, its kinds, its precisions, and other numbers of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.fake_step import FakeStep, trace_step
from lightning_oom.planning.real_step import measure_rows, measure_step
from lightning_oom.planning.rows import TraceByRows, count_rows, take_rows

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")


class Classifier(LightningModule):
    """A small CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


def images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of 8 x 8 images."""
    return torch.randn(rows, 3, 8, 8), torch.randint(0, 5, (rows,))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("how", [{}, {"accumulate": 2, "zero_grad": "early"}], ids=["plain", "two"])
def test_the_fake_step_allocates_what_the_real_one_does(
    precision: str, how: dict[str, Any]
) -> None:
    """Peak, phase, kinds and modules, for each precision and window."""
    module, batch = Classifier(), images(4)

    fake = trace_step(module, batch, precision=precision, **how)
    real = measure_rows(module, batch, precision=precision, **how)

    assert fake.peak_bytes == real.peak_bytes
    assert fake.phase_peaks() == real.phase_peaks()
    assert fake.by_kind() == real.by_kind()
    assert fake.by_module() == real.by_module()


def test_phases_follow_lightning_s_order() -> None:
    """Forward, zero_grad, backward, step; early, gradients are gone when the forward begins."""
    step = FakeStep(Classifier(), images(2))

    late, early = step.run(), step.run(zero_grad="early")

    order = ["step", "forward", "zero_grad", "backward", "optimizer"]
    assert [mark.name for mark in late.marks] == [*order, *order, "end"]
    starts = [
        next(mark.event for mark in trace.marks if mark.name == "forward" and mark.step == 1)
        for trace in (late, early)
    ]
    assert "gradient" in late.by_kind(starts[0] - 1)
    assert "gradient" not in early.by_kind(starts[1] - 1)


def test_kinds_say_what_a_storage_is_for_in_the_end() -> None:
    """Gradients and optimizer state are as large as the parameters say."""
    module = nn.Linear(8, 8, bias=False)
    trace = trace_step(module, torch.zeros(2, 8), optimizer=torch.optim.Adam)

    held = trace.by_kind(event=len(trace.events) - 1)

    weight_bytes = 8 * 8 * 4
    assert held == {
        "parameter": weight_bytes,
        "batch": 2 * 8 * 4,
        "gradient": weight_bytes,
        "optimizer": 2 * weight_bytes + 4,
    }


def test_a_backward_is_told_by_the_module_whose_forward_it_undoes() -> None:
    """Without hooks on tensors, from the numbers of graph nodes."""
    trace = trace_step(Classifier(), images(2), record_operators=True)

    places = {
        call.module
        for call in trace.operators
        if call.name == "aten.convolution_backward.default" and call.phase == "backward"
    }
    convolution = next(c for c in trace.operators if c.name == "aten.convolution.default")

    assert places == {"net.0"}
    assert convolution.outputs[0].shape == (2, 8, 6, 6)
    assert convolution.flops == 2 * 2 * 8 * 6 * 6 * 3 * 9
    assert convolution.inputs[0].requires_grad is False


def test_one_run_leaves_nothing_for_the_next() -> None:
    """The same trace again; a transform changes one clone only."""
    step = FakeStep(Classifier(), images(4))

    def checkpointed(clone: Any) -> None:
        forward = clone.net.forward
        clone.net.forward = lambda x: checkpoint(forward, x, use_reentrant=False)

    first = step.run()
    less = step.run(transform=checkpointed)

    assert step.run().events == first.events
    kept = [
        trace.by_kind(next(m.event for m in trace.marks if m.name == "backward") - 1)["activation"]
        for trace in (less, first)
    ]
    assert kept[0] < kept[1] / 2


def test_a_run_in_a_trainer_is_told_of_nothing() -> None:
    """Loggers, counters and optimizers of the real trainer stay as they are."""

    class Asks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.trainer.should_stop = True
            self.logger.log_metrics({"x": 1.0})
            assert self.trainer.max_epochs == 7
            assert self.optimizers is not None
            return super().training_step(batch, batch_idx)

    module = Asks()
    trainer = Trainer(max_epochs=7, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.should_stop = False
    module.trainer = trainer

    trace_step(module, images(2))

    assert trainer.should_stop is False
    assert module.trainer is trainer


def test_rows_are_extended_event_by_event() -> None:
    """From 2 and 3 rows to any number, as a run there would say; and back from a budget."""
    step = FakeStep(Classifier(), images(2))

    by_rows = TraceByRows.between(step.run(), step.run(rows=3))
    largest = by_rows.largest_rows(by_rows.peak_bytes(40))

    assert by_rows.at(40).events == step.run(rows=40).events
    assert largest == 40
    assert measure_step(Classifier(), images(40)).peak_bytes == by_rows.peak_bytes(40)


def test_steps_that_differ_between_rows_are_refused() -> None:
    """A line through two different steps means nothing."""

    class Odd(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if len(batch[0]) % 2 else loss.exp()

    with pytest.raises(StepNotTracedError, match="same operators at 2 and 3 rows"):
        measure_step(Odd(), images(8))


def test_rows_of_nested_batches_are_taken() -> None:
    """Lists of one entry per row too; what has no rows is left."""
    batch = {"x": torch.arange(6).view(3, 2), "names": ["a", "b", "c"], "scale": torch.ones(7)}

    taken = take_rows(batch, 5)

    assert count_rows(batch) == 3
    assert taken["x"][:, 0].tolist() == [0, 2, 4, 0, 2]
    assert taken["names"] == ["a", "b", "c", "a", "b"]
    assert taken["scale"] is batch["scale"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"num_steps": -1}, "num_steps must be at least 1, got -1"),
        ({"zero_grad": "never"}, "got 'never'"),
        ({"precision": "8-bit"}, "got '8-bit'"),
    ],
)
def test_wrong_arguments_are_named(how: dict[str, Any], message: str) -> None:
    """Before anything runs."""
    with pytest.raises(ValueError, match=message):
        trace_step(Classifier(), images(2), **how)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_fake_cuda_tensors_are_never_made_without_cuda() -> None:
    """Torch would end the process at the first operator of autograd."""
    with pytest.raises(ValueError, match="device='cuda'"):
        FakeStep(Classifier(), images(2), device="cuda")


def test_a_module_without_memory_can_be_traced() -> None:
    """On the meta device: the trace is that of the CPU."""
    with torch.device("meta"):
        module = nn.Linear(4, 4)

    trace = trace_step(module, torch.zeros(2, 4), optimizer=torch.optim.SGD)

    assert trace.peak_bytes == trace_step(
        nn.Linear(4, 4), torch.zeros(2, 4), optimizer=torch.optim.SGD
    ).peak_bytes  # fmt: skip


def test_rows_are_not_taken_from_a_batch_without_rows() -> None:
    """There is nothing to repeat."""
    with pytest.raises(ValueError, match="no rows to take: give one"):
        take_rows((torch.zeros(0, 3), torch.zeros(0)), 2)


def test_a_module_whose_layers_are_not_made_says_what_to_call() -> None:
    """Not that an optimizer has nothing to optimize."""

    class Late(nn.Module):
        def configure_model(self) -> None:
            self.layer = nn.Linear(3, 2)

    with pytest.raises(StepNotTracedError, match=r"call its configure_model\(\) first"):
        trace_step(Late(), torch.zeros(2, 3), optimizer=torch.optim.SGD)

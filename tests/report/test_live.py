"""What is alive at the moment of an error is found, named, and let go of."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from fakes import cuda_oom
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.recovery.cleanup import clear_frames
from lightning_oom.report.collect import Scene, collect_report
from lightning_oom.report.frames import failed_frames, find_batch, find_module, locals_of
from lightning_oom.report.graph import walk_graph
from lightning_oom.report.record import OOMReport
from lightning_oom.testing import SimulatedGPU
from lightning_oom.units import MIB


class Attention(nn.Module):
    """One module that keeps scores in a local variable and then runs out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64)
        self.kept: list[torch.Tensor] = []
        self.fails = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Make scores, then fail."""
        scores = torch.softmax(self.project(x) @ x.T, -1)
        if self.fails:
            raise cuda_oom()
        return scores


class Model(nn.Module):
    """Attention inside of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both."""
        return self.attention(self.first(x))


def training_step(model: nn.Module, batch: Any, batch_idx: int) -> torch.Tensor:
    """Stand for the user's."""
    return model(batch["x"])


def failed(device: torch.device, rows: int = 128) -> OOMReport:
    """The report of a step whose attention ran out of memory."""
    model = Model().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    batch = {"x": torch.randn(rows, 64, device=device), "names": ["a"] * rows}
    try:
        training_step(model, batch, 3)
    except OutOfMemoryError as error:
        cause = classify_oom(error)
        assert cause is not None
        return collect_report(
            Scene(error=error, cause=cause, device=device, module=model, optimizers=[optimizer])
        )
    raise AssertionError


@pytest.fixture
def gpu() -> Any:
    """A simulated GPU of 64 MiB."""
    with SimulatedGPU("64 MiB") as simulated:
        yield simulated.device


def test_module_batch_and_index_are_found_in_the_frames(gpu) -> None:
    """The innermost module that ran, and the batch as the step had it."""
    report = failed(gpu)

    assert report.module_path == "model.attention"
    assert report.batch_index == 3
    assert report.rows == 128
    leaves = {leaf.path: leaf for leaf in report.batch}
    assert leaves["batch['x']"].shape == (128, 64)
    assert leaves["batch['x']"].dtype == "float32"
    assert leaves["batch['x']"].values is None
    assert leaves["batch['names'][0]"].kind == "str"


def test_the_largest_tensors_have_owners(gpu) -> None:
    """A local variable, a parameter and the batch are called by their names."""
    owners = {tensor.owner: tensor for tensor in failed(gpu).tensors}

    scores = owners["local 'scores' of forward"]
    assert (scores.shape, scores.kind, scores.num_bytes) == ((128, 128), "activations", 64 * 1024)
    assert owners["model.first.weight"].kind == "parameters"
    assert owners["the batch"].kind == "batch"


def test_kinds_add_up_to_what_is_allocated(gpu) -> None:
    """Activations are those that the graph holds, and nothing is counted twice."""
    report = failed(gpu)

    assert report.kinds is not None
    assert report.reading is not None
    assert report.kinds.total_bytes == report.reading.allocated_bytes
    assert report.kinds.activations_bytes >= 64 * 1024 + 2 * 128 * 64 * 4
    assert report.kinds.parameters_bytes == 2 * (64 * 64 * 4 + 512)


def test_saved_bytes_belong_to_the_module_whose_parameters_came_last(gpu) -> None:
    """Softmax and the product behind a projection count for the projection's module."""
    modules = {module.path: module for module in failed(gpu).modules}

    assert modules["attention.project"].saved_bytes >= 64 * 1024
    assert modules["attention"].saved_bytes == modules["attention.project"].saved_bytes
    assert modules[""].saved_bytes >= modules["attention"].saved_bytes
    assert modules["first"].is_leaf
    assert not modules["attention"].is_leaf


def test_a_report_allocates_nothing_on_the_device(gpu) -> None:
    """Neither allocated nor peak memory of the device moves while a report is made."""
    model = Model().to(gpu)
    x = torch.randn(128, 64, device=gpu)
    try:
        model(x.T.contiguous().T)
    except OutOfMemoryError as error:
        torch.simgpu.reset_peak_memory_stats()
        before = torch.simgpu.memory_allocated()
        cause = classify_oom(error)
        assert cause is not None
        scene = Scene(error=error, cause=cause, device=gpu, module=model)
        report = collect_report(scene, include_values=True)
        assert report.tensors
        assert torch.simgpu.max_memory_allocated() == before


def test_nothing_is_kept_alive_by_a_report(gpu) -> None:
    """After the frames are cleared, what the failed call held is free, with the report still there."""
    del gpu
    seen: list[weakref.ref[torch.Tensor]] = []

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = x * 2
            seen.append(weakref.ref(hidden))
            raise cuda_oom()

    model = Failing()
    try:
        model(torch.ones(4))
    except OutOfMemoryError as error:
        cause = classify_oom(error)
        assert cause is not None
        scene = Scene(error=error, cause=cause, device=torch.device("cpu"), module=model)
        report = collect_report(scene, include_values=True)
        del scene
        assert seen[0]() is not None
        clear_frames(error)
        assert seen[0]() is None  # while the traceback, and with it the frames, are still there
        assert report.module_path == "model"


def test_locals_are_read_without_a_copy_in_the_frame() -> None:
    """A frame's own dictionary, which outlives ``frame.clear()``, is emptied again."""

    def fail() -> None:
        value = torch.ones(2)
        seen.append(weakref.ref(value))
        raise ValueError

    seen: list[weakref.ref[torch.Tensor]] = []
    try:
        fail()
    except ValueError as error:
        (frame,) = failed_frames(error)
        assert list(locals_of(frame)) == ["value", "seen"]
        frame.clear()
        assert seen[0]() is None


def test_running_frames_are_left_alone() -> None:
    """The frame that handles the error is not among those that have failed."""
    try:
        raise cuda_oom()
    except OutOfMemoryError as error:
        frames = failed_frames(error)

    assert frames == []
    assert find_batch(frames) == (None, None)
    assert find_module(frames, nn.Linear(1, 1)) is None


def test_a_checkpoint_is_not_recomputed_to_look_into_it() -> None:
    """What was saved through hooks is passed over; no forward runs again."""
    calls = []
    layer = nn.Linear(4, 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return layer(x).relu()

    y = checkpoint(forward, torch.ones(2, 4, requires_grad=True), use_reentrant=False).exp()
    names = {id(parameter): name for name, parameter in layer.named_parameters()}

    saved = [type(item.tensor) for item in walk_graph([y.grad_fn], names)]

    assert calls == [1]
    assert saved == [torch.Tensor]  # exp's result, outside of the checkpoint


def test_a_released_graph_has_nothing_saved() -> None:
    """After the backward pass the nodes are there and hold nothing."""
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.sum().backward()

    assert list(walk_graph([y.grad_fn], {})) == []


def test_tensors_in_attributes_are_named(gpu) -> None:
    """A list on a module that keeps losses is called by its path."""
    model = Model().to(gpu)
    model.attention.kept = [torch.zeros(MIB // 4, device=gpu) for _ in range(2)]
    gc.collect()  # they are old
    try:
        model(torch.randn(8, 64, device=gpu))
    except OutOfMemoryError as error:
        cause = classify_oom(error)
        assert cause is not None
        scene = Scene(error=error, cause=cause, device=gpu, module=model, may_go_on=True)
        report = collect_report(scene)

    assert [tensor.owner for tensor in report.tensors[:2]] == ["model.attention.kept"] * 2


def test_values_are_there_only_when_asked_for() -> None:
    """Shapes and dtypes say what a batch is; numbers are private."""
    for include_values in (False, True):
        batch = {"x": torch.tensor([[1.5, float("nan")]]), "name": "secret"}
        try:
            training_step(nn.ParameterDict(), batch, 0)  # not callable
        except Exception as error:
            scene = Scene(
                error=error, cause=classify_oom(MemoryError()), device=torch.device("cpu")
            )
            report = collect_report(scene, include_values=include_values)
        text = report.to_json()
        assert ("secret" in text, "1.5" in text) == (include_values, include_values)
        assert OOMReport.from_json(text) == report

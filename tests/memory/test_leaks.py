"""The leak finder names what grows, and nothing else."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from leak_runs import CLEAN, Run, run_epochs
from lightning.pytorch import Callback
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC

from lightning_oom.memory.leaks import Leak, LeakFinder
from lightning_oom.memory.leaks_growth import AllocatedTrend

PILE: list[Any] = []


class Keeping(Run):
    """Keeps what ``keep`` says in an attribute that starts as ``start``."""

    def __init__(self, start: Any, keep: Any) -> None:
        super().__init__()
        self.kept = start
        self.how = keep

    def keep(self, index, loss, output) -> None:
        """Keep what a step made."""
        self.how(self, loss, output)


KEEP = {
    "add": lambda run, loss, output: setattr(run, "kept", run.kept + loss),
    "append_loss": lambda run, loss, output: run.kept.append(loss),
    "append_outputs": lambda run, loss, output: run.kept.append({"loss": loss, "logits": output}),
    "append_detached": lambda run, loss, output: run.kept.append({"logits": output.detach()}),
    "extend": lambda run, loss, output: setattr(
        run, "kept", torch.cat([run.kept, output.detach()])
    ),
    "fill": lambda run, loss, output: run.kept.update({len(run.kept): output.detach()}),
    "record": lambda run, loss, output: run.kept.append(Record(output.detach())),
    "fill_named": lambda run, loss, output: run.kept["val"].append(output.detach()),
}
"""What a step may do with what it made."""


class Record:
    """An object of the user's that carries a tensor."""

    def __init__(self, logits: Any) -> None:
        self.logits = logits


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_has_no_leak(name) -> None:
    """No false alarm on what stays the same, fluctuates, saturates or is cleared."""
    assert run_epochs(CLEAN[name]()).leaks() == []


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_has_no_leak_in_long_epochs(name) -> None:
    """Where attributes are looked at in bursts, what is cleared in between is no leak."""
    assert run_epochs(CLEAN[name](), epochs=2, batches=300).leaks() == []


@pytest.mark.parametrize("name", sorted(CLEAN.keys() - {"saw-tooth"}))
def test_a_clean_model_has_no_leak_in_short_epochs(name) -> None:
    """Epochs of three batches; a saw-tooth longer than the run cannot be told from a leak."""
    assert run_epochs(CLEAN[name](), epochs=4, batches=3).leaks() == []


LEAKS = {
    "sum of losses": (lambda: torch.zeros(()), KEEP["add"], "graph", True, "model.kept"),
    "list of losses": (list, KEEP["append_loss"], "graph", True, "model.kept"),
    "returned dictionaries": (list, KEEP["append_outputs"], "graph", True, "model.kept"),
    "outputs": (list, KEEP["append_detached"], "outputs", False, "model.kept"),
    "one tensor": (lambda: torch.zeros(0, 2), KEEP["extend"], "cache", False, "model.kept"),
    "by key": (dict, KEEP["fill"], "cache", False, "model.kept"),
    "records": (list, KEEP["record"], "outputs", False, "model.kept"),
    "by name": (lambda: {"val": []}, KEEP["fill_named"], "outputs", False, "model.kept['val']"),
}


@pytest.mark.parametrize("case", LEAKS)
@pytest.mark.parametrize(("epochs", "batches"), [(1, 50), (3, 40), (2, 150)])
def test_a_leak_is_named(case, epochs, batches) -> None:
    """Attribute path, count, kind and graph of everything that is kept for good."""
    start, keep, kind, holds_graph, path = LEAKS[case]
    finder = run_epochs(Keeping(start(), keep), epochs=epochs, batches=batches)
    (leak,) = finder.leaks()
    assert (leak.path, leak.kind, leak.holds_graph) == (path, kind, holds_graph)
    assert leak.path.rpartition(".")[2] in leak.line()
    assert "detach" in leak.advice or "bound" in leak.advice


def test_a_kept_graph_is_named_after_a_few_steps() -> None:
    """A sum of losses is reported in the first epoch, ten steps after it began."""
    named: list[int] = []

    def look(step: int, finder: LeakFinder) -> None:
        if finder.leaks() and not named:
            named.append(step)

    run_epochs(Keeping(torch.zeros(()), KEEP["add"]), epochs=1, after_step=look)
    assert named[0] <= 10


def test_the_bytes_that_a_kept_graph_keeps_are_counted() -> None:
    """Losses without a backward keep their activations: the leak is their size, not that of scalars."""

    class Kept(Run):
        def __init__(self) -> None:
            super().__init__()
            self.extra: list[Any] = []

        def keep(self, index, loss, output) -> None:
            x = torch.ones(1000, requires_grad=True)
            self.extra.append(x.exp().sum())

    finder = LeakFinder()
    run_epochs(Kept(), epochs=1, batches=9, finder=finder)
    (leak,) = finder.leaks()
    assert leak.num_tensors == 9
    assert leak.num_bytes == pytest.approx(9 * 4004, rel=0.01)


def test_counts_and_growth_are_right() -> None:
    """100 outputs of 6 x 2 floats each: count, bytes and growth per step."""
    finder = run_epochs(Keeping([], KEEP["append_detached"]), epochs=1, batches=100)
    (leak,) = finder.leaks()
    assert leak.bytes_per_step == pytest.approx(48)
    assert leak.num_tensors == 100
    assert leak.num_bytes == 48 * leak.num_tensors


def test_growth_is_a_suspect_until_the_epoch_ends() -> None:
    """What may yet be cleared is no leak, but is there to explain an out-of-memory error."""
    run, finder = Keeping([], KEEP["append_detached"]), LeakFinder()
    for index in range(20):
        run.step(index)
        finder.observe(index, {"model": run})
    assert finder.leaks() == []
    assert [leak.path for leak in finder.suspects()] == ["model.kept"]


def test_evaluation_outputs_are_named_and_a_cleared_list_is_not() -> None:
    """Each stage has its own history; clearing after the end of the epoch is soon enough."""

    def evaluate(*, clears: bool) -> list[Leak]:
        run, finder = Run(), LeakFinder()
        run.val_outputs = []
        for step in range(3):
            run.step(step)
            finder.observe(step, {"model": run})
            for index in range(30):
                run.val_outputs.append({"logits": torch.zeros(6, 2)})
                finder.observe(index, {"model": run}, stage="validate")
            finder.end_epoch("validate")
            if clears:
                run.val_outputs.clear()
        finder.finish({"model": run})
        return finder.leaks()

    assert [leak.path for leak in evaluate(clears=False)] == ["model.val_outputs"]
    assert evaluate(clears=True) == []


def test_list_states_of_metrics_are_named_with_advice() -> None:
    """Metrics that are never reset: once per state, also in a collection that shares states."""

    class Measured(Run):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = MetricCollection({"auroc": BinaryAUROC(thresholds=None)})
            self.seen = CatMetric()

        def keep(self, index, loss, output) -> None:
            scores = output.detach()[:, 0].sigmoid()
            self.metrics.update(scores, torch.ones(len(scores), dtype=torch.long))
            self.seen.update(output[:, 0])

    leaks = {leak.path: leak for leak in run_epochs(Measured(), epochs=1, batches=50).leaks()}
    assert set(leaks) == {
        "model.metrics.auroc.preds",
        "model.metrics.auroc.target",
        "model.seen.value",
    }
    assert {leak.kind for leak in leaks.values()} == {"metric_state"}
    assert "thresholds" in leaks["model.metrics.auroc.preds"].advice
    assert "compute_on_cpu" in leaks["model.metrics.auroc.preds"].advice
    assert "BinaryAUROC" in leaks["model.metrics.auroc.preds"].advice
    assert leaks["model.seen.value"].holds_graph
    assert "detach" in leaks["model.seen.value"].advice


def test_what_other_roots_hold_is_named_by_them() -> None:
    """A callback in the list of the trainer, and the trainer itself."""

    class Watching(Callback):
        def __init__(self) -> None:
            self.outs: list[Any] = []

    class Owner:
        def __init__(self, watching: Watching) -> None:
            self.callbacks = [Watching(), watching]
            self.extra: list[Any] = []

    watching = Watching()
    run, owner, finder = Run(), Owner(watching), LeakFinder()
    for index in range(20):
        watching.outs.append(torch.ones(3))
        owner.extra.append(torch.ones(2))
        finder.observe(index, {"model": run, "trainer": owner})
    finder.finish({"model": run, "trainer": owner})
    assert [leak.path for leak in finder.leaks()] == ["trainer.callbacks[1].outs", "trainer.extra"]


def test_tensors_in_a_global_are_found_by_comparing_objects() -> None:
    """Where the device fills up and no attribute says why, the global is named."""
    run, finder = Run(), LeakFinder()
    try:
        for index in range(80):
            PILE.append(torch.zeros(8192, 4))
            run.step(index)
            finder.observe(index, {"model": run}, allocated_bytes=2**30 + index * 2**17)
        (leak,) = [leak for leak in finder.leaks() if leak.num_bytes >= 2**20]
    finally:
        PILE.clear()
    assert leak.kind == "unnamed"
    assert leak.path.endswith("PILE")


def test_objects_are_not_compared_without_suspicion() -> None:
    """Noise, variable sizes, saw-tooth and a single step up bring no comparison of all objects."""
    noise = random.Random(5)  # noqa: S311 - noise of a test
    shapes = {
        "flat": lambda i: 0,
        "noise": lambda i: noise.randrange(2**20),
        "lengths": lambda i: (0, 5, 9)[i * 7 % 3] * 2**20,
        "saw-tooth": lambda i: i % 5 * 2**20,
        "one step": lambda i: (i > 30) * 2**22,
    }
    for shape in shapes.values():
        finder = LeakFinder()
        for index in range(1000):
            finder.observe(index, {}, allocated_bytes=2**30 + shape(index))
        assert finder._num_scans == 0


def test_growth_below_noise_is_still_seen() -> None:
    """256 KiB a step under noise of 1 MiB: found, and the rate is about right."""
    noise, trend = random.Random(5), AllocatedTrend()  # noqa: S311 - noise of a test
    for index in range(64):
        trend.add(index, 2**30 + index * 2**18 + noise.randrange(2**20))
    assert trend.bytes_per_step() == pytest.approx(2**18, rel=0.1)


def test_nothing_that_is_looked_at_stays_alive() -> None:
    """The finder holds numbers and names alone."""
    run, finder = Keeping([], KEEP["append_loss"]), LeakFinder()
    run_epochs(run, epochs=1, batches=20, finder=finder)
    tensor, module = weakref.ref(run.kept[0]), weakref.ref(run)
    del run
    gc.collect()
    assert tensor() is None
    assert module() is None
    assert finder.leaks() != []


def test_most_steps_of_a_long_epoch_look_at_nothing() -> None:
    """After the first 16 steps, 4 of every 64 read the attributes."""
    looks: list[int] = []

    class Root:
        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":
                looks.append(1)
            return object.__getattribute__(self, name)

    finder = LeakFinder()
    for step in range(640):
        finder.observe(step, {"root": Root()})
    assert len(looks) <= 2 * (16 + 10 * 4)


def test_long_lists_are_estimated() -> None:
    """10,000 entries are counted from 256 of them, evenly spaced."""
    run, finder = Run(), LeakFinder()
    run.kept = [torch.zeros(4) for _ in range(10_000)]
    for step in range(12):
        run.kept.append(torch.zeros(4))
        finder.observe(step, {"model": run})
    finder.finish({"model": run})
    (leak,) = finder.leaks()
    assert leak.num_tensors == pytest.approx(10_012, rel=0.001)
    assert leak.num_bytes == pytest.approx(16 * 10_012, rel=0.01)

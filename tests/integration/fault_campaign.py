"""Fail every allocation of a step in turn, recover, and compare with the run that never failed.

SQLite shows its memory safety by failing each malloc; this does the same with a training step. A
:class:`Scenario` says how the model is trained and in which batch the fault falls. ``run_campaign``
runs it once undisturbed (the reference), once with the guard and no fault (which counts the
allocations), then once for each allocation with a fault there, and compares everything that a user
could see.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from campaign_model import CampaignModel, Recipe, campaign_loader, do_nothing
from fakes import ListLogger
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from states import Difference, compare, plain_copy, user_rows, without_own_keys
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from lightning_oom._torch import OutOfMemoryError, tree_leaves

__all__ = [
    "Campaign",
    "Outcome",
    "Scenario",
    "fit_once",
    "run_campaign",
    "trainable_state",
]

GuardFactory = Callable[[], "Callback | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One row of the campaign: a way of training, and the batch in which the fault falls.

    Attributes:
        name: Shown in the table and used as the test id.
        recipe: Of the model.
        batch: Batch, counted from 0 over the whole run, whose step fails.
        accumulate: ``accumulate_grad_batches``.
        clip: ``gradient_clip_val`` and its algorithm.
        precision: Of the Trainer; ``"16-mixed"`` trains with a ``GradScaler`` on the CPU.
        extra_callbacks: Makes further callbacks (weight averaging).
        strategy: Makes the strategy; ``None`` trains on the CPU.
        tolerance: Largest accepted relative difference; 0 asks for the same bits.
    """

    name: str
    recipe: Recipe = field(default_factory=Recipe)
    batch: int = 1
    accumulate: int = 1
    clip: tuple[float, str] | None = None
    precision: str = "32-true"
    extra_callbacks: Callable[[], list[Callback]] = list
    strategy: Callable[[], Any] | None = None
    tolerance: float = 0.0

    def trainer(self, callbacks: list[Callback]) -> Trainer:
        """A Trainer without anything slow, for four batches or six."""
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "precision": self.precision}
        if self.strategy is not None:
            options = {"strategy": self.strategy(), "precision": self.precision}
        if self.precision == "16-mixed":
            del options["precision"]
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
            options["plugins"] = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        clip_value, clip_algorithm = self.clip or (None, None)
        return Trainer(
            **options,
            callbacks=[*callbacks, *self.extra_callbacks()],
            max_epochs=2,
            max_steps=4 if self.accumulate == 1 else 3,
            logger=ListLogger(),
            log_every_n_steps=1,
            accumulate_grad_batches=self.accumulate,
            gradient_clip_val=clip_value,
            gradient_clip_algorithm=clip_algorithm,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )


class _AllocationFaults(TorchDispatchMode):
    """Raise an out-of-memory error at chosen allocations, counted from 1; each fires once."""

    def __init__(self, at: Iterable[int]) -> None:
        super().__init__()
        self.at = set(at)
        self.count = 0
        self.num_raised = 0
        self.paused = False
        self.trace: list[str] = []
        self.update_begins_after: int | None = None

    def note_update(self) -> None:
        """The allocations from here on belong to the optimizer's update."""
        self.update_begins_after = self.count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name.startswith("aten::_foreach_") and func._schema.name.endswith("_"):
            # Below a dispatch mode these kernels do not move the version counters; without one they do.
            torch.autograd.graph.increment_version([t for t in args[0] if isinstance(t, Tensor)])
        if self.paused or all(value.alias_info is not None for value in func._schema.returns):
            return out
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
            self.count += 1
            self.trace.append(func._schema.name)
            if self.count in self.at:
                self.at.discard(self.count)
                self.num_raised += 1
                del out, args, kwargs
                raise OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of "
                    "8.00 GiB of which 1.00 MiB is free."
                )
        return out


class _FaultInBatch(Callback):
    """Put :class:`_AllocationFaults` around one batch: its closure and its optimizer step."""

    def __init__(self, batch: int | None, at: Iterable[int]) -> None:
        self.batch = batch
        self.faults = _AllocationFaults(at)
        self.batches_seen = 0
        self.before: dict[str, Any] | None = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        pl_module.when_ready_to_update = do_nothing

    def on_train_start(self, trainer, pl_module) -> None:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        run = loop.run

        def run_with_faults(*args: Any, **kwargs: Any) -> Any:
            self.batches_seen += 1
            if self.batches_seen - 1 != self.batch:
                return run(*args, **kwargs)
            self.before = trainable_state(trainer)
            pl_module.when_ready_to_update = self.faults.note_update
            with self.faults:
                return run(*args, **kwargs)

        loop.run = run_with_faults

    def teardown(self, trainer, pl_module, stage) -> None:
        trainer.fit_loop.epoch_loop.automatic_optimization.__dict__.pop("run", None)


class _StepOutputs(Callback):
    """Keep what hooks can see: outputs, gradients of each step, metric states of each epoch."""

    def __init__(self, faults: _AllocationFaults) -> None:
        self.faults = faults
        self.outputs: list[Any] = []
        self.gradients: dict[int, Any] = {}
        self.metrics: list[dict[str, Any]] = []

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        named = pl_module.named_modules()
        self.metrics.append({n: _metric_state(m) for n, m in named if isinstance(m, Metric)})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.outputs.append(plain_copy(outputs))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.faults.paused = True  # our copies are nobody's allocations
        self.gradients[trainer.global_step] = plain_copy([p.grad for p in pl_module.parameters()])
        self.faults.paused = False


@dataclass(slots=True)
class Run:
    """A finished or broken fit."""

    state: dict[str, Any] | None
    faults: _AllocationFaults
    error: str | None
    moved: list[Difference] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What became of one fault."""

    allocation: int
    op: str
    kind: str
    differences: list[Difference] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class Campaign:
    """The result of one scenario.

    ``update_begins_after`` is the last allocation before the optimizer's update, ``None`` where the
    batch does not end an accumulation window.

    ``kind`` of an outcome is ``exact``, ``differ``, ``refused`` (raised, and weights and optimizer
    state are as before the step) or ``moved`` (raised after something had moved).
    """

    scenario: Scenario
    num_allocations: int
    update_begins_after: int | None
    idle_differences: list[Difference]
    outcomes: list[Outcome]

    def of_kind(self, kind: str) -> list[Outcome]:
        """The outcomes of one kind."""
        return [outcome for outcome in self.outcomes if outcome.kind == kind]

    def refused_too_early(self) -> list[Outcome]:
        """Refusals before the optimizer's update, where every fault must be survived."""
        last = self.update_begins_after or self.num_allocations
        refused = [*self.of_kind("refused"), *self.of_kind("moved")]
        return [outcome for outcome in refused if outcome.allocation <= last]

    def row(self) -> str:
        """The numbers of the table: K, injected, exact, differ, refused, of those early, moved."""
        exact, differ, refused, moved = (
            len(self.of_kind(kind)) for kind in ("exact", "differ", "refused", "moved")
        )
        early = len(self.refused_too_early())
        return (
            f"{self.num_allocations:>5} {len(self.outcomes):>8} {exact:>6} {differ:>6}"
            f" {refused:>7} {early:>5} {moved:>5}"
        )

    def explain(self, limit: int = 5) -> str:
        """The first outcomes that are neither exact nor a clean refusal; empty when there is none."""
        lines = [f"without a fault: {d.path} {d.detail}" for d in self.idle_differences[:limit]]
        wrong = [*self.of_kind("differ"), *self.of_kind("moved"), *self.refused_too_early()]
        for outcome in wrong[:limit]:
            shown = "; ".join(f"{d.path} {d.detail}" for d in outcome.differences[:4])
            lines.append(
                f"allocation {outcome.allocation} ({outcome.op}): {outcome.kind} {shown}"
                f" {outcome.error or ''}"
            )
        return "\n".join(lines)


def fit_once(
    scenario: Scenario,
    guard: Callback | None = None,
    *,
    fail_at: Iterable[int] = (),
    watched: bool = True,
) -> Run:
    """Fit once from fixed seeds; an out-of-memory error that reaches the caller is kept as text.

    Args:
        scenario: What is trained.
        guard: The callback under test.
        fail_at: Allocations of the scenario's batch that fail, from 1.
        watched: Count the allocations of that batch. The reference does without.
    """
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 the global state is what a user's code draws from
    torch.manual_seed(3)
    injector = _FaultInBatch(scenario.batch if watched else None, fail_at)
    outputs = _StepOutputs(injector.faults)
    model = CampaignModel(scenario.recipe)
    trainer = scenario.trainer([outputs, injector, *([guard] if guard else [])])
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(model, campaign_loader())
        except OutOfMemoryError as oom:
            error = str(oom).splitlines()[0]
    if error is not None:
        assert injector.before is not None
        moved = compare(injector.before, trainable_state(trainer))
        return Run(None, injector.faults, error, moved)
    return Run(_visible_state(trainer, model, outputs, guard), injector.faults, None)


def run_campaign(
    scenario: Scenario,
    make_guard: GuardFactory,
    *,
    max_faults: int | None = None,
    offset: int = 0,
    reference: dict[str, Any] | None = None,
) -> Campaign:
    """Fail the allocations of the scenario's batch, one a run.

    Args:
        scenario: What is trained, and where the fault falls.
        make_guard: Makes the callback under test, afresh for each fit.
        max_faults: Fail about so many, evenly spread; ``None`` fails all of them.
        offset: Moves the first one; rotate it so that many thin runs cover all.
        reference: State of the undisturbed run, where the caller has it already.
    """
    expected = reference or fit_once(scenario, watched=False).state
    idle = fit_once(scenario, make_guard())
    assert idle.error is None, idle.error
    num_allocations = idle.faults.count
    stride = 1 if max_faults is None else max(1, num_allocations // max_faults)
    outcomes = [
        _judge(scenario, make_guard(), allocation, expected, idle.faults.trace)
        for allocation in range(1 + offset % stride, num_allocations + 1, stride)
    ]
    return Campaign(
        scenario,
        num_allocations,
        idle.faults.update_begins_after,
        compare(expected, idle.state, tolerance=scenario.tolerance),
        outcomes,
    )


def _judge(
    scenario: Scenario, guard: Callback | None, allocation: int, expected: Any, trace: list[str]
) -> Outcome:
    op = trace[allocation - 1].removeprefix("aten::")
    run = fit_once(scenario, guard, fail_at=[allocation])
    if run.error is not None:
        kind = "moved" if run.moved else "refused"
        return Outcome(allocation, op, kind, run.moved, run.error)
    if run.faults.num_raised != 1:
        return Outcome(allocation, op, "differ", [Difference("fault", "never raised")])
    differences = compare(expected, run.state, tolerance=scenario.tolerance)
    return Outcome(allocation, op, "differ" if differences else "exact", differences)


def trainable_state(trainer: Trainer) -> dict[str, Any]:
    """Copies of what an optimizer step moves."""
    return {
        "weights": plain_copy(dict(trainer.lightning_module.named_parameters())),
        "optimizers": [plain_copy(optimizer.state_dict()) for optimizer in trainer.optimizers],
    }


def _visible_state(
    trainer: Trainer, model: CampaignModel, outputs: _StepOutputs, guard: Callback | None
) -> dict[str, Any]:
    """Everything a user could look at after the fit."""
    callbacks = [c for c in trainer.callbacks if c is not guard and c.state_dict()]
    averaged = [getattr(c, "_average_model", None) for c in trainer.callbacks]
    return {
        **trainable_state(trainer),
        "gradients": plain_copy([p.grad for p in model.parameters()]),
        "gradients of each step": outputs.gradients,
        "outputs of each step": outputs.outputs,
        "buffers": plain_copy(dict(model.named_buffers())),
        "metrics": outputs.metrics,
        "random": {
            "torch": torch.get_rng_state().clone(),
            "python": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002 as above
        },
        "logged rows": user_rows(trainer.logger),
        "callback_metrics": without_own_keys(plain_copy(dict(trainer.callback_metrics))),
        "global_step": trainer.global_step,
        "loops": plain_copy(trainer.fit_loop.state_dict()),
        "precision": plain_copy(trainer.precision_plugin.state_dict()),
        "schedules": [plain_copy(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
        "attributes": {"num_calls": model.num_calls, "losses": plain_copy(model.losses)},
        "callbacks": [plain_copy(c.state_dict()) for c in callbacks],
        "averages": [plain_copy(a.state_dict()) for a in averaged if a is not None],
    }


def _metric_state(metric: Metric) -> dict[str, Any]:
    states = {name: plain_copy(getattr(metric, name)) for name in metric._defaults}
    joined = {
        name: torch.cat([s.reshape(-1) for s in state])
        if isinstance(state, list) and state
        else state
        for name, state in states.items()
    }
    return {**joined, "num_updates": metric._update_count}

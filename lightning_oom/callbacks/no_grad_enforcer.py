"""No graphs in validation, test and prediction: found, named, and taken out."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom._torch import tree_leaves
from lightning_oom.errors import GradInEvaluationError, GradInEvaluationWarning
from lightning_oom.reduction.evaluation_watch import ROOT, EvaluationWatch
from lightning_oom.reduction.grad_mode import Exemptions, users_line_of
from lightning_oom.reduction.grad_violation import GradViolation
from lightning_oom.reduction.kept_graphs import (
    KeptTensors,
    carries_graph,
    cleaned,
    is_inference,
)
from lightning_oom.undo import Undo, UndoStack, shadow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lightning.pytorch import LightningModule, Trainer

    from lightning_oom.reduction.grad_violation import Kind

__all__ = ["NoGradEnforcer"]

_STEPS = ("validation_step", "test_step", "predict_step")
_LOOPS = ("validate_loop", "test_loop", "predict_loop")


class NoGradEnforcer(Callback):
    """Find what builds or keeps a graph in validation, test and prediction, and take it out.

    Lightning switches grad mode off in evaluation, and user code can switch it on again. Then every
    batch costs the memory of a training step, and what is kept of it (an output, an entry of a list)
    keeps its whole graph. Seen are, each with the line, reported once:

    ==============  =================================================================================
    Kind            What
    ==============  =================================================================================
    ``graph``       operators that save tensors for a backward, whichever way grad mode was switched
                    on: ``enable_grad``, ``set_grad_enabled``, a decorator, private functions
    ``grad_mode``   grad mode that is on at the start or the end of a step
    ``train_mode``  modules in training mode in evaluation (dropout, batch normalisation)
    ``output``      an output of a step with a graph
    ``logged``      a value given to ``self.log`` with a graph
    ``attribute``   tensors with a graph, kept in attributes or their lists and dictionaries
    ``inference``   tensors made in inference mode that training would meet in attributes and buffers
    ==============  =================================================================================

    With ``"fix"`` graphs keep nothing, outputs and attributes are detached, modules are put into
    evaluation mode (and back afterwards), grad mode off, and validation, test and prediction run in
    ``no_grad`` in place of inference mode, so that tensors that are cached there can be trained on.
    Results of steps are the same bits, save for modules that were in training mode.

    Args:
        on_violation: ``"fix"`` takes it out and prints one line. ``"warn"`` warns and changes
            nothing. ``"raise"`` raises at the end of the step.
        exempt: What may build graphs and be in training mode: names of hooks (``"validation_step"``),
            names of classes, paths of modules with wildcards (``"model.forces"``, ``"blocks.*"``),
            or classes. In code: :class:`~lightning_oom.allow_grad`. In a step in which exempt code
            has built a graph, outputs, logged values and attributes may carry one.
        verbose: Print a line for what was fixed.

    Attributes:
        violations: What was found, a list of :class:`~lightning_oom.reduction.grad_violation.GradViolation`.

    Raises:
        ValueError: ``on_violation`` is none of the three; an entry of ``exempt`` fits nothing.
        GradInEvaluationError: With ``"raise"``; and with ``"fix"`` from a backward that evaluation
            code runs without being exempt.

    Note:
        Cost of a step without a violation: 0.1 ms on a slow core; nothing per operator. Modes of modules are
        looked at after the steps 1, 2, 4, 8, ... of a stage and at its end; after each step once one
        was found. Not seen: grad mode that is on for operators that save nothing and whose result is
        not kept (no memory is lost), a module that is in training mode only within a step, and
        ``torch.func`` transforms, whose derivatives are always meant. Attributes of children are looked at
        after each step where they have lists or dictionaries, and all of them at the end of the stage.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Careless(BoringModel):
        ...     def validation_step(self, batch, batch_idx):
        ...         with torch.enable_grad():
        ...             return self.layer(batch).square().sum()
        >>> enforcer = NoGradEnforcer(verbose=False)
        >>> trainer = Trainer(
        ...     callbacks=[enforcer], accelerator="cpu", logger=False, limit_val_batches=2,
        ...     enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.validate(Careless(), verbose=False)
        [{}]
        >>> [violation.kind for violation in enforcer.violations]
        ['graph', 'output']

    References:
        Lightning-AI/pytorch-lightning#201, #14497, #19910.
    """

    def __init__(
        self,
        *,
        on_violation: Literal["fix", "warn", "raise"] = "fix",
        exempt: Sequence[str | type] = (),
        verbose: bool = True,
    ) -> None:
        if on_violation not in ("fix", "warn", "raise"):
            raise ValueError(f"on_violation is 'fix', 'warn' or 'raise', got {on_violation!r}")
        if isinstance(exempt, str) or not all(isinstance(e, (str, type)) for e in exempt):
            raise ValueError(f"exempt is a list of names and classes, got {exempt!r}")
        self.on_violation = on_violation
        self.exempt = tuple(exempt)
        self.verbose = verbose
        self.violations: list[GradViolation] = []
        self._undos = UndoStack()
        self._told: set[tuple[str, str, str]] = set()
        self._pending: list[GradViolation] = []
        self._stage: EvaluationWatch | None = None

    @property
    def _fixes(self) -> bool:
        return self.on_violation == "fix"

    # -- wiring
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand before the evaluation steps; choose ``no_grad``."""
        self._close()
        self.violations, self._pending = [], []
        self._told.clear()
        for name in _STEPS:
            self._undos.push(self._stand_before(trainer, pl_module, name))
        if self._fixes:
            for name in _LOOPS:
                self._undos.push(_without_inference_mode(getattr(trainer, name)))

    def _stand_before(self, trainer: Trainer, pl_module: LightningModule, name: str) -> Undo:
        step = getattr(trainer.strategy, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            stage = self._stage
            if stage is None:
                return step(*args, **kwargs)
            return self._run_step(stage, name, lambda: step(*args, **kwargs))

        return shadow(trainer.strategy, name, guarded)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell of an exemption that fits nothing before the first epoch is trained."""
        Exemptions(self.exempt, pl_module)

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_stage()
        exemptions = Exemptions(self.exempt, pl_module)
        if not exemptions.covers_root:
            self._stage = EvaluationWatch(pl_module, exemptions, drops=self._fixes)

    def _end_stage(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.close()

    def _close(self) -> None:
        self._end_stage()
        self._undos()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch, in the sanity check too."""
        self._start(trainer, pl_module)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch."""
        self._start(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch."""
        self._start(trainer, pl_module)

    def _finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at everything once more, and stop watching."""
        stage = self._stage
        if stage is None:
            return
        try:
            self._look_at_lines(stage, "a hook of evaluation")
            if stage.step is not None:  # an exempt step may leave modules in training mode
                self._look_at_modes(stage, "after evaluation")
            if not stage.has_allowed:
                self._look_at_attributes(
                    "attribute", stage.kept.everything(), "evaluation", stage.line_of_step()
                )
            if trainer.state.fn == "fit":
                self._look_for_inference(pl_module)
            self._raise_pending()
        finally:
            self._end_stage()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop watching."""
        self._finish(trainer, pl_module)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop watching."""
        self._finish(trainer, pl_module)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop watching."""
        self._finish(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for inference tensors that an earlier evaluation has left."""
        self._look_for_inference(pl_module)
        self._raise_pending()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave everything as it was."""
        self._close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave everything as it was."""
        self._close()

    # -- one step
    def _run_step(self, stage: EvaluationWatch, name: str, step: Callable[[], Any]) -> Any:
        if name in stage.exemptions.hooks:
            stage.has_allowed = stage.graphs.is_allowed = True
            try:
                return step()
            finally:
                stage.graphs.is_allowed = False
        if stage.step is None:
            self._look_at_modes(stage, f"before {name}")
        stage.step = name
        self._look_at_grad_mode(stage, name, "at the start of")
        allowed = stage.allowed_so_far()
        undo = shadow(stage.module, "log", self._checked_log(stage, name, allowed))
        try:
            output = step()
        finally:
            undo()
        line = self._look_at_lines(stage, name)
        self._look_at_grad_mode(stage, name, "at the end of")
        if stage.is_time_for_modes():
            self._look_at_modes(stage, f"after {name}")
        if stage.allowed_so_far() != allowed:
            stage.has_allowed = True
        else:
            output = self._look_at_output(stage, name, output, line)
            self._look_at_attributes(
                "attribute", stage.kept.recent(), name, line or stage.line_of_step()
            )
        self._raise_pending()
        return output

    def _checked_log(
        self, stage: EvaluationWatch, hook: str, allowed: tuple[int, int]
    ) -> Callable[..., None]:
        log: Callable[..., None] = stage.module.log  # type: ignore[assignment] # a LightningModule's

        def checked(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if (
                isinstance(value, torch.Tensor)
                and carries_graph(value)
                and stage.allowed_so_far() == allowed
            ):
                self._found("logged", hook, repr(name), users_line_of(), value.nbytes)
            log(name, value, *args, **kwargs)

        return checked

    def _look_at_lines(self, stage: EvaluationWatch, hook: str) -> tuple[str, int] | None:
        lines = stage.graphs.take_lines()
        for line, num_bytes in lines.items():
            self._found("graph", hook, "", line, num_bytes)
        return next(iter(lines), None)

    def _look_at_grad_mode(self, stage: EvaluationWatch, name: str, when: str) -> None:
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._found("grad_mode", name, when, stage.line_of_step(), None)
            if self._fixes:
                torch.set_grad_enabled(False)

    def _look_at_modes(self, stage: EvaluationWatch, when: str) -> None:
        told = ""
        for path, module in stage.in_training_mode():
            if told != ROOT and not path.startswith(f"{told}."):  # one word for all that is below
                self._found("train_mode", when, path, None, None)
                told = path
            if self._fixes:
                stage.switch_to_eval(module)

    def _look_at_output(
        self, stage: EvaluationWatch, name: str, output: Any, line: tuple[str, int] | None
    ) -> Any:
        if output is None or (isinstance(output, torch.Tensor) and not carries_graph(output)):
            return output
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        bad = [leaf for leaf in leaves if carries_graph(leaf)]
        if not bad:
            return output
        held = sum(leaf.nbytes for leaf in bad)
        self._found("output", name, "", line or stage.line_of_step(), held)
        return cleaned(output) if self._fixes else output

    def _look_at_attributes(
        self,
        kind: Kind,
        finds: Iterator[tuple[str, int, Callable[[], None]]],
        hook: str,
        line: tuple[str, int] | None = None,
    ) -> None:
        for path, num_bytes, clean in finds:
            self._found(kind, hook, path, line, num_bytes)
            if self._fixes:
                clean()

    def _look_for_inference(self, pl_module: LightningModule) -> None:
        finds = KeptTensors(pl_module, is_inference, only_new=False).everything()
        self._look_at_attributes("inference", finds, "training")

    # -- telling
    def _found(
        self, kind: Kind, hook: str, what: str, line: tuple[str, int] | None, num_bytes: int | None
    ) -> None:
        where = None if line is None else f"{line[0]}:{line[1]}"
        # an attribute is told once, whichever line filled it; a line once, whatever it did
        place = what if kind in ("attribute", "train_mode", "inference") else where or ""
        key = (kind, place, what if kind == "logged" else "")
        if key in self._told:
            return
        self._told.add(key)
        violation = GradViolation(kind=kind, hook=hook, what=what, where=where, num_bytes=num_bytes)
        self.violations.append(violation)
        if self.on_violation == "raise":
            self._pending.append(violation)
        elif self.on_violation == "warn":
            warnings.warn(f"NoGradEnforcer: {violation}.", GradInEvaluationWarning, stacklevel=2)
        elif self.verbose:
            rank_zero_info(f"NoGradEnforcer: {violation}; fixed.")

    def _raise_pending(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            raise GradInEvaluationError("; ".join(map(str, pending)))


def _without_inference_mode(loop: Any) -> Undo:
    before, loop.inference_mode = loop.inference_mode, False

    def put_back() -> None:
        loop.inference_mode = before

    return Undo(put_back)

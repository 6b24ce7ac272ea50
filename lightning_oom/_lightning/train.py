"""A batch of automatic optimization as a program that can be run whole, chunked or in parts."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule

from lightning_oom._lightning.log_check import explain_differing_logs
from lightning_oom._lightning.results import LogRecorder
from lightning_oom._lightning.slice_check import SliceCheck
from lightning_oom.recovery.batches import split_batch
from lightning_oom.recovery.batches.part_rows import rows_of_parts
from lightning_oom.recovery.batchnorm import merged_batchnorm
from lightning_oom.recovery.chunked import chunked_children
from lightning_oom.recovery.outputs import merge_outputs
from lightning_oom.recovery.snapshot import BatchContainers, merge_attributes
from lightning_oom.undo import Undo, shadow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lightning_oom._lightning.train_setup import TrainSetup
    from lightning_oom.recovery.chunked.chunk_gain import ChunkGain
    from lightning_oom.recovery.plan import AttemptPlan, Failure, Trial
    from lightning_oom.recovery.separability import Separability
    from lightning_oom.recovery.snapshot import SavedSnapshot
    from lightning_oom.recovery.snapshot.part import Part

__all__ = ["TrainProgram", "install_closures"]


def install_closures(setup: TrainSetup, run: Callable[[TrainProgram], Any]) -> Undo:
    """Let every closure that the loop makes run through ``run``.

    Args:
        setup: What the programs share.
        run: Gets one program per call of a closure and returns its result.

    Returns:
        The undo; it drops what the programs hold on to as well.
    """
    loop = setup.loop
    make = loop._make_closure

    def make_closure(kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        closure = make(kwargs, optimizer, batch_idx)
        if "batch" not in kwargs:  # a `dataloader_iter` step fetches its own batches
            return closure
        guarded = _guarded_class(type(closure))(
            closure._step_fn, closure._backward_fn, closure._zero_grad_fn
        )
        guarded.run = functools.partial(_run_guarded, setup, run, kwargs, optimizer)
        return guarded

    undo = shadow(loop, "_make_closure", make_closure)

    def remove() -> None:
        undo()
        setup.gradients.forget()

    return Undo(remove)


@functools.cache
def _guarded_class(kind: type[Any]) -> type[Any]:
    """Return a kind of closure that runs through ``self.run``.

    A class instead of a function put on the instance: the closure, and with it the batch, must die
    with the step and not wait for the garbage collector.
    """

    class GuardedClosure(kind):  # type: ignore[misc] # a class that is known at run time only
        asks_zeroes_first = True
        run: Callable[[Any], Any]

        @torch.enable_grad()
        def closure(self, *_: Any, **__: Any) -> Any:
            return self.run(self)

        def plain(self) -> Any:
            return super().closure()

    return GuardedClosure


def _run_guarded(
    setup: TrainSetup,
    run: Callable[[TrainProgram], Any],
    kwargs: OrderedDict[str, Any],
    optimizer: Any,
    closure: Any,
) -> Any:
    # an optimizer may call its closure several times; each call is a step of its own
    zero_grad, backward = closure._zero_grad_fn, closure._backward_fn
    program = TrainProgram(setup, closure, kwargs, optimizer)
    program.wire(zero_grad, backward)
    try:
        return run(program)
    finally:
        closure._zero_grad_fn, closure._backward_fn = zero_grad, backward


class TrainProgram:
    """Forward, zeroing of gradients and backward of one batch.

    Args:
        setup: What all programs of the fit share.
        closure: The loop's own closure for this batch.
        kwargs: Arguments of ``training_step``.
        optimizer: Handed to the strategy's backward.
    """

    can_split = True
    stage = "train"

    def __init__(
        self,
        setup: TrainSetup,
        closure: Any,
        kwargs: OrderedDict[str, Any],
        optimizer: Any,
    ) -> None:
        self.setup = setup
        self.kwargs = kwargs
        self.optimizer = optimizer
        self.batch = kwargs["batch"]
        self.phase = "forward"
        self.on_host = setup.transfer.is_on_host(self.batch)
        self.prior_failure: Failure | None = setup.transfer.failure if self.on_host else None
        self.can_chunk = not self.on_host
        self._closure = closure
        self._zero: Callable[[], None] | None = None
        self._plain_backward: Callable[[Any], None] | None = None
        self._accumulates = False
        self._containers = BatchContainers(self.batch)
        self._saved: SavedSnapshot | None = None

    def wire(
        self, zero_grad: Callable[[], None] | None, backward: Callable[[Any], None] | None
    ) -> None:
        """Put the loop's own functions behind ours, which keep track of phase and gradients.

        Args:
            zero_grad: What zeroes gradients; ``None`` inside an accumulation window.
            backward: What runs backward; ``None`` when the loop skips it.
        """
        self._zero = zero_grad
        self._plain_backward = backward
        self._accumulates = zero_grad is None or self.setup.owns_zero_grad
        if self._accumulates:
            self.setup.gradients.mark()
        self._closure._zero_grad_fn = self._zero_grad if zero_grad is not None else None
        self._closure._backward_fn = self._marked_backward if backward is not None else None

    # -- what the engine asks for
    def parts(self) -> Sequence[Part]:
        """Return what this batch alone can change."""
        return (self._containers, self.setup.progress, self.setup.results)

    def begin(self, saved: SavedSnapshot) -> None:
        """Keep the state before the first attempt: containers and attributes come from it."""
        self._saved = saved

    def gradients_droppable(self) -> bool:
        """Return whether old gradients were alive, which a retry drops before its forward."""
        setup = self.setup
        return (
            self.phase == "forward"
            and self._zero is not None
            and not setup.zeroes_first
            and setup.gradients.any_alive
        )

    def reset(self) -> tuple[str, ...]:
        """Take a failed attempt's contributions out of the gradients."""
        self.phase = "forward"
        return self.setup.gradients.reset()

    def succeed(self) -> None:
        """Forget what only a retry would have needed."""
        if self._accumulates:
            self.setup.gradients.learn()
        self.setup.gradients.forget()

    def learn(self, trial: Trial, plan: AttemptPlan) -> None:
        """Drop old gradients first from now on, where that alone was what helped."""
        forward = trial.failures[-1].phase == "forward"
        if plan.rung == "release" and forward and self.setup.may_zero_first:
            self.setup.zero_first = True

    def give_up(self) -> Any:
        """Return the result of a step without a loss; gradients of earlier micro-steps stay."""
        if self._zero is not None:
            self._zero()
        self.setup.gradients.merge()
        self.setup.gradients.forget()
        return self.setup.loop.output_result_cls(None)

    # -- whole
    def run_plain(self) -> Any:
        """Run the loop's own closure, unguarded."""
        return self._closure.plain()

    def run_whole(self, *, attempt: int) -> Any:
        """Run the closure; from the second attempt on, zero gradients before the forward."""
        closure = self._closure
        if attempt == 1 and not self.setup.zeroes_first and not self.on_host:
            return closure.plain()
        kwargs = self._fresh_kwargs() if attempt > 1 else self.kwargs
        if self.on_host:
            self.phase = "transfer"
            kwargs = OrderedDict(kwargs, batch=self.setup.transfer.move(kwargs["batch"]))
            self.phase = "forward"
        if self._zero is not None:
            self._zero_grad()
            self.phase = "forward"
        again = type(closure)(self.setup.loop._make_step_fn(kwargs), closure._backward_fn, None)
        with self._merge_before_hooks():
            return again.plain()

    @contextlib.contextmanager
    def chunked(self, rows: int, rows_together: int) -> Iterator[None]:
        """Let the module's children run chunk by chunk; once none of them may, ask no more."""
        setup = self.setup
        verdicts = setup.chunk_verdicts
        with chunked_children(setup.module, rows, rows_together, verdicts=verdicts) as report:
            try:
                yield
            finally:
                self.can_chunk = bool(report.chunked) or not report.whole

    def _fresh_kwargs(self) -> OrderedDict[str, Any]:
        batch = self._fresh_batch()
        results = self.setup.trainer._results
        if results is not None:
            results.batch = batch
        return OrderedDict(self.kwargs, batch=batch)

    def _fresh_batch(self) -> Any:
        return self.batch if self._saved is None else self._saved.of(self._containers).fresh()

    def _zero_grad(self) -> None:
        self.phase = "zero_grad"
        if self._zero is not None:
            self._zero()
        self.setup.gradients.mark()

    def _marked_backward(self, loss: torch.Tensor) -> None:
        self.phase = "backward"
        if self._plain_backward is not None:
            self._plain_backward(loss)

    @contextlib.contextmanager
    def _merge_before_hooks(self) -> Iterator[None]:
        """Put finished gradients back before ``on_after_backward`` looks at them."""
        plugin = self.setup.trainer.precision_plugin
        real = plugin.post_backward

        def post_backward(tensor: Any, module: Any) -> Any:
            self.setup.gradients.merge()
            return real(tensor, module)

        undo = shadow(plugin, "post_backward", post_backward)
        try:
            yield
        finally:
            undo()

    # -- parts
    def run_parts(self, rows_together: int) -> Any:
        """Run micro-batches; losses weighted, logs merged, hooks once."""
        setup = self.setup
        batch = self._fresh_batch()
        parts = split_batch(batch, rows_together, split_fn=setup.split_fn)
        rows = rows_of_parts(parts, setup.split_fn)
        weights = self._weights(parts, rows)
        if self._zero is not None:
            self._zero_grad()
        recorder = LogRecorder(
            setup.trainer,
            rows=rows,
            weights=None if setup.weight_fn is None else weights,
            log_merge=setup.log_merge,
        )
        with merged_batchnorm(setup.module) as norms, recorder:
            losses, extras, counted = self._run_each(parts, weights, recorder, norms)
        if self._saved is not None:
            merge_attributes(self._saved.of(setup.attributes), counted, rows)
        results = setup.trainer._results
        if results is not None:
            results.batch, results.batch_size = batch, None
        recorder.replay()
        setup.gradients.merge()
        loss = torch.stack(losses).sum() if losses else None
        if loss is not None and self._plain_backward is not None:
            self.phase = "after_backward"
            setup.trainer.precision_plugin.post_backward(loss, setup.module)
        return setup.loop.output_result_cls(loss, extra=merge_outputs(extras, rows) or {})

    def _run_each(
        self, parts: list[Any], weights: list[float], recorder: Any, norms: Any
    ) -> tuple[list[torch.Tensor], list[Any], list[dict[str, float]]]:
        losses: list[torch.Tensor] = []
        extras: list[Any] = []
        counted: list[dict[str, float]] = []
        for index in range(len(parts)):
            part, parts[index] = parts[index], None
            self.phase = "forward"
            norms.begin_micro_batch()
            if self.on_host:
                self.phase = "transfer"
                part = self.setup.transfer.move(part)
                self.phase = "forward"
            with recorder.micro_batch(index, part):
                output = self.setup.loop._make_step_fn(OrderedDict(self.kwargs, batch=part))()
                loss = output.closure_loss
                if loss is not None and weights[index]:
                    losses.append(loss.detach() * weights[index])
                    self._backward(loss, weights[index])
            extras.append(output.extra)
            if self._saved is not None:
                counted.append(self._saved.of(self.setup.attributes).counters())
            del output, loss, part
        return losses, extras, counted

    def _backward(self, loss: torch.Tensor, weight: float) -> None:
        """Run one micro-batch's backward; ``on_after_backward`` waits for the last."""
        if self._plain_backward is None:
            return
        self.phase = "backward"
        plugin = self.setup.trainer.precision_plugin
        undo = shadow(plugin, "post_backward", _without_hooks)
        try:
            if type(self.setup.module).backward is LightningModule.backward:
                gradient = torch.full_like(loss, weight)
                self.setup.trainer.strategy.backward(loss, self.optimizer, gradient=gradient)
            else:
                self._marked_backward(loss * weight)
        finally:
            undo()

    def _weights(self, parts: list[Any], rows: list[int]) -> list[float]:
        weigh = self.setup.weight_fn
        amounts = [float(n) for n in rows] if weigh is None else [float(weigh(p)) for p in parts]
        total = sum(amounts)
        if weigh is not None and not (total > 0 and all(a >= 0 for a in amounts)):
            raise ValueError(
                f"weight_fn gave {amounts} for {len(parts)} micro-batches: weights are at least 0 "
                "and not all 0"
            )
        return [amount / total for amount in amounts]

    # -- before the first split
    def check_separability(self, *, whole_failed: bool) -> Separability:
        """Compare a slice with its parts; the engine puts the state back."""
        setup, saved = self.setup, self._saved
        check = self._slice_check()
        verdict = check.separability(whole_failed=whole_failed)
        if verdict.separable and saved is not None:
            verdict = check.keeping_what_steps_count(verdict, restore=saved.restore)
            names = check.differing_logs(setup.log_merge, restore=saved.restore)
            if names:
                setup.warn(explain_differing_logs(names))
        return verdict

    def estimate_chunk_gain(self) -> ChunkGain | None:
        """Count, on a small slice, what chunks would save; the engine puts the state back."""
        return self._slice_check().chunk_gain()

    def _slice_check(self) -> SliceCheck:
        setup = self.setup
        return SliceCheck(
            setup.trainer,
            self._run_step,
            self._fresh_batch(),
            weight_fn=setup.weight_fn,
            split_fn=setup.split_fn,
        )

    def _run_step(self, batch: Any) -> Any:
        if self.on_host:
            batch = self.setup.transfer.move(batch)
        return self.setup.loop._make_step_fn(OrderedDict(self.kwargs, batch=batch))()


def _without_hooks(tensor: torch.Tensor, module: LightningModule) -> torch.Tensor:  # noqa: ARG001 - Lightning's signature
    """Stand in for ``post_backward`` of every micro-batch; its hooks run once, after the last."""
    return tensor.detach()

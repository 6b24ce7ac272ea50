"""Whether activation functions may overwrite their input, and what that saves."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_oom._torch import tree_leaves
from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.fake_step import FakeStep
from lightning_oom.planning.real_step import measure_rows
from lightning_oom.reduction.inplace import set_inplace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["InplaceProof", "prove_inplace"]

_ROWS = 2


@dataclass(frozen=True, kw_only=True)
class InplaceProof:
    """What was found for each module.

    Attributes:
        proven: Paths that may overwrite their input, all of them together.
        refused: Path -> why it may not.
        saved_bytes: How much lower the peak is with all that are proven; ``None`` where the step
            cannot be followed on fake tensors.
    """

    proven: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    saved_bytes: int | None = None


@dataclass(kw_only=True)
class _Facts:
    """What one step on a few rows did."""

    gradients: list[torch.Tensor | None] = field(default_factory=list)
    loss: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    is_batch_untouched: bool = True


def prove_inplace(
    module: torch.nn.Module, batch: Any, paths: Sequence[str], *, precision: str | int | None = None
) -> InplaceProof:
    """Run a training step on two rows of a copy, with and without, and compare everything.

    Loss, gradients and buffers have to be the same bits, and the batch has to be as it was: an
    overwritten batch cannot be tried again after an out-of-memory error. Modules are tried all
    together; where that fails, one after the other beside those that are proven.

    Args:
        module: With a ``training_step``, or called on the batch. Copied, never changed.
        batch: With real values.
        paths: Modules with a switch ``inplace``.
        precision: As in ``Trainer(precision=...)``.

    Returns:
        The proof.

    Raises:
        StepNotTracedError: The step cannot be run on a copy at all.

    Note:
        Cost: a step of two rows for each path where not all go together. True for what a step on
        these rows does: code that branches on values may do something else on others.
    """
    plain = _run(module, batch, (), precision)
    proven: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    if _why_not(module, batch, tuple(paths), precision, plain) is None:
        proven = tuple(paths)
    else:
        for path in paths:
            reason = _why_not(module, batch, (*proven, path), precision, plain)
            if reason is None:
                proven = (*proven, path)
            else:
                refused[path] = reason
    return InplaceProof(
        proven=proven,
        refused=refused,
        saved_bytes=_saved_bytes(module, batch, proven, precision),
    )


def _why_not(
    module: torch.nn.Module,
    batch: Any,
    paths: tuple[str, ...],
    precision: str | int | None,
    plain: _Facts,
) -> str | None:
    try:
        changed = _run(module, batch, paths, precision)
    except StepNotTracedError as error:
        return str(error.__cause__ or error).splitlines()[0]
    if not changed.is_batch_untouched:
        return "it overwrites the batch"
    for name in ("loss", "gradients", "buffers"):
        before, after = getattr(plain, name), getattr(changed, name)
        if len(before) != len(after) or not all(map(_same, before, after)):
            return f"it changes the {name}"
    return None


def _same(before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
    if before is None or after is None:
        return before is after
    return torch.equal(before, after)


def _run(
    module: torch.nn.Module, batch: Any, paths: tuple[str, ...], precision: str | int | None
) -> _Facts:
    facts = _Facts()

    def prepare(clone: Any) -> None:
        set_inplace(clone, paths)
        name = "training_step" if hasattr(clone, "training_step") else "forward"
        vars(clone)[name] = _watched(getattr(clone, name), facts, clone)

    measure_rows(
        module,
        batch,
        rows=_ROWS,
        precision=precision,
        num_steps=1,
        transform=prepare,
        optimizer=functools.partial(_Recorder, facts=facts),
    )
    return facts


def _watched(step: Callable[..., Any], facts: _Facts, clone: torch.nn.Module) -> Callable[..., Any]:
    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = [leaf.detach().clone() for leaf in leaves]
        result = step(*args, **kwargs)
        facts.is_batch_untouched = all(map(torch.equal, before, leaves))
        facts.loss = [
            leaf.detach().clone() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)
        ]
        facts.buffers = [buffer.detach().clone() for buffer in clone.buffers()]
        return result

    return run


class _Recorder(torch.optim.Optimizer):
    """Keeps gradients and updates nothing."""

    def __init__(self, parameters: Any, *, facts: _Facts) -> None:
        super().__init__(parameters, {})
        self._facts = facts

    @override
    def step(self, closure: Any = None) -> Any:
        result = None if closure is None else closure()
        self._facts.gradients = [
            None if parameter.grad is None else parameter.grad.detach().clone()
            for group in self.param_groups
            for parameter in group["params"]
        ]
        return result


def _saved_bytes(
    module: torch.nn.Module, batch: Any, paths: tuple[str, ...], precision: str | int | None
) -> int | None:
    if not paths:
        return 0
    step = FakeStep(module, batch)
    try:
        before = step.run(precision=precision).peak_bytes
        after = step.run(
            precision=precision, transform=lambda clone: set_inplace(clone, paths)
        ).peak_bytes
    except StepNotTracedError:
        return None
    return before - after

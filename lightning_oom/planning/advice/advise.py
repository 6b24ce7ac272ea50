"""Try every change on fake tensors and keep those that lower the peak."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.advice.candidates import Candidate, changes_to_try
from lightning_oom.planning.advice.copies import CopyWatch
from lightning_oom.planning.advice.record import Advice, AdviceList
from lightning_oom.planning.advice.recounts import changes_to_count
from lightning_oom.planning.advice.what_if import peak_if_scaled
from lightning_oom.planning.fake_step import FakeStep
from lightning_oom.planning.on_target import settings_on
from lightning_oom.planning.target import parse_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from lightning_oom.planning.target import TargetDevice
    from lightning_oom.planning.trace import MemoryTrace

__all__ = ["advise"]

_LEAST_FRACTION = 0.01
_ORDER = ("same numbers", "rounding", "other numbers", "another model")


def advise(
    module: torch.nn.Module,
    batch: Any,
    *,
    precision: str | int | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    device: TargetDevice | torch.device | str | None = None,
    num_devices: int = 1,
    progress: Callable[[str], None] | None = None,
) -> AdviceList:
    """Say what would lower the peak of a module's training step, and by how much.

    Each change is tried alone on fake tensors, or counted from the trace where the user's code would
    have to be rewritten; shown is what saves at least 1 % of the peak. Two changes together save less
    than the sum of both.

    Args:
        module: A LightningModule, or any ``nn.Module`` as for
            :class:`~lightning_oom.planning.fake_step.FakeStep`. Not changed.
        batch: The largest that is to fit; only types and shapes matter.
        precision: As in ``Trainer(precision=...)``.
        loss: As for :class:`~lightning_oom.planning.fake_step.FakeStep`.
        optimizer: Makes the optimizer; ``None`` asks ``configure_optimizers``.
        device: Whose operators are run, as for
            :func:`~lightning_oom.planning.estimate.estimate_peak`.
        num_devices: Devices that train side by side, for the effective batch in the advice.
        progress: Called with the title of each change before it is tried.

    Returns:
        The advice, what keeps the numbers first.

    Raises:
        StepNotTracedError: The plain step cannot be followed on fake tensors.

    Note:
        Cost: one dry run of two steps per change, a second or two each for a model such as BERT-base.
        Pruning with masks, channels-last and in-place activations are not tried: in training they
        lower no peak.

    Example:
        >>> import torch
        >>> layers = [torch.nn.TransformerEncoderLayer(16, 2, 64) for _ in range(3)]
        >>> model = torch.nn.Sequential(*layers)
        >>> found = advise(model, torch.zeros(32, 8, 16), optimizer=torch.optim.AdamW)
        >>> any(entry.title == "checkpoint activations" for entry in found.entries)
        True
    """
    target = parse_target(device, module)
    step = FakeStep(module, batch, loss=loss)
    how = {**settings_on(target, precision), "optimizer": optimizer}
    watch = CopyWatch()
    contexts = [watch.watching, *([how["context"]] if "context" in how else [])]
    watched = {**how, "context": lambda clone: _entered(contexts, clone)}
    trace = step.run(**watched, record_operators=True)
    copies = watch.lines(trace)
    candidates = [
        *changes_to_try(
            module,
            trace,
            rows=step.rows,
            num_devices=num_devices,
            precision=precision,
            target=target,
        ),
        *changes_to_count(module, trace, copies),
    ]
    entries: list[Advice] = []
    for candidate in candidates:
        if progress is not None:
            progress(candidate.title)
        peak_bytes = _try(step, trace, how, candidate)
        if peak_bytes is None or trace.peak_bytes - peak_bytes < _LEAST_FRACTION * trace.peak_bytes:
            continue
        entries.append(_entry(candidate, trace, peak_bytes))
    entries.sort(key=lambda entry: (_ORDER.index(entry.effect), -entry.saved_bytes))
    return AdviceList(
        peak_bytes=trace.peak_bytes,
        peak_phase=trace.peak_phase,
        entries=tuple(_without_repeats(entries)),
        substitutions=sum(substitution.num_times for substitution in trace.substitutions),
    )


@contextmanager
def _entered(contexts: list[Callable[[Any], Any]], clone: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context(clone))
        yield


def _try(
    step: FakeStep, trace: MemoryTrace, how: dict[str, Any], candidate: Candidate
) -> int | None:
    if candidate.factors is not None:
        return peak_if_scaled(trace, candidate.factors)
    try:
        return step.run(**{**how, **candidate.run}).peak_bytes
    except StepNotTracedError:  # the change does not go with this module
        return None


def _entry(candidate: Candidate, trace: MemoryTrace, peak_bytes: int) -> Advice:
    return Advice(
        title=candidate.title,
        place=candidate.place,
        how=candidate.how,
        effect=candidate.effect,
        cost=candidate.cost,
        peak_bytes=peak_bytes,
        saved_bytes=trace.peak_bytes - peak_bytes,
        basis="dry run" if candidate.factors is None else "recount",
    )


def _without_repeats(entries: list[Advice]) -> list[Advice]:
    """Leave out what was counted from the trace where the same change was run as well."""
    run = {entry.title for entry in entries if entry.basis == "dry run"}
    return [entry for entry in entries if entry.basis == "dry run" or entry.title not in run]

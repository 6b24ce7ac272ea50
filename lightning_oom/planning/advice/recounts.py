"""Changes that cannot be run on the user's code as it stands, but counted from its trace."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from lightning_oom.planning.advice.candidates import Candidate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from lightning_oom.planning.advice.copies import CopyingLine
    from lightning_oom.planning.trace import MemoryTrace

__all__ = ["changes_to_count"]

_LARGE_VOCABULARY = 8192
_TOKENS_PER_CHUNK = 1024
_SHORTEST_SEQUENCE = 64
_EIGHT_BIT_FRACTION = (1 + 4 / 256) / 4
"""One byte an element and one 32-bit scale for 256 of them, instead of four bytes."""
_SMALLEST_QUANTIZED = 4096 * 4
"""Bytes below which 8-bit optimizers keep 32 bits."""


def changes_to_count(
    module: nn.Module, trace: MemoryTrace, copies: Iterable[CopyingLine]
) -> Iterator[Candidate]:
    """Give the changes whose effect follows from the trace of the plain step.

    Args:
        module: The user's own; looked at, never changed.
        trace: Of the plain step, with its operators.
        copies: Lines of user code that copy.
    """
    for line in copies:
        yield Candidate(
            title=f"a line that {line.what}",
            place=line.place,
            how="take it out where nobody writes to the copy",
            effect="same numbers",
            factors=dict.fromkeys(line.storages, 0.0),
        )
    yield from _chunked_loss(trace)
    yield from _eager_attention(trace)
    yield from _eight_bits(trace)
    yield from _frozen(module, trace)


def _chunked_loss(trace: MemoryTrace) -> Iterator[Candidate]:
    """Logits of a large vocabulary, and all that has their size, in chunks of tokens."""
    losses = [
        call
        for call in trace.operators
        if "log_softmax" in call.name
        and call.outputs
        and call.outputs[0].shape[-1] >= _LARGE_VOCABULARY
    ]
    if not losses:
        return
    shape = losses[0].outputs[0].shape
    tokens = 1
    for extent in shape[:-1]:
        tokens *= extent
    if tokens <= _TOKENS_PER_CHUNK:
        return
    size = tokens * shape[-1]
    storages = {
        spec.storage
        for call in trace.operators
        for spec in call.outputs
        if spec.shape[-1:] == shape[-1:] and _num_elements(spec.shape) >= size // 2
    }
    yield Candidate(
        title=f"cross-entropy of {shape[-1]:,} classes in chunks",
        place=losses[0].module,
        how="lightning_oom.chunked_cross_entropy(hidden, head.weight, target)",
        effect="rounding",
        cost="the output layer runs once more in backward",
        factors=dict.fromkeys(storages, _TOKENS_PER_CHUNK / tokens),
    )


def _num_elements(shape: tuple[int, ...]) -> int:
    number = 1
    for extent in shape:
        number *= extent
    return number


def _eager_attention(trace: MemoryTrace) -> Iterator[Candidate]:
    """Score matrices of attention that is written out: the softmax and what has its shape."""
    matrices: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for call in trace.operators:
        if call.phase == "forward" and ("_softmax" in call.name) and "log" not in call.name:
            shape = call.outputs[0].shape
            if len(shape) > 2 and min(shape[-2:]) >= _SHORTEST_SEQUENCE:  # noqa: PLR2004 - rows, heads
                matrices[call.module].add(shape)
    if not matrices:
        return
    storages = {
        spec.storage
        for call in trace.operators
        if call.module in matrices
        for spec in call.outputs
        if spec.shape in matrices[call.module]
    }
    names = sorted(matrices)
    yield Candidate(
        title="attention without its score matrix",
        place=names[0] if len(names) == 1 else f"{len(names)} modules, {names[0]} to {names[-1]}",
        how="torch.nn.functional.scaled_dot_product_attention",
        effect="rounding",
        factors=dict.fromkeys(storages, 0.0),
    )


def _eight_bits(trace: MemoryTrace) -> Iterator[Candidate]:
    storages = {
        event.storage
        for event in trace.events
        if event.kind == "optimizer" and event.num_bytes >= _SMALLEST_QUANTIZED
    }
    if storages:
        yield Candidate(
            title="optimizer state in 8 bits",
            how="torchao.optim.AdamW8bit, or bitsandbytes.optim.AdamW8bit",
            effect="other numbers",
            factors=dict.fromkeys(storages, _EIGHT_BIT_FRACTION),
        )


def _frozen(module: nn.Module, trace: MemoryTrace) -> Iterator[Candidate]:
    paths = {
        path
        for path, part in module.named_modules()
        if any(True for _ in part.parameters(recurse=False))
        and not any(p.requires_grad for p in part.parameters(recurse=False))
    }
    storages = {
        event.storage
        for event in trace.events
        if event.kind == "parameter" and event.module in paths
    }
    if storages:
        yield Candidate(
            title="frozen weights in 16 bits",
            place=f"{len(paths)} frozen modules",
            how="module.to(torch.bfloat16) for what is frozen, or torchao's quantize_",
            effect="other numbers",
            factors=dict.fromkeys(storages, 0.5),
        )

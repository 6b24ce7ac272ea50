"""Language models, and what of a 24 GiB device they need with one remedy after the other.

Run from the repository root (transformers is in the development environment); nothing is allocated,
some minutes::

    python tests/benchmarks/fits_24_gib.py > tests/benchmarks/results/fits_24_gib.md

Two steps run on fake tensors, with the kernels that an RTX 3090 would take, and their allocations go
through the model of the caching allocator. What is not run but recounted, the table says.
"""

from __future__ import annotations

import argparse
import platform
from bisect import bisect_left
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from silence import be_quiet  # isort: skip  puts the tests on the path

import torch

from lightning_oom.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.planning.estimate import MemoryEstimate
    from lightning_oom.planning.trace import MemoryEvent, MemoryTrace

DEVICE_BYTES = 24 * GIB
EIGHT_BIT = (1 + 4 / 256) / 4
"""Of a state in float32: one byte a value, and four for each block of 256."""
_LEAST_VALUES = 4096  # states of smaller parameters stay in float32, in bitsandbytes and torchao

NAMES = ("BERT-Base", "BERT-Large", "GPT-2 Medium", "GPT-2 Large", "GPT-2 XL")


class Case(NamedTuple):
    """A model with its batch, and what was published of it.

    Attributes:
        head: The class, with its loss.
        config: Of transformers.
        rows: Of the batch.
        length: Tokens in a row.
        published_gib: Its peak without anything; ``None`` where it did not fit.
        published_less: By what part everything together lowered that.
    """

    head: Any
    config: Any
    rows: int
    length: int
    published_gib: float | None
    published_less: float | None


def case_of(name: str) -> Case:
    """Return a model by its name."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    bert_large = BertConfig(intermediate_size=4096, **large)
    medium = GPT2Config(n_embd=1024, n_layer=24, n_head=16)
    gpt2_large = GPT2Config(n_embd=1280, n_layer=36, n_head=20)
    extra_large = GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    return {
        "BERT-Base": Case(BertForMaskedLM, BertConfig(), 16, 128, 3.14, 0.731),
        "BERT-Large": Case(BertForMaskedLM, bert_large, 16, 128, 7.60, 0.734),
        "GPT-2 Medium": Case(GPT2LMHeadModel, medium, 4, 512, 10.87, 0.760),
        "GPT-2 Large": Case(GPT2LMHeadModel, gpt2_large, 2, 512, 14.87, 0.685),
        "GPT-2 XL": Case(GPT2LMHeadModel, extra_large, 1, 512, None, None),
    }[name]


def with_state_on_host(trace: MemoryTrace, *, factor: float = 1.0) -> MemoryTrace:
    """Recount a trace: optimizer state is on the device in the optimizer's step only.

    Args:
        trace: In which the state stays where it is.
        factor: What part of each state in float32 is there, for states in 8 bits.
    """
    states: dict[int, MemoryEvent] = {}
    for event in trace.events:
        if event.kind == "optimizer" and event.num_bytes > 0:
            small = event.num_bytes < _LEAST_VALUES * 4
            size = event.num_bytes if small else int(event.num_bytes * factor)
            states[event.storage] = event._replace(num_bytes=size)
    extra: dict[int, list[MemoryEvent]] = defaultdict(list)
    in_steps = [mark.event for mark in trace.marks if mark.name == "optimizer"]
    after_steps = [mark.event for mark in trace.marks if mark.name in ("step", "end")][1:]
    made = {
        s: i for i, e in enumerate(trace.events) if (s := e.storage) in states and e.num_bytes > 0
    }
    for storage, state in states.items():
        if state.num_bytes < MIB:
            continue
        for position in after_steps[bisect_left(after_steps, made[storage] + 1) :]:
            extra[position].append(state._replace(num_bytes=-state.num_bytes))
        for position in in_steps[bisect_left(in_steps, made[storage] + 1) :]:
            extra[position].append(state)
    events: list[MemoryEvent] = []
    for index, event in enumerate(trace.events):
        events += extra.get(index, ())
        state = states.get(event.storage)
        if state is None:
            events.append(event)
        elif event.num_bytes > 0:
            events.append(state)
    events += extra.get(len(trace.events), ())
    return replace(trace, events=tuple(events))


def estimates_of(case: Case) -> Iterator[tuple[str, MemoryEstimate, float]]:
    """Give the name of each column, its estimate, and GiB that a forward moves to the host."""
    from lightning_oom.planning.estimate import estimate_trace
    from lightning_oom.planning.fake_step import FakeStep
    from lightning_oom.planning.offload_dry_run import DryOffload
    from lightning_oom.planning.on_target import settings_on
    from lightning_oom.planning.target import parse_target
    from lightning_oom.reduction.checkpointing import find_blocks, install

    target = parse_target("rtx3090")
    with torch.device("meta"):
        model = case.head(case.config).train()
        ids = torch.zeros(case.rows, case.length, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": ids}
    step = FakeStep(model, batch, loss=lambda network, inputs: network(**inputs).loss)
    checkpoint = partial(install, paths=[block.path for block in find_blocks(model)])

    def run(precision: str | None = None, **how: Any) -> tuple[MemoryTrace, float]:
        host = DryOffload(batch=[ids], has_streams=True)
        remedies = {"zero_grad": "early", "transform": checkpoint, "forward_context": host.around}
        if how.pop("plain", False):
            remedies = {}
        settings = settings_on(target, precision) | remedies | how
        trace = step.run(record_operators=True, **settings)
        return trace, host.moved_bytes / GIB / max(host.num_forwards, 1)

    trace, moved = run(plain=True, optimizer=torch.optim.AdamW)
    yield "plain", estimate_trace(trace, target), moved
    one_by_one = partial(torch.optim.AdamW, foreach=False)
    trace, moved = run(optimizer=one_by_one)
    yield "exact", estimate_trace(with_state_on_host(trace), target), moved
    fused = partial(torch.optim.AdamW, fused=True)
    trace, moved = run(optimizer=fused)
    yield "exact, fused", estimate_trace(with_state_on_host(trace), target), moved
    trace, moved = run("bf16-mixed", optimizer=fused)
    yield "bf16", estimate_trace(with_state_on_host(trace), target, precision="bf16-mixed"), moved
    trace = with_state_on_host(trace, factor=EIGHT_BIT)
    yield "8-bit", estimate_trace(trace, target, precision="bf16-mixed"), moved


HEAD = """# What fits into 24 GiB

{versions}. Two steps of AdamW on fake tensors, kernels of an RTX 3090, GiB of
`max_memory_allocated` as estimated; "device" adds what the allocator reserves beyond and 0.4 GiB of
context. Made by `tests/benchmarks/fits_24_gib.py`.

- **plain**: Lightning's order of `zero_grad`, `foreach` optimizer.
- **exact**: `EarlyZeroGrad`, `ActivationCheckpointing` of every block, `CPUOffload(activations=True,
  optimizer=True)`, AdamW one tensor at a time; **fused**: the same with a fused AdamW.
- **bf16**: the fused one in `bf16-mixed`. **8-bit**: and the optimizer's state in 8 bits.

| model | rows x length | plain | published plain | exact | fused | + bf16 | + 8-bit | less | published less | device plain -> last | fits 24 GiB from |
|---|---|---|---|---|---|---|---|---|---|---|---|"""

TAIL = """
Run on fake tensors: forward, backward and step with checkpointed blocks, autocast, both kinds of AdamW.
Recounted, not run: activations of 1 MiB and more are freed when they are saved and allocated when they
are wanted, four copies out and two back under way; state of 1 MiB and more is there in the optimizer's
step only; a state of 4096 values or more in 8 bits takes {eight:.4f} of its bytes, and the kernel that
steps it has no temporaries. Nothing here was measured on a GPU; the plain column is checked against the
published one by `estimate_published.py` (which drops gradients early, as was done there).

The published reductions come from another program with other remedies, against a plain step that
drops gradients early. Where "less" stays behind them, the optimizer's step sets the peak: weights,
gradients and state in full, all at once, and none of these remedies takes weights or gradients away."""


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    import transformers

    parser = argparse.ArgumentParser(description="What fits into 24 GiB.")
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args(arguments)
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    print(HEAD.format(versions=versions), flush=True)
    details = []
    for name in NAMES:
        if options.only not in name:
            continue
        case = case_of(name)
        found = list(estimates_of(case))
        sizes = [estimate.allocated_bytes / GIB for _, estimate, _ in found]
        totals = [estimate.total_bytes for _, estimate, _ in found]
        first = next(
            (n for (n, _, _), size in zip(found, totals, strict=True) if size <= DEVICE_BYTES), "-"
        )
        published = "OOM" if case.published_gib is None else f"{case.published_gib:.2f}"
        less = "fits" if case.published_less is None else f"{case.published_less:.1%}"
        cells = [
            name,
            f"{case.rows} x {case.length}",
            f"{sizes[0]:.2f}",
            published,
            *(f"{size:.2f}" for size in sizes[1:]),
            f"{1 - sizes[-1] / sizes[0]:.1%}",
            less,
            f"{totals[0] / GIB:.2f} -> {totals[-1] / GIB:.2f}",
            first,
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
        details.append((name, found))
    print("\nThe most in each phase, GiB, and what a forward moves to the host:\n")
    print(
        "| model | remedies | forward | backward | optimizer | to the host |\n|---|---|---|---|---|---|"
    )
    for name, found in details:
        for column, estimate, moved in found:
            peaks = estimate.phase_peaks
            shown = " | ".join(
                f"{peaks.get(phase, 0) / GIB:.2f}" for phase in ("forward", "backward", "optimizer")
            )
            print(f"| {name} | {column} | {shown} | {moved:.2f} |")
    print(TAIL.format(eight=EIGHT_BIT))


if __name__ == "__main__":
    be_quiet()
    main()

"""Checkpoint plans side by side: peak of the activations, and recomputation, for a budget each.

Run with ``python tests/benchmarks/checkpoint_plan.py [transformer] [resnet] [large]``. Nothing is
allocated: every step is simulated on fake tensors. Activations are all that is neither parameter,
buffer, batch, gradient nor optimizer state. Recomputation is in percent of the work of a plain step,
an operator costing its floating-point operations or 32 for each byte that it moves.

``large`` is the task of the published benchmark of ckptplan (memory_budget_matrix_result.json): 24
encoder layers of width 2048 on 2048 tokens.
"""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_oom.planning.checkpoint_plan import plan_checkpoints
from lightning_oom.planning.checkpoint_profile import profile_step, recomputation_costs
from lightning_oom.planning.fake_step import FakeStep
from lightning_oom.reduction.checkpointing import block_levels, install
from lightning_oom.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_oom.planning.checkpoint_profile import StepProfile
    from lightning_oom.planning.trace import MemoryTrace

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
MOST_EXHAUSTIVE = 16

PUBLISHED_BUDGET_BYTES = 12 * GIB
PUBLISHED_ACTIVATIONS = 2_997_681_152 / 4_433_117_184
PUBLISHED = {
    "uniform": ((0, 3, 6, 9, 12, 15, 18, 21), 11.98),
    "ckptplan": ((0, 12, 13, 14, 17, 18, 22, 23), 12.83),
}
"""Blocks that were chosen there, and by how many percent the step was slower on an A10G."""


class ActivationsOnly:
    """A step whose traces leave out what checkpointing does not change."""

    def __init__(self, step: FakeStep) -> None:
        self._step = step

    def run(self, **how: Any) -> MemoryTrace:
        """Trace the step."""
        trace = self._step.run(**how)
        kept = tuple(e for e in trace.events if e.kind in ("activation", "temporary"))
        return replace(trace, events=kept)


class Encoder(nn.Module):
    """An embedding, encoder layers and a head with its loss."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting the tokens."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Stack(nn.Module):
    """Encoder layers alone, with the mean square of the output as the loss."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class ResNet50(nn.Module):
    """The one of transformers, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetForImageClassification

        self.net = ResNetForImageClassification(ResNetConfig(num_labels=1000))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Cross-entropy against the first class."""
        logits = self.net(pixel_values=images).logits
        target = torch.zeros(len(images), dtype=torch.long)
        return nn.functional.cross_entropy(logits, target)


def uniform(count: int, blocks: int) -> frozenset[int]:
    """Spread a number of checkpoints evenly."""
    return frozenset((index * blocks) // count for index in range(count))


def first_that_fits(
    choices: Iterable[frozenset[int]], profile: StepProfile, budget_bytes: float
) -> frozenset[int] | None:
    """Return the first choice whose predicted peak is in the budget."""
    return next((c for c in choices if profile.peak_bytes(c) <= budget_bytes), None)


def rivals(
    profile: StepProfile, costs: Sequence[float], budget_bytes: float
) -> dict[str, frozenset[int] | None]:
    """What simpler rules choose, and the best choice of all."""
    blocks = range(len(costs))
    kept = {call.block: call.kept_bytes for call in profile.calls}
    dense = sorted(blocks, key=lambda block: -kept[block] / costs[block])
    found = {
        "uniform": first_that_fits(
            (uniform(count, len(costs)) for count in range(1, len(costs) + 1)),
            profile,
            budget_bytes,
        ),
        "greedy": first_that_fits(
            (frozenset(dense[:count]) for count in range(1, len(costs) + 1)), profile, budget_bytes
        ),
        "last first": first_that_fits(
            (frozenset(blocks[-count:]) for count in range(1, len(costs) + 1)),
            profile,
            budget_bytes,
        ),
    }
    if len(costs) <= MOST_EXHAUSTIVE:
        fitting = (
            choice
            for size in range(len(costs) + 1)
            for choice in map(frozenset, itertools.combinations(blocks, size))
            if profile.peak_bytes(choice) <= budget_bytes
        )
        found["exhaustive"] = min(
            fitting, key=lambda choice: sum(costs[b] for b in choice), default=None
        )
    return found


def compare(name: str, model: nn.Module, batch: torch.Tensor, **how: Any) -> None:
    """Print what every block saves, then one row for each budget."""
    model.train()
    step = ActivationsOnly(FakeStep(model, batch))
    levels = [[block.path for block in level] for level in block_levels(model)]
    everything = plan_checkpoints(step, levels, **how)
    paths = list(everything.paths)
    plain_bytes = everything.plain_peak_bytes
    print(
        f"\n{name}: levels of {[len(level) for level in levels]} blocks, {len(paths)} taken; "
        f"activations {format_bytes(plain_bytes)}; all blocks: "
        f"{everything.peak_bytes / plain_bytes:.1%} of it, +{everything.recomputed_fraction:.1%} work"
    )
    plain = step.run(**how)
    ours = step.run(transform=lambda clone: install(clone, paths), **how)
    profile = profile_step(plain, ours, paths)
    assert profile is not None
    costs, total = recomputation_costs(step.run(record_operators=True, **how), paths)
    print(f"forward of the blocks over a whole plain step: {sum(costs) / total:.1%}")
    check_predictions(step, profile, paths, how)
    print("budget | ours: blocks, work, simulated peak, dry runs | others: blocks, work")
    for part in BUDGETS:
        budget_bytes = int(part * plain_bytes)
        plan = plan_checkpoints(step, [paths], budget_bytes=budget_bytes, **how)
        if plan.is_feasible:
            text = f"{len(plan.paths)}, +{plan.recomputed_fraction:.2%}"
        else:
            text = "infeasible"
        text += f", {plan.peak_bytes / plain_bytes:.1%}, {plan.num_dry_runs}"
        for rival, choice in rivals(profile, costs, budget_bytes).items():
            work = "-" if choice is None else f"{sum(costs[b] for b in choice) / total:.2%}"
            text += f" | {rival}: {'-' if choice is None else len(choice)}, +{work}"
        print(f"{part:.0%} | {text}", flush=True)


def check_predictions(
    step: ActivationsOnly, profile: StepProfile, paths: list[str], how: dict[str, Any]
) -> None:
    """Print how far predicted peaks are from simulated ones, for a few choices."""
    draw = random.Random(0)  # noqa: S311 - not for secrets
    errors = []
    for _ in range(6):
        choice = {index for index in range(len(paths)) if draw.random() < 0.5}
        chosen = [paths[index] for index in choice]
        trace = step.run(transform=lambda clone, c=chosen: install(clone, c), **how)
        errors.append(profile.peak_bytes(choice) / trace.peak_bytes - 1)
    print(
        f"predicted over simulated peak, 6 choices at random: {min(errors):+.2%}..{max(errors):+.2%}"
    )


def large() -> None:
    """The published task: the whole device as budget, and the activations alone."""
    with torch.device("meta"):
        model, batch = Stack(24, 2048, 16).train(), torch.empty(1, 2048, 2048)
    paths = [f"layers.{index}" for index in range(24)]
    how: dict[str, Any] = {"zero_grad": "early"}
    step = FakeStep(model, batch)
    plan = plan_checkpoints(step, [paths], budget_bytes=PUBLISHED_BUDGET_BYTES, **how)
    print(
        f"\n24 layers of 2048, 12 GiB: peak without {format_bytes(plan.plain_peak_bytes)}, ours "
        f"checkpoints {len(plan.paths)} blocks, +{plan.recomputed_fraction:.1%} work; published: "
        + ", ".join(f"{name} 8 blocks, +{slower} %" for name, (_, slower) in PUBLISHED.items())
    )
    alone = ActivationsOnly(step)
    plain = alone.run(**how)
    everything = alone.run(transform=lambda clone: install(clone, paths), **how)
    profile = profile_step(plain, everything, paths)
    assert profile is not None
    budget_bytes = int(PUBLISHED_ACTIVATIONS * plain.peak_bytes)
    print(f"activations {format_bytes(plain.peak_bytes)}, budget {PUBLISHED_ACTIVATIONS:.1%} of it")
    for name, (choice, _) in PUBLISHED.items():
        print(
            f"  {name}: 8 blocks, predicted peak {profile.peak_bytes(choice) / plain.peak_bytes:.1%}"
        )
        same = plan_checkpoints(alone, [paths], budget_bytes=profile.peak_bytes(choice), **how)
        print(
            f"    ours for that peak: {len(same.paths)} blocks, simulated "
            f"{same.peak_bytes / plain.peak_bytes:.1%}"
        )
    plan = plan_checkpoints(alone, [paths], budget_bytes=budget_bytes, **how)
    print(
        f"  ours for the budget: {len(plan.paths)} blocks, simulated "
        f"{plan.peak_bytes / plain.peak_bytes:.1%}"
    )


def main(names: Sequence[str]) -> None:
    """Run the comparisons that are named, or all."""
    if not names or "transformer" in names:
        tokens = torch.randint(0, 1000, (8, 128))
        compare("12 layers of 512, 8 x 128", Encoder(12, 512, 8), tokens, num_steps=1)
    if not names or "resnet" in names:
        compare("ResNet-50, 8 x 224 x 224", ResNet50(), torch.zeros(8, 3, 224, 224), num_steps=1)
    if not names or "large" in names:
        large()


if __name__ == "__main__":
    main(sys.argv[1:])

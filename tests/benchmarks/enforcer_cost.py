"""Print what ``NoGradEnforcer`` costs in evaluation that does nothing wrong.

Run ``python tests/benchmarks/enforcer_cost.py``. Each step of one validation is timed inside and outside of
the enforcer; the difference is its work, the median of all steps counts. Operators are not slowed
down while no graph is built; the last column is a forward below its hooks over one without, the
least of many in turns.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from silence import be_quiet  # isort: skip  puts the tests on the path

import torch
from fits import quiet
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP_BATCHES = 5


class Timed(Callback):
    """Put into the list on both sides of the enforcer: seconds of each validation step there."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand before the step that is there now."""
        step = trainer.strategy.validation_step

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return step(*args)
            finally:
                self.seconds.append(time.perf_counter() - start)

        trainer.strategy.validation_step = timed  # type: ignore[method-assign] # of this run only


class Evaluated(LightningModule):
    """Any network; its mean output is logged and returned."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Log and return."""
        found = self.net(batch)
        loss = (found if isinstance(found, torch.Tensor) else found[0]).float().mean()
        self.log("val", loss)
        return loss


def layers() -> tuple[nn.Module, torch.Tensor]:
    """The 150 small layers of TECHNIQUES.md: nearly all of the time is overhead."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64)) for _ in range(50)]
    return nn.Sequential(*blocks), torch.randn(8, 64)


def bert() -> tuple[nn.Module, torch.Tensor]:
    """BERT, 4 layers of width 256, 8 x 64 tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    return BertModel(config), torch.randint(0, 1000, (8, 64))


def resnet() -> tuple[nn.Module, torch.Tensor]:
    """ResNet-50, 2 x 128 x 128 pixels."""
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig()), torch.randn(2, 3, 128, 128)


def step_seconds(net: nn.Module, batch: torch.Tensor, batches: int) -> tuple[float, float]:
    """Median time of a step, and what the enforcer adds to it."""
    from lightning_oom import NoGradEnforcer

    inside, outside = Timed(), Timed()
    guard = NoGradEnforcer(on_violation="warn", verbose=False)
    trainer = quiet(inside, guard, outside, logger=False, inference_mode=False)
    loader = DataLoader([batch] * batches, batch_size=None)
    trainer.validate(Evaluated(net), loader, verbose=False)
    pairs = list(zip(inside.seconds, outside.seconds, strict=True))[WARM_UP_BATCHES:]
    return statistics.median(a for a, _ in pairs), statistics.median(b - a for a, b in pairs)


def hooks_ratio(net: nn.Module, batch: torch.Tensor, batches: int) -> float:
    """Least time of a forward below the hooks over the least without."""
    from lightning_oom.reduction.grad_mode import GraphWatch

    least = {False: float("inf"), True: float("inf")}
    with torch.no_grad():
        for turn in range(2 * batches):
            watch = GraphWatch()
            if turn % 2:
                watch.start()
            start = time.perf_counter()
            net(batch)
            least[bool(turn % 2)] = min(least[bool(turn % 2)], time.perf_counter() - start)
            watch.stop()
    return least[True] / least[False]


def main() -> None:
    """Print one line a model."""
    models: tuple[tuple[str, Callable[[], tuple[nn.Module, torch.Tensor]], int], ...] = (
        ("150 small layers", layers, 300),
        ("BERT 4 x 256", bert, 40),
        ("ResNet-50", resnet, 25),
    )
    print(f"{'model':<18} {'us/step':>9} {'added us':>9} {'ratio':>7} {'hooks':>7}")
    for name, make, batches in models:
        net, batch = make()
        step, added = step_seconds(net, batch, batches)
        print(
            f"{name:<18} {step * 1e6:>9.0f} {added * 1e6:>9.0f} {1 + added / step:>7.4f}"
            f" {hooks_ratio(net.eval(), batch, batches):>7.4f}",
            flush=True,
        )


if __name__ == "__main__":
    be_quiet()
    main()

"""Print by how much dropping gradients before the forward lowers the peak, on fake tensors.

Run ``python tests/benchmarks/early_zero_grad.py``; a minute and 4 GiB. AdamW, single precision, and the kernels
that a CUDA device would run.
"""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING, Any

from silence import be_quiet  # isort: skip  puts the tests on the path

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 2**30


def vit() -> tuple[torch.nn.Module, Any]:
    """ViT-B/16 with 8 images of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_labels=1000)
    batch = {"pixel_values": torch.zeros(8, 3, 224, 224), "labels": torch.zeros(8).long()}
    return ViTForImageClassification(config), batch


def gpt2_large() -> tuple[torch.nn.Module, Any]:
    """GPT-2 Large with 2 texts of 512 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1280, n_layer=36, n_head=20, use_cache=False)
    tokens = torch.zeros(2, 512).long()
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens.clone()}


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The model's own."""
    found: torch.Tensor = model(**batch).loss
    return found


MODELS: dict[str, tuple[Callable[[], tuple[torch.nn.Module, Any]], float]] = {
    "ViT-B/16 8": (vit, 0.13),
    "GPT-2 Large 2x512": (gpt2_large, 0.13),
}


def main(arguments: list[str] | None = None) -> None:
    """Print one line a model."""
    from lightning_oom.planning.fake_step import FakeStep
    from lightning_oom.planning.on_target import settings_on
    from lightning_oom.planning.target import parse_target

    parser = argparse.ArgumentParser(description="The gain of an early zero_grad.")
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args(arguments)
    how = settings_on(parse_target("cuda"), None)
    how["optimizer"] = functools.partial(torch.optim.AdamW, lr=1e-4)
    print(f"{'model':<20} {'Lightning GiB':>13} {'early GiB':>10} {'change':>8} {'bar':>6}")
    for name, (make, bar) in MODELS.items():
        if options.only not in name:
            continue
        model, batch = make()
        step = FakeStep(model.train(), batch, loss=loss)
        plain, early = (
            step.run(zero_grad=order, **how).peak_bytes for order in ("lightning", "early")
        )
        print(
            f"{name:<20} {plain / GIB:>13.2f} {early / GIB:>10.2f}"
            f" {early / plain - 1:>8.1%} {-bar:>6.0%}",
            flush=True,
        )


if __name__ == "__main__":
    be_quiet()
    main()

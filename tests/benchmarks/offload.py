"""Print what activation offload saves on a simulated GPU, and what it costs the host.

Run ``python tests/benchmarks/offload.py [--only resnet50] [--rows 8]``. For each model one training
step is run plain and offloaded, in float32: forward and backward, gradients included, without an
optimizer. "peak" is the most that is allocated, weights included; "activation peak" the most above
what is held before the step, weights and batch. Losses, gradients, buffers and the random state are
compared bit by bit. "host us" is the processor time for each saved tensor on the host, where all of
them stay: that of the hooks themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import TYPE_CHECKING, Any

from silence import be_quiet  # isort: skip  puts the tests on the path

import torch

from lightning_oom.reduction.offload import OffloadTally, offload_activations
from lightning_oom.testing import SimulatedGPU

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20


def resnet50(rows: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Random pictures of 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    pictures = torch.randn(rows, 3, 224, 224)
    return ResNetForImageClassification(ResNetConfig(num_labels=1000)), {
        "pixel_values": pictures,
        "labels": torch.arange(rows),
    }


def gpt2(rows: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Four layers of GPT-2 small on 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, 50257, (rows, 128))
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, use_cache=False, loss_type="ForCausalLM"))
    return model, {"input_ids": tokens, "labels": tokens}


def bert(rows: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Four layers of BERT-base on 128 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    tokens = torch.randint(0, 30522, (rows, 128))
    return BertForMaskedLM(BertConfig(num_hidden_layers=4)), {
        "input_ids": tokens,
        "labels": tokens,
    }


MODELS: dict[str, Callable[[int], tuple[torch.nn.Module, dict[str, torch.Tensor]]]] = {
    "resnet50": resnet50,
    "gpt2-4": gpt2,
    "bert-4": bert,
}


def step(make: Any, rows: int, *, on: bool, min_bytes: str) -> dict[str, Any]:
    """One step on the device; everything that can be compared, and its peaks."""
    device = SimulatedGPU.enable()
    torch.manual_seed(0)
    model, batch = make(rows)
    model.train().to(device)
    batch = {name: value.to(device) for name, value in batch.items()}
    tally = OffloadTally()
    keep = [*model.parameters(), *model.buffers(), *batch.values()]
    context = offload_activations(min_bytes=min_bytes, keep=keep, tally=tally)
    before = torch.simgpu.memory_allocated()
    torch.simgpu.reset_peak_memory_stats()
    torch.manual_seed(1)
    start = time.process_time()
    with context if on else contextlib.nullcontext():
        loss = model(**batch).loss
    loss.backward()
    seconds = time.process_time() - start
    peak = torch.simgpu.max_memory_allocated()
    return {
        "peak": peak / MIB,
        "activation peak": (peak - before) / MIB,
        "seconds": seconds,
        "tally": tally,
        "bits": [
            loss.detach().cpu(),
            *(p.grad.cpu() for p in model.parameters() if p.grad is not None),
            *(b.cpu() for b in model.buffers()),
            torch.get_rng_state(),
        ],
    }


def host_cost(saves: int = 2000, rounds: int = 15) -> float:
    """Microseconds of the processor for each saved tensor that stays."""
    x = torch.ones(64, requires_grad=True)

    def run(context: Any) -> float:
        start = time.process_time()
        with context:
            y = x
            for _ in range(saves):
                y = y.exp()
        y.backward(torch.ones_like(y))
        return (time.process_time() - start) * 1e6 / saves

    plain, hooked = [], []
    for _ in range(rounds):
        plain.append(run(contextlib.nullcontext()))
        hooked.append(run(offload_activations()))
    return min(hooked) - min(plain)


def main(arguments: list[str] | None = None) -> None:
    """Print one line a model."""
    parser = argparse.ArgumentParser(description="What activation offload saves and costs.")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--min-bytes", default="1 MiB")
    options = parser.parse_args(arguments)
    for name, make in MODELS.items():
        if options.only not in name:
            continue
        plain = step(make, options.rows, on=False, min_bytes=options.min_bytes)
        moved = step(make, options.rows, on=True, min_bytes=options.min_bytes)
        same = all(
            torch.equal(a, b) for a, b in zip(plain.pop("bits"), moved.pop("bits"), strict=True)
        )
        ratios = ", ".join(
            f"{key} {plain[key]:.0f} -> {moved[key]:.0f} MiB ({moved[key] / plain[key]:.1%})"
            for key in ("peak", "activation peak")
        )
        tally = moved["tally"]
        print(
            f"{name}, {options.rows} rows: {ratios}; {tally.to_host_bytes / MIB:.0f} MiB out in "
            f"{tally.num_to_host} copies, {tally.to_device_bytes / MIB:.0f} MiB back; processor "
            f"{plain['seconds']:.1f} -> {moved['seconds']:.1f} s; bits "
            f"{'equal' if same else 'DIFFER'}",
            flush=True,
        )
    print(f"host us for a saved tensor that stays: {host_cost():.1f}")


if __name__ == "__main__":
    be_quiet()
    main()

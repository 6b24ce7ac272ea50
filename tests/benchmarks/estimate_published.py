"""Language models on an RTX 3090, as published: what was allocated, and what is estimated.

Run from the repository root (transformers is in the development environment)::

    python tests/benchmarks/estimate_published.py

Source: README of MemScale; LM heads, float32, AdamW, gradients zeroed before the forward, the peak of
``torch.cuda.max_memory_allocated``, "GB" read as GiB.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from lightning_oom.planning.estimate import estimate_peak
from lightning_oom.units import GIB

_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
PUBLISHED: dict[str, tuple[float, type, Any, int, int]] = {
    "BERT-Base": (3.14, BertForMaskedLM, BertConfig(), 16, 128),
    "BERT-Large": (7.60, BertForMaskedLM, BertConfig(**_LARGE), 16, 128),
    "GPT-2 Medium": (
        10.87,
        GPT2LMHeadModel,
        GPT2Config(n_embd=1024, n_layer=24, n_head=16),
        4,
        512,
    ),
    "GPT-2 Large": (14.87, GPT2LMHeadModel, GPT2Config(n_embd=1280, n_layer=36, n_head=20), 2, 512),
}


def main() -> int:
    """Print the table; fail when an estimate is off by more than 1 %."""
    worst = 0.0
    print("model          rows x length   published   estimated   error   seconds")
    for name, (published, model, config, rows, length) in PUBLISHED.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        start = time.perf_counter()
        with torch.device("meta"):
            module = model(config).train()
            ids = torch.zeros(rows, length, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids, "attention_mask": ids}
        estimate = estimate_peak(
            module,
            batch,
            optimizer=torch.optim.AdamW,
            loss=lambda network, inputs: network(**inputs).loss,
            zero_grad="early",
            device="rtx3090",
        )
        seconds = time.perf_counter() - start
        error = estimate.allocated_bytes / GIB / published - 1
        worst = max(worst, abs(error))
        print(
            f"{name:14s} {rows:4d} x {length:<6d} {published:9.2f}   "
            f"{estimate.allocated_bytes / GIB:9.2f}   {error:+6.1%}   {seconds:6.0f}"
        )
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main())

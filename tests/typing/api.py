"""What a user's type checker sees. Read by mypy, never run."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from typing_extensions import assert_type

from lightning_oom import OOMRecovery
from lightning_oom.memory import MemoryReading, read_memory, release_cached
from lightning_oom.recovery.classify import OOMCause, classify_oom
from lightning_oom.testing import SimulatedGPUStrategy, memory_limit
from lightning_oom.units import format_bytes, parse_bytes

assert_type(parse_bytes("64 MiB"), int)
assert_type(format_bytes(512), str)

reading = read_memory(torch.device("cpu"))
assert_type(reading, MemoryReading)
assert_type(reading.peak_allocated_bytes, int | None)
assert_type(release_cached("cpu"), int | None)

cause = classify_oom(RuntimeError("CUDA out of memory"))
assert_type(cause, OOMCause | None)

with memory_limit("64 MiB", device="cpu") as limit:
    assert_type(limit.limit_bytes, int)
    assert_type(limit.peak_bytes, int)

Trainer(strategy=SimulatedGPUStrategy(limit="64 MiB"), callbacks=[OOMRecovery()])
OOMRecovery(ladder=("release", "split"), log_merge={"train/tokens": "sum"})
OOMRecovery(margin="a lot")  # type: ignore[arg-type]  # a fraction, not text
OOMRecovery(("release",))  # type: ignore[call-arg]  # keywords only

"""Print live tensors and bytes over 1,000 recoveries, and what outlives the fit.

Run ``python tests/benchmarks/recoveries.py``. Every second forward of the model runs out of memory,
so each step recovers once; tensors are counted after every hundredth.
"""

from __future__ import annotations

import argparse
import gc
import weakref
from typing import Any

from silence import be_quiet  # isort: skip  puts the tests on the path

from fakes import batches_of, failing
from fits import AtBatch, quiet, recovery
from torch import Tensor

from lightning_oom.testing import MemoryLimit, memory_limit


def measure(recoveries: int) -> tuple[list[tuple[int, int, int]], list[str]]:
    """Fit through so many recoveries.

    Returns:
        ``(recoveries, live tensors, live bytes)`` at ten places, and what is still alive afterwards.
    """
    readings: list[tuple[int, int, int]] = []
    with memory_limit("1 GiB", device="cpu") as limit:
        references = _fit(recoveries, readings, limit)
    gc.collect()
    return readings, [name for name, reference in references.items() if reference() is not None]


def _fit(recoveries: int, readings: list[tuple[int, int, int]], limit: MemoryLimit) -> Any:
    guard = recovery()
    model = failing(*range(1, 2 * recoveries + 1, 2))()

    def look(trainer: Any, module: Any) -> None:
        if trainer.global_step % max(1, recoveries // 10) == 0:
            gc.collect()
            tensors = sum(issubclass(type(item), Tensor) for item in gc.get_objects())
            readings.append((guard.summary.num_recovered, tensors, limit.live_bytes))

    trainer = quiet(guard, AtBatch(look), logger=False)
    trainer.fit(model, batches_of([8] * (recoveries + 1)))
    owned = {"model": model, "trainer": trainer, "guard": guard}
    return {name: weakref.ref(owner) for name, owner in owned.items()}


def main(arguments: list[str] | None = None) -> int:
    """Print the readings; the exit code says whether anything grew or stayed."""
    parser = argparse.ArgumentParser(description="Live tensors over many recoveries.")
    parser.add_argument("--recoveries", type=int, default=1000)
    options = parser.parse_args(arguments)
    readings, alive = measure(options.recoveries)
    print(f"{'recoveries':>10} {'live tensors':>12} {'live bytes':>10}")
    for recovered, tensors, live_bytes in readings:
        print(f"{recovered:>10} {tensors:>12} {live_bytes:>10}")
    grew = readings[-1][1:] > readings[1][1:]
    print(f"growth: {'yes' if grew else 'none'}; alive after the fit: {', '.join(alive) or 'none'}")
    return int(grew or bool(alive))


if __name__ == "__main__":
    be_quiet()
    raise SystemExit(main())

"""Hold estimates against fits on the simulated GPU.

Run ``python tests/benchmarks/estimate_simgpu.py [--only gpt2] [--precision 32-true] [--rows 16]``.
Each of 12 modules is estimated from a batch on the host and then trained by a Trainer with the
simulated GPU's strategy, at 3 batch sizes, in fp32 and mixed bfloat16. A line is within the bar where
allocated bytes are within 1 %, reserved ones within 3 % and the peak is in the same phase.
"""

from __future__ import annotations

import argparse

from silence import be_quiet  # isort: skip  puts the tests on the path

import torch
from planning.estimate_models import MODELS, ROWS, example
from planning.fit_peaks import fit_peaks

from lightning_oom.planning.estimate import estimate_peak
from lightning_oom.units import MIB

PRECISIONS = ("32-true", "bf16-mixed")


def compare(name: str, rows: int, precision: str) -> bool:
    """Print one line; say whether it is within the bar."""
    torch.manual_seed(0)
    module = MODELS[name]()
    batch = example(module, rows)
    estimate = estimate_peak(module, batch, device="simgpu", precision=precision)
    peaks = fit_peaks(module, batch, precision=precision)
    allocated = estimate.allocated_bytes / peaks.allocated_bytes - 1
    reserved = estimate.reserved_bytes / peaks.reserved_bytes - 1
    same_phase = estimate.peak_phase == peaks.peak_phase
    within = abs(allocated) < 0.01 and abs(reserved) < 0.03 and same_phase
    print(
        f"{name:12} {rows:3} {precision:10} "
        f"{estimate.allocated_bytes / MIB:8.2f} {peaks.allocated_bytes / MIB:8.2f} {allocated:+7.2%}"
        f" {estimate.reserved_bytes / MIB:6.0f} {peaks.reserved_bytes / MIB:6.0f} {reserved:+7.2%}"
        f"  {estimate.peak_phase:9} {peaks.peak_phase:9} {'within' if within else 'OUTSIDE'}",
        flush=True,
    )
    return within


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    arguments = parser.parse_args()
    be_quiet()
    print(
        f"{'model':12} {'rows':>3} {'precision':10} {'est. MiB':>8} {'real':>8} {'':7}"
        f" {'res.':>6} {'real':>6} {'':7}  {'phase':9} {'real':9}"
    )
    results = [
        compare(name, rows, precision)
        for precision in arguments.precision
        for name in arguments.only
        for rows in arguments.rows
    ]
    print(f"{sum(results)} of {len(results)} within the bar")


if __name__ == "__main__":
    main()

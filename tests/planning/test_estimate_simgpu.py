"""Estimates from the host, held against fits on the simulated GPU."""

from __future__ import annotations

import pytest
import torch
from planning.estimate_models import MODELS, ROWS, example
from planning.fit_peaks import fit_peaks

from lightning_oom.planning.estimate import estimate_peak

FEW = [
    ("cnn", 16, "32-true"),
    ("cnn", 33, "bf16-mixed"),
    ("autoencoder", 33, "32-true"),
    ("gan", 16, "32-true"),
]
"""What is run each time; the rest is slow."""

KNOWN = {
    ("embedding", 16, "32-true"): "fake sparse gradients have no rows, so the peak phase differs",
    ("embedding", 16, "bf16-mixed"): "as in fp32",
    ("tied", 16, "32-true"): "a segment of 2 MiB is missed, which is 4 % of what is reserved",
    ("tied", 16, "bf16-mixed"): "as in fp32",
    ("autoencoder", 16, "bf16-mixed"): "6 % too low; the cause is not known",
    ("gan", 16, "bf16-mixed"): "3.8 % too low; the cause is not known",
    ("gan", 33, "bf16-mixed"): "the same",
}
"""Where an estimate was measured outside the bar, and how far the cause is known."""

ALL = [
    pytest.param(
        name,
        rows,
        precision,
        marks=[pytest.mark.xfail(reason=KNOWN[name, rows, precision], strict=True)]
        if (name, rows, precision) in KNOWN
        else [],
    )
    for name in MODELS
    for rows in ROWS
    for precision in ("32-true", "bf16-mixed")
]


def check(name: str, rows: int, precision: str) -> None:
    """Allocated bytes within 1 %, reserved ones within 3 %, the peak in the same phase."""
    torch.manual_seed(0)
    module = MODELS[name]()
    batch = example(module, rows)
    estimate = estimate_peak(module, batch, device="simgpu", precision=precision)
    peaks = fit_peaks(module, batch, precision=precision)

    assert estimate.allocated_bytes == pytest.approx(peaks.allocated_bytes, rel=0.01)
    assert estimate.reserved_bytes == pytest.approx(peaks.reserved_bytes, rel=0.03)
    assert estimate.peak_phase == peaks.peak_phase


@pytest.mark.parametrize(("name", "rows", "precision"), FEW)
def test_a_fit_takes_what_was_foreseen(name: str, rows: int, precision: str) -> None:
    """Without the device at hand."""
    check(name, rows, precision)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "rows", "precision"), ALL)
def test_every_fit_takes_what_was_foreseen(name: str, rows: int, precision: str) -> None:
    """All modules, batch sizes and precisions."""
    check(name, rows, precision)

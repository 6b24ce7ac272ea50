"""Which device an estimate is made for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_oom.planning.target import TARGETS, parse_target
from lightning_oom.units import MIB


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("A100", "a100"),
        ("cuda", "cuda"),
        ("cuda:1", "cuda"),
        (torch.device("cpu"), "host"),
        ("mps", "host"),
        (TARGETS["h100"], "h100"),
    ],
)
def test_a_device_is_named_in_many_ways(device, name) -> None:
    """By what torch calls it, by what people call it, or by the record itself."""
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("then it is the device that is there")
    assert parse_target(device).name == name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_on_the_host_is_meant_for_cuda(device) -> None:
    """Which is where it goes when training starts."""
    assert parse_target(None, torch.nn.Linear(1, 1, device=device)).name == "cuda"
    assert parse_target(None, torch.nn.ReLU()).name == "cuda"


def test_an_unknown_device_is_refused() -> None:
    """With those that are known."""
    with pytest.raises(ValueError, match=r"one of a100, cuda.*got 'a9000'"):
        parse_target("a9000")


def test_hopper_has_a_larger_workspace() -> None:
    """32 MiB for cuBLAS."""
    assert TARGETS["h100"].matmul_workspace_bytes == 32 * MIB


def test_whether_convolutions_are_tried_out_is_read_from_torch(monkeypatch) -> None:
    """Unless it is said; without cuDNN there is nothing to try."""
    target = TARGETS["cuda"]
    assert not target.empties_cache
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert target.empties_cache
    assert not replace(target, benchmarks_convolutions=False).empties_cache
    assert not TARGETS["host"].empties_cache

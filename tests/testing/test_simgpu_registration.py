"""The simulated GPU enters torch's one outside slot on first use, and says so when it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lightning_oom.errors import UnsupportedTorchError
from lightning_oom.testing.simgpu import registration

PROBE = """
import torch
import lightning_oom
import lightning_oom.testing.simgpu
assert not hasattr(torch, "simgpu")
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
{}
"""

AFTER_A_BACKWARD_ON_THE_CPU = """
from lightning_oom.testing import SimulatedGPU
SimulatedGPU(num_devices=2)
for device in ("simgpu:0", "simgpu:1"):
    model = torch.nn.Linear(2, 2).to(device)
    model(torch.ones(1, 2, device=device)).sum().backward()
    assert model.weight.grad.device == torch.device(device)
"""

AFTER_ANOTHER_DEVICE = """
from lightning_oom.testing import SimulatedGPU
from lightning_oom.errors import UnsupportedTorchError
torch.utils.rename_privateuse1_backend("npu")
try:
    SimulatedGPU()
except UnsupportedTorchError as error:
    assert "'npu' has taken it" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param("", id="import alone"),
        pytest.param(AFTER_A_BACKWARD_ON_THE_CPU, id="after a backward on the CPU"),
        pytest.param(AFTER_ANOTHER_DEVICE, id="after another device"),
    ],
)
def test_a_fresh_process(rest: str) -> None:
    """An import fills nothing; the first use does, whatever ran before, unless the slot is taken."""
    done = subprocess.run(  # noqa: S603 - this interpreter, on the text above
        [sys.executable, "-c", PROBE.format(rest)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_an_older_torch_is_told_which_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch cannot be given a device from Python, the error names the release that can."""
    monkeypatch.setattr(registration, "setup_python_backend", None)
    monkeypatch.setattr(registration, "_LIBRARIES", [])

    with pytest.raises(
        UnsupportedTorchError, match=r"torch 2\.10 or later; this is torch"
    ) as caught:
        registration.install_backend()
    assert torch.__version__ in str(caught.value)

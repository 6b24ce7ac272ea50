"""The driver's view of a GPU, through the real ``pynvml`` and a library that the tests compile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_oom.memory.nvml import NVMLDevice, read_processes
from lightning_oom.memory.visible import parse_visible_devices

STUB = Path(__file__).with_name("nvml_stub.c")

PAIR = """\
gpu GPU-aaaa1111-0 H200 -1
gpu GPU-bbbb2222-0 H200 -1
process GPU-aaaa1111-0 101 1000 c
process GPU-bbbb2222-0 202 2000 c
"""
"""Two GPUs of one model; process 101 is on the first, 202 on the second."""

TWINS = PAIR + "gpu GPU-bbbb3333-0 H200 -1\nprocess GPU-bbbb3333-0 303 3000 c\n"
MIXED = PAIR.replace("bbbb2222-0 H200 -1", "bbbb2222-0 T4 -1")
DIVIDED = """\
gpu GPU-aaaa1111-0 H200 0
gpu GPU-bbbb2222-0 H200 1
mig 1 MIG-cccc-1 7 0
mig 1 MIG-dddd-2 8 1
process GPU-aaaa1111-0 101 1000 c
process GPU-bbbb2222-0 202 9000 c
process MIG-cccc-1 303 3000 c
process MIG-dddd-2 404 4000 c
"""
EMPTY_MIG = "gpu GPU-bbbb2222-0 H200 1\nprocess GPU-bbbb2222-0 202 9000 c\n"
FULL = """\
gpu GPU-aaaa1111-0 H200 -1
process GPU-aaaa1111-0 101 1000 c
process GPU-aaaa1111-0 102 5000 c
process GPU-aaaa1111-0 101 1500 g
process GPU-aaaa1111-0 103 -1 c
"""

CASES: dict[str, tuple[str, dict[str, str], str, list[list[int | None]] | None]] = {
    # id -> GPUs, environment, device, [pid, bytes] of each process
    "unset": (PAIR, {}, "cuda:1", [[202, 2000]]),
    "without an index": (PAIR, {}, "cuda", [[101, 1000]]),
    "index": (PAIR, {"CUDA_VISIBLE_DEVICES": "1"}, "cuda:0", [[202, 2000]]),
    "indices in another order": (PAIR, {"CUDA_VISIBLE_DEVICES": "1,0"}, "cuda:1", [[101, 1000]]),
    "UUID": (PAIR, {"CUDA_VISIBLE_DEVICES": "GPU-bbbb2222-0"}, "cuda:0", [[202, 2000]]),
    "short UUID": (PAIR, {"CUDA_VISIBLE_DEVICES": "GPU-bb"}, "cuda:0", [[202, 2000]]),
    "short UUID of two": (TWINS, {"CUDA_VISIBLE_DEVICES": "GPU-bb"}, "cuda:0", None),
    "empty": (PAIR, {"CUDA_VISIBLE_DEVICES": ""}, "cuda:0", None),
    "minus one": (PAIR, {"CUDA_VISIBLE_DEVICES": "-1"}, "cuda:0", None),
    "not visible": (PAIR, {"CUDA_VISIBLE_DEVICES": "1"}, "cuda:1", None),
    "no such index": (PAIR, {"CUDA_VISIBLE_DEVICES": "5"}, "cuda:0", None),
    "two models, order unknown": (MIXED, {}, "cuda:0", None),
    "two models, by bus": (MIXED, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "cuda:1", [[202, 2000]]),
    "MIG id": (DIVIDED, {"CUDA_VISIBLE_DEVICES": "MIG-dddd-2"}, "cuda:0", [[404, 4000]]),
    "short MIG id": (DIVIDED, {"CUDA_VISIBLE_DEVICES": "MIG-dd"}, "cuda:0", [[404, 4000]]),
    "old MIG id": (
        DIVIDED,
        {"CUDA_VISIBLE_DEVICES": "MIG-GPU-bbbb2222-0/8/1"},
        "cuda:0",
        [[404, 4000]],
    ),
    "index of a divided GPU": (DIVIDED, {"CUDA_VISIBLE_DEVICES": "1"}, "cuda:0", [[303, 3000]]),
    "MIG without an instance": (EMPTY_MIG, {}, "cuda:0", None),
    "whole GPU beside a divided one": (DIVIDED, {}, "cuda:0", [[101, 1000]]),
    "several processes, most first": (FULL, {}, "cuda:0", [[102, 5000], [101, 1500], [103, None]]),
    "nobody": ("gpu GPU-aaaa1111-0 H200 -1\n", {}, "cuda:0", []),
    "no permission": (PAIR + "refuse GPU-aaaa1111-0 4\n", {}, "cuda:0", None),
    "no driver": (PAIR + "init 9\n", {}, "cuda:0", None),
    "no CUDA device": (PAIR, {}, "cpu", None),
}

ASK = """
import json, os, sys, warnings
warnings.simplefilter("error")
import ctypes, pathlib
import lightning_oom.memory.nvml as nvml
uuids = {}
nvml._torch_uuid = lambda device: uuids.get("uuid")
answers = {}
for name, (gpus, environment, device, _) in json.load(sys.stdin).items():
    pathlib.Path(os.environ["NVML_STUB_GPUS"]).write_text(gpus)
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        os.environ.pop(variable, None)
    uuids.clear()
    uuids.update({"uuid": environment.pop("uuid")} if "uuid" in environment else {})
    os.environ.update(environment)
    found = nvml.read_processes(device)
    answers[name] = None if found is None else [[p.pid, p.used_bytes] for p in found]
answers["open sessions"] = ctypes.CDLL("libnvidia-ml.so.1").stub_open_sessions()
import torch
answers["CUDA in use"] = torch.cuda.is_initialized()
print(json.dumps(answers))
"""

BY_UUID: dict[str, tuple[str, dict[str, str], str, list[list[int | None]] | None]] = {
    # CUDA counts the fast one first, NVML by bus: only the UUID that CUDA gives is right.
    "two models, UUID known": (MIXED, {"uuid": "bbbb2222-0"}, "cuda:0", [[202, 2000]]),
    "UUID of a divided GPU": (DIVIDED, {"uuid": "bbbb2222-0"}, "cuda:0", [[303, 3000]]),
    "UUID of an instance": (DIVIDED, {"uuid": "dddd-2"}, "cuda:0", [[404, 4000]]),
    "UUID of the GPU, id of the instance": (
        DIVIDED,
        {"uuid": "bbbb2222-0", "CUDA_VISIBLE_DEVICES": "MIG-dddd-2"},
        "cuda:0",
        [[404, 4000]],
    ),
}

ALL_CASES = {**CASES, **BY_UUID}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Compile the stub and ask about every case, in one process of its own."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(  # noqa: S603 # the stub stands beside this file
        [compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(STUB)], check=True
    )
    finished = subprocess.run(  # noqa: S603 # the code stands in this file
        [sys.executable, "-c", ASK],
        input=json.dumps(ALL_CASES),
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(folder),
            "NVML_STUB_GPUS": str(folder / "gpus.txt"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize("case", ALL_CASES)
def test_processes_are_those_of_the_device_that_torch_means(answers, case) -> None:
    """Each form of CUDA_VISIBLE_DEVICES, each MIG set-up and each refusal has its right answer."""
    assert answers[case] == ALL_CASES[case][3]


def test_every_session_is_closed(answers) -> None:
    """Whatever the answer was, NVML is shut down as often as it was opened."""
    assert answers["open sessions"] == 0


def test_asking_makes_no_context(answers) -> None:
    """CUDA is not started in order to ask the driver."""
    assert answers["CUDA in use"] is False


def test_without_pynvml_there_is_no_answer(monkeypatch) -> None:
    """A missing nvidia-ml-py is no error."""
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert read_processes("cuda:0") is None


def test_an_outdated_package_of_the_same_name_warns_nobody(monkeypatch, tmp_path) -> None:
    """The FutureWarning of the package `pynvml` at its import is not shown (prime-rl#881)."""
    (tmp_path / "pynvml.py").write_text(
        "import warnings\n"
        "warnings.warn('use nvidia-ml-py', FutureWarning, stacklevel=2)\n"
        "def nvmlInit():\n    raise RuntimeError('no library')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    assert read_processes("cuda:0") is None
    assert sys.modules["pynvml"].__file__ == str(tmp_path / "pynvml.py")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", ()),
        (" 1 , 0", ("1", "0")),
        ("0,x,1", ("0",)),
        ("GPU-a,1", ("GPU-a",)),
        ("MIG-a, MIG-b", ("MIG-a", "MIG-b")),
        ("1,1", ()),
        ("NoDevFiles", ()),
    ],
)
def test_visible_devices_are_read_as_the_driver_does(text, expected) -> None:
    """A list ends at the first entry that is no device, and a repeated one is empty."""
    assert parse_visible_devices(text) == expected


@pytest.mark.gpu
def test_this_process_is_on_its_own_gpu() -> None:
    """The real driver lists this process with at least what torch has reserved."""
    x = torch.ones(2**24, device="cuda")
    opened = NVMLDevice.open("cuda:0")

    assert opened is not None
    with opened:
        found = opened.read_processes()
    own = [process for process in found or () if process.pid == os.getpid()]
    assert all(process.used_bytes >= x.nbytes for process in own if process.used_bytes)

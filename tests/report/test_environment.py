"""The doctor's facts and verdicts."""

from __future__ import annotations

import json

import pytest

from lightning_oom.cli.main import main
from lightning_oom.memory import MemoryReading
from lightning_oom.memory.nvml import ProcessMemory
from lightning_oom.report.environment import DeviceFacts, Environment, collect_environment
from lightning_oom.report.environment_findings import judge
from lightning_oom.units import GIB, MIB

HOST = MemoryReading(device="cpu", limit_bytes=64 * GIB, free_bytes=60 * GIB)


def _card(**changes):
    facts = {
        "name": "cuda:0 (NVIDIA A10)",
        "limit_bytes": 24 * GIB,
        "free_bytes": 23 * GIB,
        "supports_bf16": True,
        "processes": (),
    }
    return DeviceFacts(**{**facts, **changes})


def _environment(**changes):
    facts = {
        "versions": {"torch": "2.13.0", "lightning": "2.6.6"},
        "python": "3.11.9",
        "system": "Linux",
        "cuda_build": "12.8",
        "has_driver": True,
        "devices": (_card(),),
        "host": HOST,
        "shared_bytes": 8 * GIB,
        "settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        "missing_names": (),
    }
    return Environment(**{**facts, **changes})


def _lines(**changes):
    return [f"{f.level} {f.subject}: {f.text}" for f in judge(_environment(**changes))]


def test_a_machine_in_order_has_no_findings() -> None:
    """Silence means that there is nothing to do."""
    assert _lines() == []
    assert _lines(devices=(), has_driver=False, cuda_build=None, settings={}) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cuda_build": None, "devices": ()}, "problem torch: a GPU driver is installed, but"),
        ({"devices": ()}, "problem torch: torch for CUDA 12.8 sees no GPU"),
        (
            {"devices": (), "settings": {"CUDA_VISIBLE_DEVICES": ""}},
            "note torch: CUDA_VISIBLE_DEVICES='' hides every GPU",
        ),
        ({"settings": {}}, "note allocator: expandable_segments:True"),
        (
            {"settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:16"}},
            "problem PYTORCH_CUDA_ALLOC_CONF: max_split_size_mb must be above 20, got '16'",
        ),
        (
            {"settings": {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:1.5"}},
            "problem PYTORCH_ALLOC_CONF: garbage_collection_threshold is within (0, 1), got '1.5'",
        ),
        (
            {"settings": {"PYTORCH_ALLOC_CONF": "expandable:True"}},
            "problem PYTORCH_ALLOC_CONF: 'expandable' is no setting that torch knows",
        ),
        (
            {"settings": {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}},
            "note PYTORCH_ALLOC_CONF: with cudaMallocAsync",
        ),
        (
            {"devices": (_card(name="cuda:0 (MIG 1g.5gb)", is_mig=True),)},
            "problem PYTORCH_CUDA_ALLOC_CONF: expandable_segments does not work on a MIG slice",
        ),
        (
            {"system": "Windows"},
            "problem PYTORCH_CUDA_ALLOC_CONF: expandable_segments does nothing",
        ),
        (
            {
                "settings": {
                    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
                    "PYTORCH_ALLOC_CONF": "expandable_segments:False",
                }
            },
            "problem allocator: PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF are both set",
        ),
        (
            {"settings": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}},
            "problem PYTORCH_NO_CUDA_MEMORY_CACHING: the caching allocator is off",
        ),
        (
            {"devices": (_card(processes=None),)},
            "note cuda:0 (NVIDIA A10): NVML does not tell",
        ),
        (
            {"devices": (_card(processes=(ProcessMemory(pid=7, name="x", used_bytes=9 * GIB),)),)},
            "problem cuda:0 (NVIDIA A10): processes hold 9.00 GiB of 24.00 GiB already, most of",
        ),
        (
            {"shared_bytes": 64 * MIB},
            "note shared memory: 64.00 MiB in /dev/shm: workers of a DataLoader",
        ),
        ({"versions": {"lightning": "2.9.0"}}, "note lightning: 2.9.0 is not among the releases"),
        ({"missing_names": ("trainer._results",)}, "problem lightning: OOMRecovery would stand"),
    ],
)
def test_each_trouble_is_named_with_its_remedy(changes, expected) -> None:
    """One finding for one trouble."""
    assert [line for line in _lines(**changes) if line.startswith(expected)] != []


def test_brackets_in_a_setting_hold_its_commas_together() -> None:
    """A list of divisions is one setting."""
    text = "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"
    assert _lines(settings={"PYTORCH_CUDA_ALLOC_CONF": text}) == []


def test_problems_come_first() -> None:
    """Notes wait."""
    lines = _lines(settings={"CUDA_LAUNCH_BLOCKING": "1"}, missing_names=("x",))

    assert [line.split()[0] for line in lines] == ["problem", "note", "note"]


def test_the_facts_of_this_machine_are_read() -> None:
    """Settings are those that are set, and everything can be written as JSON."""
    environment = collect_environment(variables={"CUDA_VISIBLE_DEVICES": "0", "HOME": "x"})

    assert environment.settings == {"CUDA_VISIBLE_DEVICES": "0"}
    assert environment.host.limit_bytes is not None
    assert json.loads(json.dumps(environment.to_dict()))["versions"]["torch"] is not None


def test_the_doctor_prints_facts_or_json(capsys, monkeypatch) -> None:
    """Both views name the same versions; this Lightning has every name."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["missing_names"] == []

    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert facts["versions"]["torch"] in shown
    assert "host" in shown


def test_the_doctor_advises_on_a_model(capsys):
    """Facts of the machine first; a model that cannot be run is one line."""
    layer = ["torch.nn:TransformerEncoderLayer", "--init", '{"d_model": 32, "nhead": 2}']

    main(["doctor", *layer, "--batch", "float32[64,16,32]"])

    shown = capsys.readouterr().out
    assert "A step needs " in shown
    assert "accumulate" in shown
    assert main(["doctor", *layer, "--batch", "float32[64,16,33]"]) == 2
    assert capsys.readouterr().err.startswith("lightning-oom doctor: the training step cannot be")

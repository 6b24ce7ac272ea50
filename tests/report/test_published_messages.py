"""What is said of out-of-memory errors that people have published, one row each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lightning_oom.report.from_log import read_log
from lightning_oom.report.remedies import with_advice

if TYPE_CHECKING:
    from lightning_oom.report.record import OOMReport

MESSAGES = {
    row["source"].removeprefix("https://github.com/"): row
    for row in map(
        json.loads,
        (Path(__file__).parents[1] / "data" / "oom_messages.jsonl").read_text().splitlines(),
    )
}

EXPECTED = {
    # torch names two processes of 1.19 GiB, and 15.5 GiB more are taken by nobody it can see
    "rwth-i6/returnn/issues/1466": (
        "other_processes",
        "15.50 GiB of it by processes",
        "nvidia-smi",
    ),
    # 2 MiB refused with 203 GiB free
    "pytorch/pytorch/issues/175431": ("refused_with_room", "203.49 GiB of 287.98 GiB", None),
    # the old form: 4.00 - 0 - 2.35 GiB are outside of PyTorch, and 19 % of the rest is in pieces
    "oatsu-gh/enunu_training_kit/issues/8": ("outside_torch", "1.65 GiB of 4.00 GiB", "nvidia-smi"),
    "deepbeepmeep/Wan2GP/issues/1083": ("driver_full", "CUDA error: out of memory", "nvidia-smi"),
    "Comfy-Org/ComfyUI/issues/7440": ("outside_torch", "17.35 GiB of 27.20 GiB are Metal's", None),
    "Lightning-AI/lightning-thunder/issues/1296": ("driver_full", "CUBLAS_STATUS", "nvidia-smi"),
    # the oldest form: 0.66 GiB beside PyTorch are CUDA's own
    "facebookresearch/fairseq/issues/869": ("too_big", "20.00 MiB were asked for", None),
    "firewaterfire/HKDnet/issues/1": ("too_big", "5.52 GiB were missing", None),
    "huggingface/autotrain-advanced/issues/737": ("refused_with_room", "554.47 MiB of", None),
    "intel/intel-extension-for-pytorch/issues/629": (
        "outside_torch",
        "at least 13.85 GiB of 15.56 GiB",
        "xpu-smi ps",
    ),
    "KupynOrest/DeblurGAN/issues/128": ("driver_full", "a library asked", "nvidia-smi"),
    "pytorch/pytorch/issues/190972": ("disguised", "OUT_OF_RESOURCES", None),
    "Lightning-AI/pytorch-lightning/issues/5897": ("disguised", "cuDNN algorithm", None),
    "pytorch/pytorch/issues/112377": ("disguised", "NVML_SUCCESS", None),
    "bghira/SimpleTuner/issues/3176": ("disguised", "aoti_torch", None),
    "MIC-DKFZ/nnUNet/issues/2675": ("host_memory", "1.37 GiB of host memory", "numpy.load"),
    "pytorch/pytorch/issues/59904": ("host_memory", "paging file", None),
    "mxfold/mxfold2/issues/20": ("host_memory", "123.33 GiB of host memory", None),
    "TorchSSL/TorchSSL/issues/4": ("host_memory", "another process", "DataLoader(num_workers=2"),
    "pytorch/pytorch/issues/108861": ("shared_memory", "Bus error", "docker run --shm-size"),
}
"""Where it was published -> first cause, what its evidence says, and the first setting."""


def explained(source: str) -> OOMReport:
    """The report of a message that was pasted with its class."""
    row = MESSAGES[source]
    report = read_log(f"{row['exception_type']}: {row['message']}")
    assert report is not None
    return with_advice(report)


@pytest.mark.parametrize("source", EXPECTED)
def test_a_published_message_gets_the_diagnosis_that_its_numbers_speak_for(source) -> None:
    """Cause, evidence and the first remedy."""
    cause, evidence, setting = EXPECTED[source]
    report = explained(source)
    first = report.diagnoses[0]

    assert first.cause == cause
    assert evidence in " ".join(first.evidence)
    if setting is not None:
        assert (report.remedies[0].setting or "").startswith(setting)


@pytest.mark.parametrize("source", EXPECTED)
def test_remedies_are_those_of_the_backend(source) -> None:
    """No tool of NVIDIA for AMD, Intel or Apple, and no setting that they do not read."""
    report = explained(source)
    words = " ".join(f"{r.action} {r.setting}" for r in report.remedies)
    message = report.cause.message

    if any(name in message for name in ("HIP", "XPU", "MPS", "level_zero")):
        assert "nvidia-smi" not in words
        assert "CUDA_LAUNCH_BLOCKING" not in words
    assert "PYTORCH_CUDA" not in words or message.startswith("CUDA")

"""A pasted traceback or a log tells the same as the error itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_oom.report.from_log import read_log
from lightning_oom.report.remedies import with_advice
from lightning_oom.units import GIB

MESSAGES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "oom_messages.jsonl").read_text().splitlines()
]
OOMS = [row for row in MESSAGES if row["is_oom"] and not row["ambiguous"]]
OTHERS = [row for row in MESSAGES if not row["is_oom"] and not row["ambiguous"]]


@pytest.mark.parametrize("row", OOMS, ids=lambda row: row["source"][-24:])
def test_published_messages_are_found_in_a_log(row) -> None:
    """Between other lines, behind a class and the prefix of a rank."""
    kind = row["exception_type"] or "RuntimeError"
    error = f"{kind}: {row['message']}"
    text = "\n".join(["Epoch 0: 3/10", *(f"[rank0]: {line}" for line in error.splitlines()), "bye"])

    report = read_log(text)

    assert report is not None
    assert report.cause.scope == row["scope"]
    assert with_advice(report).diagnoses


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row["source"][-24:])
def test_other_errors_are_not_taken_for_it(row) -> None:
    """Published errors that are no OOM give no report, or one that says so."""
    report = read_log(f"{row['exception_type'] or 'RuntimeError'}: {row['message']}")

    assert report is None or report.cause.kind == "collective"


LOG = """Epoch 3:  12%|#   | 7/60 [00:01<00:08, v_num=0]
[rank1]: Traceback (most recent call last):
[rank1]:   File "/site-packages/lightning/pytorch/strategies/strategy.py", line 3, in training_step
[rank1]:     return self.lightning_module.training_step(*args, **kwargs)
[rank1]:   File "/home/me/model.py", line 88, in forward
[rank1]:     scores = q @ k
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 24.00 GiB of which 1.00 GiB is free. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.

[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 1, in <module>
[rank0]: torch.distributed.DistBackendError: NCCL error: unhandled system error, Socket timeout
"""


def test_place_and_amounts_are_read_from_a_log() -> None:
    """Epoch and batch from the progress bar, phase and line from the traceback of the error."""
    report = read_log(LOG)
    assert report is not None

    assert (report.epoch, report.batch_index, report.phase) == (3, 7, "forward")
    assert (report.requested_bytes, report.limit_bytes) == (2 * GIB, 24 * GIB)
    assert report.device == "cuda:1"
    assert str(report.lines[-1]) == "model.py:88 in forward"


def test_a_restore_is_recognised_in_a_log() -> None:
    """A traceback through ``torch.load`` is the cause, whatever the amounts say."""
    text = """Traceback (most recent call last):
  File "resume.py", line 4, in <module>
    torch.load(path)
  File "/x/site-packages/torch/serialization.py", line 1471, in load
    return _load(
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."""
    report = read_log(text)
    assert report is not None

    assert with_advice(report).diagnoses[0].cause == "checkpoint_restore"


@pytest.mark.parametrize("text", ["", "all is well", "Epoch 3: 7/60\nValueError: no memory of it"])
def test_a_log_without_an_oom_gives_nothing(text) -> None:
    """No guess is made."""
    assert read_log(text) is None


def test_a_long_log_is_read_in_reasonable_time() -> None:
    """A hundred thousand lines that speak of memory, the error among the last."""
    text = "memory: 3 GiB allocated in step\n" * 100_000 + LOG

    assert read_log(text) is not None

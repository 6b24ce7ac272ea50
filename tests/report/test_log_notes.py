"""What OOMRecovery and OOMReporter wrote into a log is not lost on whoever explains it."""

from __future__ import annotations

import pytest
from report_cases import cuda_report

from lightning_oom.report.from_log import read_log
from lightning_oom.report.record import FailedAttempt
from lightning_oom.report.remedies import with_advice
from lightning_oom.report.text import render_text
from lightning_oom.units import MIB

LOG = """Epoch 2:  12%|#   | 7/60 [00:01<00:08, v_num=0]
OOMRecovery: epoch 2, batch 8, out of memory with 64 rows of (8,): asked for 2.00 MiB; failed: whole (backward); recovered by release (0.1 s lost)
OOMRecovery: epoch 2, batch 9, out of memory with 2048 rows of (64,): asked for 8.00 MiB with 3.20 MiB free of 40.00 MiB; failed: whole (backward), chunks of 1024 rows (forward); not recovered (0.72 s lost)
OOMReporter: Out of memory on cuda:0 (NVIDIA H200): asked for 8.00 MiB of 40.00 MiB (training, phase backward, epoch 2, batch 9, optimizer step 129, in model.net.2). The step needs more than the device has. Report: reports/oom-1.*
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 5, in <module>
[rank0]:     trainer.fit(model)
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 MiB. GPU 0 has a total capacity of 40.00 MiB of which 3.20 MiB is free. Of the allocated memory 36.80 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.
[rank0]: lightning_oom: 2048 rows of (64,) ran out of memory and could not be saved.
[rank0]:   tried: whole (backward), chunks of 1024 rows (forward)
[rank0]:   release: nothing could be freed
[rank0]:   chunk: chunks did not lower the peak enough
[rank0]:   split: rows depend on each other through batch normalisation, which takes its statistics over the batch (net.1): gradients of parts differ from those of the whole by 7.4e-01 at net.0.weight
[rank0]:   first error: CUDA out of memory. Tried to allocate 8.00 MiB.
[rank0]: lightning_oom: The step needs more than the device has.
[rank0]:   try first: Checkpoint the model's blocks.
[rank0]:   report: reports/oom-1.*
"""


def test_what_the_recovery_tried_is_read_from_its_note() -> None:
    """Attempts and reasons, the place, and the error without the note."""
    report = read_log(LOG)
    assert report is not None

    assert report.has_recovery
    assert report.attempts == (
        FailedAttempt(what="whole", phase="backward"),
        FailedAttempt(what="chunks of 1024 rows", phase="forward"),
    )
    assert [line.partition(":")[0] for line in report.declined] == ["release", "chunk", "split"]
    assert (report.epoch, report.batch_index, report.step) == (2, 9, 129)
    assert (report.stage, report.phase, report.module_path) == ("fit", "backward", "model.net.2")
    assert report.rows == 2048
    assert report.requested_bytes == 4 * MIB
    assert "lightning_oom" not in report.cause.message


def test_recovery_is_not_recommended_where_it_has_just_failed() -> None:
    """What it tried and why each rung declined is said instead; remedies that are left come first."""
    report = read_log(LOG)
    assert report is not None
    report = with_advice(report)
    text = " ".join(render_text(report).split())

    assert not [r for r in report.remedies if r.action.startswith("Add OOMRecovery")]
    assert report.remedies[0].setting == "Trainer(callbacks=[ActivationCheckpointing()])"
    assert "chunks of 1024 rows: failed in forward" in text
    assert "chunk: chunks did not lower the peak enough" in text
    assert "not the same step: BatchNorm takes its statistics over fewer rows" in text


def test_a_note_on_another_error_is_not_taken() -> None:
    """A later error without a note says nothing of the recovery's attempts before it."""
    later = "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    report = read_log(f"{LOG}\nrestarted\n{later}")
    assert report is not None

    assert report.attempts == ()
    assert report.declined == ()
    assert (report.step, report.module_path, report.has_recovery) == (None, None, None)


@pytest.mark.parametrize("place", ["reports/oom-1.json", "oom-1.json"])
def test_the_record_beside_the_log_is_read(tmp_path, place) -> None:
    """At the path that the log names, below its folder, or right beside the log."""
    record = cuda_report(epoch=2, batch_index=9, module_path="model.net.2")
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(record.to_json())

    assert read_log(LOG, folder=tmp_path) == record


@pytest.mark.parametrize("content", [None, "", "{}", '{"record": "OOMReport"}', "\0" * 10])
def test_a_record_that_cannot_be_read_leaves_the_log(tmp_path, content) -> None:
    """Missing, empty, of another form."""
    (tmp_path / "reports").mkdir()
    if content is not None:
        (tmp_path / "reports" / "oom-1.json").write_text(content)
    report = read_log(LOG, folder=tmp_path)
    assert report is not None

    assert len(report.attempts) == 2


def test_a_byte_limit_on_the_cpu_is_not_taken_for_a_gpu() -> None:
    """The text is that of CUDA; what follows it says where the limit was."""
    report = read_log(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 MiB. GPU 0 has a total "
        "capacity of 40.00 MiB of which 2.20 MiB is free. Of the allocated memory 37.80 MiB is "
        "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. (memory_limit of "
        "40.00 MiB on cpu, operator aten.mm.default)"
    )
    assert report is not None

    assert report.device == "cpu"
    assert report.reserved_bytes is None
    assert "nvidia" not in render_text(with_advice(report))

"""``lightning-oom explain``: a log, a report or a snapshot in, the diagnosis out."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import sys

import pytest

from lightning_oom.cli.main import main
from lightning_oom.report.from_log import read_log
from lightning_oom.report.record import OOMReport

LOG = (
    "Epoch 1: 4/10\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 GiB. GPU 0 has a total "
    "capacity of 80.00 GiB of which 79.00 GiB is free.\n"
)


class Stdin:
    """Standard input with these bytes in it."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


def test_a_log_is_explained(tmp_path, capsys) -> None:
    """The cause and the first remedy are printed; status 0; no colours into a file."""
    path = tmp_path / "train.log"
    path.write_text(LOG)

    assert main(["explain", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "One single tensor is larger than the whole device." in printed
    assert "What to do" in printed
    assert "\x1b" not in printed


def test_standard_input_is_read(monkeypatch, capsys) -> None:
    """A traceback can be pasted or piped."""
    monkeypatch.setattr(sys, "stdin", Stdin(LOG.encode()))

    assert main(["explain", "-"]) == 0
    assert "asked for 96.00 GiB of 80.00 GiB" in capsys.readouterr().out


def test_json_goes_in_and_out(tmp_path, capsys) -> None:
    """What ``--json`` prints is a report that the verb reads again, with the same diagnosis."""
    log, report = tmp_path / "train.log", tmp_path / "report.json"
    log.write_text(LOG)
    assert main(["explain", str(log), "--json"]) == 0
    report.write_text(capsys.readouterr().out)

    assert main(["explain", str(report), "--json"]) == 0
    again = OOMReport.from_json(capsys.readouterr().out)
    assert again == OOMReport.from_json(report.read_text())
    assert again.diagnoses[0].cause == "request_exceeds_device"


def test_a_log_is_explained_from_the_record_that_it_names(tmp_path, capsys) -> None:
    """The JSON of the reporter knows the module and the breakdown."""
    record = OOMReport.from_json(
        json.dumps(
            {
                "record": "OOMReport",
                "format_version": 1,
                "cause": vars_of(LOG),
                "module_path": "model.blocks.3",
                "batch_index": 41,
            }
        )
    )
    (tmp_path / "oom-1.json").write_text(record.to_json())
    log = tmp_path / "train.log"
    log.write_text(
        LOG + "lightning_oom: The step needs more.\n  report: /elsewhere/oom_reports/oom-1.*\n"
    )

    assert main(["explain", str(log)]) == 0
    printed = capsys.readouterr().out
    assert "in model.blocks.3" in printed
    assert "batch 41" in printed


def vars_of(log: str) -> dict[str, object]:
    """The cause that a log names, as plain data."""
    report = read_log(log)
    assert report is not None
    return dataclasses.asdict(report.cause)


def test_a_snapshot_is_explained(tmp_path, capsys) -> None:
    """A pickle of plain values with segments in it."""
    path = tmp_path / "snapshot.pickle"
    segment = {"device": 0, "total_size": 4096, "allocated_size": 1024, "blocks": []}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": []}))

    assert main(["explain", str(path)]) == 0
    assert "1.00 KiB allocated, 4.00 KiB reserved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"all is well", "no out-of-memory error in it"),
        (b"", "no out-of-memory error in it"),
        (pickle.dumps(os.getcwd), "this pickle is refused: it wants posix.getcwd"),
        (json.dumps({"record": "OOMReport", "format_version": 99}).encode(), "has form 99"),
        (json.dumps({"record": "Other"}).encode(), "is no OOMReport"),
        (b"\xff\xfe\x00broken", "no out-of-memory error in it"),
    ],
    ids=["no error", "empty", "malicious", "later form", "another record", "bytes"],
)
def test_what_cannot_be_explained_is_one_line_and_status_2(
    tmp_path, capsys, content, message
) -> None:
    """No traceback."""
    path = tmp_path / "file"
    path.write_bytes(content)

    assert main(["explain", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_file_or_a_folder_is_one_line_and_status_2(tmp_path, capsys) -> None:
    """What the system says is passed on."""
    for path in (tmp_path / "missing", tmp_path):
        assert main(["explain", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1

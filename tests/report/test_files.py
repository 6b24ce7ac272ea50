"""Reports in a folder: named, counted, and never in the way of the error."""

from __future__ import annotations

import warnings

import pytest
from report_cases import cuda_report

from lightning_oom.errors import LightningOOMWarning
from lightning_oom.report.files import ReportFolder
from lightning_oom.report.record import OOMReport

MOMENT = "2030-01-02T03:04:05+00:00"


def test_one_file_per_format_named_after_rank_and_batch(tmp_path) -> None:
    """The folder is made; names say when, which rank, and where."""
    folder = ReportFolder(tmp_path / "a" / "b", formats=["json", "text"], max_reports=3)

    written = folder.write(cuda_report(made_at=MOMENT, rank=2, epoch=1, batch_index=9))

    assert [path.name for path in written] == [
        "oom-20300102-030405-rank2-epoch1-batch9.json",
        "oom-20300102-030405-rank2-epoch1-batch9.txt",
    ]
    assert OOMReport.from_json(written[0].read_text()).rank == 2


def test_files_of_the_same_second_are_not_overwritten(tmp_path) -> None:
    """A second report of one moment gets a number."""
    folder = ReportFolder(tmp_path, formats=["text"], max_reports=5)
    names = [folder.write(cuda_report(made_at=MOMENT))[0].name for _ in range(3)]

    assert len(set(names)) == 3


def test_a_place_is_kept_for_the_error_that_ends_the_run(tmp_path) -> None:
    """Recovered OOMs fill all places but one."""
    folder = ReportFolder(tmp_path, formats=["text"], max_reports=3)
    for _ in range(5):
        folder.write(cuda_report(made_at=MOMENT, outcome="recovered"))

    assert len(list(tmp_path.iterdir())) == 2
    assert folder.write(cuda_report(made_at=MOMENT))
    assert folder.write(cuda_report(made_at=MOMENT)) == ()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path) -> None:
    """The path is a file: no error, one warning however many reports."""
    (tmp_path / "taken").write_text("")
    folder = ReportFolder(tmp_path / "taken" / "reports", formats=["text"], max_reports=3)

    with pytest.warns(LightningOOMWarning, match="could not be written") as caught:
        written = [folder.write(cuda_report()) for _ in range(2)]

    assert written == [(), ()]
    assert len(caught) == 1


def test_a_warning_that_is_an_error_does_not_pass(tmp_path) -> None:
    """With ``-W error`` the callback sees an error; it is the callback that must not pass it on."""
    (tmp_path / "taken").write_text("")
    folder = ReportFolder(tmp_path / "taken", formats=["text"], max_reports=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LightningOOMWarning):
            folder.write(cuda_report())

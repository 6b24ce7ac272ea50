"""OOMReporter: a report at the moment of the error, in every stage, and never in its way."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from fakes import TinyRegressor, batches_of, cuda_oom, regression_loader
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_oom import OOMRecovery, OOMReport, OOMReporter
from lightning_oom._torch import OutOfMemoryError
from lightning_oom.errors import LightningOOMWarning
from lightning_oom.testing import SimulatedGPUStrategy, fail_on

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


class NestedRegressor(TinyRegressor):
    """Takes batches that are nested dictionaries with texts and ``None`` in them."""

    def loss(self, batch: Any) -> torch.Tensor:
        """Unpack and go on as before."""
        return super().loss((batch["inputs"]["x"], batch["y"]))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return self.loss(batch)


def nested_batches(rows: list[int]) -> DataLoader:
    """Nested batches of the given numbers of rows."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        {
            "inputs": {"x": torch.randn(n, 8, generator=generator), "names": ["secret"] * n},
            "y": torch.randn(n, generator=generator),
            "weights": None,
        }
        for n in rows
    ]
    return DataLoader(batches, batch_size=None)


def on_gpu(tmp_path, *callbacks, limit: str | None = None, **options) -> Trainer:
    """A trainer on a simulated GPU."""
    return Trainer(
        strategy=SimulatedGPUStrategy(limit=limit),
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        **{**QUIET, **options},
    )


def test_the_oversized_batch_is_named(tmp_path) -> None:
    """Batch 7 of 10 does not fit: its number, shapes, dtypes, phase and epoch (icefall#343)."""
    reporter = OOMReporter()
    trainer = on_gpu(tmp_path, reporter)
    model = NestedRegressor(fits_rows=16)

    with pytest.raises(OutOfMemoryError) as caught:
        trainer.fit(model, nested_batches([8] * 7 + [64] + [8] * 2))

    report = reporter.last_report
    assert report is not None
    assert (report.batch_index, report.epoch, report.step, report.phase) == (7, 0, 7, "forward")
    assert (report.stage, report.rows, report.device) == ("fit", 64, "simgpu:0")
    assert report.module_path == "model.limit"
    shapes = {leaf.path: (leaf.shape, leaf.dtype) for leaf in report.batch}
    assert shapes["batch['inputs']['x']"] == ((64, 8), "float32")
    assert shapes["batch['weights']"] == (None, None)
    assert "secret" not in report.to_json()
    assert len(report.timeline) == 7
    (note,) = caught.value.__notes__
    assert str(reporter.paths[0].with_suffix("")) in note
    assert sorted(path.suffix for path in (tmp_path / "oom_reports").iterdir()) == [
        ".html",
        ".json",
        ".txt",
    ]
    (json,) = (tmp_path / "oom_reports").glob("*.json")
    assert OOMReport.from_json(json.read_text()) == report


def test_a_real_limit_gives_a_breakdown_and_a_remedy(tmp_path) -> None:
    """On a GPU that is too small: amounts, kinds, and rows that are said to fit do fit."""

    class Wide(NestedRegressor):
        def __init__(self) -> None:
            super().__init__(features=8, hidden=2048)

    reporter = OOMReporter()
    rows = 4096
    with pytest.raises(OutOfMemoryError):
        on_gpu(tmp_path, reporter, limit="48 MiB").fit(Wide(), nested_batches([8, 8, rows, 8]))

    report = reporter.last_report
    assert report is not None
    assert report.kinds is not None
    assert report.reading is not None
    assert report.kinds.total_bytes == report.reading.allocated_bytes
    assert report.diagnoses[0].cause == "too_big"
    (advice,) = [r for r in report.remedies if "batch_size" in (r.setting or "")]
    fitting = int((advice.setting or "").partition("batch_size=")[2].partition(")")[0])
    assert 1 <= fitting < rows
    on_gpu(tmp_path, limit="48 MiB").fit(Wide(), nested_batches([8, 8, fitting, 8]))


@pytest.mark.parametrize(
    ("phase", "stage"),
    [
        ("transfer", "fit"),
        ("forward", "fit"),
        ("backward", "fit"),
        ("optimizer", "fit"),
        ("validation", "validate"),
    ],
)
def test_phases_of_a_fit(tmp_path, phase, stage) -> None:
    """Each is called by its name, and the batch is known, also before it was on the device."""
    reporter = OOMReporter(formats=["json"])
    index = {"validation": 1, "optimizer": 0}.get(phase, 2)  # momentum is made in the first update
    trainer = on_gpu(tmp_path, reporter, fail_on(step=index, phase=phase), num_sanity_val_steps=0)

    with pytest.raises(OutOfMemoryError):
        trainer.fit(TinyRegressor(), regression_loader(), regression_loader())

    report = reporter.last_report
    assert report is not None
    assert report.stage == stage
    assert report.phase == ("forward" if phase == "validation" else phase)
    assert report.batch_index == index
    assert [leaf.shape for leaf in report.batch] == [(8, 8), (8,)]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_stages_beside_fit(tmp_path, stage) -> None:
    """Validate, test and predict have reports as well."""
    reporter = OOMReporter(formats=["json"])
    phase = {"validate": "validation"}.get(stage, stage)
    trainer = on_gpu(tmp_path, reporter, fail_on(step=1, phase=phase))

    with pytest.raises(OutOfMemoryError):
        getattr(trainer, stage)(TinyRegressor(), regression_loader(), **_silent(stage))

    report = reporter.last_report
    assert report is not None
    assert (report.stage, report.phase, report.batch_index) == (stage, "forward", 1)
    assert report.uses_graph is False


def _silent(stage: str) -> dict[str, Any]:
    return {} if stage == "predict" else {"verbose": False}


def test_a_folder_that_cannot_be_written_does_not_hide_the_error(tmp_path) -> None:
    """The original error is raised, and one warning says that there is no report."""
    (tmp_path / "taken").write_text("")
    reporter = OOMReporter(dirpath="taken")
    trainer = on_gpu(tmp_path, reporter)

    with (
        pytest.warns(LightningOOMWarning, match="could not be written"),
        pytest.raises(OutOfMemoryError, match="out of memory"),
    ):
        trainer.fit(TinyRegressor(fits_rows=4), batches_of([8]))
    assert reporter.last_report is not None
    assert reporter.paths == ()


def test_warnings_as_errors_do_not_replace_the_error(tmp_path) -> None:
    """Under ``-W error`` the warning about the folder stays inside."""
    (tmp_path / "taken").write_text("")
    trainer = on_gpu(tmp_path, OOMReporter(dirpath="taken"))

    with pytest.raises(OutOfMemoryError):
        trainer.fit(TinyRegressor(fits_rows=4), batches_of([8]))


def test_other_errors_have_no_report(tmp_path) -> None:
    """A mistake of the user is none of its business."""
    reporter = OOMReporter()
    model = TinyRegressor(fits_rows=4)
    model.limit.make_error = lambda: ValueError("not mine")

    with pytest.raises(ValueError, match="not mine") as caught:
        on_gpu(tmp_path, reporter).fit(model, batches_of([8]))
    assert reporter.last_report is None
    assert not hasattr(caught.value, "__notes__")
    assert not (tmp_path / "oom_reports").exists()


def test_recovered_errors_are_reported_on_request(tmp_path) -> None:
    """Beside OOMRecovery: nothing by default; on request one report with what was tried."""
    for on_recovered in (False, True):
        reporter = OOMReporter(formats=["json"], on_recovered=on_recovered)
        trainer = on_gpu(tmp_path, reporter, OOMRecovery(verbose=False))
        trainer.fit(TinyRegressor(fits_rows=16), batches_of([8, 8, 40, 8]))

        assert trainer.global_step == 4
        assert len(reporter.paths) == int(on_recovered)
    report = reporter.last_report
    assert report is not None
    assert (report.outcome, report.batch_index, report.rows) == ("recovered", 2, 40)
    assert report.attempts[0].what == "whole"
    assert report.module_path == "model.limit"
    assert report.has_recovery


def test_one_report_when_the_recovery_gives_up(tmp_path) -> None:
    """It is that of the first attempt, with all attempts in it, and the error ends the run."""
    reporter = OOMReporter(formats=["json"])
    trainer = on_gpu(tmp_path, reporter, OOMRecovery(verbose=False))

    with pytest.raises(OutOfMemoryError):
        trainer.fit(TinyRegressor(fits_rows=0), batches_of([4, 8]))

    report = reporter.last_report
    assert report is not None
    assert len(reporter.paths) == 1
    assert (report.outcome, report.batch_index, report.rows) == ("raised", 0, 4)
    assert len(report.attempts) >= 2
    assert report.declined


def test_the_number_of_reports_is_limited(tmp_path) -> None:
    """Every batch is too large: as many reports as agreed, less one for an error that ends the run."""
    reporter = OOMReporter(formats=["text"], max_reports=3, on_recovered=True)
    trainer = on_gpu(tmp_path, reporter, OOMRecovery(ladder=["release"], on_unrecoverable="skip"))

    with pytest.warns(UserWarning, match="batch skipped|could not be saved"):
        trainer.fit(TinyRegressor(fits_rows=4), batches_of([8] * 6))
    assert len(list((tmp_path / "oom_reports").iterdir())) == 2


def test_values_are_saved_when_asked_for(tmp_path) -> None:
    """The batch lies beside the report and has its values."""
    reporter = OOMReporter(formats=["json"], include_values=True)
    loader = nested_batches([8, 64])
    with pytest.raises(OutOfMemoryError):
        on_gpu(tmp_path, reporter).fit(NestedRegressor(fits_rows=16), loader)

    saved = torch.load(reporter.paths[-1], weights_only=True)
    expected = list(loader)[1]
    assert torch.equal(saved["inputs"]["x"], expected["inputs"]["x"])
    assert saved["inputs"]["names"] == expected["inputs"]["names"]
    assert saved["inputs"]["x"].device.type == "cpu"


def test_nothing_of_the_run_is_kept_alive(tmp_path) -> None:
    """After an OOM the model, its tensors and the error die, although the callback lives on."""
    reporter = OOMReporter(include_values=True)
    model = TinyRegressor(fits_rows=4)
    trainer = on_gpu(tmp_path, reporter)
    with contextlib.suppress(OutOfMemoryError):
        trainer.fit(model, batches_of([8]))
    watched = weakref.ref(model)
    for name in ("log", "log_dict"):  # Lightning gives each callback those of the module
        del vars(reporter)[name]
    del model, trainer
    gc.collect()

    assert watched() is None
    assert reporter.last_report is not None
    assert torch.simgpu.memory_allocated() == 0


def test_an_idle_run_is_the_same_run(tmp_path) -> None:
    """Without an OOM weights are bit-equal and no folder is made."""
    weights = []
    for callbacks in ([], [OOMReporter()]):
        torch.manual_seed(0)
        model = TinyRegressor()
        on_gpu(tmp_path, *callbacks).fit(model, regression_loader())
        weights.append([p.detach().cpu().clone() for p in model.parameters()])

    assert all(map(torch.equal, *weights))
    assert not (tmp_path / "oom_reports").exists()


def test_an_error_of_the_host_on_a_cpu_run(tmp_path) -> None:
    """Host memory is not taken for that of a GPU."""
    reporter = OOMReporter(formats=["json"])
    model = TinyRegressor(fits_rows=4)
    model.limit.make_error = MemoryError
    with pytest.raises(MemoryError):
        Trainer(accelerator="cpu", callbacks=[reporter], default_root_dir=tmp_path, **QUIET).fit(
            model, batches_of([8])
        )

    report = reporter.last_report
    assert report is not None
    assert report.diagnoses[0].cause == "host_memory"


def test_a_leak_is_the_diagnosis_when_memory_has_grown(tmp_path) -> None:
    """Losses kept with their graphs fill the device: the report says so."""

    class Leaky(TinyRegressor):
        def __init__(self) -> None:
            super().__init__(hidden=64)
            self.kept: list[torch.Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.kept.append(self.body[0](batch[0]).exp().mean())
            return self.loss(batch)

    reporter = OOMReporter(formats=["json"])
    with pytest.raises(OutOfMemoryError):
        on_gpu(tmp_path, reporter, limit="40 MiB").fit(Leaky(), batches_of([2048] * 400))

    report = reporter.last_report
    assert report is not None
    assert report.diagnoses[0].cause == "leak"
    assert "detach" in report.remedies[0].action


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"formats": []}, "formats is a list out of"),
        ({"formats": ["pdf"]}, "pdf"),
        ({"formats": "html"}, "formats is a list out of"),
        ({"max_reports": 0}, "max_reports is at least 1, got 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message) -> None:
    """In the constructor, with the value."""
    with pytest.raises(ValueError, match=message):
        OOMReporter(**arguments)


def test_the_report_is_in_tensorboard(tmp_path) -> None:
    """Text and picture are in the event file when the run has ended."""
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    with pytest.raises(OutOfMemoryError):
        on_gpu(tmp_path, OOMReporter(), limit="64 MiB", logger=logger).fit(
            TinyRegressor(fits_rows=4), batches_of([4, 8])
        )
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0, "images": 0})
    events.Reload()

    assert [image.step for image in events.Images("oom/memory")] == [1]
    assert "oom/report/text_summary" in events.Tags()["tensors"]


def test_a_restore_that_does_not_fit(tmp_path) -> None:
    """Loading a checkpoint to the device inside of a hook is named as the cause."""

    class Loads(TinyRegressor):
        def on_train_start(self) -> None:
            torch.load(tmp_path / "weights.pt", map_location=_to_full_device)

    def _to_full_device(storage, location):
        raise cuda_oom()

    torch.save(torch.ones(3), tmp_path / "weights.pt")
    reporter = OOMReporter(formats=["json"])
    with pytest.raises(OutOfMemoryError):
        on_gpu(tmp_path, reporter).fit(Loads(), batches_of([8]))

    report = reporter.last_report
    assert report is not None
    assert report.phase == "restore"
    assert report.diagnoses[0].cause == "checkpoint_restore"

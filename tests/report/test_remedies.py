"""Remedies fit the cause, the stage and the numbers of the record."""

from __future__ import annotations

import re

import pytest
from report_cases import cuda_report

from lightning_oom.report.needs import bytes_per_row, rows_that_fit
from lightning_oom.report.record import (
    FailedAttempt,
    ModuleMemory,
    OOMReport,
    OptimizerMemory,
)
from lightning_oom.report.remedies import with_advice
from lightning_oom.units import GIB, MIB


def expandable(report: OOMReport) -> list[str]:
    """What the remedies say of expandable segments as a setting."""
    settings = [remedy.setting or "" for remedy in with_advice(report).remedies]
    return [setting for setting in settings if "expandable_segments" in setting]


def fragmented(**facts) -> OOMReport:
    """A fragmented device."""
    return cuda_report(allocated=12 * GIB, unallocated=11 * GIB, requested=2 * GIB, **facts)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]),
        ({"torch_version": "2.13.0+cu130"}, ["PYTORCH_ALLOC_CONF=expandable_segments:True"]),
        ({"is_mig": True}, []),
        ({"platform": "win32"}, []),
        ({"device": "xpu:0"}, []),
        ({"allocator_settings": "expandable_segments:True"}, []),
    ],
    ids=["CUDA", "newer name", "MIG", "Windows", "no CUDA", "already on"],
)
def test_expandable_segments_are_advised_only_where_they_are_safe(facts, expected) -> None:
    """Not on MIG, not where the backend lacks them, not where they are on."""
    assert expandable(fragmented(**facts)) == expected


def test_the_advice_says_that_the_setting_is_read_before_cuda_starts() -> None:
    """Set in the script after the first allocation it does nothing."""
    first = with_advice(fragmented()).remedies[0]

    assert "before CUDA starts" in first.action
    assert first.saving_bytes == 11 * GIB


def test_rows_are_predicted_from_the_numbers_in_the_report() -> None:
    """What grows with the rows has to fit beside what does not."""
    report = cuda_report(requested=4 * GIB)
    (remedy,) = [r for r in with_advice(report).remedies if "batch_size" in (r.setting or "")]
    standing = 4 * GIB
    moving = 22 * GIB - standing + 4 * GIB
    available = 22 * GIB + 128 * MIB + 256 * MIB - standing
    assert 32 < int(0.9 * 64 * available / moving) < 64

    assert remedy.setting == "DataLoader(batch_size=32), Trainer(accumulate_grad_batches=2)"
    assert remedy.action.endswith("accumulate gradients over 2: the same step.")
    assert remedy.suffices


def test_one_row_cannot_be_split() -> None:
    """No batch of zero rows is advised."""
    remedies = with_advice(cuda_report(rows=1)).remedies

    assert not [remedy for remedy in remedies if "batch_size" in (remedy.setting or "")]


def test_remedies_that_free_enough_come_first() -> None:
    """Within a cause: enough before too little, then the cheaper one."""
    verdicts = [r.suffices is True for r in with_advice(cuda_report(requested=6 * GIB)).remedies]

    assert verdicts == sorted(verdicts, reverse=True)


def test_a_graph_in_validation_is_pointed_out() -> None:
    """What autograd records there is of no use."""
    report = cuda_report(stage="validate", phase="forward", uses_graph=True)

    assert with_advice(report).remedies[0].setting == "Trainer(callbacks=[NoGradEnforcer()])"


@pytest.mark.parametrize("stage", ["validate", "test", "predict", "sanity_check"])
@pytest.mark.parametrize("phase", ["forward", "optimizer", None])
def test_stages_without_gradients_get_remedies_of_theirs(stage, phase) -> None:
    """Nothing about optimizers, gradients, BatchNorm or activations kept for a backward."""
    layer = ModuleMemory(path="norm", type_name="BatchNorm2d", parameters_bytes=64)
    report = with_advice(
        cuda_report(stage=stage, phase=phase, uses_graph=False, modules=(layer,), requested=4 * GIB)
    )
    words = " ".join(f"{r.action} {r.setting} {r.cost}" for r in report.remedies)

    assert report.remedies
    for name in (
        *("accumul", "AdamW", "8bit", "zero_grad", "EarlyZeroGrad", "BatchNorm", "fsdp"),
        *("ActivationCheckpointing", "CPUOffload", "activations take"),
    ):
        assert name not in words


def test_rows_that_should_all_have_fitted_are_not_advised_by_one_less() -> None:
    """Where the numbers contradict the error, no number of rows is made up."""
    report = cuda_report(
        stage="validate", uses_graph=False, rows=1024, allocated=5 * GIB, free=3 * GIB // 2
    )
    words = " ".join(f"{r.action} {r.setting}" for r in with_advice(report).remedies)

    assert "1023" not in words
    assert "Take a smaller batch." in words


@pytest.mark.parametrize(
    ("rows", "allocated", "expected"),
    [
        (64, 22 * GIB, "batch_size=32), Trainer(accumulate_grad_batches=2)"),
        (61, 22 * GIB, "batch_size=31), Trainer(accumulate_grad_batches=2)"),
        (96, 23 * GIB, "batch_size=48), Trainer(accumulate_grad_batches=2)"),
    ],
)
def test_parts_of_a_batch_make_up_the_batch(rows, allocated, expected) -> None:
    """Equal parts where that comes out even; "the same step" is said only then."""
    report = cuda_report(requested=4 * GIB, rows=rows, allocated=allocated)
    (remedy,) = [r for r in with_advice(report).remedies if "batch_size" in (r.setting or "")]

    assert expected in (remedy.setting or "")
    assert ("the same step" in remedy.action) == (rows % 2 == 0)


def test_rows_leave_room_for_what_later_steps_add() -> None:
    """State that the first update makes, and gradients that accumulate, are there from then on."""
    early = cuda_report(
        requested=4 * GIB,
        optimizers=(OptimizerMemory(type_name="AdamW", state_bytes=0, expected_bytes=8 * GIB),),
    )

    assert (rows_that_fit(early) or 0) < (rows_that_fit(cuda_report(requested=4 * GIB)) or 0)


def test_no_smaller_batch_is_advised_where_the_rest_alone_is_too_much() -> None:
    """State that the first update makes leaves no room for a single row."""
    report = cuda_report(
        requested=4 * GIB,
        optimizers=(OptimizerMemory(type_name="AdamW", state_bytes=0, expected_bytes=30 * GIB),),
    )

    assert rows_that_fit(report) == 0
    assert not [r for r in with_advice(report).remedies if "DataLoader" in (r.setting or "")]


def test_bytes_of_a_row_follow_from_the_record() -> None:
    """The peak less what does not depend on the rows, over the rows."""
    report = cuda_report(requested=4 * GIB)
    assert report.kinds is not None
    peak = report.kinds.total_bytes + 4 * GIB

    assert bytes_per_row(report) == (peak - 4 * GIB) / 64


REFUSED = {
    "BatchNorm": (
        (
            "split: rows depend on each other through batch normalisation, which takes its statistics "
            "over the batch (norm): gradients of parts differ from those of the whole by 7.4e-01"
        ),
        "BatchNorm takes its statistics over fewer rows",
    ),
    "another loss": (
        "split: rows depend on each other: gradients of parts differ by 7.4e-01 at net.w",
        "the loss of the parts is another one",
    ),
}


@pytest.mark.parametrize(("declined", "differs"), REFUSED.values(), ids=REFUSED)
def test_where_a_split_was_refused_what_keeps_the_batch_whole_comes_first(
    declined, differs
) -> None:
    """Smaller batches come last, and never as "the same step"."""
    report = cuda_report(requested=4 * GIB, has_recovery=True, declined=(declined,))
    remedies = with_advice(report).remedies
    position = {(r.setting or "").partition("(")[0]: n for n, r in enumerate(remedies)}
    whole = [n for n, r in enumerate(remedies) if "same result" in r.cost]
    (fewer,) = [r for r in remedies if "batch_size" in (r.setting or "")]
    (split,) = [r for r in remedies if "on_inseparable" in (r.setting or "")]

    assert max(whole) < min(position["DataLoader"], position["OOMRecovery"])
    assert differs in fewer.cost
    assert differs in split.action
    assert "the same step" not in fewer.action


def test_a_weight_fn_is_advised_where_that_is_what_was_wrong() -> None:
    """The refusal says that the loss is a mean over something else than rows."""
    reason = (
        "split: the loss is a mean over something else than rows: parts add up with weights 0.2 "
        "instead of 0.5, give each part its weight with a weight_fn (its number of counted tokens?)"
    )
    remedies = with_advice(cuda_report(has_recovery=True, declined=(reason,))).remedies

    assert remedies[0].setting is not None
    assert remedies[0].setting.startswith("OOMRecovery(weight_fn=")


def test_no_smaller_batch_is_advised_where_one_row_did_not_fit() -> None:
    """The recovery has tried."""
    report = cuda_report(
        requested=4 * GIB,
        has_recovery=True,
        attempts=(FailedAttempt(what="split into micro-batches of 1 row", phase="forward"),),
        declined=("split: a single row does not fit",),
    )

    assert not [r for r in with_advice(report).remedies if "batch" in (r.setting or "").lower()]


@pytest.mark.parametrize("requested", [1, 4, 12, 23])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_nothing_frees_more_than_there_was(phase, requested) -> None:
    """Not more than the device, and of activations not more than the breakdown has."""
    report = cuda_report(phase=phase, requested=requested * GIB, allocated=8 * GIB, free=GIB)
    assert report.kinds is not None
    assert report.limit_bytes is not None
    remedies = with_advice(report).remedies

    for remedy in remedies:
        assert (remedy.saving_bytes or 0) <= report.limit_bytes
        if re.search("AMPSwitcher|ActivationCheckpointing|CPUOffload", remedy.setting or ""):
            assert (remedy.saving_bytes or 0) <= report.kinds.activations_bytes


def test_what_waits_for_an_oom_is_advised_with_what_meets_it() -> None:
    """AMPSwitcher repeats no step itself."""
    settings = [remedy.setting or "" for remedy in with_advice(cuda_report()).remedies]
    found = [setting for setting in settings if "AMPSwitcher" in setting]

    assert found
    assert all("OOMRecovery(), AMPSwitcher()" in setting for setting in found)


def test_nothing_is_said_to_be_freed_where_the_breakdown_is_missing() -> None:
    """Unknown is left out."""
    remedies = with_advice(cuda_report(kinds=None)).remedies

    assert remedies
    assert not [remedy for remedy in remedies if remedy.saving_bytes]


def test_a_model_that_does_not_fit_gets_no_advice_about_batches() -> None:
    """There was none yet."""
    settings = [r.setting or "" for r in with_advice(cuda_report(phase="setup")).remedies]

    assert not [s for s in settings if "batch" in s.lower() or "OOMRecovery" in s]
    assert 'Trainer(precision="bf16-true")' in settings


def test_recovery_is_not_advised_to_those_who_have_it() -> None:
    """Remedies that are in place are left out."""
    with_it = with_advice(cuda_report(has_recovery=True)).remedies

    assert not [remedy for remedy in with_it if "OOMRecovery" in remedy.action]

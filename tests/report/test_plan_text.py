"""A plan in words and as YAML that builds the callbacks it names."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import yaml

from lightning_oom.planning.memory_plan import MemoryPlan
from lightning_oom.planning.plan_remedies import Remedies
from lightning_oom.report.plan_text import plan_line, plan_table, plan_yaml
from lightning_oom.units import GIB

PLAN = MemoryPlan(
    limit_bytes=24 * GIB,
    fits=True,
    remedies=Remedies(
        num_micro_batches=3,
        early_zero_grad=True,
        checkpointed=("layers.0", "layers.1", "layers.2", "layers.3"),
        offload=True,
        one_by_one=True,
        mixed=True,
    ),
    rows=32,
    precision="bf16-mixed",
    slowdown=0.25,
    allocated_bytes=19 * GIB,
    peak_bytes=20 * GIB,
    upper_bytes=22 * GIB,
    plain_peak_bytes=60 * GIB,
    plain_upper_bytes=66 * GIB,
    smallest_limit_bytes=None,
    missing=(),
    excluded=(),
    device="cuda",
    coverage=0.9,
    batch="the 32 longest of 900 items",
    num_dry_runs=21,
)


def test_one_line_says_what_is_done_and_what_it_costs():
    """Rows, blocks, bytes, slowdown."""
    assert plan_line(PLAN) == (
        "to fit into 24.00 GiB: run 11 of 32 rows at a time (3 micro-batches); drop old gradients "
        "before the forward; checkpoint 4 blocks (layers.0, layers.1, layers.2, ...); keep saved "
        "activations on the host; step the optimizer one tensor at a time (foreach=False); compute in "
        "bf16-mixed. Predicted: 20.00 GiB, at most 22.00 GiB (as it is: 60.00 GiB), 25% slower"
    )
    as_it_is = replace(PLAN, remedies=Remedies())
    assert plan_line(as_it_is) == (
        "the step fits into 24.00 GiB as it is: 20.00 GiB, at most 22.00 GiB"
    )


def test_what_would_fit():
    """The least, how, and which remedy is missing."""
    plan = replace(
        PLAN,
        fits=False,
        limit_bytes=GIB,
        remedies=Remedies(early_zero_grad=True),
        smallest_limit_bytes=22 * GIB,
        missing=("rows", "precision"),
        excluded=("rows: net.norm normalises over the batch, which may not be split",),
    )

    assert plan_line(plan) == (
        "nothing that may be done fits into 1.00 GiB: the least that is needed is 22.00 GiB (drop old "
        "gradients before the forward); it would fit if 'rows' or 'precision' were allowed"
    )
    assert dict(plan_table(plan))["left out"] == plan.excluded[0]


def test_the_table_has_what_was_planned_for():
    """Limit, batch, both peaks, each step, the slowdown."""
    rows = plan_table(PLAN)

    assert ("planned for", "the 32 longest of 900 items, 32 rows") in rows
    assert ("as it is", "60.00 GiB, at most 66.00 GiB (95%)") in rows
    assert [value for name, value in rows if not name][-1] == "compute in bf16-mixed"
    assert ("", "change nothing") in plan_table(replace(PLAN, remedies=Remedies()))


def test_the_yaml_builds_what_it_names():
    """Every class is there and takes its arguments; nothing to change gives nothing to paste."""
    config = yaml.safe_load(plan_yaml(PLAN))["trainer"]

    assert config["precision"] == "bf16-mixed"
    made = {}
    for entry in config["callbacks"]:
        package, _, name = entry["class_path"].rpartition(".")
        made[name] = getattr(importlib.import_module(package), name)(**entry.get("init_args", {}))
    assert list(made) == ["EarlyZeroGrad", "ActivationCheckpointing", "CPUOffload", "OOMRecovery"]
    assert made["OOMRecovery"]._options.max_rows == 11
    assert plan_yaml(PLAN).splitlines()[-1].startswith("# and foreach=False")
    assert plan_yaml(replace(PLAN, remedies=Remedies())) == ""


@pytest.mark.parametrize("fits", [True, False])
def test_plain_data(fits):
    """For JSON."""
    facts = replace(PLAN, fits=fits).to_dict()

    assert facts["rows_per_micro_batch"] == 11
    assert facts["checkpointed"] == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert facts["fits"] is fits

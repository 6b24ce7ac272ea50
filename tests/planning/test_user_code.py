"""What users write in a training step is followed on fake tensors, or measured on a few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from user_code_cases import FOLLOWED, MEASURED, PESSIMISTIC, UserModule, make_batch

from lightning_oom._torch.fake import is_fake
from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.fake_step import trace_step
from lightning_oom.planning.real_step import measure_rows, measure_step

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _without_mkldnn() -> Iterator[None]:
    """Its LSTM says nothing of its workspace."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def fakes_in(value: Any, seen: set[int]) -> list[str]:
    """Name the types of holders of fake tensors that can be reached from ``value``."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return ["fake"] * (is_fake(value) or is_fake(value.grad if value.is_leaf else None))
    if isinstance(value, dict):
        return fakes_in([*value.keys(), *value.values()], seen)
    if isinstance(value, (list, tuple, set)):
        return [found for item in value for found in fakes_in(item, seen)]
    found = fakes_in(vars(value), seen) if hasattr(value, "__dict__") else []
    return [f"{type(value).__name__}: {name}" for name in found]


def state_of(module: UserModule) -> dict[str, Any]:
    """What a dry step must leave alone."""
    return {
        "state": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "attributes": {name: id(value) for name, value in vars(module).items()},
        "kept": len(getattr(module, "kept", ())),
        "random": torch.get_rng_state(),
        "generator": getattr(module, "generator", torch.Generator()).get_state(),
        "hooks": [len(part._forward_hooks) for part in module.modules()],
    }


def assert_untouched(module: UserModule, before: dict[str, Any]) -> None:
    """Compare, and look for fake tensors."""
    torch.testing.assert_close(state_of(module), before, rtol=0, atol=0)
    assert fakes_in(module, set()) == []
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_step_on_fake_tensors_has_the_peak_of_the_real_one(name: str) -> None:
    """To the byte, in the same phase, with nothing guessed and nothing touched."""
    module, batch = FOLLOWED[name](), make_batch()
    before = state_of(module)

    fake = trace_step(module, batch)
    real = measure_rows(module, batch)

    if name == "Sparse":  # below any dispatch mode, autograd copies what it otherwise takes over
        assert fake.peak_bytes <= real.peak_bytes
    else:
        assert (fake.peak_bytes, fake.peak_phase) == (real.peak_bytes, real.peak_phase)
    assert fake.substitutions == ()
    assert_untouched(module, before)


@pytest.mark.parametrize("name", PESSIMISTIC)
def test_a_step_that_asks_for_numbers_is_answered_from_above(name: str) -> None:
    """Never below the real peak, and the lines that asked are named."""
    module, batch = PESSIMISTIC[name](), make_batch()
    before = state_of(module)

    fake = trace_step(module, batch)

    slack_bytes = 4 if name == "LineSearch" else 0  # a step length stays a plain number
    assert fake.peak_bytes + slack_bytes >= measure_rows(module, batch).peak_bytes
    if name != "LineSearch":  # torch's own optimizer asks
        assert {s.place.rpartition("/")[2].partition(":")[0] for s in fake.substitutions} == {
            "user_code_cases.py"
        }
    assert_untouched(module, before)


@pytest.mark.parametrize("name", MEASURED)
def test_a_step_that_fake_tensors_cannot_follow_is_measured(name: str) -> None:
    """The refusal names the line; two small real runs give the peak of a larger one."""
    module, batch = MEASURED[name](), make_batch(5)
    before = state_of(module)

    with pytest.raises(StepNotTracedError, match=r"user_code_cases\.py:\d+"):
        trace_step(module, batch)
    extended = measure_step(module, batch)

    assert extended.peak_bytes == measure_rows(module, batch).peak_bytes
    assert extended.is_measured
    assert_untouched(module, before)


def test_all_cases_are_there() -> None:
    """35 of them, all but three on fake tensors."""
    assert len(FOLLOWED) + len(PESSIMISTIC) == 32
    assert len(MEASURED) == 3

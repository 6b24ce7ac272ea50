"""The search finds the best of its combinations, and more memory never makes a plan slower."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.memory_plan import make_plan, plan_memory
from lightning_oom.planning.offload_dry_run import DryOffload
from lightning_oom.planning.plan_remedies import ALWAYS_ALLOWED, REMEDIES, Remedies
from lightning_oom.planning.plan_search import Candidate, PlanSearch
from lightning_oom.units import MIB


class Block(nn.Module):
    """Keeps more than it hands on."""

    def __init__(self, norm=nn.Identity) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), norm())

    def forward(self, x):
        """Add."""
        return x + self.inner(x)


def model_of(blocks=2, norm=nn.Identity):
    """Blocks and a head."""
    return nn.Sequential(*(Block(norm) for _ in range(blocks)), nn.Linear(32, 4))


@pytest.fixture(scope="module")
def search():
    """What is known of a step of two blocks with 4096 rows; tests add to it."""
    batch = torch.zeros(4096, 32)
    return PlanSearch(model_of(), batch, optimizer=torch.optim.SGD, device="cpu")


class Invented(PlanSearch):
    """The combinations of a real step, with invented needs and no dry run."""

    def __init__(self, real, needs) -> None:
        vars(self).update(vars(real), _known={}, needs=needs, _batch_bytes=0)

    def _blocks(self):
        return [[("0",), ("0", "1")]]

    def _moved(self, remedies):
        return MIB

    def _judge(self, remedies):
        seconds = self._time.seconds(remedies, moved_bytes=MIB if remedies.offload else 0)
        needed = self.needs(remedies)
        return Candidate(remedies, seconds, needed, needed, needed, "optimizer")

    def all_combinations(self, allow):
        """Give every combination that the search may look at, tried or not."""
        plain = [self.candidate(Remedies())]
        lines = self._lines(frozenset(allow))
        return plain + [self.candidate(remedies) for line in lines for remedies in line]


def invented_needs(seed):
    """Needs without any order."""

    def needs(remedies):
        return Random(f"{seed} {remedies}").randrange(100)  # noqa: S311

    return needs


def lower_with_each(remedies):
    """Needs that each further remedy lowers, as in practice."""
    needed = 1000 // remedies.num_micro_batches + 200 - 60 * len(remedies.checkpointed)
    return needed - 10 * remedies.early_zero_grad - 55 * remedies.offload - 20 * remedies.one_by_one


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), limits=st.lists(st.integers(1, 100), min_size=2, max_size=2))
def test_more_memory_never_gives_a_slower_plan(search, seed, limits):
    """Whatever the needs are: even where a remedy makes things worse."""
    invented = Invented(search, invented_needs(seed))
    small, large = (invented.best(limit, REMEDIES) for limit in sorted(limits))

    if small is not None:
        assert large is not None
        assert large.seconds <= small.seconds
        assert small.upper_bytes <= max(limits)


@pytest.mark.parametrize("allow", [REMEDIES, ("rows",), ("checkpoint", "zero_grad"), ("offload",)])
def test_the_plan_is_the_fastest_of_all_combinations(search, allow):
    """Every limit, against trying everything."""
    invented = Invented(search, lower_with_each)
    everything = invented.all_combinations(allow)

    for limit in range(0, 1300, 7):
        fitting = [c for c in everything if c.upper_bytes <= limit]
        found = invented.best(limit, allow)
        assert (found is None) == (not fitting)
        if found is not None:
            assert found.seconds == pytest.approx(min(c.seconds for c in fitting))


def test_the_plan_of_a_real_step_is_within_5_percent_of_every_subset(search):
    """Dry runs of all subsets of blocks, with every number of micro-batches up to 8."""
    plain = search.candidate(Remedies())
    everything = [
        search.candidate(Remedies(early_zero_grad=True, checkpointed=paths, num_micro_batches=n))
        for paths in ((), ("0",), ("1",), ("0", "1"))
        for n in range(1, 9)
    ]
    least = min(candidate.upper_bytes for candidate in everything)
    for fraction in (0.9, 0.6, 0.3):
        limit = int(least + (plain.upper_bytes - least) * fraction)
        found = search.best(limit, ("zero_grad", "checkpoint", "rows"))
        fitting = [c.seconds for c in everything if c.upper_bytes <= limit]
        assert found.upper_bytes <= limit
        assert found.seconds <= 1.05 * min(fitting)


def test_candidates_are_dry_runs_of_the_whole_combination(search):
    """What a combination needs is what a step with all of it needs, not a difference of sums."""
    both = Remedies(early_zero_grad=True, checkpointed=("0", "1"))
    trace = search._step.run(zero_grad="early", optimizer=torch.optim.SGD, **_installed(both))

    assert search.candidate(both).allocated_bytes == pytest.approx(trace.peak_bytes, rel=0.01)


def _installed(remedies):
    options = remedies.run_options(None)
    return {"transform": options["transform"]}


def test_offloading_moves_what_is_saved_and_nothing_else(search):
    """Parameters, the batch and small tensors stay."""
    step = search._step
    dry = DryOffload(batch=[torch.zeros(1, 32)], min_bytes=MIB)
    offloaded = step.run(optimizer=torch.optim.SGD, forward_context=dry.around)
    plain = step.run(optimizer=torch.optim.SGD)
    # Of each block: the sum before GELU, and its result. The input of the second block and of the
    # head is 512 KiB, and stays.
    assert dry.moved_bytes == dry.num_forwards * 2 * 2 * 4096 * 128 * 4
    assert offloaded.peak_bytes < plain.peak_bytes
    assert offloaded.final_bytes == plain.final_bytes


def test_the_early_copies_of_cuda_hold_more(search):
    """Four storages on their way, two ahead: still there when the next ones come."""
    run = search._step.run
    waiting, streaming = (DryOffload(has_streams=streams) for streams in (False, True))

    assert (
        run(forward_context=streaming.around).peak_bytes
        >= run(forward_context=waiting.around).peak_bytes
    )


def test_nothing_fits_and_what_would(search):
    """The smallest limit is one for which there is a plan; a remedy that is not allowed is named."""
    invented, model = Invented(search, lower_with_each), model_of()
    allow = ("zero_grad", "checkpoint")
    plan = make_plan(invented, model, 500, allow=allow)
    assert not plan.fits
    assert plan.smallest_limit_bytes == plan.upper_bytes == 1000 + 200 - 2 * 60 - 10
    assert plan.missing == ("rows",)
    assert make_plan(invented, model, plan.smallest_limit_bytes, allow=allow).fits
    assert make_plan(invented, model, 500, allow=(*allow, *plan.missing)).fits

    hopeless = Invented(search, lambda _: 1000)
    assert make_plan(hopeless, model, 500, allow=("zero_grad",)).missing == ()


def test_what_helps_only_together_is_named_together(search):
    """Rows alone and checkpoints alone are too little."""
    plan = make_plan(Invented(search, lower_with_each), model_of(), 60, allow=("zero_grad",))

    assert plan.missing == ("checkpoint", "rows", "offload", "optimizer", "precision")


def test_batch_normalisation_is_not_split(search):
    """Its statistics are those of the whole batch: rows are not used, and the plan says so."""
    invented = Invented(search, lower_with_each)
    model = model_of(norm=lambda: nn.BatchNorm1d(32))
    plan = make_plan(invented, model, 500)

    assert not plan.fits
    assert "rows" not in plan.remedies.names
    assert "0.inner.3" in plan.excluded[0]
    assert make_plan(invented, model.eval(), 500).remedies.num_micro_batches > 1


def test_what_fits_is_left_as_it_is_and_precision_is_asked_for(search):
    """No remedy without need; other numbers only where they are allowed."""
    plain = search.candidate(Remedies())
    plan = make_plan(search, model_of(), plain.upper_bytes)
    assert (plan.fits, plan.remedies, plan.slowdown) == (True, Remedies(), 0.0)

    assert "precision" not in ALWAYS_ALLOWED
    mixed = make_plan(search, model_of(), int(plain.upper_bytes * 0.8), allow=("precision",))
    assert (mixed.fits, mixed.precision, mixed.slowdown) == (True, "bf16-mixed", 0.0)


def test_arguments_out_of_range():
    """Named, with what is allowed; a step that cannot be followed is an error of its own."""
    model, batch = model_of(), torch.zeros(4, 32)
    with pytest.raises(ValueError, match="allow takes names out of"):
        plan_memory(model, batch, "1 GiB", allow=("luck",))
    with pytest.raises(ValueError, match="limit must be above 0"):
        plan_memory(model, batch, 0)
    with pytest.raises(ValueError, match="coverage is above 0 and below 1"):
        plan_memory(model, batch, "1 GiB", coverage=1.0)
    with pytest.raises(StepNotTracedError):
        plan_memory(model, torch.zeros(4, 31), "1 GiB")


def test_more_micro_batches_and_recomputation_take_longer(search):
    """The time model: nothing is free but dropping gradients early."""
    time = search._time.seconds
    plain = Remedies()
    assert time(replace(plain, early_zero_grad=True)) == time(plain)
    assert time(plain) < time(replace(plain, num_micro_batches=2))
    assert time(plain) < time(replace(plain, checkpointed=("0",)))
    assert time(replace(plain, checkpointed=("0",))) < time(replace(plain, checkpointed=("0", "1")))
    assert time(plain) < time(plain, moved_bytes=MIB)
    assert time(plain) < time(replace(plain, one_by_one=True))

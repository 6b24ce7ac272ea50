"""The cheapest choice of blocks under a peak, exactly, by walking along the forward once."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_oom.planning.checkpoint_profile import StepProfile

__all__ = ["cheapest_choice", "least_peak_bytes"]

_MAX_STATES = 4096
_MAX_REPEATED = 6


class _State(NamedTuple):
    kept_bytes: int
    cost: float
    chosen: frozenset[int]


def cheapest_choice(
    profile: StepProfile, costs: Sequence[float], budget_bytes: int
) -> frozenset[int] | None:
    """Choose which blocks to checkpoint: the least recomputation whose peak is in the budget.

    What the calls so far keep is all that later calls depend on, and less of it is never worse: so
    of the choices for the calls so far, only those matter that no other one beats both in bytes and
    in cost. Exact with up to 4096 of these, which blocks of equal size never reach; beyond, the
    cheapest of each range of bytes is followed.

    Args:
        profile: Of the step.
        costs: Of one recomputation of each block.
        budget_bytes: The peak that is allowed.

    Returns:
        Positions of the chosen blocks; ``None`` where no choice is in the budget.

    Note:
        Blocks that are called several times are decided first: each of their combinations up to six
        such blocks, else all or none of them.
    """
    if profile.fixed_bytes > budget_bytes:
        return None
    found = [
        state
        for forced in _repeated_choices(profile)
        if (state := _walk(profile, costs, budget_bytes, forced)) is not None
    ]
    return min(found, key=lambda state: (state.cost, state.kept_bytes)).chosen if found else None


def least_peak_bytes(profile: StepProfile) -> int:
    """Return the lowest peak that any choice of blocks reaches, to one part in a million."""
    blocks = {call.block for call in profile.calls}
    low, high = profile.fixed_bytes, profile.peak_bytes(blocks)
    costs = [0.0] * (max(blocks) + 1)
    while high - low > max(high // 10**6, 0):
        middle = (low + high) // 2
        if cheapest_choice(profile, costs, middle) is None:
            low = middle + 1
        else:
            high = middle
    return high


def _walk(
    profile: StepProfile, costs: Sequence[float], budget_bytes: int, forced: dict[int, bool]
) -> _State | None:
    states = [_State(0, sum(costs[b] for b, is_on in forced.items() if is_on), frozenset())]
    for between, call in zip(profile.between_bytes, profile.calls, strict=False):
        room = budget_bytes - between
        following: list[_State] = []
        for state in states:
            if state.kept_bytes > room:
                continue
            wanted = forced.get(call.block)
            if wanted is not True and state.kept_bytes + call.plain_bytes <= budget_bytes:
                following.append(state._replace(kept_bytes=state.kept_bytes + call.kept_bytes))
            if wanted is not False and state.kept_bytes + call.checkpointed_bytes <= budget_bytes:
                following.append(
                    _State(
                        state.kept_bytes,
                        state.cost + (costs[call.block] if wanted is None else 0.0),
                        state.chosen | {call.block},
                    )
                )
        states = _unbeaten(following)
        if not states:
            return None
    room = budget_bytes - profile.between_bytes[-1]
    fitting = [state for state in states if state.kept_bytes <= room]
    return min(fitting, key=lambda state: (state.cost, state.kept_bytes)) if fitting else None


def _unbeaten(states: list[_State]) -> list[_State]:
    """Leave out states that keep no less and cost no less than another one."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: (state.kept_bytes, state.cost)):
        if not kept or state.cost < kept[-1].cost:
            kept.append(state)
    if len(kept) <= _MAX_STATES:
        return kept
    width = kept[-1].kept_bytes / _MAX_STATES
    return list({int(state.kept_bytes / width): state for state in kept}.values())


def _repeated_choices(profile: StepProfile) -> Iterator[dict[int, bool]]:
    """Give what is decided beforehand: which of the blocks with several calls are checkpointed."""
    counts: dict[int, int] = {}
    for call in profile.calls:
        counts[call.block] = counts.get(call.block, 0) + 1
    repeated = [block for block, count in counts.items() if count > 1]
    sizes = range(len(repeated) + 1) if len(repeated) <= _MAX_REPEATED else (0, len(repeated))
    for size in sizes:
        for on in combinations(repeated, size):
            yield {block: block in on for block in repeated}

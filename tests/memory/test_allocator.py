"""The caching-allocator model: the policy of torch's CUDA allocator, and what must always hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_oom.memory.allocator import AllocatorFullError, CachingAllocator
from lightning_oom.memory.blocks import FREE, LIVE, UNMAPPED
from lightning_oom.units import MIB

if TYPE_CHECKING:
    from lightning_oom.memory.blocks import Block


@pytest.mark.parametrize(
    ("requested_bytes", "allocated_bytes", "reserved_bytes"),
    [
        pytest.param(1, 512, 2 * MIB, id="one byte is a block of 512"),
        pytest.param(4, 512, 2 * MIB, id="one float"),
        pytest.param(513, 1024, 2 * MIB, id="just above a block"),
        pytest.param(1 * MIB, 1 * MIB, 2 * MIB, id="largest of the small pool"),
        pytest.param(1 * MIB + 1, 1 * MIB + 512, 20 * MIB, id="smallest of the large pool"),
        pytest.param(4 * MIB, 4 * MIB, 20 * MIB, id="shares a 20 MiB segment"),
        pytest.param(10 * MIB - 512, 10 * MIB - 512, 20 * MIB, id="just below its own segment"),
        pytest.param(10 * MIB, 10 * MIB, 10 * MIB, id="own segment"),
        pytest.param(11 * MIB, 12 * MIB, 12 * MIB, id="own segment, unsplit remainder counts"),
        pytest.param(11 * MIB - 512, 11 * MIB - 512, 12 * MIB, id="own segment, split"),
    ],
)
def test_sizes_follow_the_policy(
    requested_bytes: int, allocated_bytes: int, reserved_bytes: int
) -> None:
    """A request becomes a block and a segment of the sizes that torch's constants give."""
    allocator = CachingAllocator()
    allocator.allocate(requested_bytes)

    assert allocator.allocated_bytes == allocated_bytes
    assert allocator.reserved_bytes == reserved_bytes


def test_the_smallest_block_that_fits_is_taken() -> None:
    """Of two free blocks the smaller one serves the request, and no new segment is made."""
    allocator = CachingAllocator()
    large, _, small, _ = (allocator.allocate(n * MIB) for n in (6, 2, 3, 2))
    allocator.free(large)
    allocator.free(small)

    assert allocator.allocate(3 * MIB).address == small.address
    assert allocator.reserved_bytes == 20 * MIB


def test_freed_neighbours_merge() -> None:
    """Three blocks freed in any order serve one request of their joint size."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    for index in (1, 3, 2):
        allocator.free(blocks[index])

    assert allocator.allocate(12 * MIB).address == blocks[1].address
    assert allocator.reserved_bytes == 20 * MIB


def test_only_wholly_free_segments_go_back() -> None:
    """A segment with one live block stays reserved; the rest of it cannot be released."""
    allocator = CachingAllocator()
    kept, freed, own = (allocator.allocate(n * MIB) for n in (2, 18, 40))
    allocator.free(freed)
    allocator.free(own)

    assert allocator.release_cached() == 40 * MIB
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(kept)
    assert allocator.release_cached() == 20 * MIB


def test_a_full_device_gives_cached_segments_back_first() -> None:
    """The allocation is tried once more after cached segments were freed, and that is counted."""
    allocator = CachingAllocator("40 MiB")
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(36 * MIB)

    assert allocator.alloc_retries == 1
    assert allocator.num_ooms == 0
    assert allocator.reserved_bytes == 36 * MIB


@pytest.mark.parametrize(("limit_bytes", "fits"), [(20 * MIB - 1, False), (20 * MIB, True)])
def test_the_limit_is_on_what_is_reserved(limit_bytes: int, fits: bool) -> None:
    """A request of 4 MiB needs a device with room for a segment of 20 MiB."""
    allocator = CachingAllocator(limit_bytes)
    if fits:
        allocator.allocate(4 * MIB)
        return

    with pytest.raises(AllocatorFullError) as caught:
        allocator.allocate(4 * MIB)
    assert caught.value.failure.segment_bytes == 20 * MIB
    assert caught.value.failure.free_bytes == limit_bytes
    assert allocator.num_ooms == 1
    assert allocator.allocated_bytes == allocator.reserved_bytes == 0


def test_fragmentation_can_refuse_what_would_fit() -> None:
    """With 18 MiB free in two pieces of one segment, 12 MiB are refused; expandable segments fit."""

    def fill(allocator: CachingAllocator) -> None:
        first, _, last = (allocator.allocate(n * MIB) for n in (9, 2, 9))
        allocator.free(first)
        allocator.free(last)
        allocator.allocate(12 * MIB)

    with pytest.raises(AllocatorFullError) as caught:
        fill(CachingAllocator("22 MiB"))
    assert caught.value.failure.reserved_unallocated_bytes == 18 * MIB
    fill(CachingAllocator("40 MiB", expandable_segments=True))


def test_expandable_segments_grow_by_pages() -> None:
    """One segment per pool grows by 2 or 20 MiB, and a large block may cross old ends."""
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(100)
    assert allocator.reserved_bytes == 2 * MIB
    first = allocator.allocate(15 * MIB)
    second = allocator.allocate(15 * MIB)

    assert second.address == first.address + 15 * MIB
    assert allocator.reserved_bytes == 42 * MIB


def test_expandable_segments_give_whole_pages_back() -> None:
    """Pages inside a free range go back although the segment is in use, and come again."""
    allocator = CachingAllocator(expandable_segments=True)
    kept, freed, last = (allocator.allocate(n * MIB) for n in (5, 50, 5))
    allocator.free(freed)

    assert allocator.release_cached() == 20 * MIB
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.allocate(50 * MIB).address == freed.address
    assert allocator.reserved_bytes == 60 * MIB
    assert kept.state == last.state == LIVE


def test_large_blocks_are_not_split_past_the_limit_for_splits() -> None:
    """A block of ``max_split_bytes`` serves no smaller request and keeps its remainder."""
    allocator = CachingAllocator(max_split_bytes="32 MiB")
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(16 * MIB)

    assert allocator.reserved_bytes == 80 * MIB


def test_peaks_start_again_from_what_is_held() -> None:
    """After a reset the peaks are what is allocated and reserved now."""
    allocator = CachingAllocator()
    kept, freed = allocator.allocate(3 * MIB), allocator.allocate(5 * MIB)
    allocator.free(freed)
    assert allocator.peak_allocated_bytes == 8 * MIB
    allocator.reset_peak()

    assert allocator.peak_allocated_bytes == kept.num_bytes == 3 * MIB
    assert allocator.peak_reserved_bytes == 20 * MIB


def test_a_replay_ends_where_the_calls_end() -> None:
    """A recorded trace leaves the counters that the same calls leave, and returns what lives."""
    by_calls = CachingAllocator()
    block = by_calls.allocate(7 * MIB)
    by_calls.allocate(300)
    by_calls.free(block)
    replayed = CachingAllocator()
    live = replayed.replay([("a", 7 * MIB), ("b", 300), ("a", None)])

    assert list(live) == ["b"]
    for name in ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes"):
        assert getattr(replayed, name) == getattr(by_calls, name)


def test_a_block_is_freed_once() -> None:
    """Freeing a block again is an error that shows the block."""
    allocator = CachingAllocator()
    block = allocator.allocate(100)
    allocator.free(block)

    with pytest.raises(ValueError, match=r"only a live block can be freed, got Block\(free"):
        allocator.free(block)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_bytes": 0}, "limit_bytes must be above 0, got 0"),
        ({"max_split_bytes": "20 MiB"}, "max_split_bytes must be above 20 MiB, got '20 MiB'"),
    ],
)
def test_a_bad_argument_is_named(options: dict[str, int | str], message: str) -> None:
    """The constructor names the value and the range."""
    with pytest.raises(ValueError, match=message):
        CachingAllocator(**options)  # type: ignore[arg-type]  # the parameters are of one type


def test_a_request_holds_at_least_one_byte() -> None:
    """Nothing is not a block."""
    with pytest.raises(ValueError, match="a block holds at least 1 byte, got 0"):
        CachingAllocator().allocate(0)


_STEPS = st.lists(
    st.one_of(
        st.integers(1, 30 * MIB),
        st.integers(1, 4096),
        st.floats(0, 1, exclude_max=True),  # frees the live block at that fraction of the list
        st.none(),  # empties the cache
    ),
    max_size=80,
)


@given(steps=_STEPS, expandable=st.booleans(), limit_mib=st.sampled_from([None, 64, 200]))
def test_blocks_tile_their_segments(
    steps: list[float | int | None], expandable: bool, limit_mib: int | None
) -> None:
    """Counters are sums over blocks, blocks do not overlap, and freeing all leaves nothing."""
    allocator = CachingAllocator(
        None if limit_mib is None else limit_mib * MIB, expandable_segments=expandable
    )
    live: list[Block] = []
    for step in steps:
        if step is None:
            allocator.release_cached()
        elif isinstance(step, float):
            if live:
                allocator.free(live.pop(int(step * len(live))))
        else:
            try:
                live.append(allocator.allocate(step))
            except AllocatorFullError:
                assert limit_mib is not None
        check_invariants(allocator, live)

    for block in live:
        allocator.free(block)
    check_invariants(allocator, [])
    allocator.release_cached()
    assert allocator.allocated_bytes == allocator.reserved_bytes == 0


def check_invariants(allocator: CachingAllocator, live: list[Block]) -> None:
    """Check what holds after every call."""
    blocks = list(allocator.blocks())
    assert {id(b) for b in blocks if b.state == LIVE} == {id(b) for b in live}
    assert allocator.allocated_bytes == sum(b.num_bytes for b in live)
    assert all(b.num_bytes >= b.requested_bytes for b in live)
    assert allocator.reserved_bytes == sum(b.num_bytes for b in blocks if b.state != UNMAPPED)
    assert allocator.limit_bytes is None or allocator.reserved_bytes <= allocator.limit_bytes
    for pool in allocator.pools:
        free = [block for _, _, block in pool.free]
        assert pool.free == sorted((b.num_bytes, b.address, b) for b in free)
        of_pool = [b for b in blocks if b.pool is pool]
        assert {id(b) for b in free} == {id(b) for b in of_pool if b.state == FREE}
    for block in blocks:
        if block.next is not None:
            assert block.next.previous is block
            assert block.next.address == block.address + block.num_bytes
            assert (block.state, block.next.state) not in ((FREE, FREE), (UNMAPPED, UNMAPPED))

"""The pieces of the caching-allocator model: blocks, pools, and the sizes of the policy."""

from __future__ import annotations

from bisect import bisect_left

from lightning_oom.units import MIB

__all__ = ["Block", "Pool", "cut_block", "join_blocks", "segment_bytes"]

ROUND_BYTES = 512
SMALL_BYTES = 1 * MIB  # the largest request that the small pool serves
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB  # requests from here on get a segment of their own
OWN_SEGMENT_ROUND_BYTES = 2 * MIB

LIVE, FREE, UNMAPPED = 0, 1, 2


class Block:
    """A range of addresses in a segment: live, free (reserved), or unmapped (address space only)."""

    __slots__ = ("address", "next", "num_bytes", "pool", "previous", "requested_bytes", "state")

    def __init__(self, pool: Pool, address: int, num_bytes: int, state: int) -> None:
        self.pool = pool
        self.address = address
        self.num_bytes = num_bytes
        self.requested_bytes = 0
        self.state = state
        self.previous: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        state = ("live", "free", "unmapped")[self.state]
        return f"Block({state}, address={self.address:#x}, num_bytes={self.num_bytes})"


class Pool:
    """The small or the large pool: its free blocks by (bytes, address), and its counters."""

    __slots__ = (
        "free",
        "heads",
        "is_small",
        "live_bytes",
        "num_allocations",
        "num_live",
        "num_segments",
        "peak_live_bytes",
        "peak_num_live",
        "peak_num_segments",
        "peak_requested_bytes",
        "peak_reserved_bytes",
        "requested_bytes",
        "reserved_bytes",
        "total_allocated_bytes",
        "total_requested_bytes",
        "total_reserved_bytes",
        "unmapped",
    )

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []  # by address; expandable segments only
        self.heads: dict[int, Block] = {}  # the first block of each segment, by address
        self.live_bytes = self.peak_live_bytes = self.total_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = self.total_reserved_bytes = 0
        self.num_live = self.peak_num_live = self.num_allocations = 0
        self.requested_bytes = self.peak_requested_bytes = self.total_requested_bytes = 0
        self.num_segments = self.peak_num_segments = 0  # ever provided; most at once

    @property
    def page_bytes(self) -> int:
        """The unit in which an expandable segment grows and shrinks."""
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES

    def count_allocation(self, requested_bytes: int, num_bytes: int) -> None:
        """Count one more live block."""
        self.num_allocations += 1
        self.total_requested_bytes += requested_bytes
        self.total_allocated_bytes += num_bytes
        live = self.num_live = self.num_live + 1
        self.peak_num_live = max(self.peak_num_live, live)
        requested = self.requested_bytes = self.requested_bytes + requested_bytes
        self.peak_requested_bytes = max(self.peak_requested_bytes, requested)
        held = self.live_bytes = self.live_bytes + num_bytes
        self.peak_live_bytes = max(self.peak_live_bytes, held)

    def count_free(self, block: Block) -> None:
        """Count one live block less."""
        self.num_live -= 1
        self.requested_bytes -= block.requested_bytes
        self.live_bytes -= block.num_bytes

    def count_reserved(self, num_bytes: int) -> None:
        """Count what the device has provided, or got back if below 0; called after the change."""
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        if num_bytes > 0:
            self.num_segments += 1
            self.total_reserved_bytes += num_bytes
            self.peak_num_segments = max(self.peak_num_segments, len(self.heads))

    def reset_peak(self) -> None:
        """Let every peak start again from what is held now."""
        self.peak_live_bytes = self.live_bytes
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_num_live = self.num_live
        self.peak_num_segments = len(self.heads)

    def discard(self, block: Block) -> None:
        """Take ``block`` out of the free list."""
        del self.free[bisect_left(self.free, (block.num_bytes, block.address))]


def segment_bytes(wanted: int) -> int:
    """Return the size of the segment that the device is asked for when no cached block fits."""
    if wanted <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if wanted < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-wanted // OWN_SEGMENT_ROUND_BYTES) * OWN_SEGMENT_ROUND_BYTES


def cut_block(block: Block, num_bytes: int) -> Block:
    """Shorten ``block`` to ``num_bytes`` and return the rest, linked behind it."""
    rest = Block(block.pool, block.address + num_bytes, block.num_bytes - num_bytes, FREE)
    rest.previous, rest.next = block, block.next
    if block.next is not None:
        block.next.previous = rest
    block.next = rest
    block.num_bytes = num_bytes
    return rest


def join_blocks(first: Block, second: Block) -> Block:
    """Merge two neighbours, in either order, into the one with the lower address."""
    if second.address < first.address:
        first, second = second, first
    first.num_bytes += second.num_bytes
    first.next = second.next
    if second.next is not None:
        second.next.previous = first
    return first

"""A pure model of torch's CUDA caching allocator: what a device holds, reserves and refuses.

The policy is the one of ``CUDACachingAllocator`` for a single stream. Requests are rounded to 512
bytes. Up to 1 MiB they come from a small pool of 2 MiB segments, below 10 MiB from segments of
20 MiB, above that from a segment of their own, rounded to 2 MiB. Within a pool the smallest free
block that fits is taken (lowest address first) and split when enough is left over. Freed blocks
merge with free neighbours and stay reserved. When the device is full, wholly free segments are given
back and the allocation is tried once more before it fails.

Nothing here touches a device: the simulated GPU asks it for each storage, forecasts replay a trace.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_oom.errors import LightningOOMError
from lightning_oom.memory.blocks import (
    FREE,
    LARGE_SEGMENT_BYTES,
    LIVE,
    OWN_SEGMENT_ROUND_BYTES,
    ROUND_BYTES,
    SMALL_BYTES,
    UNMAPPED,
    Block,
    Pool,
    cut_block,
    join_blocks,
    segment_bytes,
)
from lightning_oom.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

__all__ = ["AllocationFailure", "AllocatorFullError", "Block", "CachingAllocator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationFailure:
    """Why an allocation was refused. All figures are taken after cached segments were given back."""

    requested_bytes: int
    """What the caller asked for."""
    segment_bytes: int
    """What the device would have had to provide; CUDA's message calls this "tried to allocate"."""
    limit_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    @property
    def free_bytes(self) -> int:
        """What the device could still provide."""
        return max(0, self.limit_bytes - self.reserved_bytes)

    @property
    def reserved_unallocated_bytes(self) -> int:
        """What is reserved but belongs to no live block."""
        return self.reserved_bytes - self.allocated_bytes


class AllocatorFullError(LightningOOMError):
    """The model has no room for a request; :attr:`failure` holds the figures."""

    def __init__(self, failure: AllocationFailure) -> None:
        super().__init__(failure)
        self.failure = failure


class CachingAllocator:
    """Serve and take back blocks of one simulated device, as torch's CUDA allocator would.

    Args:
        limit_bytes: What the device can hold, in bytes or as text such as ``"64 MiB"``; above 0.
            ``None`` never refuses.
        expandable_segments: Grow one segment per pool page by page instead of reserving whole
            segments (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``).
        max_split_bytes: Blocks of this size and above are never split, nor given to smaller
            requests (``max_split_size_mb``); above 20 MiB. ``None`` splits all.

    Attributes:
        allocated_bytes: Bytes in live blocks, rounding and unsplit remainders included.
        reserved_bytes: Bytes that the device has provided and not got back.
        peak_allocated_bytes: The most of ``allocated_bytes`` since the start or :meth:`reset_peak`.
        peak_reserved_bytes: The most of ``reserved_bytes``, likewise.
        alloc_retries: Allocations that had to give cached segments back first.
        num_ooms: Allocations that failed.

    Raises:
        ValueError: An argument is outside its range.

    Note:
        One stream, no ``roundup_power2_divisions``, no garbage collection threshold, no workspaces
        of cuBLAS and the like. Not safe across threads: the caller locks.

    Example:
        >>> allocator = CachingAllocator("64 MiB")
        >>> block = allocator.allocate(4)
        >>> allocator.allocated_bytes, allocator.reserved_bytes
        (512, 2097152)
        >>> allocator.free(block)
        >>> allocator.release_cached()
        2097152
    """

    def __init__(
        self,
        limit_bytes: int | str | None = None,
        *,
        expandable_segments: bool = False,
        max_split_bytes: int | str | None = None,
    ) -> None:
        self.limit_bytes = None if limit_bytes is None else _positive("limit_bytes", limit_bytes)
        self.expandable_segments = expandable_segments
        self.max_split_bytes: float = float("inf")
        if max_split_bytes is not None:
            self.max_split_bytes = _positive("max_split_bytes", max_split_bytes)
            if self.max_split_bytes <= LARGE_SEGMENT_BYTES:
                raise ValueError(f"max_split_bytes must be above 20 MiB, got {max_split_bytes!r}")
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.alloc_retries = self.num_ooms = self.num_segments_provided = 0
        self.pools = (Pool(is_small=True), Pool(is_small=False))
        self._next_address = OWN_SEGMENT_ROUND_BYTES

    def allocate(self, num_bytes: int) -> Block:
        """Hand out a block of at least ``num_bytes``.

        Args:
            num_bytes: Bytes wanted, above 0.

        Returns:
            A live block; pass it to :meth:`free` once.

        Raises:
            ValueError: ``num_bytes`` is below 1.
            AllocatorFullError: No room, even after all cached segments were given back.
        """
        outcome = self.try_allocate(num_bytes)
        if isinstance(outcome, AllocationFailure):
            raise AllocatorFullError(outcome)
        return outcome

    def try_allocate(self, num_bytes: int) -> Block | AllocationFailure:
        """Do as :meth:`allocate`, but return the refusal instead of raising it.

        Args:
            num_bytes: Bytes wanted, above 0.

        Returns:
            A live block, or the figures of the refusal.

        Raises:
            ValueError: ``num_bytes`` is below 1.
        """
        if num_bytes <= 0:
            raise ValueError(f"a block holds at least 1 byte, got {num_bytes}")
        wanted = -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
        pool = self.pools[0 if wanted <= SMALL_BYTES else 1]
        block = self._find_free(pool, wanted)
        if block is None:
            block = self._provide(pool, wanted)
            if block is None:
                self.alloc_retries += 1
                self.release_cached()
                block = self._provide(pool, wanted)
            if block is None:
                return self._refuse(pool, num_bytes, wanted)
        remainder = block.num_bytes - wanted
        if remainder >= ROUND_BYTES and (
            pool.is_small
            or self.expandable_segments
            or (remainder > SMALL_BYTES and wanted < self.max_split_bytes)
        ):
            rest = cut_block(block, wanted)
            rest.state = FREE
            insort(pool.free, (remainder, rest.address, rest))
        else:
            wanted = block.num_bytes
        block.state = LIVE
        block.requested_bytes = num_bytes
        pool.count_allocation(num_bytes, wanted)
        allocated = self.allocated_bytes = self.allocated_bytes + wanted
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
        return block

    def free(self, block: Block) -> None:
        """Take a live block back; it stays reserved.

        Args:
            block: What :meth:`allocate` returned.

        Raises:
            ValueError: The block is not live: it was freed before.
        """
        if block.state != LIVE:
            raise ValueError(f"only a live block can be freed, got {block!r}")
        pool = block.pool
        pool.count_free(block)
        self.allocated_bytes -= block.num_bytes
        self._merge_into_free(pool, block)

    def release_cached(self) -> int:
        """Give back what is reserved but wholly free, as ``torch.cuda.empty_cache`` does.

        Returns:
            Bytes given back.
        """
        before = self.reserved_bytes
        for pool in self.pools:
            for num_bytes, address, block in list(pool.free):
                if self.expandable_segments:
                    self._unmap_pages(pool, block)
                elif block.previous is None and block.next is None:
                    pool.discard(block)
                    del pool.heads[address]
                    self._change_reserved(pool, -num_bytes)
        return before - self.reserved_bytes

    def reset_peak(self) -> None:
        """Let both peaks start again from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes
        for pool in self.pools:
            pool.reset_peak()

    def replay(self, trace: Iterable[tuple[Hashable, int | None]]) -> dict[Hashable, Block]:
        """Run a recorded history through the model.

        Args:
            trace: Events in order: ``(key, num_bytes)`` allocates, ``(key, None)`` frees what was
                allocated under that key. A key may be used again once it is free.

        Returns:
            The blocks that are still live at the end, by key.

        Raises:
            AllocatorFullError: The history does not fit; the counters stand where it stopped.

        Example:
            >>> allocator = CachingAllocator()
            >>> sorted(allocator.replay([("a", 4 * 2**20), ("b", 100), ("a", None)]))
            ['b']
            >>> allocator.peak_allocated_bytes, allocator.reserved_bytes // 2**20
            (4194816, 22)
        """
        live: dict[Hashable, Block] = {}
        for key, num_bytes in trace:
            if num_bytes is None:
                self.free(live.pop(key))
            elif num_bytes > 0:
                live[key] = self.allocate(num_bytes)
        return live

    def blocks(self) -> Iterator[Block]:
        """Walk over all blocks, segment by segment, in address order within each."""
        for pool in self.pools:
            for head in pool.heads.values():
                block: Block | None = head
                while block is not None:
                    yield block
                    block = block.next

    def _find_free(self, pool: Pool, wanted: int) -> Block | None:
        free = pool.free
        index = bisect_left(free, (wanted,))
        if index == len(free):
            return None
        block = free[index][2]
        if wanted < self.max_split_bytes <= block.num_bytes:
            return None
        if wanted >= self.max_split_bytes and block.num_bytes >= wanted + LARGE_SEGMENT_BYTES:
            return None
        del free[index]
        return block

    def _provide(self, pool: Pool, wanted: int) -> Block | None:
        """Get more from the device: a block that fits and is in no free list, ``None`` when full."""
        if self.expandable_segments:
            return self._map_pages(pool, wanted)
        num_bytes = segment_bytes(wanted)
        if not self._fits(num_bytes):
            return None
        block = Block(pool, self._new_address(num_bytes), num_bytes, FREE)
        pool.heads[block.address] = block
        self.num_segments_provided += 1
        self._change_reserved(pool, num_bytes)
        return block

    def _map_pages(self, pool: Pool, wanted: int) -> Block | None:
        """Grow the pool's segment at the first gap where ``wanted`` bytes are free or unmapped."""
        if not pool.heads:
            space = Block(pool, self._new_address(1 << 50), 1 << 50, UNMAPPED)
            pool.heads[space.address] = space
            pool.unmapped.append((space.address, space))
        for _, gap in pool.unmapped:
            before = gap.previous
            have = before.num_bytes if before is not None and before.state == FREE else 0
            missing = -(-(wanted - have) // pool.page_bytes) * pool.page_bytes
            if gap.num_bytes >= missing:
                break
            after = gap.next
            behind = after.num_bytes if after is not None and after.state == FREE else 0
            if have + gap.num_bytes + behind >= wanted:
                missing = gap.num_bytes
                break
        if not self._fits(missing):
            return None
        pool.unmapped.remove((gap.address, gap))
        if gap.num_bytes > missing:
            rest = cut_block(gap, missing)
            rest.state = UNMAPPED
            insort(pool.unmapped, (rest.address, rest))
        self.num_segments_provided += 1
        self._change_reserved(pool, missing)
        self._merge_into_free(pool, gap)
        block = self._find_free(pool, wanted)
        if block is None:  # pragma: no cover - the gap was chosen so that it fits
            raise AssertionError(f"grown by {missing} bytes but nothing of {wanted} bytes is free")
        return block

    def _unmap_pages(self, pool: Pool, block: Block) -> None:
        """Give the whole pages inside a free block of an expandable segment back."""
        page, origin = pool.page_bytes, next(iter(pool.heads))
        start = origin - (origin - block.address) // page * page
        stop = origin + (block.address + block.num_bytes - origin) // page * page
        if stop <= start:
            return
        pool.discard(block)
        middle = block
        if start > block.address:
            middle = cut_block(block, start - block.address)
            insort(pool.free, (block.num_bytes, block.address, block))
        if middle.num_bytes > stop - start:
            rest = cut_block(middle, stop - start)
            rest.state = FREE
            insort(pool.free, (rest.num_bytes, rest.address, rest))
        self._change_reserved(pool, start - stop)
        middle.state = UNMAPPED
        for neighbour in (middle.previous, middle.next):
            if neighbour is not None and neighbour.state == UNMAPPED:
                pool.unmapped.remove((neighbour.address, neighbour))
                middle = join_blocks(middle, neighbour)
        insort(pool.unmapped, (middle.address, middle))

    def _merge_into_free(self, pool: Pool, block: Block) -> None:
        before, after = block.previous, block.next
        if before is not None and before.state == FREE:
            pool.discard(before)
            block = join_blocks(before, block)
        if after is not None and after.state == FREE:
            pool.discard(after)
            block = join_blocks(block, after)
        block.state = FREE
        insort(pool.free, (block.num_bytes, block.address, block))

    def _refuse(self, pool: Pool, num_bytes: int, wanted: int) -> AllocationFailure:
        self.num_ooms += 1
        return AllocationFailure(
            requested_bytes=num_bytes,
            segment_bytes=wanted if self.expandable_segments else segment_bytes(wanted),
            limit_bytes=self.limit_bytes or 0,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
        )

    def _fits(self, num_bytes: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + num_bytes <= self.limit_bytes

    def _change_reserved(self, pool: Pool, num_bytes: int) -> None:
        pool.count_reserved(num_bytes)
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _new_address(self, num_bytes: int) -> int:
        address = self._next_address
        self._next_address += num_bytes + OWN_SEGMENT_ROUND_BYTES  # a gap: segments never merge
        return address


def _positive(name: str, amount: int | str) -> int:
    num_bytes = parse_bytes(amount)
    if num_bytes <= 0:
        raise ValueError(f"{name} must be above 0, got {amount!r}")
    return num_bytes

"""The counters of an allocator under the names of ``torch.cuda.memory_stats``, and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_oom.memory.allocator import CachingAllocator
    from lightning_oom.memory.blocks import Pool

__all__ = ["collect_stats", "format_summary"]

_POOL_NAMES = ("small_pool", "large_pool")
_OVERSIZE = {  # blocks past max_split_size, which the model does not have
    f"oversize_{family}.{metric}": 0
    for family in ("allocations", "segments")
    for metric in ("current", "peak", "allocated", "freed")
}


def collect_stats(allocator: CachingAllocator) -> dict[str, int]:
    """Return what the allocator counts, under the names of ``torch.cuda.memory_stats``.

    Args:
        allocator: The model to read.

    Returns:
        Counters by name. A name of ``torch.cuda.memory_stats`` that the model does not count is
        absent; a block is active exactly as long as it is allocated.

    Example:
        >>> from lightning_oom.memory.allocator import CachingAllocator
        >>> allocator = CachingAllocator()
        >>> _ = allocator.allocate(1000)
        >>> stats = collect_stats(allocator)
        >>> stats["allocated_bytes.all.current"], stats["requested_bytes.all.current"]
        (1024, 1000)
    """
    stats = {
        "num_alloc_retries": allocator.alloc_retries,
        "num_ooms": allocator.num_ooms,
        "num_device_alloc": allocator.num_segments_provided,
        "num_sync_all_streams": 0,  # there is one stream
        **_OVERSIZE,
    }
    groups: list[tuple[str, Iterable[Pool]]] = [("all", allocator.pools)]
    groups += [(name, (pool,)) for name, pool in zip(_POOL_NAMES, allocator.pools, strict=True)]
    for group, pools in groups:
        for name, value in _sum_pools(pools).items():
            family, _, metric = name.rpartition(".")
            if group == "all" and metric == "peak":
                continue  # two pools need not have theirs at the same moment
            stats[f"{family}.{group}.{metric}"] = value
    stats["allocated_bytes.all.peak"] = allocator.peak_allocated_bytes
    stats["active_bytes.all.peak"] = allocator.peak_allocated_bytes
    stats["reserved_bytes.all.peak"] = allocator.peak_reserved_bytes
    return dict(sorted(stats.items()))


def _sum_pools(pools: Iterable[Pool]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for pool in pools:
        split = [
            b.num_bytes for _, _, b in pool.free if b.previous is not None or b.next is not None
        ]
        counted = {
            "allocated_bytes.current": pool.live_bytes,
            "allocated_bytes.peak": pool.peak_live_bytes,
            "allocated_bytes.allocated": pool.total_allocated_bytes,
            "allocated_bytes.freed": pool.total_allocated_bytes - pool.live_bytes,
            "active_bytes.current": pool.live_bytes,
            "active_bytes.peak": pool.peak_live_bytes,
            "active_bytes.allocated": pool.total_allocated_bytes,
            "active_bytes.freed": pool.total_allocated_bytes - pool.live_bytes,
            "requested_bytes.current": pool.requested_bytes,
            "requested_bytes.peak": pool.peak_requested_bytes,
            "requested_bytes.allocated": pool.total_requested_bytes,
            "requested_bytes.freed": pool.total_requested_bytes - pool.requested_bytes,
            "allocation.current": pool.num_live,
            "allocation.peak": pool.peak_num_live,
            "allocation.allocated": pool.num_allocations,
            "allocation.freed": pool.num_allocations - pool.num_live,
            "active.current": pool.num_live,
            "active.peak": pool.peak_num_live,
            "active.allocated": pool.num_allocations,
            "active.freed": pool.num_allocations - pool.num_live,
            "reserved_bytes.current": pool.reserved_bytes,
            "reserved_bytes.peak": pool.peak_reserved_bytes,
            "reserved_bytes.allocated": pool.total_reserved_bytes,
            "reserved_bytes.freed": pool.total_reserved_bytes - pool.reserved_bytes,
            "segment.current": len(pool.heads),
            "segment.peak": pool.peak_num_segments,
            "segment.allocated": pool.num_segments,
            "segment.freed": pool.num_segments - len(pool.heads),
            "inactive_split.current": len(split),
            "inactive_split_bytes.current": sum(split),
        }
        for name, value in counted.items():
            totals[name] = totals.get(name, 0) + value
    return totals


def format_summary(allocator: CachingAllocator, *, title: str, abbreviated: bool) -> str:
    """Return the counters as a table in the manner of ``torch.cuda.memory_summary``.

    Args:
        allocator: The model to read.
        title: What the table is about, such as ``"simgpu:0"``.
        abbreviated: Leave the two pools out.
    """
    stats = collect_stats(allocator)
    groups = ("all",) if abbreviated else ("all", *_POOL_NAMES)
    rows = [f"{'Metric':<24} {'Current':>14} {'Peak':>14} {'Total':>14}"]
    for family, label in (
        ("allocated_bytes", "Allocated memory"),
        ("requested_bytes", "Requested memory"),
        ("reserved_bytes", "Reserved memory"),
        ("inactive_split_bytes", "Non-releasable memory"),
        ("allocation", "Allocations"),
        ("segment", "Segments"),
    ):
        for group in groups:
            name = label if group == "all" else f"  from {group.replace('_', ' ')}"
            cells = [
                _show_cell(stats.get(f"{family}.{group}.{metric}"), in_bytes="bytes" in family)
                for metric in ("current", "peak", "allocated")
            ]
            rows.append(f"{name:<24} {cells[0]:>14} {cells[1]:>14} {cells[2]:>14}")
    limit = allocator.limit_bytes
    head = [
        f"Memory summary of {title}",
        f"limit: {'none' if limit is None else format_bytes(limit)}",
        f"out of memory: {allocator.num_ooms}, allocation retries: {allocator.alloc_retries}",
    ]
    rule = "-" * len(rows[0])
    return "\n".join([rule, *head, rule, rows[0], rule, *rows[1:], rule])


def _show_cell(value: int | None, *, in_bytes: bool) -> str:
    if value is None:
        return ""
    return format_bytes(value) if in_bytes else str(value)

"""Out-of-memory causes for tests of the ladder."""

from __future__ import annotations

from lightning_oom.recovery.classify import OOMCause

__all__ = ["oom_cause"]


def oom_cause(confidence: str = "certain", requested: int | None = None) -> OOMCause:
    """Make the cause of an out-of-memory error of a device."""
    return OOMCause(
        kind="device",
        scope="device",
        confidence=confidence,
        message="out of memory",
        error_type="RuntimeError",
        requested_bytes=requested,
        limit_bytes=None,
        free_bytes=None,
        allocated_bytes=None,
        reserved_unallocated_bytes=None,
        device=None,
        recoverable=True,
    )

"""Take a snapshot although memory is short."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.recovery.cleanup import clear_frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_oom.recovery.classify import OOMCause
    from lightning_oom.recovery.snapshot.compose import SavedSnapshot, Snapshot

__all__ = ["take_patiently"]


def take_patiently(
    snapshot: Snapshot,
    *,
    classify: Callable[[Exception], OOMCause | None],
    release: Callable[[], object],
) -> SavedSnapshot:
    """Take a snapshot; if that runs out of memory, release what can be released and take it again.

    Nothing has been changed when a snapshot cannot be taken, so nothing has to be put back.

    Args:
        snapshot: What to take.
        classify: Gives the cause of an error that may be recovered from, else ``None``.
        release: Collects garbage and empties caches.

    Raises:
        Exception: The error of the second attempt, or one that is no OOM.
    """
    try:
        return snapshot.take()
    except Exception as error:
        if classify(error) is None:
            raise
        clear_frames(error)
    release()
    return snapshot.take()

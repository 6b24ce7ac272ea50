"""Say in one sentence why a step could not be followed, and in which line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.answers import is_user_file

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["not_traced", "place_of"]

_MAX_CHARACTERS = 300


def not_traced(error: BaseException, how: str) -> StepNotTracedError:
    """Return the error that names the user's line and what went wrong there.

    Args:
        error: What the step raised.
        how: How it was run: ``"on fake tensors"``.
    """
    place = place_of(error.__traceback__)
    where = f" at {place}" if place else ""
    lines = str(error).strip().splitlines() or [""]
    return StepNotTracedError(
        f"the training step cannot be run {how}{where}: "
        f"{type(error).__name__}: {lines[0][:_MAX_CHARACTERS]}"
    )


def place_of(traceback: TracebackType | None) -> str | None:
    """Return ``file:line`` of the innermost frame of user code; of a library where there is none."""
    user: str | None = None
    library: str | None = None
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        kind = is_user_file(name)
        place = f"{name}:{traceback.tb_lineno}"
        if kind:
            user = place
        elif kind is None:
            library = place
        traceback = traceback.tb_next
    return user or library

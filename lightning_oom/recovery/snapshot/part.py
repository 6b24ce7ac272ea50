"""What a part of a snapshot is: something that can be taken before an attempt and put back after."""

from __future__ import annotations

from typing import Protocol

__all__ = ["LearningPart", "Part", "Saved"]


class Saved(Protocol):
    """The state of one part at one moment."""

    def restore(self) -> tuple[str, ...]:
        """Put the state back; may be called once for every failed attempt.

        Returns:
            Names of what could not be put back. Empty when everything is as it was.
        """


class Part(Protocol):
    """Something that an attempt can change and a retry must not see twice."""

    def take(self) -> Saved:
        """Remember the present state.

        A later :meth:`take` of the same part may reuse the memory of an earlier one, so one
        :class:`Saved` is valid at a time.
        """


class LearningPart(Part, Protocol):
    """A part that gets cheaper once it has seen what a step changes."""

    def learn(self, saved: Saved) -> None:
        """Compare the state before a step that succeeded with the present one."""

"""Questions about a step that are answered once per run, by running a few of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lightning_oom.recovery.cleanup import clear_frames
from lightning_oom.recovery.separability import Separability

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_oom.recovery.batches import BatchSignature
    from lightning_oom.recovery.chunked.chunk_gain import ChunkGain
    from lightning_oom.recovery.classify import OOMCause
    from lightning_oom.recovery.snapshot.compose import SavedSnapshot

__all__ = ["SliceQuestions", "SlicedProgram"]


class SlicedProgram(Protocol):
    """What is asked of a program; it may leave any state behind."""

    def check_separability(self, *, whole_failed: bool) -> Separability:
        """Compare gradients of a small slice with those of its parts.

        Args:
            whole_failed: The whole batch has just run out of memory, so that a slice of all its
                rows would too.
        """

    def estimate_chunk_gain(self) -> ChunkGain | None:
        """Count, on a small slice, what chunks would save; ``None`` where it cannot be known."""

    def reset(self) -> tuple[str, ...]:
        """Put gradients back."""


class SliceQuestions:
    """Asks once per structure of a batch, and puts everything back afterwards.

    Args:
        classify: Gives the cause of an error that may be recovered from, else ``None``.
        release: Collects garbage and empties caches.

    Attributes:
        lost: What the last question has changed and could not be put back, a parameter that the
            step itself writes to, say; the batch must not be run then.
    """

    def __init__(
        self,
        *,
        classify: Callable[[Exception], OOMCause | None],
        release: Callable[[], object],
    ) -> None:
        self.classify = classify
        self.release = release
        self.lost: tuple[str, ...] = ()
        self._verdicts: dict[str, Separability] = {}
        self._gains: dict[str, ChunkGain | None] = {}

    def forget(self) -> None:
        """Ask again: the module is another one."""
        self._verdicts.clear()
        self._gains.clear()

    def separability(
        self,
        program: SlicedProgram,
        signature: BatchSignature | None,
        saved: SavedSnapshot,
        *,
        whole_failed: bool,
    ) -> Separability:
        """Return whether the gradients of parts add up; asked again while the answer is open."""
        key = signature.structure if signature is not None else ""
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._check(program, whole_failed=whole_failed)
            self._put_back(program, saved)
            if verdict.conclusive:
                self._verdicts[key] = verdict
        return verdict

    def chunk_gain(
        self, program: SlicedProgram, signature: BatchSignature | None, saved: SavedSnapshot
    ) -> ChunkGain | None:
        """Return what chunks would save; ``None`` for unknown."""
        key = signature.structure if signature is not None else ""
        if key not in self._gains:
            self._gains[key] = self._estimate(program)
            self._put_back(program, saved)
        return self._gains[key]

    def _check(self, program: SlicedProgram, *, whole_failed: bool) -> Separability:
        try:
            return program.check_separability(whole_failed=whole_failed)
        except Exception as caught:
            if self.classify(caught) is None:
                raise
            clear_frames(caught)
        return Separability(
            separable=False,
            largest_relative_difference=float("nan"),
            parameter=None,
            reason="a few rows do not fit, so whether the step may be split cannot be found out",
            conclusive=False,
        )

    @staticmethod
    def _estimate(program: SlicedProgram) -> ChunkGain | None:
        try:
            return program.estimate_chunk_gain()
        except Exception as caught:  # user code on few rows, which it may not be made for
            clear_frames(caught)
            return None

    def _put_back(self, program: SlicedProgram, saved: SavedSnapshot) -> None:
        self.lost = (*saved.restore(), *program.reset())
        self.release()

"""Gradients that an interrupted backward has left behind.

A backward writes each parameter's ``.grad`` once. When it is interrupted, some parameters have got
their whole contribution and the others none, and nothing may be counted twice. No copy is made: a
parameter whose ``.grad`` moved is *finished*, and what it holds is right.

* Without earlier micro-steps, finished gradients are dropped and computed again.
* Inside an accumulation window they hold the earlier micro-steps too. They are set aside, the
  retry's contribution to them is dropped, and they are put back before ``on_after_backward``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

__all__ = ["GradientGuard"]


class GradientGuard:
    """Watches ``.grad`` of the trained parameters over the attempts of one step.

    Args:
        parameters: All parameters of the module. One that is frozen now may be trained later.

    Note:
        Cost of :meth:`mark`: about 0.1 us per parameter inside an accumulation window. Outside of
        one, gradients have just been set to ``None`` and nothing is held, so that memory that would
        have been freed is freed.

        A parameter that gets several contributions in one backward (re-entrant checkpointing) may
        be interrupted between them; :meth:`reset` reports it as lost instead of guessing.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._marks: list[tuple[Tensor | None, int]] | None = None
        self._finished: dict[int, Tensor] = {}
        self._usual_bumps: dict[int, int] = {}

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch these parameters from now on, after some were added or exchanged; between attempts."""
        self.parameters = list(parameters)
        self._usual_bumps.clear()
        if self._marks is not None:
            self.mark()

    def mark(self) -> None:
        """Remember what ``.grad`` holds now: before the forward, or after gradients were zeroed."""
        self._marks = [
            (None, 0) if (grad := parameter.grad) is None else (grad, grad._version)  # noqa: SLF001 - public in all but name
            for parameter in self.parameters
        ]

    def forget(self) -> None:
        """Drop every reference: the step is over."""
        self._marks = None
        self._finished.clear()

    @property
    def any_alive(self) -> bool:
        """Whether some parameter holds a gradient right now."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def reset(self) -> tuple[str, ...]:
        """Take what a failed attempt has added out of ``.grad``, or set it aside.

        Returns:
            What could not be put back; empty when all is well.
        """
        if self._marks is None:
            return ()
        lost = 0
        for index, (parameter, (before, version)) in enumerate(
            zip(self.parameters, self._marks, strict=True)
        ):
            grad = parameter.grad
            if index in self._finished:
                parameter.grad = None
            elif grad is None or (grad is before and grad._version == version):  # noqa: SLF001
                continue
            elif before is None:
                parameter.grad = None
            else:
                lost += grad is before and not self._is_whole(index, grad._version - version)  # noqa: SLF001
                self._finished[index] = grad
                parameter.grad = None
        return (f"gradients of {lost} parameters (several contributions each)",) if lost else ()

    def _is_whole(self, index: int, bumps: int) -> bool:
        return bumps == self._usual_bumps.get(index, 1)

    def merge(self) -> None:
        """Put finished gradients back; what a retry computed for them is dropped."""
        for index, grad in self._finished.items():
            self.parameters[index].grad = grad
        self._finished.clear()

    def learn(self) -> None:
        """After a backward that was not interrupted: how many contributions each gradient got."""
        if self._marks is None:
            return
        alive = [index for index, (before, _) in enumerate(self._marks) if before is not None]
        if len(alive) <= len(self._usual_bumps):
            return
        for index in alive:
            before, version = self._marks[index]
            grad = self.parameters[index].grad
            bumps = grad._version - version if grad is not None and grad is before else 1  # noqa: SLF001
            if bumps:  # else this backward had no use for the parameter
                self._usual_bumps[index] = bumps

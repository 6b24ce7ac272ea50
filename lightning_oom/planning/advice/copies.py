"""Find copies that a step makes in the user's own code, with their lines."""

from __future__ import annotations

import inspect
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import WatchingMode
from lightning_oom.planning.answers import is_user_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.planning.trace import MemoryTrace

__all__ = ["CopyWatch", "CopyingLine"]

_OURS = str(Path(__file__).parents[2])
_aten = torch.ops.aten
_COPIES = {
    _aten.clone.default: "copies",
    _aten._to_copy.default: "changes the dtype or device of",  # noqa: SLF001 - an operator's name
}


@dataclass(frozen=True, slots=True)
class CopyingLine:
    """A line of user code that copies tensors in the forward pass.

    Attributes:
        place: ``file:line``.
        what: What it does, in words.
        storages: The copies' numbers in the trace.
    """

    place: str
    what: str
    storages: frozenset[int]


class CopyWatch:
    """Notes where copies are made, while a step is traced with ``record_operators=True``.

    Copies that autograd makes in backward, and those inside libraries, have no line of the user and
    are left out.

    Example:
        >>> from lightning_oom.planning.fake_step import FakeStep
        >>> watch = CopyWatch()
        >>> step = FakeStep(torch.nn.Linear(4, 2), torch.zeros(3, 4))
        >>> watch.lines(step.run(context=watch.watching, record_operators=True))
        []
    """

    def __init__(self) -> None:
        self._seen: list[tuple[str | None, str]] = []

    @contextmanager
    def watching(self, clone: Any) -> Iterator[None]:
        """Watch everything that runs inside."""
        self._seen.clear()
        with _Watching(self._seen):
            yield

    def lines(self, trace: MemoryTrace) -> list[CopyingLine]:
        """Match what was seen with the trace of the same run.

        Args:
            trace: Of the run inside :meth:`watching`, with its operators.

        Returns:
            One entry per line, in the order of the code.
        """
        names = {str(operator) for operator in _COPIES}
        calls = [call for call in trace.operators if call.name in names]
        if len(calls) != len(self._seen):  # something else ran below: nothing can be matched
            return []
        found: dict[tuple[str, str], set[int]] = defaultdict(set)
        for call, (place, what) in zip(calls, self._seen, strict=True):
            if place is not None and call.phase == "forward":
                made = {spec.storage for spec in call.outputs if spec.storage >= 0}
                found[place, what] |= made - {spec.storage for spec in call.inputs}
        return [CopyingLine(place, what, frozenset(made)) for (place, what), made in found.items()]


class _Watching(WatchingMode):
    def __init__(self, seen: list[tuple[str | None, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COPIES:
            self._seen.append((_own_line(), self._describe(func, args)))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _describe(func: Any, args: Any) -> str:
        if func is _aten.clone.default and not args[0].is_contiguous():
            return "makes a tensor contiguous"
        return f"{_COPIES[func]} a tensor"


def _own_line() -> str | None:
    """Return ``file:line`` where the user's own code copies; ``None`` where a library does."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None and is_user_file(frame.f_code.co_filename) is False:
        if frame.f_code.co_filename.startswith(_OURS):
            return None
        frame = frame.f_back
    if frame is None or not is_user_file(frame.f_code.co_filename):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

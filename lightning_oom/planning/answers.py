# ruff: noqa: ARG001 - one form for all answers
"""Answer what a step asks of numbers that fake tensors do not have, on the pessimistic side."""

from __future__ import annotations

import inspect
import math
import operator
import site
import sysconfig
import weakref
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import schema_of
from lightning_oom._torch.fake import is_fake, without_any_mode
from lightning_oom.planning.known_values import follow, value_of
from lightning_oom.planning.trace import Substitution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    Handler = Callable[["Answers", Any, tuple[Any, ...], dict[str, Any]], Any]

__all__ = ["Answers", "is_user_file", "user_place"]

_aten = torch.ops.aten
_LARGEST = "the largest possible size"
_MASKS = (torch.bool, torch.uint8)
_INFINITIES = (math.inf, -math.inf)


class Answers:
    """Answers questions about values; counts them by the line of user code that asked.

    Whole numbers that come from the batch alone are known
    (:mod:`~lightning_oom.planning.known_values`). Any other number is 1; a size that depends on values is the largest possible; two tensors are equal.
    Truth is followed in three values: nothing is not-a-number or infinite, everything is finite,
    what equals itself does, ``all`` holds and ``any`` does not unless something else is known, and
    ``not``, ``and``, ``or`` of these follow. So guards against NaN and assertions about labels take
    their ordinary way.

    Args:
        when_unknown: Answer to a condition of which nothing is known.

    Attributes:
        num_unknown: How often nothing was known of a condition.
    """

    def __init__(self, *, when_unknown: bool = False) -> None:
        self.num_unknown = 0
        self._num_numbers = 0
        self._when_unknown = when_unknown
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._truths: dict[int, tuple[weakref.ref[torch.UntypedStorage], bool]] = {}

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the answer to an operator's question; ``NotImplemented`` where it asks none.

        Args:
            func: The operator, as a dispatch mode sees it.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        handler = _HANDLERS.get(func)
        return NotImplemented if handler is None else handler(self, func, args, kwargs)

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Follow what is known of values through an operator that has run."""
        follow(func, args, kwargs, out)

    def substitutions(self) -> tuple[Substitution, ...]:
        """Return what was answered so far."""
        return tuple(Substitution(*key, count) for key, count in self._counts.items())

    def note(self, question: str, answer: str) -> None:
        """Count one answer, at the user's line that is running."""
        place = user_place()
        if place is not None:
            self._counts[question, answer, place] += 1

    def truth(self, value: Any) -> bool | None:
        """Return what is known of a tensor of booleans."""
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.bool:
            return None
        storage = value.untyped_storage()
        reference, truth = self._truths.get(id(storage), (None, None))
        return truth if reference is not None and reference() is storage else None

    def set_truth(self, tensor: torch.Tensor, truth: bool) -> None:
        """Remember what is known of a tensor, as long as it lives."""
        storage = tensor.untyped_storage()
        self._truths[id(storage)] = (weakref.ref(storage), truth)

    def next_number(self) -> float:
        """Answer a number, slightly less each time: a search that waits for progress goes on."""
        self._num_numbers += 1
        return 1.0 / (1.0 + 1e-3 * (self._num_numbers - 1))

    def unknown(self) -> bool:
        """Answer a condition of which nothing is known."""
        self.num_unknown += 1
        return self._when_unknown


def user_place() -> str | None:
    """Return ``file:line`` of the innermost frame of user code; of a library where there is none.

    Returns:
        ``None`` where nobody but torch asks, such as an optimizer of torch.
    """
    library: str | None = None
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        name = frame.f_code.co_filename
        kind = is_user_file(name)
        if kind:
            return f"{name}:{frame.f_lineno}"
        if kind is None and library is None:
            library = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return library


def is_user_file(name: str) -> bool | None:
    """Say whether a file is the user's own; ``None`` for an installed library, False for torch."""
    if name.startswith(_SKIPPED):
        return False
    return None if name.startswith(_LIBRARIES) else True


_OURS = str(Path(__file__).parents[1])
_SKIPPED = (_OURS, str(Path(torch.__file__).parent), "<")
_LIBRARIES = (
    *site.getsitepackages(),
    site.getusersitepackages(),
    sysconfig.get_paths()["stdlib"],
)


def _item(answers: Answers, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    known = value_of(tensor)
    if known is not None:
        with without_any_mode():
            return known.item()
    if tensor.dtype is torch.bool:
        truth = answers.truth(tensor)
        answer: Any = answers.unknown() if truth is None else truth
    elif tensor.is_floating_point() or tensor.is_complex():
        answers.note("item", "a number near 1")
        return answers.next_number()
    else:
        answer = 1
    answers.note("item", str(answer))
    return answer


def _same(answers: Answers, func: Any, args: Any, kwargs: Any) -> Any:
    if not _any_fake(args[:2]):
        return NotImplemented
    values = [value_of(tensor) for tensor in args[:2]]
    if values[0] is not None and values[1] is not None:
        with without_any_mode():
            return torch.equal(values[0], values[1])
    answers.note("equal", "True")
    return True


def _nonzero(answers: Answers, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if not is_fake(tensor):
        return NotImplemented
    answers.note("nonzero", _LARGEST)
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(answers: Answers, func: Any, args: Any, kwargs: Any) -> Any:
    if not _any_fake(args[:2]):
        return NotImplemented
    answers.note("masked_select", _LARGEST)
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return args[0].new_empty((math.prod(shape),))


def _unique(answers: Answers, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if not is_fake(tensor):
        return NotImplemented
    asked = _named(func, args, kwargs)
    dim = asked.get("dim")
    num = tensor.numel() if dim is None else tensor.shape[dim]
    flags = [asked.get(name, False) for name in ("return_inverse", "return_counts")]
    if func is _aten.unique_dim.default:
        flags = [True, True]  # it always returns both
    answers.note("unique", _LARGEST)
    inverse_shape = tensor.shape if dim is None else (num,)
    return (
        tensor.new_empty((num,) if dim is None else tensor.shape),
        tensor.new_empty(inverse_shape if flags[0] else (0,), dtype=torch.int64),
        tensor.new_empty((num,) if flags[1] else (0,), dtype=torch.int64),
    )


def _repeat_interleave(answers: Answers, func: Any, args: Any, kwargs: Any) -> Any:
    repeats = args[0]
    size = kwargs.get("output_size")
    if not is_fake(repeats) or size is not None:
        return NotImplemented
    known = value_of(repeats)
    if known is not None:
        with without_any_mode():
            size = int(known.sum())
        return repeats.new_empty((size,), dtype=torch.int64)
    answers.note("repeat_interleave", "each once")
    return repeats.new_empty((repeats.numel(),), dtype=torch.int64)


def _bincount(answers: Answers, func: Any, args: Any, kwargs: Any) -> Any:
    if not is_fake(args[0]):
        return NotImplemented
    asked = _named(func, args, kwargs)
    weights = asked.get("weights")
    answers.note("bincount", "as many as minlength")
    dtype = torch.int64 if weights is None else torch.float64
    return args[0].new_empty((max(asked.get("minlength", 0), 1),), dtype=dtype)


def _index(answers: Answers, func: Any, args: Any, kwargs: Any) -> Any:
    indices = args[1]
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        return NotImplemented
    if not _any_fake(indices) and not is_fake(args[0]):
        return NotImplemented
    positions: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in _MASKS:
            size = index.numel()
            rows = index.new_empty((size,), dtype=torch.int64)
            positions += [rows] * index.dim()
        else:
            positions.append(index)
    answers.note("boolean index", _LARGEST)
    return func(args[0], positions)


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments by name."""
    names = [argument.name for argument in schema_of(func).arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _any_fake(values: Any) -> bool:
    return any(is_fake(value) for value in values)


def _with_truth(find: Callable[[Answers, Any, tuple[Any, ...]], bool | None]) -> Handler:
    """Make a handler that runs the operator and remembers what ``find`` says of its result."""

    def handle(answers: Answers, func: Any, args: Any, kwargs: Any) -> Any:
        if not args or not is_fake(args[0]):
            return NotImplemented
        truth = find(answers, func, args)
        if truth is None:
            return NotImplemented
        out = func(*args, **kwargs)
        if value_of(out) is None:
            answers.set_truth(out, truth)
        return out

    return handle


def _equals(answers: Answers, func: Any, args: tuple[Any, ...]) -> bool | None:
    if args[1] is args[0]:
        return True
    if args[0].numel() == 1 and isinstance(args[1], (int, float)):
        return float(args[1]) == 1.0
    if isinstance(args[1], float) and (args[1] in _INFINITIES or math.isnan(args[1])):
        return False
    return None


def _differs(answers: Answers, func: Any, args: tuple[Any, ...]) -> bool | None:
    same = _equals(answers, func, args)
    return None if same is None else not same


def _compares(holds: Callable[[float, float], bool]) -> Any:
    """Compare an unknown number, which is 1, with a plain one from 0; its sign stays unknown."""

    def find(answers: Answers, func: Any, args: tuple[Any, ...]) -> bool | None:
        if args[0].numel() != 1 or not isinstance(args[1], (int, float)) or args[1] < 0:
            return None
        return holds(1.0, args[1])

    return find


def _all(answers: Answers, func: Any, args: tuple[Any, ...]) -> bool:
    return answers.truth(args[0]) is not False


def _any(answers: Answers, func: Any, args: tuple[Any, ...]) -> bool:
    return answers.truth(args[0]) is True


def _not(answers: Answers, func: Any, args: tuple[Any, ...]) -> bool | None:
    truth = answers.truth(args[0])
    return None if truth is None else not truth


def _and(answers: Answers, func: Any, args: tuple[Any, ...]) -> bool | None:
    truths = [answers.truth(value) for value in args[:2]]
    if args[0].dtype is not torch.bool or truths == [None, None]:
        return None
    return False not in truths


def _or(answers: Answers, func: Any, args: tuple[Any, ...]) -> bool | None:
    truths = [answers.truth(value) for value in args[:2]]
    if args[0].dtype is not torch.bool or truths == [None, None]:
        return None
    return True in truths


def _is_not(answers: Answers, func: Any, args: tuple[Any, ...]) -> bool:
    return False


def _is(answers: Answers, func: Any, args: tuple[Any, ...]) -> bool:
    return True


def _same_truth(answers: Answers, func: Any, args: tuple[Any, ...]) -> bool | None:
    return answers.truth(args[0])


def _handlers() -> Iterator[tuple[Any, Handler]]:
    questions: list[tuple[Any, Handler]] = [
        (_aten._local_scalar_dense, _item),  # noqa: SLF001 - an operator's name
        (_aten.equal, _same),
        (_aten.allclose, _same),
        (_aten.nonzero, _nonzero),
        (_aten.masked_select, _masked_select),
        (_aten._unique2, _unique),  # noqa: SLF001 - likewise
        (_aten.unique_dim, _unique),
        (_aten.unique_consecutive, _unique),
        (_aten.bincount, _bincount),
    ]
    truths: list[tuple[Any, Callable[[Answers, Any, tuple[Any, ...]], bool | None]]] = [
        (_aten.isnan, _is_not),
        (_aten.isinf, _is_not),
        (_aten.isposinf, _is_not),
        (_aten.isneginf, _is_not),
        (_aten.isfinite, _is),
        (_aten.eq, _equals),
        (_aten.ne, _differs),
        (_aten.lt, _compares(operator.lt)),
        (_aten.le, _compares(operator.le)),
        (_aten.gt, _compares(operator.gt)),
        (_aten.ge, _compares(operator.ge)),
        (_aten.all, _all),
        (_aten.any, _any),
        (_aten.logical_not, _not),
        (_aten.bitwise_not, _not),
        (_aten.logical_and, _and),
        (_aten.bitwise_and, _and),
        (_aten.mul, _and),
        (_aten.logical_or, _or),
        (_aten.bitwise_or, _or),
        (_aten.clone, _same_truth),
    ]
    questions += [(packet, _with_truth(find)) for packet, find in truths]
    for packet, handler in questions:
        for name in packet.overloads():
            if "out" not in name.split("_"):
                yield getattr(packet, name), handler
    yield _aten.repeat_interleave.Tensor, _repeat_interleave
    yield _aten.index.Tensor, _index


_HANDLERS: dict[Any, Handler] = dict(_handlers())

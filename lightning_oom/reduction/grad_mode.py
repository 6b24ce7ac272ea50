"""Graphs that are built where none is wanted: seen as autograd saves tensors, and emptied there.

With grad mode off autograd saves nothing, so that looking costs nothing until a graph is built,
whichever way grad mode was switched on.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.errors import GradInEvaluationError
from lightning_oom.memory.saved_tensors import SavedTensorTracker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType, FrameType

    from typing_extensions import Self

__all__ = ["Exemptions", "GraphWatch", "allow_grad", "users_line_of"]

_LIBRARY = re.compile(
    r"[/\\](?:site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]|^<(?:frozen|eval_with_key|string)"
)
_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_MAX_FRAMES = 200


class allow_grad(contextlib.ContextDecorator):  # noqa: N801 - used like torch.no_grad
    """Say that code may build graphs in evaluation: a context, or a decorator.

    For derivatives that belong to the model: forces, physics-informed losses, Grad-CAM, adversarial
    examples. It does not switch grad mode on, and does nothing where no
    :class:`~lightning_oom.NoGradEnforcer` is at work. May be nested.

    Attributes:
        depth: How many are entered now, in all threads.
        num_entered: How many were ever entered.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with torch.no_grad(), allow_grad(), torch.enable_grad():
        ...     torch.autograd.grad(weight.square().sum(), weight)
        (tensor([2., 2.]),)
    """

    depth = 0
    num_entered = 0

    def __enter__(self) -> Self:
        allow_grad.depth += 1
        allow_grad.num_entered += 1
        return self

    def __exit__(self, *error: object) -> None:
        allow_grad.depth -= 1


class Exemptions:
    """What may build graphs in evaluation, and may stay in training mode.

    Args:
        entries: Classes of modules; or texts: the name of a hook, of a module's class, or a path
            in ``root.named_modules()``, with wildcards.
        root: The module in which they are looked for.

    Attributes:
        hooks: The hooks among the entries.
        modules: Identities of the exempt modules and of everything below them.
        covers_root: Whether the root itself is exempt.

    Raises:
        ValueError: An entry fits nothing; the message lists what it may have meant.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
        >>> exemptions = Exemptions(["1", "validation_step"], net)
        >>> exemptions.hooks, id(net[1]) in exemptions.modules, id(net[0]) in exemptions.modules
        (frozenset({'validation_step'}), True, False)
    """

    def __init__(self, entries: Iterable[str | type], root: torch.nn.Module) -> None:
        named = dict(root.named_modules())
        hooks: set[str] = set()
        chosen: list[torch.nn.Module] = []
        for entry in entries:
            found = [module for path, module in named.items() if _fits(entry, path, module)]
            if not found and isinstance(entry, str) and _is_hook(entry):
                hooks.add(entry)
            elif not found:
                raise ValueError(_explain(entry, named))
            chosen += found
        self.hooks = frozenset(hooks)
        self.covers_root = any(module is root for module in chosen)
        self.modules = frozenset(id(child) for module in chosen for child in module.modules())
        self._codes = frozenset(code for module in chosen for code in _codes_of(type(module)))

    def __bool__(self) -> bool:
        return bool(self.hooks or self.modules)

    def covers(self, frame: FrameType) -> bool:
        """Whether a call on the stack is that of an exempt hook, or of a method of an exempt module."""
        code = frame.f_code
        if code.co_name in self.hooks and not _is_library(code.co_filename):
            return True
        return code in self._codes and id(frame.f_locals.get("self")) in self.modules


def _is_hook(entry: str) -> bool:
    return entry.isidentifier() and (entry.startswith("on_") or entry.endswith("_step"))


def _fits(entry: str | type, path: str, module: torch.nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    return entry in {kind.__name__ for kind in type(module).__mro__[:-2]} or (
        bool(path) and fnmatchcase(path, entry)
    )


def _explain(entry: str | type, named: dict[str, torch.nn.Module]) -> str:
    import difflib  # noqa: PLC0415 - for this message only

    known = sorted({*filter(None, named), *(type(module).__name__ for module in named.values())})
    text = entry.__name__ if isinstance(entry, type) else str(entry)
    near = difflib.get_close_matches(text, known, n=5, cutoff=0.4) or known[:5]
    return (
        f"exempt={text!r} is no hook and fits no module; classes and paths such as: "
        f"{', '.join(near)}"
    )


def _codes_of(kind: type) -> Iterator[CodeType]:
    for base in kind.__mro__:
        if base.__module__.startswith(("torch.nn.modules.module", "lightning.", "builtins")):
            continue
        for member in vars(base).values():
            function = getattr(member, "__func__", member)  # of static and class methods
            code = (
                getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            )
            if code is not None:
                yield code


class GraphWatch(SavedTensorTracker):
    """Knows the lines that build graphs between ``start`` and ``stop``, and can let them hold nothing.

    Args:
        exemptions: What may build graphs.
        drops: Keep nothing of what a graph saves. Results are the same bits; a backward through such
            a graph raises :class:`~lightning_oom.errors.GradInEvaluationError` with the line.

    Attributes:
        lines: ``(file, line)`` -> bytes that were saved there, parameters left out.
        is_allowed: While true, everything may build graphs.
        num_allowed: How many tensors were saved where that is allowed.

    Note:
        Cost: none without a graph; 5 us for each saved tensor, 10 us with exempt modules or hooks. A
        graph for which nothing is saved (sums, views) is not seen here, and holds no memory.

        Grad mode itself is left alone: torch puts it back after each call of a hook. What could
        block it, a ``TorchFunctionMode``, makes every operator 1.6 times as slow.

    Example:
        >>> watch = GraphWatch(drops=True)
        >>> weight = torch.ones(3, requires_grad=True)
        >>> watch.start()
        >>> y = weight.exp().sin()
        >>> watch.stop()
        >>> list(watch.alive()), sum(watch.lines.values())
        ([], 24)
    """

    def __init__(self, exemptions: Exemptions | None = None, *, drops: bool = False) -> None:
        super().__init__()
        self.exemptions = exemptions
        self.drops = drops
        self.lines: dict[tuple[str, int], int] = {}
        self.is_allowed = False
        self.num_allowed = 0

    def take_lines(self) -> dict[tuple[str, int], int]:
        """Return :attr:`lines` and begin anew; saved tensors are forgotten as well."""
        lines, self.lines = self.lines, {}
        self.forget()
        return lines

    def _pack(self, tensor: torch.Tensor) -> Any:
        line = None
        if self.is_allowed or allow_grad.depth:
            self.num_allowed += 1
        else:
            line = self._judge(tensor)
        return _Dropped(line) if line is not None and self.drops else super()._pack(tensor)

    def _judge(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Note the line that builds a graph; ``None`` where it may."""
        frames = list(_stack())
        if self.exemptions and any(self.exemptions.covers(frame) for frame in frames):
            self.num_allowed += 1
            return None
        line = users_line_of(frames)
        if line is not None:  # else a thread of the engine: the forward has been seen before
            held = 0 if tensor.is_leaf and tensor.requires_grad else _num_bytes(tensor)
            self.lines[line] = self.lines.get(line, 0) + held
        return line


class _Dropped:
    """What a graph that should not be keeps in place of a tensor."""

    __slots__ = ("_line",)

    def __init__(self, line: tuple[str, int]) -> None:
        self._line = line

    @property
    def tensor(self) -> torch.Tensor:
        path, number = self._line
        raise GradInEvaluationError(
            f"a backward in evaluation through a graph that was built at {path}:{number}, of which "
            "NoGradEnforcer kept nothing. If the derivative is meant: put the code below "
            "lightning_oom.allow_grad(), or name its module or hook in exempt."
        )


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _stack() -> Iterator[FrameType]:
    """Give the running calls outside of this package, innermost first."""
    frame = inspect.currentframe()
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        if not frame.f_code.co_filename.startswith(_OWN):
            yield frame
        frame = frame.f_back


def users_line_of(frames: Iterable[FrameType] | None = None) -> tuple[str, int] | None:
    """Return file and line of the innermost call that is in no library, else of one beside torch.

    Args:
        frames: Innermost first; default those that are running now.
    """
    fallback = None
    for frame in _stack() if frames is None else frames:
        path = frame.f_code.co_filename
        if not _is_library(path):
            return path, frame.f_lineno
        if fallback is None and not path.startswith(_TORCH):
            fallback = path, frame.f_lineno
    return fallback


def _is_library(path: str) -> bool:
    return _LIBRARY.search(path) is not None

"""What plain Python code keeps between steps: numbers, containers, small tensors, small objects.

A :class:`Capture` walks attribute dictionaries once and remembers every value by the rule of its
kind:

==============================  ==================================================================
value                           rule
==============================  ==================================================================
number, text, ``None``,         by reference; it cannot change
function, class, module
list, dict, set, deque,         the object and its entries, three levels deep; what an attempt
bytearray, their subclasses     changed in place is undone in place
tensor up to 64 KiB             the object, and a copy of its values
larger tensor                   weakly, with its version; overwritten or written to means lost
tensor with a graph             weakly, with a detached copy if small: its graph dies when it would
random generator                the object and its state (``random.Random``, ``torch.Generator``,
                                numpy's)
numpy array up to 64 KiB        the object, and a copy of its values
object of a user's class        the object and its attributes, three levels deep
anything else                   by reference
==============================  ==================================================================

A container or object that holds something weakly is itself held weakly, or rebuilt.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_oom.recovery.snapshot import remembered as by_kind
from lightning_oom.recovery.snapshot.copies import storage_bytes, tensor_bytes
from lightning_oom.recovery.snapshot.generators import generator_access, is_generator_type

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import TypeAlias

    from lightning_oom.recovery.snapshot.copies import TensorCopies
    from lightning_oom.recovery.snapshot.remembered import Remembered

    _Rule: TypeAlias = Callable[["Capture", Any], Remembered | None]

__all__ = ["ATOMIC", "SMALL_BYTES", "Capture"]

SMALL_BYTES = 64 << 10
"""A tensor or array up to this size is copied."""

MAX_DEPTH = 3
"""How far below an attribute containers and objects are followed."""

MAX_ENTRIES = 1024
"""A container with more entries is copied, but its entries are not looked into."""

WATCHED_TENSORS = 8
"""Of a list of more than four times as many tensors, only this many at its end are copied."""

ATOMIC = frozenset(
    {
        int, float, complex, bool, str, bytes, type(None), type, range, slice, type(...),
        types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
        torch.dtype, torch.device, torch.Size, torch.layout,
    }
)  # fmt: skip
"""Types whose values cannot change, or are no state of a step."""

_INSTALLED = r"[/\\](site|dist)-packages[/\\]"

# Objects of these packages are machinery, not state of a step (and some refer to everything)
_FRAMEWORKS = frozenset(
    {"torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "numpy"}
    | {"lightning_utilities", "lightning_oom", "tensorboard", "rich", "tqdm"}
)


class Capture:
    """One walk over attribute dictionaries; :meth:`seal` ends it.

    Args:
        copies: Where the values of small tensors go.
        small_bytes: Copy tensors up to this size, larger ones are held weakly; ``None`` copies all.
        own_package: Objects of this package are followed even where it is installed.
    """

    def __init__(
        self,
        copies: TensorCopies,
        *,
        small_bytes: int | None = SMALL_BYTES,
        own_package: str = "__main__",
    ) -> None:
        self._own_package = own_package
        self._small_bytes = small_bytes
        self._store = copies
        self._small: list[torch.Tensor] = []
        self._copied: list[torch.Tensor] = []
        self._depth = 0
        self._seen: dict[int, Remembered | None] = {}

    def attributes(
        self, namespace: dict[str, Any], *, skip: Collection[str] = ()
    ) -> by_kind.Attributes:
        """Remember every entry of ``namespace``, an object's ``__dict__``, but those to skip."""
        plain = namespace.copy()
        for name in skip:  # three times faster than a comprehension that asks for each entry
            plain.pop(name, None)
        return by_kind.Attributes(self.entries(plain, list(plain.items())), skip)

    def seal(self) -> None:
        """Copy the small tensors that were met, all at once, and forget the objects."""
        self._copied[:] = self._store.store(self._small)
        self._small, self._seen = [], {}

    def tensor(self, tensor: torch.Tensor) -> Remembered:
        """Remember one tensor."""
        weak = tensor.grad_fn is not None
        limit = self._small_bytes
        if limit is not None:
            if tensor_bytes(tensor) > limit:
                return by_kind.LargeTensor(tensor)
            weak = weak or storage_bytes(tensor) > limit
        self._small.append(tensor)
        return by_kind.SmallTensor(tensor, self._copied, len(self._small) - 1, weak=weak)

    def entries(self, plain: Any, items: Iterable[tuple[Any, Any]]) -> by_kind.Entries:
        """Remember those entries of ``plain``, among ``items``, that can change."""
        children = []
        for key, value in items:
            if type(value) not in ATOMIC:
                child = self._remember(value)
                if child is not None:
                    children.append((key, child))
        return by_kind.Entries(plain, children)

    def _remember(self, value: Any) -> Remembered | None:
        """Return what is remembered of a value; ``None`` where a reference is enough."""
        rule = _rule(type(value), self._own_package)  # type: ignore[arg-type] # a type is hashable
        if rule is None or self._depth > MAX_DEPTH:
            return None
        key = id(value)
        if key in self._seen:
            return self._seen[key]
        self._seen[key] = None  # a cycle ends here
        self._depth += 1
        found = self._seen[key] = rule(self, value)
        self._depth -= 1
        return found


# ------------------------------------------------------------------ rules
def _tensor(capture: Capture, value: torch.Tensor) -> Remembered:
    return capture.tensor(value)


def _list(capture: Capture, value: Any) -> Remembered:
    plain = list(value)
    if len(plain) > MAX_ENTRIES:
        return by_kind.Container(value, by_kind.Entries(plain, []))
    items: Iterable[tuple[Any, Any]] = enumerate(plain)
    if len(plain) > 4 * WATCHED_TENSORS:
        settled = len(plain) - WATCHED_TENSORS
        items = ((i, v) for i, v in items if i >= settled or type(v) is not torch.Tensor)
    return by_kind.Container(value, capture.entries(plain, items))


def _dict(capture: Capture, value: Any) -> Remembered:
    plain = dict(value)
    items = list(plain.items()) if len(plain) <= MAX_ENTRIES else []
    return by_kind.Container(value, capture.entries(plain, items))


def _tuple(capture: Capture, value: Any) -> Remembered | None:
    plain = list(value)
    entries = capture.entries(plain, list(enumerate(plain[:MAX_ENTRIES])))
    return by_kind.Tuple(value, entries) if entries.children else None


def _set(_capture: Capture, value: Any) -> Remembered:
    return by_kind.SetEntries(value)


def _bytes(_capture: Capture, value: bytearray) -> Remembered:
    return by_kind.Bytes(value)


def _array(_capture: Capture, value: Any) -> Remembered | None:
    small = value.nbytes <= SMALL_BYTES and not value.dtype.hasobject
    return by_kind.Array(value) if small else None


def _generator(_capture: Capture, value: Any) -> Remembered:
    read, write = generator_access(value)
    return by_kind.RandomGenerator(value, read(), write)


def _object(capture: Capture, value: Any) -> Remembered | None:
    return by_kind.Object(value, capture.attributes(vars(value)))


_BY_BASE: tuple[tuple[type, Any], ...] = (
    (torch.Tensor, _tensor),
    (list, _list),
    (deque, _list),
    (dict, _dict),
    (tuple, _tuple),
    (set, _set),
    (bytearray, _bytes),
)


@functools.lru_cache(maxsize=4096)
def _rule(kind: type, own_package: str) -> _Rule | None:
    """Return the rule for objects of a type, ``None`` where a reference is enough."""
    if kind in ATOMIC or issubclass(kind, (torch.nn.Module, type, torch.Size)):
        return None
    for base, rule in _BY_BASE:
        if issubclass(kind, base):
            return cast("_Rule", rule)
    if is_generator_type(kind):
        return _generator
    np = sys.modules.get("numpy")
    if np is not None and issubclass(kind, np.ndarray):
        return _array
    return _object if _is_user_class(kind, own_package) else None


def _is_user_class(kind: type, own_package: str) -> bool:
    """Tell whether objects of a class are followed: the user's own, not those of a library.

    To roll back half of a library's object (a tracker's run, a connection) would break it.
    """
    if kind.__name__ in ("SimpleNamespace", "Namespace"):
        return True
    if not any("__dict__" in vars(base) for base in kind.__mro__):
        return False
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if roots & _FRAMEWORKS:  # a user's Trainer, data module or dataset
        return False
    root = kind.__module__.partition(".")[0]
    if root in ("__main__", own_package):
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return root not in sys.stdlib_module_names and not re.search(_INSTALLED, file)

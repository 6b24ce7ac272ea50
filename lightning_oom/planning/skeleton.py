"""A second module of the same form around other tensors: nothing is copied, nothing is changed."""

from __future__ import annotations

import collections
import copy
import functools
import random
import types
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_oom._torch.fake import compiled_original

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Skeleton"]

_Module = TypeVar("_Module", bound=nn.Module)

_MAX_DEPTH = 8
_LOOK_AT = 16
_SCALARS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, type)
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState)
_LEFT_ALONE = (Dataset, DataLoader, Sampler, types.ModuleType, *_SCALARS)
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


class Skeleton:
    """Clones modules and batches, with every tensor replaced by what ``make_tensor`` returns.

    Modules are made anew without calling their constructor. Their parameters, buffers and plain
    tensors are replaced, one for one: what was tied stays tied. Containers are copied; methods,
    partials, closures and hooks that are bound to a cloned module are bound to its clone. Objects
    that hold tensors or modules (an EMA helper, an optimizer) are cloned likewise; everything else
    is shared: locks, data sets, loggers, the trainer. Random generators are copied. Compiled
    modules are replaced by what was compiled.

    Args:
        make_tensor: Makes the counterpart of a tensor; asked once for each.
        device_of: Maps a device that is kept as an attribute; ``None`` keeps it.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(2, 2)
        >>> linear.twin = linear.weight
        >>> clone = Skeleton(lambda t: torch.nn.Parameter(torch.zeros_like(t))).module(linear)
        >>> clone.twin is clone.weight, clone.weight is linear.weight
        (True, False)
    """

    def __init__(
        self,
        make_tensor: Callable[[torch.Tensor], torch.Tensor],
        device_of: Callable[[torch.device], torch.device] | None = None,
    ) -> None:
        self._make_tensor = make_tensor
        self._device_of = device_of
        self._made: dict[int, tuple[Any, Any]] = {}  # keeps the original, so that its id stays its

    def module(self, module: _Module) -> _Module:
        """Return the clone of ``module``, the same one each time."""
        clone: _Module = self._module(module)
        return clone

    def value(self, value: Any) -> Any:
        """Return ``value`` with its tensors and modules replaced, whatever holds them."""
        return self._value(value, 0)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the counterpart of a tensor, the same one each time."""
        made = self._made.get(id(tensor))
        if made is None:
            made = self._remember(tensor, self._make_tensor(tensor))
        replaced: torch.Tensor = made[1]
        return replaced

    def _remember(self, original: Any, clone: Any) -> tuple[Any, Any]:
        made = self._made[id(original)] = (original, clone)
        return made

    def _module(self, module: nn.Module) -> Any:
        made = self._made.get(id(module))
        if made is not None:
            return made[1]
        original = compiled_original(module)
        if original is not None:
            return self._remember(module, self._module(original))[1]
        clone = module.__class__.__new__(module.__class__)
        self._remember(module, clone)
        attributes = clone.__dict__
        for name, value in module.__dict__.items():
            if name == "_compiled_call_impl":
                attributes[name] = None
            elif name in ("_parameters", "_buffers", "_modules"):
                attributes[name] = {key: self._value(item, 0) for key, item in value.items()}
            else:
                attributes[name] = self._value(value, 0)
        return clone

    def _value(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return self(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, torch.device):
            return value if self._device_of is None else self._device_of(value)
        if isinstance(value, _LEFT_ALONE) or depth > _MAX_DEPTH:
            return value
        made = self._made.get(id(value))
        if made is not None:
            return made[1]
        clone = self._container(value, depth + 1)
        if clone is None:
            clone = self._callable(value, depth + 1)
        if clone is None:
            clone = self._object(value, depth + 1)
        return self._remember(value, value if clone is None else clone)[1]

    def _container(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in (list, set, collections.deque):
            new: Any = (
                collections.deque(maxlen=value.maxlen) if kind is collections.deque else kind()
            )
            self._remember(value, new)
            items = (self._value(item, depth) for item in value)
            new.update(items) if kind is set else new.extend(items)
            return new
        if kind is tuple:
            return tuple(self._value(item, depth) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*(self._value(item, depth) for item in value))
        if isinstance(value, dict) and (
            kind in (dict, collections.OrderedDict, collections.defaultdict)
            or _holds_tensors(value.values())
        ):
            new = copy.copy(value)
            self._remember(value, new)
            dict.clear(new)
            for key, item in value.items():
                dict.__setitem__(new, self._key(key), self._value(item, depth))
            if kind not in (dict, collections.defaultdict, collections.OrderedDict):
                self._attributes(value, new, depth)  # such as the outputs of transformers
            return new
        return None

    def _key(self, key: Any) -> Any:
        return self._value(key, 0) if isinstance(key, (torch.Tensor, nn.Module)) else key

    def _callable(self, value: Any, depth: int) -> Any:
        if isinstance(value, types.MethodType):
            owner = self._value(value.__self__, depth)
            return None if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if type(value) is functools.partial:
            return functools.partial(
                self._value(value.func, depth),
                *(self._value(item, depth) for item in value.args),
                **{name: self._value(item, depth) for name, item in value.keywords.items()},
            )
        if isinstance(value, types.FunctionType) and value.__closure__:
            return self._function(value, value.__closure__, depth)
        return None

    def _function(
        self, function: types.FunctionType, cells: tuple[types.CellType, ...], depth: int
    ) -> Any:
        """Bind a closure over modules or tensors to their clones; ``None`` where it has none."""
        bound = [_contents(cell) for cell in cells]
        if not _holds_tensors(bound):
            return None
        closure = tuple(
            types.CellType(self._value(content, depth)) if content is not _EMPTY else cell
            for content, cell in zip(bound, cells, strict=True)
        )
        clone = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            closure,
        )
        clone.__kwdefaults__ = function.__kwdefaults__
        clone.__dict__.update(function.__dict__)
        return clone

    def _object(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Generator):
            generator = torch.Generator(value.device)
            generator.set_state(value.get_state())
            return generator
        if isinstance(value, _RANDOM):
            return copy.deepcopy(value)
        attributes = getattr(value, "__dict__", None)
        if (
            attributes is None
            or isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
            or type(value).__module__.split(".")[0] in _LIGHTNING
            or not _holds_tensors(attributes.values())
        ):
            return None
        try:
            clone = object.__new__(type(value))
        except TypeError:  # built in, or its memory is laid out by another language
            return None
        self._remember(value, clone)
        self._attributes(value, clone, depth)
        return clone

    def _attributes(self, value: Any, clone: Any, depth: int) -> None:
        for name, item in value.__dict__.items():
            clone.__dict__[name] = self._value(item, depth)


_EMPTY = object()


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _holds_tensors(values: Iterable[Any], depth: int = 3) -> bool:
    """Say whether there are tensors or modules among the first of some values, or in containers there."""
    for position, value in enumerate(values):
        if position == _LOOK_AT:
            return False
        if isinstance(value, (torch.Tensor, nn.Module, torch.Generator)):
            return True
        if depth and isinstance(value, dict) and _holds_tensors(value.values(), depth - 1):
            return True
        if (
            depth
            and isinstance(value, (list, tuple, set, collections.deque))
            and _holds_tensors(value, depth - 1)
        ):
            return True
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return True
    return False

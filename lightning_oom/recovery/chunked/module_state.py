"""What a forward changed in its module, and how to put it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_oom._torch import read_version

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Marks", "ModuleState"]

Marks = dict[str, tuple[Any, Any]]
"""Attribute path -> its value, and what would show that the value was changed in place."""


class ModuleState:
    """Parameters, buffers and attributes (one level deep) of a module and its submodules.

    Buffers and tensors in attributes are copied to the host. What objects of other types hold
    inside is not seen.

    Args:
        module: The module to watch.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = dict(module.named_modules())
        self._tensors = {path: (t, _version(t)) for path, t in self._registered().items()}
        self.first = self.attributes()
        values = [(path, value) for path, (value, _) in self.first.items()]
        self._copies = [
            (path, tensor, _version(tensor), tensor.detach().to("cpu", copy=True))
            for path, tensor in [*module.named_buffers(), *values]
            if isinstance(tensor, Tensor)
        ]

    def moved_tensor(self) -> str | None:
        """Name a parameter or buffer that was written to or replaced, if any."""
        now = self._registered()
        for path in self._tensors.keys() | now.keys():
            tensor, version = self._tensors.get(path, (None, 0))
            if tensor is None or now.get(path) is not tensor or _version(tensor) != version:
                return path
        for path, tensor, _, copy in self._copies:
            if path in self._tensors and not _equal(tensor.detach().to("cpu"), copy):
                return path
        return None

    def attributes(self) -> Marks:
        """Return what all attributes hold now."""
        return {
            f"{prefix}.{key}" if prefix else key: (value, _mark(value))
            for prefix, module in self._modules.items()
            for key, value in vars(module).items()
        }

    @staticmethod
    def moved_attribute(marks: Sequence[Marks]) -> str | None:
        """Name an attribute that is not the same in all of ``marks``, if any."""
        reference = marks[0]
        for other in marks[1:]:
            for path in reference.keys() | other.keys():
                if path not in reference or path not in other:
                    return path
                if not _same(reference[path], other[path]):
                    return path
        return None

    @torch.no_grad()
    def restore(self) -> None:
        """Put attributes back, and what buffers and tensors in attributes held."""
        for prefix, module in self._modules.items():
            attributes, start = module.__dict__, len(prefix) + 1 if prefix else 0
            before = {
                path[start:]: mark
                for path, mark in self.first.items()
                if path.rpartition(".")[0] == prefix
            }
            for key in [key for key in attributes if key not in before]:
                del attributes[key]
            for key, (value, mark) in before.items():
                _put_back(value, mark)
                if attributes.get(key) is not value:
                    attributes[key] = value
        for _, tensor, version, copy in self._copies:
            if _version(tensor) != version or not _equal(tensor.detach().to("cpu"), copy):
                tensor.copy_(copy)

    def _registered(self) -> dict[str, Tensor]:
        return {
            name: tensor
            for prefix, module in self._modules.items()
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named(prefix, recurse=False)
        }


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else int(read_version(tensor))


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _version(value)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, set)):
        return list(value)
    return None


def _put_back(value: Any, mark: Any) -> None:
    if isinstance(value, dict):
        if not _same_items(list(value.items()), list(mark.items())):
            value.clear()
            value.update(mark)
    elif isinstance(value, list):
        value[:] = mark
    elif isinstance(value, set):
        value.clear()
        value.update(mark)


def _same(left: tuple[Any, Any], right: tuple[Any, Any]) -> bool:
    (a, a_mark), (b, b_mark) = left, right
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a_mark == b_mark if a is b else _equal(a, b)
    if a is b and not isinstance(a, (dict, list, set)):
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return _same_items(list(a_mark.items()), list(b_mark.items()))
    if isinstance(a, (list, set)) and type(a) is type(b):
        return _same_items(a_mark, b_mark)
    return isinstance(
        a, (bool, int, float, str, tuple, torch.Size, torch.dtype, torch.device)
    ) and (type(a) is type(b) and bool(a == b))


def _same_items(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists hold the same objects (or equal numbers and strings) in the same order."""
    return len(left) == len(right) and all(
        _same_item(a, b) for a, b in zip(left, right, strict=True)
    )


def _same_item(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return _same_items(list(a), list(b))
    return a is b or (isinstance(a, (bool, int, float, str)) and type(a) is type(b) and a == b)


def _equal(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    same = left == right
    if left.is_floating_point() or left.is_complex():
        same |= left.isnan() & right.isnan()
    return bool(same.all())

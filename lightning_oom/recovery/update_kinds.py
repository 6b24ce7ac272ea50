"""What is known about the updates of torch's own optimizers.

How much memory one needs beside what is there, and whether an interrupted one can be finished by
counting its writes. Read off torch's source and held to what is measured by tests. State and temporaries are
counted in copies of the parameter; updates on lists hold their temporaries for all parameters of a
group at once, the others for one parameter, plus what is left of the one before.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import sparse_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["UpdateKind", "find_kind", "is_guardable", "num_bytes", "runs_on_lists"]

_Group = dict[str, Any]
_DISTANT_STEP = 1e6  # ASGD averages from a step on; this is its default, and means never


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateKind:
    """What the update of one parameter needs, in copies of it, and how it can be finished.

    Attributes:
        state: Made in its first step.
        single: Temporaries, one parameter after the other.
        foreach: Temporaries when all parameters of a group are updated together.
        factored: The state of a matrix is a row and a column instead.
        takes_sparse: Gradients may be sparse, for which other operations are used.
        counted_single: No operation after a write needs what was there before the write, in an
            update of one parameter after the other. False: the update must be recorded.
        counted_foreach: The same of an update with operations on lists.
        counted_decay: The same also where ``weight_decay`` is not 0.
        numbers_stay: A number read from a tensor is used for its parameter alone.
    """

    state: Callable[[_Group], float]
    single: Callable[[_Group], float]
    foreach: Callable[[_Group], float]
    factored: bool = False
    takes_sparse: bool = False
    counted_single: bool = True
    counted_foreach: bool = True
    counted_decay: bool = True
    numbers_stay: bool = False

    def is_counted(self, group: _Group, device: torch.device) -> bool:
        """Whether an interrupted update of a group can be finished by counting its writes.

        A fused update is one write that raises no version.
        """
        if group.get("fused") or (group.get("weight_decay") and not self.counted_decay):
            return False
        return self.counted_foreach if runs_on_lists(group, device) else self.counted_single

    def state_bytes(self, parameter: torch.Tensor, group: _Group) -> int:
        """Return bytes of the state that the first update of a parameter makes."""
        copies = self.state(group)
        if self.factored and parameter.dim() > 1:
            rows, columns = parameter.shape[-2:]
            copies *= 1 / max(columns, 1) + 1 / max(rows, 1)
        return int(copies * num_bytes(parameter))

    def temporary_bytes(
        self, parameters: list[torch.Tensor], group: _Group, device: torch.device
    ) -> int:
        """Return the most bytes that temporaries hold at once.

        Args:
            parameters: Those of a group that have a gradient.
            group: Their group of the optimizer.
            device: Where they are.
        """
        sizes = [num_bytes(p.grad) for p in parameters if p.grad is not None]
        if not sizes or group.get("fused"):
            return 0
        if runs_on_lists(group, device):
            return int(self.foreach(group) * sum(sizes))
        copies = self.single(group)
        leftover = min(copies, 1) if len(sizes) > 1 else 0  # of the parameter before
        return int((copies + leftover) * max(sizes))


def find_kind(optimizer: torch.optim.Optimizer) -> UpdateKind:
    """Return the need of an optimizer's kind; that of a subclass is its base's.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(100, 10))
        >>> adam = torch.optim.AdamW([weight])
        >>> find_kind(adam).state_bytes(weight, adam.param_groups[0])
        8000
    """
    for kind in type(optimizer).__mro__:
        if kind in _KINDS:
            return _KINDS[kind]
    return _UNKNOWN


def is_guardable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an interrupted update of the optimizer can be finished.

    True for torch's own optimizers, and for subclasses that leave the update as it is. Not for
    ``LBFGS``, which interleaves its update with calls of the closure, not with ``differentiable``,
    and not for others: they may write through ``.data``, which leaves no trace.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> is_guardable(torch.optim.AdamW([weight])), is_guardable(torch.optim.LBFGS([weight]))
        (True, False)
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return False
    kind = type(optimizer)
    parts = [getattr(kind, name, None) for name in ("step", "_init_group")]
    return all(
        inspect.unwrap(part).__module__.startswith("torch.optim")
        for part in parts
        if part is not None
    ) and not any(group.get("differentiable") for group in optimizer.param_groups)


def runs_on_lists(group: _Group, device: torch.device) -> bool:
    """Whether a group is updated with operations on lists of tensors, as far as can be said."""
    foreach = group.get("foreach")
    if foreach is None:
        return "foreach" in group and device.type != "cpu" and not group.get("differentiable")
    return bool(foreach)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that the elements of a tensor take."""
    parts: Iterable[torch.Tensor] = (
        (tensor,) if tensor.layout is torch.strided else sparse_parts(tensor)
    )
    return sum(part.numel() * part.element_size() for part in parts)


def _changed(group: _Group) -> int:
    """Count the copies of the gradient that sign and decay make, one after the other."""
    return bool(group.get("maximize")) + _decay(group)


def _decay(group: _Group) -> bool:
    """Whether decay goes through the gradient."""
    return bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay")


def _any_changed(group: _Group) -> bool:
    return bool(_changed(group))


def _sgd_single(group: _Group) -> int:
    return min(2, _changed(group) + bool(group["nesterov"]))


def _is_maximized(group: _Group) -> bool:
    return bool(group.get("maximize"))


def _adam_state(group: _Group) -> int:
    return 2 + bool(group.get("amsgrad"))


def _rmsprop_state(group: _Group) -> int:
    return 1 + bool(group["momentum"]) + bool(group["centered"])


def _always(copies: float) -> Callable[[_Group], float]:
    return lambda _: copies


def _plus(copies: float, more: Callable[[_Group], float]) -> Callable[[_Group], float]:
    return lambda group: copies + more(group)


def _averages(group: _Group) -> bool:
    return bool(group["t0"] < _DISTANT_STEP)


_o = torch.optim
_UNKNOWN = UpdateKind(
    state=_always(0),
    single=_always(0),
    foreach=_always(0),
    counted_single=False,
    counted_foreach=False,
)
_ADAM = UpdateKind(state=_adam_state, single=_plus(2, _changed), foreach=_always(1))
_ADAMW = UpdateKind(state=_adam_state, single=_plus(2, _is_maximized), foreach=_always(1))
_KINDS: dict[type, UpdateKind] = {
    _o.SGD: UpdateKind(
        state=lambda group: bool(group["momentum"]),
        single=_sgd_single,
        foreach=_any_changed,
        takes_sparse=True,
    ),
    _o.AdamW: _ADAMW,
    _o.Adam: _ADAM,
    _o.NAdam: UpdateKind(
        state=_always(2), single=_plus(2, _changed), foreach=_plus(1, _any_changed)
    ),
    _o.RAdam: UpdateKind(state=_always(2), single=_plus(2, _changed), foreach=_always(1)),
    _o.Adamax: UpdateKind(state=_always(2), single=_plus(1, _changed), foreach=_always(1)),
    _o.Adagrad: UpdateKind(
        state=_always(1), single=_plus(1, _changed), foreach=_always(2), takes_sparse=True
    ),
    _o.Adadelta: UpdateKind(
        state=_always(2), single=_plus(2, _changed), foreach=_plus(2, _any_changed)
    ),
    _o.RMSprop: UpdateKind(
        state=_rmsprop_state, single=_plus(1, _changed), foreach=_plus(1, _any_changed)
    ),
    _o.Rprop: UpdateKind(
        state=_always(2), single=_always(3), foreach=_always(1.5), counted_foreach=False
    ),
    _o.ASGD: UpdateKind(
        state=_always(1),
        single=lambda group: _changed(group) + _averages(group),
        foreach=_plus(1, _is_maximized),
        counted_single=False,
    ),
    _o.SparseAdam: UpdateKind(
        state=_always(2), single=_always(5), foreach=_always(5), counted_single=False
    ),
}
if hasattr(_o, "Adafactor"):  # torch 2.5
    _KINDS[_o.Adafactor] = UpdateKind(
        state=_always(1),
        single=_plus(1.1, _is_maximized),
        foreach=_plus(1.1, _is_maximized),
        factored=True,
        counted_decay=False,
        numbers_stay=True,
    )
if hasattr(_o, "Muon"):  # torch 2.9
    _KINDS[_o.Muon] = UpdateKind(state=_always(1), single=_always(3), foreach=_always(3))

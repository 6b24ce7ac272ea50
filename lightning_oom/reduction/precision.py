"""Mixed precision: what a device can compute in, what it breaks, and when to go back to 32-bit.

Autocast computes matrix products and convolutions in 16 bits and so halves what most activations
hold. Weights, gradients and optimizer state stay in 32 bits.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_oom._torch import sparse_parts
from lightning_oom._torch.gradients import largest_magnitudes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "MixedPrecisionName",
    "NonFiniteWatch",
    "PrecisionChange",
    "PrecisionSwitch",
    "choose_precision",
    "find_unsafe_losses",
]

MixedPrecisionName = Literal["bf16-mixed", "16-mixed"]

_STATE_VERSION = 1
_UNSAFE_NAMES = frozenset({"BCELoss", "binary_cross_entropy"})
_LIBRARIES = frozenset({"builtins", "lightning", "pytorch_lightning", "torch", "torchmetrics"})


def choose_precision(device: torch.device) -> MixedPrecisionName | None:
    """Return the mixed precision that suits a device: bfloat16 where it is computed in hardware.

    bfloat16 has the range of float32 and needs no loss scaling; float16 has not and does.

    Args:
        device: Where the training runs. On CUDA the current device is asked.

    Returns:
        ``"bf16-mixed"`` on the CPU and where the device has it, else ``"16-mixed"`` (CUDA before
        compute capability 8.0, MPS); ``None`` where torch has no autocast for the device.

    Note:
        On a CPU without instructions for bfloat16 it is emulated: it saves memory and costs time.

    Example:
        >>> choose_precision(torch.device("cpu"))
        'bf16-mixed'
    """
    if device.type == "cpu":
        return "bf16-mixed"
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bf16-mixed" if native else "16-mixed"
    if device.type == "mps":
        return "16-mixed"
    ask = getattr(getattr(torch, device.type, None), "get_amp_supported_dtype", None)
    dtypes = ask() if ask is not None else []
    if torch.bfloat16 in dtypes:
        return "bf16-mixed"
    return "16-mixed" if torch.float16 in dtypes else None


# -- losses
def find_unsafe_losses(module: torch.nn.Module) -> list[str]:
    """Return where a module takes the cross-entropy of probabilities, which 16 bits cannot hold.

    A probability next to 1 is 1 in 16 bits, and its logarithm is lost. CUDA's autocast refuses
    ``BCELoss`` and ``binary_cross_entropy`` with a RuntimeError; the CPU's computes something else.

    Found are children of class ``BCELoss``, and the two names in the code of the methods of the
    module, of its children, and of the functions of their own that these call by name. A place whose
    code names ``autocast`` as well is taken to switch it off around the loss. Not found: a loss that
    is reached through ``getattr``, a variable, or a function of an imported module.

    Args:
        module: Looked at, never called.

    Returns:
        One text a place, in the order of the modules; empty when there is none.

    Note:
        Cost: some ms, by the number of distinct classes.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Sigmoid())
        >>> net.add_module("criterion", torch.nn.BCELoss())
        >>> find_unsafe_losses(net)
        ['criterion (BCELoss)']
    """
    found = []
    seen: set[Any] = set()
    modules = dict(module.named_modules())
    for path, child in modules.items():
        if isinstance(child, torch.nn.BCELoss):
            parent = modules[path.rpartition(".")[0]] if path else child
            if not any("autocast" in _names_of(f.__code__) for f in _methods(type(parent))):
                found.append(f"{path or 'the module itself'} ({type(child).__name__})")
        elif type(child) not in seen:
            seen.add(type(child))
            for method in _methods(type(child)):
                name = _unsafe_name(method, seen)
                if name is not None:
                    found.append(f"{method.__qualname__} ({name})")
    return found


def _methods(kind: type) -> Iterator[FunctionType]:
    """Give the functions of a class and its bases that stand in no library."""
    for base in kind.__mro__:
        if _is_library(base.__module__):
            continue
        for value in vars(base).values():
            function = value.fget if isinstance(value, property) else value
            function = getattr(function, "__func__", function)
            if isinstance(function, FunctionType) and function.__name__ != "__init__":
                unwrapped = inspect.unwrap(function)
                if isinstance(unwrapped, FunctionType):
                    yield unwrapped


def _unsafe_name(function: FunctionType, seen: set[Any]) -> str | None:
    """Return the unsafe name in the code of a function or of those that it calls, if any."""
    if function in seen:
        return None
    seen.add(function)
    names = _names_of(function.__code__)
    if "autocast" in names:
        return None
    unsafe = names & _UNSAFE_NAMES
    if unsafe:
        return min(unsafe)
    for name in sorted(names):
        called = function.__globals__.get(name)
        if isinstance(called, FunctionType) and not _is_library(called.__module__ or ""):
            inner = _unsafe_name(called, seen)
            if inner is not None:
                return inner
    return None


def _names_of(code: CodeType) -> set[str]:
    """Return the names that code uses, functions inside of it included."""
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_of(constant)
    return names


def _is_library(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARIES


# -- going back
class NonFiniteWatch:
    """Says when 16 bits no longer do: a loss or gradient that is not finite.

    With bfloat16 each is one too many, and the update must not be made. With a loss scaler they are
    part of its search for a scale; what tells is a scale below 1, or many updates in a row that it
    skipped.

    Args:
        max_skips: Updates in a row that a scaler may skip, at least 1. From the usual scale of
            65536, a scale below 1 takes 17.
        losses: Whether losses count, not only gradients. Off where the ranks of a run see losses of
            their own: they must decide alike.

    Attributes:
        scale: The loss scale after the last update; ``None`` for none seen.

    Note:
        Cost of :meth:`is_update_finite`: every gradient is read once, and the host waits for the
        device, as it does for each update with a scaler.

    Example:
        >>> watch = NonFiniteWatch()
        >>> watch.note_loss(torch.tensor(0.5))
        >>> watch.is_update_finite([torch.tensor([1.0, float("nan")])])
        False
        >>> watch.take_failure()
        'a loss or gradient was not finite'
        >>> watch.take_failure() is None
        True
    """

    def __init__(self, *, max_skips: int = 20, losses: bool = True) -> None:
        self.max_skips = max_skips
        self.scale: float | None = None
        self._watches_losses = losses
        self._losses_finite: torch.Tensor | None = None
        self._num_skips = 0
        self._failure: str | None = None

    def note_loss(self, loss: torch.Tensor) -> None:
        """Remember whether a loss of the coming update is finite; does not wait for the device."""
        if self._watches_losses:
            finite = loss.detach().isfinite().all()
            before = self._losses_finite
            self._losses_finite = finite if before is None else before & finite

    def is_update_finite(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Say whether losses since the last call and gradients are finite; waits for the device.

        Args:
            gradients: Strided or sparse, on any devices.
        """
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in gradients:
            parts = sparse_parts(gradient)[-1:]  # the values come last
            for values in parts or (gradient,):
                if values.numel():
                    by_device.setdefault(values.device, []).append(values.detach())
        flags = [
            torch.stack([*largest_magnitudes(part)]).isfinite().all() for part in by_device.values()
        ]
        losses, self._losses_finite = self._losses_finite, None
        if losses is not None:
            flags.append(losses)
        finite = all(bool(flag) for flag in flags)
        if not finite:
            self._failure = "a loss or gradient was not finite"
        return finite

    def note_scale(self, scale: float) -> None:
        """Take in the loss scale after an update; a smaller one says that it was skipped."""
        skipped = self.scale is not None and scale < self.scale
        self.scale = scale
        self._num_skips = self._num_skips + 1 if skipped else 0
        if scale < 1:
            self._failure = f"the loss scale fell to {scale:g}"
        elif self._num_skips >= self.max_skips:
            self._failure = f"{self._num_skips} updates in a row were not finite"

    def take_failure(self) -> str | None:
        """Return why to go back, once; ``None`` when there is no reason to."""
        failure, self._failure = self._failure, None
        return failure


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChange:
    """One change of precision in a run.

    Attributes:
        step: Optimizer steps before the change.
        precision: What is computed in from there on, as Lightning names it.
        reason: Why.
    """

    step: int
    precision: str
    reason: str


class PrecisionSwitch:
    """Whether the next step is to run in mixed precision.

    Args:
        back_off_steps: Steps in 32-bit after one whose result was not finite, at least 1; ``None``
            for good.

    Attributes:
        is_mixed: Whether it is now.

    Example:
        >>> switch = PrecisionSwitch(back_off_steps=2)
        >>> switch.request(); switch.is_mixed
        True
        >>> switch.back_off(step=5); switch.is_mixed
        False
        >>> switch.advance(step=6), switch.advance(step=7), switch.is_mixed
        (False, True, True)
    """

    def __init__(self, *, back_off_steps: int | None = None) -> None:
        self.back_off_steps = back_off_steps
        self.is_mixed = False
        self._has_ended = False
        self._until_step: int | None = None

    def request(self) -> None:
        """Ask for mixed precision; nothing during and after a back-off."""
        self.is_mixed = self.is_mixed or not (self._has_ended or self._until_step is not None)

    def back_off(self, step: int) -> None:
        """Go back to 32-bit after ``step`` optimizer steps."""
        self.is_mixed = False
        self._has_ended = self.back_off_steps is None
        self._until_step = None if self.back_off_steps is None else step + self.back_off_steps

    def advance(self, step: int) -> bool:
        """Say, after ``step`` optimizer steps, whether a back-off is over now."""
        if self._until_step is None or step < self._until_step:
            return False
        self._until_step, self.is_mixed = None, True
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "version": _STATE_VERSION,
            "is_mixed": self.is_mixed,
            "has_ended": self._has_ended,
            "until_step": self._until_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over an earlier run's state; one of another version is ignored."""
        if state.get("version") == _STATE_VERSION:
            self.is_mixed = bool(state["is_mixed"])
            self._has_ended = bool(state["has_ended"])
            self._until_step = state["until_step"]

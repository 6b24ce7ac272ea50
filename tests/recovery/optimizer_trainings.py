"""Training a few parameters with any of torch's optimizers, for tests of the guarded step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.recovery.optimizer import OptimizerGuard
from lightning_oom.testing import fail_at

if TYPE_CHECKING:
    from lightning_oom.testing.faults import AllocationFault

CPU = torch.device("cpu")
_o = torch.optim
_DECAY = {"weight_decay": 0.1}
_KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (_o.SGD, {"lr": 0.1}),
    "sgd_momentum": (_o.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd_decay": (_o.SGD, {"lr": 0.1, "momentum": 0.9, **_DECAY}),
    "sgd_all": (_o.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True, **_DECAY}),
    "adam": (_o.Adam, {"lr": 0.01}),
    "adam_decay": (_o.Adam, {"lr": 0.01, **_DECAY}),
    "adam_amsgrad": (_o.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (_o.AdamW, {"lr": 0.01}),
    "nadam": (_o.NAdam, {"lr": 0.01}),
    "nadam_decay": (_o.NAdam, {"lr": 0.01, **_DECAY}),
    "radam": (_o.RAdam, {"lr": 0.01}),
    "adamax": (_o.Adamax, {"lr": 0.01}),
    "adagrad": (_o.Adagrad, {"lr": 0.01}),
    "adadelta": (_o.Adadelta, {"lr": 0.1}),
    "adadelta_decay": (_o.Adadelta, {"lr": 0.1, "maximize": True, **_DECAY}),
    "rmsprop": (_o.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "rmsprop_decay": (_o.RMSprop, {"lr": 0.01, **_DECAY}),
    "rprop": (_o.Rprop, {"lr": 0.01}),
    "asgd": (_o.ASGD, {"lr": 0.01}),
    "asgd_averaging": (_o.ASGD, {"lr": 0.01, "t0": 0, **_DECAY}),
}
if hasattr(_o, "Adafactor"):
    _KINDS["adafactor"] = (_o.Adafactor, {"lr": 0.01})
    _KINDS["adafactor_decay"] = (_o.Adafactor, {"lr": 0.01, "maximize": True, **_DECAY})
_FUSED: dict[str, tuple[type, dict[str, Any]]] = {
    "adam": (_o.Adam, {"lr": 0.01, "fused": True}),
    "adamw": (_o.AdamW, {"lr": 0.01, "fused": True}),
    "sgd": (_o.SGD, {"lr": 0.01, "momentum": 0.9, "fused": True}),
    "adagrad": (_o.Adagrad, {"lr": 0.01, "fused": True}),
}
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    f"{name}-{how}": (kind, {**options, "foreach": how == "foreach"})
    for name, (kind, options) in _KINDS.items()
    for how in ("single", "foreach")
} | {f"{name}-fused": made for name, made in _FUSED.items()}
"""Every kind of torch's optimizers that updates in one go, by name and way of updating."""


@dataclass
class Outcome:
    """What a short training has left."""

    parameters: list[torch.Tensor]
    state: list[dict[str, Any]]
    reports: list[str] = field(default_factory=list)
    fault: AllocationFault | None = None

    def is_same(self, other: Outcome) -> bool:
        """Whether parameters and state are equal to the last bit."""
        return same(self.parameters, other.parameters) and same(self.state, other.state)


@dataclass
class Training:
    """A few steps of an optimizer on random gradients.

    Attributes:
        kind: The optimizer.
        options: Its options.
        groups: 1 or 2 parameter groups.
        shapes: Of the parameters.
        dtype: Of the parameters.
        sparse: Gradients are sparse.
        unused: How many of the parameters get no gradient.
        device: Where all that is.
    """

    kind: type
    options: dict[str, Any]
    groups: int = 1
    shapes: tuple[tuple[int, ...], ...] = ((3, 4), (5,), (2, 3))
    dtype: torch.dtype = torch.float32
    sparse: bool = False
    unused: int = 0
    device: torch.device = CPU
    steps: int = 3

    def start(self, *, guard: bool = False) -> Running:
        """Make parameters and optimizer."""
        return Running(self, guard=guard)

    def run(
        self, *, guard: bool = False, fail: tuple[int, int] | None = None, times: int = 1
    ) -> Outcome:
        """Train; let one or more allocations of one step fail, from 1."""
        running = self.start(guard=guard)
        fault = None
        for step in range(self.steps):
            running.make_gradients()
            if fail is not None and step == fail[0]:
                with fail_at(fail[1], times=times) as fault:
                    running.optimizer.step()
            else:
                running.optimizer.step()
        outcome = running.outcome()
        outcome.fault = fault
        return outcome

    def count(self, step: int) -> int:
        """Return how many allocations a guarded step makes."""
        fault = self.run(guard=True, fail=(step, 100_000)).fault
        assert fault is not None
        return fault.count


class Running:
    """A training between its steps."""

    def __init__(self, training: Training, *, guard: bool) -> None:
        self.training = training
        self.generator = torch.Generator().manual_seed(0)
        self.parameters = [torch.nn.Parameter(self._random(s)) for s in training.shapes]
        cut = len(self.parameters) if training.groups == 1 else 1
        parts = [part for part in (self.parameters[:cut], self.parameters[cut:]) if part]
        self.optimizer = training.kind([{"params": part} for part in parts], **training.options)
        self.reports: list[str] = []
        self.releases = 0
        self.guard = OptimizerGuard(
            self.optimizer,
            device=training.device,
            release=self._release,
            report=self.reports.append,
        )
        self.undo = self.guard.install() if guard else None

    def make_gradients(self) -> None:
        """Give each parameter that has one a new gradient."""
        for index, parameter in enumerate(self.parameters):
            gradient = self._random(parameter.shape)
            if self.training.sparse:
                gradient = gradient[: len(gradient) // 2 + 1]
                rows = torch.arange(len(gradient), device=gradient.device)[None]
                gradient = torch.sparse_coo_tensor(
                    rows, gradient, parameter.shape, check_invariants=True
                )
            is_used = index < len(self.parameters) - self.training.unused
            parameter.grad = gradient if is_used else None

    def outcome(self) -> Outcome:
        """Return copies of parameters and state."""
        state = [
            dict(self.optimizer.state[p]) for p in self.parameters if p in self.optimizer.state
        ]
        copied = [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in sorted(entries.items())}
            for entries in state
        ]
        return Outcome([p.detach().clone() for p in self.parameters], copied, self.reports)

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator)
        if self.training.dtype.is_complex:
            drawn = torch.complex(drawn, torch.randn(shape, generator=self.generator))
        return drawn.to(self.training.device, self.training.dtype)

    def _release(self) -> None:
        self.releases += 1


def same(a: Any, b: Any) -> bool:
    """Whether two nested values are equal to the last bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a.to_dense(), b.to_dense())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)

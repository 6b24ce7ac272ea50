"""What stands in the clone for the parts of a run that must not hear of a dry step."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torchmetrics import MetricCollection, is_metric

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["OptimizerProxy", "TrainerView", "silence", "view_trainer"]

_SILENT_METHODS = ("log", "log_dict", "print", "save_hyperparameters")
_STEP_COUNTS = {
    "global_step": 0,
    "current_epoch": 0,
    "accumulate_grad_batches": 1,
    "num_training_batches": 1000,
    "estimated_stepping_batches": 1000,
    "max_steps": 1000,
    "max_epochs": 1,
    "world_size": 1,
    "global_rank": 0,
    "local_rank": 0,
    "num_devices": 1,
    "num_nodes": 1,
    "sanity_checking": False,
    "training": True,
    "is_last_batch": False,
    "is_global_zero": True,
    "gradient_clip_val": None,
}


class Inert:
    """Takes every call and every attribute, and does nothing."""

    def __getattr__(self, name: str) -> Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        """Return itself."""
        return self

    def __iter__(self) -> Iterator[Any]:
        """Give nothing."""
        return iter(())

    def __bool__(self) -> bool:
        """Be false, as a missing logger is."""
        return False


class TrainerView:
    """The trainer as a dry step sees it: read from the real one, written to nowhere.

    Args:
        trainer: The real trainer; ``None`` for a module that has none, which is told of one epoch of
            1,000 steps.
        module: The clone.
        optimizers: Its optimizers, once they are made.
    """

    def __init__(self, trainer: Any, module: Any, optimizers: Sequence[Any]) -> None:
        self._trainer = trainer
        self.lightning_module = self.model = module
        self.optimizers = optimizers
        self.logger = Inert()
        self.loggers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        trainer = self.__dict__.get("_trainer")
        if trainer is not None:
            return getattr(trainer, name)
        if name in _STEP_COUNTS:
            return _STEP_COUNTS[name]
        raise AttributeError(f"the step asks for trainer.{name}, and the module has no trainer")


class OptimizerProxy:
    """An optimizer as manual optimization gets it: with the context that toggles gradients.

    Args:
        optimizer: The one that is stepped.
        runner: Told when a step begins.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, runner: Any) -> None:
        self.optimizer = optimizer
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Step, as a phase of its own."""
        return self._runner.step_manually(self.optimizer, closure, **kwargs)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only the parameters of this optimizer ask for gradients."""
        self._runner.toggle(self.optimizer)
        try:
            yield
        finally:
            self._runner.untoggle()


def view_trainer(module: Any, optimizers: Sequence[Any]) -> None:
    """Let ``module`` see its trainer through a :class:`TrainerView`, if it is of the kind that has one."""
    if not hasattr(type(module), "trainer"):
        return
    try:
        trainer = module.trainer
    except RuntimeError:  # what Lightning says where there is none
        trainer = None
    module.trainer = TrainerView(trainer, module, optimizers)


def silence(root: torch.nn.Module) -> None:
    """Let nothing in ``root`` log, print or count a metric."""
    for module in root.modules():
        if hasattr(type(module), "training_step"):
            for name in _SILENT_METHODS:
                if hasattr(module, name):
                    module.__dict__[name] = _nothing
        if is_metric(module):
            _stub_metric(module)


def _nothing(*_: Any, **__: Any) -> None:
    """Take anything."""


def _stub_metric(metric: Any) -> None:
    def value(*_: Any, **__: Any) -> Any:
        if isinstance(metric, MetricCollection):
            return {str(name): torch.zeros(()) for name in metric.keys()}  # noqa: SIM118 - its own method
        return torch.zeros(())

    for name, stub in (("forward", value), ("compute", value), ("update", _nothing)):
        metric.__dict__[name] = stub

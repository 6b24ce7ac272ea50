"""One pass over evaluation data: the graphs that are built, what is kept, which modules train."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from lightning_oom.reduction.grad_mode import Exemptions, GraphWatch, allow_grad
from lightning_oom.reduction.kept_graphs import KeptTensors, carries_graph
from lightning_oom.undo import Undo, UndoStack

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["ROOT", "EvaluationWatch"]

ROOT = "the module itself"
"""What the module that is evaluated is called."""


class EvaluationWatch:
    """Watches from its making to :meth:`close`; both on one thread.

    Args:
        module: The module that is evaluated.
        exemptions: What may build graphs and be in training mode.
        drops: Let graphs keep nothing.

    Attributes:
        graphs: The lines that build graphs.
        kept: Attributes that carry graphs.
        step: The last step that ran, ``None`` before the first; set by the caller.
        has_allowed: Whether exempt code has built a graph; set by the caller.
    """

    def __init__(self, module: torch.nn.Module, exemptions: Exemptions, *, drops: bool) -> None:
        self.module = module
        self.exemptions = exemptions
        self.graphs = GraphWatch(exemptions, drops=drops)
        self.kept = KeptTensors(module, carries_graph)
        self.step: str | None = None
        self._num_steps = 0
        self._trains = False
        self.has_allowed = False
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._watched = [
            (vars(child), child)
            for child in module.modules()
            if id(child) not in exemptions.modules
        ]
        self._undos = UndoStack()
        self.graphs.start()

    def close(self) -> None:
        """Stop watching, and put modules back into the mode that they were found in."""
        self.graphs.stop()
        self._undos()

    def in_training_mode(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Give path and module of each that is in training mode and not exempt."""
        # the dictionaries: half the time of the attribute, on modules that are cold in the cache
        for child in [child for values, child in self._watched if values["training"]]:
            self._trains = True
            yield self._paths[id(child)] or ROOT, child

    def is_time_for_modes(self) -> bool:
        """Count a step; say whether to look for modules in training mode after it.

        A module stays in the mode that it was put into, and a step that leaves one in training mode
        does so at once: after the steps 1, 2, 4, 8, ... one look at all modules costs nothing on
        average. Once one was found, after every step.
        """
        self._num_steps += 1
        return self._trains or self._num_steps & (self._num_steps - 1) == 0

    def switch_to_eval(self, module: torch.nn.Module) -> None:
        """Put one module, not its children, into evaluation mode until :meth:`close`."""
        module.training = False

        def put_back() -> None:
            module.training = True

        self._undos.push(Undo(put_back))

    def allowed_so_far(self) -> tuple[int, int]:
        """Return numbers that differ once exempt code has built a graph in between."""
        return self.graphs.num_allowed, allow_grad.num_entered

    def line_of_step(self) -> tuple[str, int] | None:
        """Return file and line where the last step is defined, if it is written in Python."""
        function: Any = getattr(type(self.module), self.step or "", None)
        code = None if function is None else getattr(inspect.unwrap(function), "__code__", None)
        return None if code is None else (code.co_filename, code.co_firstlineno)

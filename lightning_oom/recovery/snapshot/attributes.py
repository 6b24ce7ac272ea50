"""What user code keeps on its modules: counters, lists of step outputs, small tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_oom._torch import MODULE_INTERNALS
from lightning_oom._torchmetrics import is_metric
from lightning_oom.recovery.snapshot.copies import TensorCopies
from lightning_oom.recovery.snapshot.values import MAX_DEPTH, Capture

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from lightning_oom.recovery.snapshot.remembered import Attributes as Remembered

__all__ = ["Attributes", "SavedAttributes"]


class Attributes:
    """Plain attributes of a module and of those of its children that are not torch's own.

    What counts, and by which rule, is the table of :mod:`lightning_oom.recovery.snapshot.values`.
    Attributes that an attempt created are removed, those that it deleted come back, containers are
    put back in place. The train or eval mode of every module is put back too, torch's included.

    Memory that a step would free is not kept alive: a tensor with a graph, and any tensor above
    64 KiB, is held weakly. If the attempt overwrote it, a small one comes back without its graph
    (which belonged to an earlier step), and a large one is reported as lost.

    Args:
        module: The module, usually the LightningModule.
        ignore: Attribute names left as the failed attempt leaves them, on every module.

    Note:
        Cost: 7 us for a bare LightningModule, 20 us with a counter, a list and hyperparameters, 2 us
        for every further module of a user's class, 10 us per 10,000 entries of a list. Not seen:
        changes inside objects of extension types and of installed libraries, inside entries of
        containers of more than 1,024 (the entries themselves are put back), and below three
        levels.

    Example:
        >>> import torch
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.seen, self.losses = 0, []
        >>> model = Model()
        >>> saved = Attributes(model).take()
        >>> model.seen += 1
        >>> model.losses.append(0.5)
        >>> saved.restore()
        ()
        >>> model.seen, model.losses
        (0, [])
    """

    def __init__(self, module: torch.nn.Module, *, ignore: Collection[str] = ()) -> None:
        self._skip = MODULE_INTERNALS | frozenset(ignore)
        self._copies = TensorCopies()
        self._package = type(module).__module__.partition(".")[0]
        self._root = module
        self.look_again()

    def look_again(self) -> None:
        """List the module's children anew, after one was added or exchanged."""
        self._modules = list(self._root.modules())
        self._own = [
            (f"{name}." if name else "", child)
            for name, child in self._root.named_modules()
            if child is self._root or not (is_torchs_own(child) or is_metric(child))
        ]

    @property
    def held_bytes(self) -> int:
        """Bytes of the copies of small tensors."""
        return self._copies.held_bytes

    def take(self) -> SavedAttributes:
        """Remember every attribute."""
        capture = Capture(self._copies, own_package=self._package)
        skip = self._skip
        states = [capture.attributes(vars(module), skip=skip) for _, module in self._own]
        capture.seal()
        modes = [(module, module.training) for module in self._modules]
        return SavedAttributes(self._own, states, modes, self._copies.still_latest())


class SavedAttributes:
    """Plain attributes at one moment."""

    def __init__(
        self,
        owners: list[tuple[str, torch.nn.Module]],
        states: list[Remembered],
        modes: list[tuple[torch.nn.Module, bool]],
        current: Callable[[], bool],
    ) -> None:
        self.owners = owners
        self.states = states
        self._modes = modes
        self._current = current

    def restore(self) -> tuple[str, ...]:
        """Put everything back in place.

        Raises:
            RuntimeError: A later snapshot has overwritten the copies.
        """
        if not self._current():
            raise RuntimeError("these attributes were saved before a later snapshot was taken")
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
        lost: list[str] = []
        for (prefix, owner), state in zip(self.owners, self.states, strict=True):
            state.restore(vars(owner), prefix, lost)
        return tuple(lost)

    def counters(self) -> dict[str, float]:
        """Return the present value of every number, by path; numbers in a dictionary too."""
        found: dict[str, float] = {}
        for prefix, owner in self.owners:
            _count(prefix, vars(owner), found, depth=0)
        return found


def _count(prefix: str, namespace: dict[str, Any], found: dict[str, float], *, depth: int) -> None:
    for name, value in namespace.items():
        if type(value) in (int, float):
            found[f"{prefix}{name}"] = value
        elif depth < MAX_DEPTH and isinstance(value, dict) and name not in MODULE_INTERNALS:
            _count(f"{prefix}{name}.", value, found, depth=depth + 1)


def is_torchs_own(module: torch.nn.Module) -> bool:
    """Tell whether a module's class comes with torch; such a module keeps no state of a step."""
    return type(module).__module__.partition(".")[0] == "torch"

"""The state of optimizers, on the host between their steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeAlias

    _Key: TypeAlias = tuple[Any, Any, int]
    """Parameter, name of the entry, position in it."""

__all__ = ["OptimizerStateOffload"]


class OptimizerStateOffload:
    """Moves the state of optimizers to the host after a step and back before the next one.

    Only tensors on ``device`` move, and only from ``min_bytes`` on: step counters stay. State is
    the same bits before and after, and checkpoints may be saved at any time: they get host tensors.

    Args:
        optimizers: What is moved: torch's own, no wrappers.
        device: Where they step.
        min_bytes: State tensors below this stay; at least 0.

    Attributes:
        moved_bytes: What lies on the host between steps.

    Note:
        The device holds parameters, gradients and state together only in the step itself, so this
        lowers the peak where forward or backward sets it. Cost: the state crosses the bus twice a
        step, and both copies are waited for. On CUDA the host memory is pinned and kept for the
        run.

    Example:
        >>> import torch
        >>> from lightning_oom.testing import SimulatedGPU
        >>> device = SimulatedGPU.enable()
        >>> weight = torch.nn.Parameter(torch.ones(1024, device=device))
        >>> optimizer = torch.optim.Adam([weight])
        >>> offload = OptimizerStateOffload([optimizer], device=device, min_bytes=1024)
        >>> weight.sum().backward(); optimizer.step()
        >>> offload.move_out()
        >>> optimizer.state[weight]["exp_avg"].device, offload.moved_bytes
        (device(type='cpu'), 8192)
        >>> offload.move_in()
        >>> optimizer.state[weight]["exp_avg"].device
        device(type='simgpu', index=0)
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        device: torch.device,
        min_bytes: int,
    ) -> None:
        self.moved_bytes = 0
        self._optimizers = list(optimizers)
        self._device = device
        self._min_bytes = min_bytes
        self._pins = device.type == "cuda"
        self._homes: dict[_Key, torch.Tensor] = {}
        self._is_out = False

    @staticmethod
    def reason_not_to_move(optimizers: Iterable[torch.optim.Optimizer]) -> str | None:
        """Return why the state must stay, or ``None``.

        Args:
            optimizers: Those of the run.
        """
        for optimizer in optimizers:
            if any(group.get("capturable") for group in optimizer.param_groups):
                return (
                    f"{type(optimizer).__name__} is capturable: a CUDA graph may hold the addresses "
                    "of its state; make it with capturable=False"
                )
        return None

    def move_out(self) -> None:
        """Move the state to the host; nothing while it is there."""
        if self._is_out:
            return
        self.moved_bytes = 0
        self._is_out = self._replace_leaves(self._leaf_out)
        if self._is_out and self._pins:
            torch.cuda.current_stream(
                self._device
            ).synchronize()  # the host may read it from now on

    def _replace_leaves(self, replace: Callable[[_Key, Any], Any]) -> bool:
        """Put another tensor in place of each one in the state; return whether any was replaced."""
        found = False
        for optimizer in self._optimizers:
            for parameter, entries in optimizer.state.items():
                for name, value in entries.items() if isinstance(entries, dict) else ():
                    leaves, form = tree_flatten(value)
                    new = [replace((parameter, name, i), leaf) for i, leaf in enumerate(leaves)]
                    if any(one is not other for one, other in zip(new, leaves, strict=True)):
                        entries[name] = tree_unflatten(new, form)
                        found = True
        return found

    def _leaf_out(self, key: _Key, leaf: Any) -> Any:
        if (
            type(leaf) is not torch.Tensor
            or leaf.device != self._device
            or leaf.layout is not torch.strided
            or leaf.nbytes < self._min_bytes
        ):
            return leaf
        home = self._homes.get(key)
        if home is None or home.shape != leaf.shape or home.dtype != leaf.dtype:
            home = torch.empty_like(leaf, device="cpu", pin_memory=self._pins)
            self._homes[key] = home
        home.copy_(leaf, non_blocking=self._pins)
        self.moved_bytes += leaf.nbytes
        return home

    def _leaf_in(self, key: _Key, leaf: Any) -> Any:
        if key in self._homes and leaf.device != self._device:
            return leaf.to(self._device, non_blocking=self._pins)
        return leaf

    def move_in(self) -> None:
        """Move the state back to where it steps; nothing while it is there."""
        if not self._is_out:
            return
        self._replace_leaves(self._leaf_in)
        self._is_out = False

    def close(self) -> None:
        """Move the state back and free the host memory."""
        self.move_in()
        self._homes = {}

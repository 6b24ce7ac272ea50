"""The random state of everything a training step may draw from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.recovery.snapshot import mersenne

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["RandomState"]


class RandomState:
    """Random state of torch (host and devices), Python and numpy.

    Numpy counts only where the process has imported it already. Generators that user code keeps
    as attributes are the business of :class:`~lightning_oom.recovery.snapshot.Attributes`.

    Args:
        devices: Devices whose generators count besides the host's. A backend without random state
            of its own is left out; CUDA and XPU are left alone until they are initialised.

    Note:
        Cost: 4 us without a device (``getstate`` of Python and numpy alone take 43 us). Reading a device's state
        copies a few bytes of host memory and does not synchronise.

    Example:
        >>> saved = RandomState().take()
        >>> first = torch.rand(2)
        >>> saved.restore()
        ()
        >>> torch.equal(torch.rand(2), first)
        True
    """

    def __init__(self, devices: Iterable[torch.device | str] = ()) -> None:
        found = dict.fromkeys(torch.device(device) for device in devices)
        self._devices = [d for d in found if d.type != "cpu" and _has_random_state(d)]

    def take(self) -> _SavedRandomState:
        """Read every generator."""
        return _SavedRandomState(
            torch.get_rng_state(),
            mersenne.read_python(),
            mersenne.read_numpy(),
            [
                (write, read())
                for read, write in map(_device_access, self._devices)
                if read is not None
            ],
        )


class _SavedRandomState:
    __slots__ = ("_devices", "_host", "_numpy", "_python")

    def __init__(
        self,
        host: torch.Tensor,
        python: Any,
        numpy: Any,
        devices: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]],
    ) -> None:
        self._host, self._python, self._numpy, self._devices = host, python, numpy, devices

    def restore(self) -> tuple[str, ...]:
        torch.set_rng_state(self._host)
        mersenne.write_python(self._python)
        mersenne.write_numpy(self._numpy)
        for write, state in self._devices:
            write(state)
        return ()


def _has_random_state(device: torch.device) -> bool:
    module = getattr(torch, device.type, None)
    return hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")


def _device_access(
    device: torch.device,
) -> tuple[Callable[[], torch.Tensor] | None, Callable[[torch.Tensor], None]]:
    module: Any = getattr(torch, device.type)
    if device.type == "mps":  # one device, so its functions take none
        return module.get_rng_state, module.set_rng_state

    def write(state: torch.Tensor) -> None:
        module.set_rng_state(state, device)

    initialised = getattr(module, "is_initialized", None)
    if initialised is not None and not initialised():
        return None, write
    return lambda: module.get_rng_state(device), write

"""The kernel that serves almost every operator: run it on the host tensors, adopt what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from lightning_oom._torch import CPU_KEYS, read_version, redispatch_of
from lightning_oom.memory.allocator import AllocationFailure
from lightning_oom.testing.simgpu.devices import DEVICE_TYPE, SimDevice, find_device
from lightning_oom.testing.simgpu.placement import adopt, host_of, refusal_by_host
from lightning_oom.testing.simgpu.schemas import OperatorPlan, read_plan
from lightning_oom.testing.simgpu.storage import oom_error

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Lowering", "make_kernel"]

_CPU = torch.device("cpu")
_empty = torch.ops.aten.empty.memory_format
_NUMBERS = frozenset({int, float, bool, complex})
_PLAIN = _NUMBERS | {
    str,
    type(None),
    torch.device,
    torch.dtype,
    torch.layout,
    torch.memory_format,
}
_NOTHING: tuple[Any, ...] = ()
_FIRST: tuple[Any, ...] = (0,)


class Lowering:
    """Puts host tensors in place of device tensors, and learns which device they are on."""

    __slots__ = ("index", "strict")

    def __init__(self, *, strict: bool) -> None:
        self.index: int | None = None
        self.strict = strict

    def lower(self, value: Any) -> Any:
        """Return ``value``, lists included, with host tensors.

        Raises:
            RuntimeError: Two tensors are on two devices.
        """
        cls = value.__class__
        if cls in _PLAIN:
            return value
        if cls is list or cls is tuple:
            return [self.lower(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_cpu:
            if self.strict and value.dim():
                raise self._mismatch("cpu")
            return value
        index = value.get_device()
        if self.index is None:
            self.index = index
        elif self.index != index:
            raise self._mismatch(f"{DEVICE_TYPE}:{index}")
        return host_of(value)

    def _mismatch(self, other: str) -> RuntimeError:
        here = DEVICE_TYPE if self.index is None else f"{DEVICE_TYPE}:{self.index}"
        return RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{here} and {other}!"
        )


def make_kernel(
    operator: Any, host_function: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a kernel of the simulated device for ``operator``.

    Args:
        operator: An overload such as ``torch.ops.aten.add.Tensor``.
        host_function: What to run on the host tensors; ``None`` runs the operator's CPU kernel.

    Returns:
        A function that takes device tensors and returns device tensors. Tensors that the schema says
        are written to are written to and returned as the same object.
    """
    plan = read_plan(operator)
    run = _make_runner(operator, host_function, plan)
    if plan.outputs:
        return _make_out_kernel(run, plan)
    if plan.written_lists and not plan.returned:
        return _make_list_kernel(run, plan)
    if plan.takes_device:
        return _make_factory_kernel(run)
    return _make_plain_kernel(run, plan)


def _make_runner(
    operator: Any, host_function: Callable[..., Any] | None, plan: OperatorPlan
) -> Callable[..., Any]:
    """Return a function that runs the operator on host tensors by the shortest way."""
    if host_function is not None:
        return host_function
    run = redispatch_of(operator)
    place = plan.number_place

    def run_kernel(*args: Any, **kwargs: Any) -> Any:
        return run(CPU_KEYS, *args, **kwargs)

    def run_kernel_or_operator(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place and args[place].__class__ in _NUMBERS:
            return operator(*args, **kwargs)  # only the operator turns the number into a tensor
        return run(CPU_KEYS, *args, **kwargs)

    return run_kernel_or_operator if place else run_kernel


def _make_plain_kernel(run: Callable[..., Any], plan: OperatorPlan) -> Callable[..., Any]:
    """Return the kernel of an operator whose results are where its arguments are."""
    returned, strict, draws = plan.returned, plan.strict, plan.draws
    is_new = returned == (None,)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        lowering = Lowering(strict=strict)
        lower = lowering.lower
        hosts: Any = [lower(value) for value in args]
        options = {name: lower(value) for name, value in kwargs.items()} if kwargs else kwargs
        device = find_device(lowering.index)
        state = torch.default_generator.get_state() if draws else None
        try:
            result: Any = run(*hosts, **options)
        except RuntimeError as error:
            result = refusal_by_host(error, device)
            if result is None:
                raise
        else:
            if is_new:
                result = _adopt_value(result, device)
            elif returned == _FIRST:
                return args[0]
            elif returned:
                result = _adopt_several(result, returned, args, kwargs, device)
        if result.__class__ is not AllocationFailure:
            return result
        if state is not None:
            torch.default_generator.set_state(state)  # a refused call draws no random numbers
        del hosts, options, args, kwargs
        raise oom_error(result, device)

    return kernel


def _make_list_kernel(run: Callable[..., Any], plan: OperatorPlan) -> Callable[..., Any]:
    """Return the kernel of an operator that writes to lists of tensors and returns nothing.

    Torch leaves it to such kernels to count the writes in the tensors' versions.
    """

    def kernel(*args: Any, **kwargs: Any) -> None:
        lower = Lowering(strict=plan.strict).lower
        hosts = [lower(value) for value in args]
        options = {name: lower(value) for name, value in kwargs.items()}
        before = [_versions_of(hosts[place]) for place in plan.written_lists]
        run(*hosts, **options)
        for place, old in zip(plan.written_lists, before, strict=True):
            written = (
                tensor
                for tensor, was, now in zip(
                    args[place], old, _versions_of(hosts[place]), strict=True
                )
                for _ in range(now - was)
            )
            increment_version(list(written))

    return kernel


def _versions_of(hosts: list[torch.Tensor]) -> list[int]:
    return [0 if host.is_inference() else read_version(host) for host in hosts]


def _make_factory_kernel(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of an operator that may say where its result is to be."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        lowering = Lowering(strict=False)
        lower = lowering.lower
        hosts: Any = [lower(value) for value in args]
        options = {name: lower(value) for name, value in kwargs.items()}
        place = kwargs.get("device")
        if place is not None:
            options["device"] = _CPU
            if place.type != DEVICE_TYPE:
                return run(*hosts, **options).to(place)
        device = find_device(lowering.index if place is None else place)
        try:
            result: Any = run(*hosts, **options)
        except RuntimeError as error:
            result = refusal_by_host(error, device)
            if result is None:
                raise
        else:
            result = _adopt_value(result, device)
        if result.__class__ is not AllocationFailure:
            return result
        del hosts, options, args, kwargs
        raise oom_error(result, device)

    return kernel


def _make_out_kernel(run: Callable[..., Any], plan: OperatorPlan) -> Callable[..., Any]:
    """Return the kernel of an ``out=`` overload: compute beside, then resize and copy.

    The host tensor behind a device tensor must never be resized, so it cannot be the output itself.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        lower = Lowering(strict=plan.strict).lower
        hosts = [lower(value) for value in args]
        options = {name: lower(value) for name, value in kwargs.items() if name not in plan.outputs}
        targets: list[torch.Tensor] = []
        fresh: list[torch.Tensor] = []
        for name in plan.outputs:
            value = kwargs[name]
            is_list = isinstance(value, (list, tuple))
            blanks = [_empty((0,), dtype=t.dtype) for t in (value if is_list else [value])]
            options[name] = blanks if is_list else blanks[0]
            targets += value if is_list else [value]
            fresh += blanks
        run(*hosts, **options)
        del hosts, options, args
        for target, new in zip(targets, fresh, strict=True):
            _store(target, new)
        values = [kwargs[name] for name in plan.returned if isinstance(name, str)]
        return values[0] if len(values) == 1 else tuple(values) or None

    return kernel


def _store(target: torch.Tensor, new: torch.Tensor) -> None:
    if target.shape != new.shape:
        target.resize_(new.shape)
    (target if target.is_cpu else host_of(target)).copy_(new)


def _adopt_several(
    result: Any, returned: tuple[Any, ...], args: Any, kwargs: Any, device: SimDevice
) -> Any:
    """Return ``result`` on the device, or the refusal of the first tensor that has no room."""
    values = []
    for value, place in zip(result if len(returned) > 1 else (result,), returned, strict=True):
        if place is None:
            adopted = _adopt_value(value, device)
            if adopted.__class__ is AllocationFailure:
                return adopted
            values.append(adopted)
        else:
            values.append(kwargs[place] if isinstance(place, str) else args[place])
    return values[0] if len(values) == 1 else tuple(values)


def _adopt_value(value: Any, device: SimDevice) -> Any:
    if isinstance(value, torch.Tensor):
        return adopt(value, device)
    if value.__class__ in (list, tuple):
        adopted = []
        for item in value:
            kept = _adopt_value(item, device)
            if kept.__class__ is AllocationFailure:
                return kept
            adopted.append(kept)
        return adopted
    return value

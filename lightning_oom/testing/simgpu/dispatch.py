"""The kernel that serves almost every operator: run it on the host tensors, adopt what is new.

What an operator writes to or returns again is read off its schema once, when its kernel is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import CPU_KEYS, redispatch_of, schema_of
from lightning_oom.memory.allocator import AllocationFailure
from lightning_oom.testing.simgpu.devices import DEVICE_TYPE, SimDevice, find_device
from lightning_oom.testing.simgpu.storage import adopt, host_view, oom_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["make_kernel"]

_CPU = torch.device("cpu")
_empty = torch.ops.aten.empty.memory_format
_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        type(None),
        complex,
        torch.dtype,
        torch.memory_format,
        torch.layout,
        torch.device,
    }
)
_NUMBERS = frozenset({int, float, bool, complex})

# Host tensors beside device tensors: what CUDA accepts too, or what is documented to be on the host.
_ACCEPT_HOST_TENSORS = frozenset(
    {
        "aten::index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index",
        "aten::_foreach_copy_",
        "aten::_ctc_loss",
        "aten::_ctc_loss_backward",
        "aten::tensor_split",
    }
)


class Lowered:
    """The arguments of one call with host tensors in place of device tensors."""

    __slots__ = ("device", "strict")

    def __init__(self, *, strict: bool) -> None:
        self.device: int | None = None
        self.strict = strict

    def lower(self, value: Any) -> Any:
        """Return ``value`` with host tensors; remember the device."""
        cls = value.__class__
        if cls in _PLAIN:
            return value
        if cls is list or cls is tuple:
            return [self.lower(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_cpu:
            if self.strict and value.dim():
                raise self.mismatch("cpu")
            return value
        index = value.get_device()
        if self.device is None:
            self.device = index
        elif self.device != index:
            raise self.mismatch(f"{DEVICE_TYPE}:{index}")
        return host_view(value)

    def mismatch(self, other: str) -> RuntimeError:
        """Return the error for tensors on two devices."""
        here = DEVICE_TYPE if self.device is None else f"{DEVICE_TYPE}:{self.device}"
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
    schema = schema_of(operator)
    run = redispatch_of(operator) if host_function is None else _without_keys(host_function)
    takes_device = any(a.name == "device" for a in schema.arguments)
    strict = not takes_device and schema.name not in _ACCEPT_HOST_TENSORS
    returned = _returned_arguments(schema)
    fresh_outputs = tuple(a.name for a in schema.arguments if a.is_out)
    # A number in a tensor's place (`tensor * 2`), which only the operator itself can take.
    number_place = next(
        (i for i, a in enumerate(schema.arguments) if i and str(a.type) == "Tensor"), 0
    )
    draws = torch.Tag.nondeterministic_seeded in operator.tags and None in returned
    if fresh_outputs:
        return _make_out_kernel(run, schema, fresh_outputs, returned, strict=strict)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = Lowered(strict=strict)
        lower = call.lower
        hosts: Any = [lower(value) for value in args]
        options = {name: lower(value) for name, value in kwargs.items()} if kwargs else kwargs
        target = call.device
        if takes_device and (place := kwargs.get("device")) is not None:
            options["device"] = _CPU
            target = find_device(place).index if place.type == DEVICE_TYPE else None
        state = torch.default_generator.get_state() if draws else None
        if number_place and len(hosts) > number_place and hosts[number_place].__class__ in _NUMBERS:
            result: Any = operator(*hosts, **options)
        else:
            result = run(CPU_KEYS, *hosts, **options)
        if returned == _NOTHING or (target is None and call.device is None):
            return None if returned == _NOTHING else result
        if returned == _SELF:
            return args[0]
        if takes_device and target is None:
            return result
        device = find_device(target)
        result = _raise_result(result, returned, args, kwargs, device)
        if result.__class__ is not AllocationFailure:
            return result
        if state is not None:
            torch.default_generator.set_state(state)  # a refused call draws no random numbers
        del hosts, options, args, kwargs
        raise oom_error(result, device)

    return kernel


def _without_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run


_NOTHING: tuple[Any, ...] = ()
_SELF: tuple[Any, ...] = (0,)


def _make_out_kernel(
    run: Callable[..., Any],
    schema: Any,
    outputs: Sequence[str],
    returned: tuple[Any, ...],
    *,
    strict: bool,
) -> Callable[..., Any]:
    """Return the kernel of an ``out=`` overload: compute beside, then copy or resize."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = Lowered(strict=strict)
        lower = call.lower
        hosts = [lower(value) for value in args]
        options = {name: lower(value) for name, value in kwargs.items() if name not in outputs}
        targets: list[torch.Tensor] = []
        fresh: list[torch.Tensor] = []
        for name in outputs:
            value = kwargs[name]
            group = value if isinstance(value, (list, tuple)) else [value]
            blanks = [_empty((0,), dtype=tensor.dtype) for tensor in group]
            targets += group
            fresh += blanks
            options[name] = blanks if isinstance(value, (list, tuple)) else blanks[0]
        run(CPU_KEYS, *hosts, **options)
        del hosts, args
        for target, new in zip(targets, fresh, strict=True):
            if target.is_cpu or new.numel() or target.numel():
                target.resize_(new.shape) if target.shape != new.shape else None
                (target if target.is_cpu else host_view(target)).copy_(new)
        if not returned:
            return None
        values = [kwargs[name] for name in returned]
        return values[0] if len(values) == 1 else tuple(values)

    return kernel


def _returned_arguments(schema: Any) -> tuple[Any, ...]:
    """For each return: the position or name of the argument that it is, ``None`` if it is new."""
    positions: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            place = argument.name if argument.kwarg_only else position
            for name in argument.alias_info.before_set:
                positions[name] = place
    found = []
    for value in schema.returns:
        alias = value.alias_info
        names = alias.before_set if alias is not None and alias.is_write else ()
        found.append(next((positions[name] for name in names if name in positions), None))
    return tuple(found)


def _raise_result(
    result: Any, returned: tuple[Any, ...], args: Any, kwargs: Any, device: SimDevice
) -> Any:
    """Return ``result`` on the device, or the refusal of the first tensor that has no room."""
    if len(returned) == 1:
        place = returned[0]
        if place is None:
            return _adopt_value(result, device)
        return kwargs[place] if isinstance(place, str) else args[place]
    values = []
    for value, place in zip(result, returned, strict=True):
        if place is not None:
            values.append(kwargs[place] if isinstance(place, str) else args[place])
            continue
        adopted = _adopt_value(value, device)
        if adopted.__class__ is AllocationFailure:
            return adopted
        values.append(adopted)
    return tuple(values)


def _adopt_value(value: Any, device: SimDevice) -> Any:
    if isinstance(value, torch.Tensor):
        return adopt(value, device)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        adopted = []
        for item in value:
            tensor = adopt(item, device)
            if isinstance(tensor, AllocationFailure):
                return tensor
            adopted.append(tensor)
        return adopted
    return value

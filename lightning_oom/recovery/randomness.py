"""Run code with its randomness taken out, so that two runs on different rows can be compared.

:func:`fixed_randomness` replaces what torch draws by something that does not depend on how many
rows are drawn for. What a drawn number is used for stays in place: a mask is still applied, a
permutation still moves rows.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from lightning_oom._torch import around_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["FixedRandomness", "fixed_randomness", "uses_cuda"]

_UNIFORM, _NORMAL = 0.5, 0.3
_LOW_PRECISION = (torch.float16, torch.bfloat16)
_MHA_DROPOUT, _SDPA_DROPOUT = 10, 4  # positions of `dropout_p` in the two functions' arguments


class FixedRandomness(TorchFunctionMode):
    """The mode behind :func:`fixed_randomness`.

    Attributes:
        lowest_precision: The coarsest of float16 and bfloat16 (by relative rounding) that any
            result had inside the block, so also under autocast; ``None`` when there was neither.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lowest_precision: torch.dtype | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, or what stands in for it when it draws random numbers."""
        kwargs = kwargs or {}
        stand_in = _STAND_INS.get(getattr(func, "__name__", ""))
        output = func(*args, **kwargs) if stand_in is None else stand_in(func, args, kwargs)
        if (
            isinstance(output, torch.Tensor)
            and output.dtype in _LOW_PRECISION
            and self.lowest_precision is not torch.bfloat16
        ):
            self.lowest_precision = output.dtype
        return output


@contextmanager
def fixed_randomness(*, devices: Iterable[torch.device | str] = ()) -> Iterator[FixedRandomness]:
    """Take the randomness out of what runs inside the block, and leave no trace of it outside.

    Dropout of every kind (modules, functions, attention, recurrent layers) passes its input
    through. Uniform, normal, integer and other draws give one constant, whatever their shape;
    draws with a distribution per element give its mode or mean. ``torch.randperm`` gives the
    permutation that moves every element by one place, so that code which mixes rows still mixes
    them. Python's and numpy's generators run on and are put back, as are torch's: two blocks that
    are entered in the same state see the same numbers.

    Args:
        devices: Devices beside the CPU whose generators are put back; initialised CUDA devices
            always are.

    Yields:
        The active mode; see :attr:`FixedRandomness.lowest_precision`.

    Note:
        Random kernels that do not come from torch (fused attention of other packages) keep drawing.
        A draw of one number per row from numpy or Python differs between a batch and its parts.

    Example:
        >>> import torch.nn.functional as F
        >>> before = torch.get_rng_state()
        >>> with fixed_randomness():
        ...     print(F.dropout(torch.ones(3), 0.9), torch.rand(2), torch.randperm(3))
        tensor([1., 1., 1.]) tensor([0.5000, 0.5000]) tensor([1, 2, 0])
        >>> torch.equal(before, torch.get_rng_state())
        True
    """
    restore = _remember_generators(devices)
    try:
        mode = FixedRandomness()
        with around_backward(lambda: mode), mode:
            yield mode
    finally:
        restore()


def uses_cuda() -> bool:
    """Whether CUDA has been started in this process; does not start it."""
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    return is_initialized()


def _remember_generators(devices: Iterable[torch.device | str]) -> Callable[[], None]:
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - users draw from the global generator
    cpu_state = torch.get_rng_state()
    wanted = {torch.device(device) for device in devices}
    if uses_cuda():
        wanted |= {torch.device("cuda", index) for index in range(torch.cuda.device_count())}
    states = []
    for device in wanted:
        backend: Any = getattr(torch, device.type, None)
        if device.type != "cpu" and hasattr(backend, "get_rng_state"):
            index = () if device.type == "mps" else (device,)
            states.append((backend.set_rng_state, backend.get_rng_state(*index), index))

    def restore() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002 - as above
        torch.set_rng_state(cpu_state)
        for set_rng_state, state, index in states:
            set_rng_state(state, *index)

    return restore


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs.get(name)


def _pass_through(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _argument(args, kwargs, 0, "input")


def _native_dropout(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = _argument(args, kwargs, 0, "input")
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _filled_with(constant: float) -> Callable[..., Any]:
    def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        with torch.no_grad():
            return output.fill_(constant)

    return fill


def _integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stand in for ``randint``, ``randint_like`` and ``Tensor.random_``: the middle of the range."""
    bounds = [arg for arg in args if isinstance(arg, int)]
    bounds += [
        kwargs[name] for name in ("low", "from", "high", "to") if kwargs.get(name) is not None
    ]
    low, high = (0, *bounds)[-2:] if bounds else (0, 2)
    return _filled_with(low + max(high - low - 1, 0) // 2)(func, args, kwargs)


def _permutation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    output = func(*args, **kwargs)
    return output.copy_(torch.arange(len(output), device=output.device).roll(-1))


def _bernoulli(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    probability = _argument(args, kwargs, 0, "input")
    return (probability.detach() > 0).to(probability.dtype)


def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mean, std = _argument(args, kwargs, 0, "mean"), _argument(args, kwargs, 1, "std")
    std = 1.0 if std is None else std
    if isinstance(mean, torch.Tensor) or isinstance(std, torch.Tensor):
        shifted = mean + _NORMAL * std
        return torch.as_tensor(shifted).detach()
    return _filled_with((mean or 0.0) + _NORMAL * std)(func, args, kwargs)


def _multinomial(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weights, num_samples = (
        _argument(args, kwargs, 0, "input"),
        _argument(args, kwargs, 1, "num_samples"),
    )
    best = weights.topk(min(num_samples, weights.shape[-1]), dim=-1).indices
    if best.shape[-1] == num_samples:
        return best
    return best[..., :1].expand(*best.shape[:-1], num_samples).clone()


def _gumbel_softmax(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, tau = _argument(args, kwargs, 0, "logits"), _argument(args, kwargs, 1, "tau")
    hard, dim = _argument(args, kwargs, 2, "hard"), _argument(args, kwargs, 4, "dim")
    dim = -1 if dim is None else dim
    soft = (logits / (1.0 if tau is None else tau)).softmax(dim)
    if not hard:
        return soft
    picked = torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return picked - soft.detach() + soft


def _first(transform: Callable[[Any], Any]) -> Callable[..., Any]:
    def apply(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return transform(_argument(args, kwargs, 0, "input"))

    return apply


def _without_dropout(position: int | None) -> Callable[..., Any]:
    """Stand in for a function with a dropout argument: run it with that argument at 0."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if position is None:  # recurrent layers: their dropout is the only float
            args = tuple(0.0 if isinstance(arg, float) else arg for arg in args)
        elif len(args) > position:
            args = (*args[:position], 0.0, *args[position + 1 :])
        else:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)

    return run


def _rrelu(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "lower", "upper", "training", "inplace")
    named = {**dict(zip(names, args, strict=False)), **kwargs, "training": False}
    named.pop("generator", None)
    return torch.nn.functional.rrelu(**named)


def _fractional_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = _argument(args, kwargs, 0, "input")
    dims = 2 if "2d" in func.__name__ else 3
    rows = x.shape[0] if x.ndim == dims + 2 else 1
    samples = torch.full((rows, x.shape[-dims - 1], dims), _UNIFORM, dtype=x.dtype, device=x.device)
    return func(*args[:5], **{**kwargs, "_random_samples": samples})


_STAND_INS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d"),
            *("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"),
            *("feature_dropout", "feature_dropout_"),
        ),
        _pass_through,
    ),
    "native_dropout": _native_dropout,
    **dict.fromkeys(("rand", "rand_like", "uniform_", "exponential_"), _filled_with(_UNIFORM)),
    **dict.fromkeys(("geometric_", "bernoulli_"), _filled_with(1.0)),
    **dict.fromkeys(("log_normal_", "cauchy_"), _filled_with(_UNIFORM)),
    **dict.fromkeys(("randn", "randn_like", "normal_"), _filled_with(_NORMAL)),
    **dict.fromkeys(("randint", "randint_like", "random_"), _integers),
    "randperm": _permutation,
    "bernoulli": _bernoulli,
    "normal": _normal,
    "multinomial": _multinomial,
    "gumbel_softmax": _gumbel_softmax,
    "poisson": _first(lambda rate: rate.detach().round()),
    "binomial": lambda _func, args, _kwargs: (args[0] * args[1]).detach().round(),
    "_standard_gamma": _first(torch.clone),
    "_sample_dirichlet": _first(lambda alpha: alpha / alpha.sum(-1, keepdim=True)),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _without_dropout(None)),
    "multi_head_attention_forward": _without_dropout(_MHA_DROPOUT),
    "scaled_dot_product_attention": _without_dropout(_SDPA_DROPOUT),
    **dict.fromkeys(("rrelu", "rrelu_"), _rrelu),
    **dict.fromkeys(
        (
            *("fractional_max_pool2d", "fractional_max_pool2d_with_indices"),
            *("fractional_max_pool3d", "fractional_max_pool3d_with_indices"),
        ),
        _fractional_pool,
    ),
}
"""What runs instead of each torch function that draws, by the function's name."""

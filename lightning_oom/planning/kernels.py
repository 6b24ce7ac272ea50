"""Run on fake CPU tensors the operators that torch would choose on CUDA.

The choice is made above the operators that a dispatch mode sees, by the device of the tensors. Where
it matters to memory, kernels for the CPU's dispatch keys are registered that choose as CUDA does:

- attention: flash or memory-efficient kernels, which keep queries, keys, values, the result and one
  number per row; the CPU builds the whole matrix where there is dropout;
- dropout: one fused operator that keeps a mask of one byte per element;
- LSTM layers: a fused cell per step, for oneDNN's workspace is not known to torch's fake kernel;
- autocast: layer and group norms, softmax, powers and sums in float32, which CPU autocast leaves.

Real tensors in other threads keep the kernels they have. Sources: ``aten/src/ATen/native/Dropout.cpp``,
``transformers/cuda/sdp_utils.cpp`` and ``autocast_mode.h`` of torch 2.13.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import has_kernel, without_autocast
from lightning_oom._torch.fake import is_fake
from lightning_oom._torch.kernels import registered_kernels
from lightning_oom.planning.recurrent import lstm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["cuda_autocast", "cuda_autocast_rules", "cuda_choices", "use_foreach"]

_LOCK = threading.RLock()
_aten = torch.ops.aten
_flash = _aten._scaled_dot_product_flash_attention.default  # noqa: SLF001 - an operator's name
_efficient = _aten._scaled_dot_product_efficient_attention.default  # noqa: SLF001 - likewise
_math = _aten._scaled_dot_product_attention_math.default  # noqa: SLF001 - likewise

_HALF_TYPES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256  # the widest head that the flash kernel takes

_IN_FLOAT32 = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "group_norm",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "logsumexp",
    "native_layer_norm",
    "pow.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "reciprocal",
    "rsqrt",
    "sinh",
    "softplus",
    "tan",
)
"""What autocast on CUDA computes in float32, after casting its arguments."""

_TO_FLOAT32 = (
    "cumprod",
    "cumsum",
    "log_softmax.int",
    "prod",
    "prod.dim_int",
    "softmax.int",
    "sum",
    "sum.dim_IntList",
)
"""What autocast on CUDA computes in float32 by asking for a result of that type."""


@contextmanager
def cuda_choices(*, attention: bool = True) -> Iterator[None]:
    """Let fake CPU tensors take CUDA's dropout and attention until the context ends.

    Estimates in several threads wait for each other here.

    Args:
        attention: Without it, attention stays that of the CPU, as on the simulated GPU.
    """
    kernels: dict[str, Callable[..., Any]] = {"dropout": _dropout, "lstm.input": lstm}
    if attention:
        kernels["scaled_dot_product_attention"] = _attention
    with _LOCK, registered_kernels(kernels, "AutogradCPU"):
        yield


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Autocast fake CPU tensors by the rules of CUDA until the context ends.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """
    with cuda_autocast_rules(), torch.autocast("cpu", dtype=dtype):
        yield


@contextmanager
def cuda_autocast_rules() -> Iterator[None]:
    """Let autocast follow the rules of CUDA where it is on, until the context ends.

    To be entered around a whole step: checkpointed blocks switch autocast on once more in the
    backward, and must cast there what they cast in the forward.
    """
    kernels: dict[str, Callable[..., Any]] = {
        name: make(_operator(name))
        for names, make in ((_IN_FLOAT32, _casting), (_TO_FLOAT32, _asking))
        for name in names
        if not has_kernel(_operator(name), "AutocastCPU")
    }
    with _LOCK, registered_kernels(kernels, "AutocastCPU"):
        yield


def use_foreach(optimizers: list[torch.optim.Optimizer]) -> None:
    """Let optimizers that leave the choice to torch step in groups of tensors, as on CUDA.

    Args:
        optimizers: Not yet stepped; changed in place.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002 - torch's
    if not is_fake(input):
        result: torch.Tensor = _aten.dropout.default.decompose(input, p, train)
    elif p == 0 or not train or not input.numel():
        result = input
    else:
        result = _aten.native_dropout(input, p, train)[0]
    return result


def _attention(  # noqa: PLR0917 - the operator passes them by position
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    result: torch.Tensor
    if not is_fake(query):
        rest = (attn_mask, dropout_p, is_causal)
        options = {"scale": scale, "enable_gqa": enable_gqa}
        result = _aten.scaled_dot_product_attention.default.decompose(
            query, key, value, *rest, **options
        )
        return result
    if enable_gqa and query.shape[1] != key.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    inputs = (query, key, value)
    if _takes_flash(*inputs, attn_mask):
        result = _flash(*inputs, dropout_p, is_causal, scale=scale)[0]
    elif _takes_efficient(*inputs):
        bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        result = _efficient(*inputs, bias, learns, dropout_p, is_causal, scale=scale)[0]
    else:
        result = _math(*inputs, attn_mask, dropout_p, is_causal, None, scale=scale)[0]
    return result


def _takes_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and mask is None
        and query.dtype in _HALF_TYPES
        and query.dim() == key.dim() == value.dim() == 4  # noqa: PLR2004 - batch, head, row, column
        and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD_DIM
    )


def _takes_efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    alignment = 8 if query.dtype in _HALF_TYPES else 4
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (*_HALF_TYPES, torch.float32)
        and query.dim() == key.dim() == value.dim() == 4  # noqa: PLR2004 - as above
        and not any(tensor.shape[-1] % alignment for tensor in (query, key, value))
    )


def _as_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Turn a mask into what the kernel adds to the scores, with rows that begin at multiples of 8."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    columns = mask.shape[-1]
    alignment = 8 if query.dtype in _HALF_TYPES else 4
    if columns % alignment:
        mask = torch.nn.functional.pad(mask, (0, alignment - columns % alignment))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _casting(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            cast = [_as_float32(value) for value in args]
            return operator(*cast, **{name: _as_float32(value) for name, value in kwargs.items()})

    return kernel


def _asking(operator: Any) -> Callable[..., Any]:
    def kernel(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 - torch's
        with without_autocast():
            asked = kwargs.pop("dtype", None)
            if asked is None and not any(isinstance(value, torch.dtype) for value in args):
                asked = torch.float32 if input.dtype in _HALF_TYPES else None
            return operator(input, *args, **kwargs, **({"dtype": asked} if asked else {}))

    return kernel


def _as_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _HALF_TYPES:
        return value.float()
    if isinstance(value, (list, tuple)):
        return [_as_float32(item) for item in value]
    return value

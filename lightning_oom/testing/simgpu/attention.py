"""Scaled dot-product attention: the CPU's choice of algorithm, its memory and its results.

Torch picks a fused algorithm only for devices that were compiled in. Left alone, a device from outside
would build the whole attention matrix where the CPU and CUDA do not.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["ATTENTION_OPERATORS", "choose_attention"]

_aten = torch.ops.aten
_choice = _aten._fused_sdp_choice.default  # noqa: SLF001 - an operator's name
_math = _aten._scaled_dot_product_attention_math.default  # noqa: SLF001 - an operator's name
_fused = _aten._scaled_dot_product_fused_attention_overrideable.default  # noqa: SLF001 - an operator's name
_flash = _aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - an operator's name
_flash_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001 - an operator's name

_FLASH = 1  # in the numbering of torch.nn.attention.SDPBackend
_REST_DEFAULTS: tuple[Any, ...] = (None, 0.0, False)


def choose_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run ``scaled_dot_product_attention`` with the algorithm that the CPU would take.

    Args:
        query: As in torch, like all the others.
        key: See ``query``.
        value: See ``query``.
        *rest: Mask, dropout probability and whether it is causal, as many as were given.
        scale: See ``query``.
        enable_gqa: See ``query``.
    """
    mask, dropout_p, is_causal = (*rest, *_REST_DEFAULTS[len(rest) :])
    mask_learns = mask is not None and mask.requires_grad
    options = {"scale": scale, "enable_gqa": enable_gqa}
    inputs = (query, key, value, mask, dropout_p, is_causal)
    if mask_learns or _choice(*inputs, **options) != _FLASH:
        result = _math(*inputs, None, **options)
    else:
        bias = _as_bias(mask, query.dtype)
        result = _fused(query, key, value, bias, dropout_p, is_causal, False, scale=scale)
    output: torch.Tensor = result[0]
    return output


def _as_bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Turn a mask of booleans into what is added to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute attention block by block; keep the output and one number per row."""
    mask, dropout_p, is_causal = (*rest[:3], *_REST_DEFAULTS[len(rest) :])
    output, logsumexp = _flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)
    unused = [_aten.empty.memory_format((0,), dtype=torch.int64) for _ in range(5)]
    lengths, seeds, debug = unused[:2], unused[2:4], unused[4]
    return (output, logsumexp, *lengths, query.shape[2], key.shape[2], *seeds, debug)


def fused_attention_backward(*args: Any, scale: float | None = None) -> tuple[Any, ...]:
    """Return the gradients of query, key and value; a mask that learns never comes here."""
    grad_out, query, key, value, mask, _, output, logsumexp = args[:8]
    dropout_p, is_causal = args[12:14]
    grads = _flash_backward(
        grad_out,
        query,
        key,
        value,
        output,
        logsumexp,
        dropout_p,
        is_causal,
        attn_mask=mask,
        scale=scale,
    )
    return (*grads, None)


ATTENTION_OPERATORS: dict[str, Any] = {
    "_scaled_dot_product_fused_attention_overrideable": fused_attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": fused_attention_backward,
}
"""Host functions by operator name within ``aten``; they get and return host tensors."""

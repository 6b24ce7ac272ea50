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

_FLASH = 1


def choose_attention(
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
    """Run ``scaled_dot_product_attention`` with the algorithm that the CPU would take."""
    mask_learns = attn_mask is not None and attn_mask.requires_grad
    chosen = None
    if not mask_learns:
        chosen = _choice(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if chosen == _FLASH:
        mask = _as_bias(attn_mask, query.dtype)
        result = _fused(query, key, value, mask, dropout_p, is_causal, False, scale=scale)
    else:
        result = _math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            None,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return result[0]  # type: ignore[no-any-return]  # a torch operator


def _as_bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Turn a mask of booleans into what is added to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute attention block by block; keep the output and one number per row."""
    output, logsumexp = _flash(
        query, key, value, dropout_p, is_causal, attn_mask=attn_bias, scale=scale
    )
    unused = [torch.ops.aten.empty.memory_format((0,), dtype=torch.int64) for _ in range(5)]
    lengths, seeds, debug = unused[:2], unused[2:4], unused[4]
    return (output, logsumexp, *lengths, query.shape[2], key.shape[2], *seeds, debug)


def fused_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    grad_input_mask: list[bool],
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of query, key and value."""
    grads = _flash_backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        dropout_p,
        is_causal,
        attn_mask=attn_bias,
        scale=scale,
    )
    return (*grads, None)


ATTENTION_OPERATORS: dict[str, Any] = {
    "_scaled_dot_product_fused_attention_overrideable": fused_attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": fused_attention_backward,
}
"""Host functions by operator name within ``aten``; they get and return host tensors."""

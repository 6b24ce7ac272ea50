"""Operators that torch runs off the CPU only: fused recurrent cells, fused dropout, attention.

On the CPU torch takes other operators for the same modules, so these are put together from what the
CPU does, step by step, which keeps the results equal to the last bit where that is possible.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FUSED_OPERATORS"]

_aten = torch.ops.aten


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute one step of an LSTM from the products with its weights.

    Returns:
        Hidden state, cell state, and the activated gates that the backward needs.
    """
    gates = _with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)
    chunks = gates.chunk(4, 1)
    i, f, o = (chunks[k].sigmoid() for k in (0, 1, 3))
    g = chunks[2].tanh()
    cy = (f * cx) + (i * g)
    hy = o * cy.tanh()
    return hy, cy, torch.cat((i, f, g, o), 1)


def lstm_cell_backward(  # noqa: PLR0917 - the operator passes them by position
    grad_hy: torch.Tensor | None,
    grad_cy: torch.Tensor | None,
    cx: torch.Tensor,
    cy: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the gates, of the cell state, and of the bias."""
    i, f, g, o = workspace.chunk(4, 1)
    tanh_cy = cy.tanh()
    grad_hy = torch.zeros_like(cx) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - tanh_cy * tanh_cy)
    grad_c = grad_c if grad_cy is None else grad_c + grad_cy
    grad_gates = torch.cat(
        (
            grad_c * g * i * (1 - i),
            grad_c * cx * f * (1 - f),
            grad_c * i * (1 - g * g),
            grad_hy * tanh_cy * o * (1 - o),
        ),
        1,
    )
    grad_bias = grad_gates.sum(0) if has_bias else grad_gates.new_empty(0)
    return grad_gates, grad_c * f, grad_bias


def gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute one step of a GRU from the products with its weights.

    Returns:
        Hidden state, and what the backward needs: the gates, the old state, the hidden product.
    """
    i_r, i_z, i_n = _with_bias(input_gates, input_bias).chunk(3, 1)
    h_r, h_z, h_n = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r = (h_r + i_r).sigmoid()
    z = (h_z + i_z).sigmoid()
    n = (i_n + h_n * r).tanh()
    hy = (hx - n) * z + n
    return hy, torch.cat((r, z, n, hx, h_n), 1)


def gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of both products, of the old state, and of both biases."""
    r, z, n, hx, h_n = workspace.chunk(5, 1)
    grad_n = grad_hy * (1 - z) * (1 - n * n)
    grad_z = grad_hy * (hx - n) * z * (1 - z)
    grad_r = grad_n * h_n * r * (1 - r)
    grad_input = torch.cat((grad_r, grad_z, grad_n), 1)
    grad_hidden = torch.cat((grad_r, grad_z, grad_n * r), 1)
    blank = grad_hy.new_empty(0)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (blank, blank.clone())
    return (grad_input, grad_hidden, grad_hy * z, *biases)


def _with_bias(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


def dropout(
    self: torch.Tensor, p: float, train: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the mask and scale as the CPU's dropout does; keep one byte per element."""
    if train is False or self.numel() == 0:
        return self.clone(), torch.ones_like(self, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(self), torch.zeros_like(self, dtype=torch.bool)
    noise = torch.empty_like(self).bernoulli_(1 - p)
    mask = noise.to(torch.bool)
    return self * noise.div_(1 - p), mask


def dropout_backward(grad_output: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Apply the mask of :func:`dropout` to the gradient."""
    if scale == 0:
        return torch.zeros_like(grad_output)
    return grad_output * mask.to(grad_output.dtype).div_(1 / scale)


FUSED_OPERATORS: dict[str, Any] = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "native_dropout": dropout,
    "native_dropout_backward": dropout_backward,
}
"""Host functions by operator name within ``aten``; they get and return host tensors."""

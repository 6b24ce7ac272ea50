"""LSTM layers on fake CPU tensors as torch runs them off the CPU: step by step, with a fused cell.

On the CPU torch takes oneDNN, whose workspace its fake kernel does not know. The fused cell keeps the
gates and the cell state of each step, about what cuDNN keeps in its reserve space; that space is
cuDNN's own and not known without it. Source: ``aten/src/ATen/native/RNN.cpp`` of torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch.fake import is_fake

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["lstm"]

_aten = torch.ops.aten
_cell = _aten._thnn_fused_lstm_cell.default  # noqa: SLF001 - an operator's name


def lstm(  # noqa: PLR0917 - the operator passes them by position
    input: torch.Tensor,  # noqa: A002 - torch's
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run ``aten::lstm.input``; real tensors, and projected layers, keep torch's own way.

    Returns:
        The output, the last hidden states and the last cell states, as torch returns them.
    """
    per_direction = 4 if has_biases else 2
    num_directions = 2 if bidirectional else 1
    if not is_fake(input) or len(params) != per_direction * num_layers * num_directions:
        options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        result = _aten.lstm.input.decompose(input, hx, params, *options)
        return result
    layer_input = input.transpose(0, 1) if batch_first else input
    states = [(h, c) for h, c in zip(hx[0].unbind(0), hx[1].unbind(0), strict=True)]
    last: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(num_directions):
            at = layer * num_directions + direction
            weights = params[at * per_direction : (at + 1) * per_direction]
            output, state = _direction(layer_input, states[at], weights, backwards=direction == 1)
            outputs.append(output)
            last.append(state)
        layer_input = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            layer_input = torch.dropout(layer_input, dropout, train=True)
    output = layer_input.transpose(0, 1) if batch_first else layer_input
    return output, torch.stack([h for h, _ in last]), torch.stack([c for _, c in last])


def _direction(
    steps: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    weights: Sequence[torch.Tensor],
    *,
    backwards: bool,
) -> tuple[torch.Tensor, Any]:
    """Run one direction of one layer over all steps."""
    hidden, cell = state
    outputs = []
    inputs = list(steps.unbind(0))
    for step in reversed(inputs) if backwards else inputs:
        gates = (step.matmul(weights[0].t()), hidden.matmul(weights[1].t()))
        hidden, cell = _cell(*gates, cell, *weights[2:])[:2]
        outputs.append(hidden)
    if backwards:
        outputs.reverse()
    return torch.stack(outputs), (hidden, cell)

"""How tensors, arrays and packed sequences are cut along their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_oom.errors import BatchSplitError
from lightning_oom.recovery.batches.batch_types import BatchType, register_batch_type

__all__ = ["ARRAY", "PACKED_SEQUENCE", "TENSOR"]


def _tensor_rows(tensor: Tensor) -> int | None:
    if tensor.is_nested:
        return tensor.size(0)
    return tensor.shape[0] if tensor.ndim else None


def _take_tensor(tensor: Tensor, start: int, stop: int) -> Tensor:
    if tensor.is_nested:
        return _take_nested(tensor, start, stop)
    if tensor.layout is torch.strided:
        return tensor.narrow(0, start, stop - start)
    if tensor.layout is torch.sparse_csr:
        return _take_sparse_csr(tensor, start, stop)
    if tensor.layout is torch.sparse_coo:
        return tensor.index_select(0, torch.arange(start, stop, device=tensor.device))
    raise BatchSplitError(
        f"a tensor of layout {tensor.layout} cannot be cut into rows: say how to cut the batch "
        "with split_fn"
    )


def _take_sparse_csr(tensor: Tensor, start: int, stop: int) -> Tensor:
    bounds = tensor.crow_indices()[start : stop + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    return torch.sparse_csr_tensor(
        bounds - first,
        tensor.col_indices()[first:last],
        tensor.values()[first:last],
        size=(stop - start, *tensor.shape[1:]),
        check_invariants=False,  # rows of a valid tensor are valid
    )


def _take_nested(tensor: Any, start: int, stop: int) -> Tensor:
    if tensor.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(list(tensor.unbind()[start:stop]))
    offsets, lengths = tensor.offsets(), tensor.lengths()
    first = int(offsets[start])
    if lengths is None:
        values = tensor.values()[first : int(offsets[stop])]
        return torch.nested.nested_tensor_from_jagged(values, offsets[start : stop + 1] - first)
    return torch.nested.nested_tensor_from_jagged(
        tensor.values(), offsets[start : stop + 1], lengths[start:stop]
    )


def _tensor_shape(tensor: Tensor) -> str:
    if tensor.is_nested:
        return f"(nested, {tensor.ndim} dimensions)"
    return str(tuple(tensor.shape))


def _itself(tensor: Tensor) -> list[Tensor]:
    return [tensor]


TENSOR = BatchType(
    role="rows", rows=_tensor_rows, take=_take_tensor, tensors=_itself, shape=_tensor_shape
)


def _array_rows(array: Any) -> int | None:
    return array.shape[0] if array.ndim else None


def _take_array(array: Any, start: int, stop: int) -> Any:
    return array[start:stop]


def _array_shape(array: Any) -> str:
    return str(tuple(array.shape))


ARRAY = BatchType(role="rows", rows=_array_rows, take=_take_array, shape=_array_shape)


def _packed_rows(packed: PackedSequence) -> int:
    return int(packed.batch_sizes[0])


def _take_packed(packed: PackedSequence, start: int, stop: int) -> PackedSequence:
    """The rows [start, stop) in the order of the batch, which is not that of the packed rows."""
    device = packed.data.device
    order = packed.unsorted_indices
    if order is None:
        picked = torch.arange(start, stop)
        sorted_indices = unsorted_indices = None
    else:
        picked, original = order[start:stop].cpu().sort()
        sorted_indices = original.to(device)
        unsorted_indices = original.argsort().to(device)
    sizes = packed.batch_sizes
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    present = picked[None, :] < sizes[:, None]  # time x row
    positions = (offsets[:, None] + picked[None, :])[present]
    new_sizes = present.sum(1)
    return PackedSequence(
        packed.data.index_select(0, positions.to(device)),
        new_sizes[new_sizes > 0],
        sorted_indices,
        unsorted_indices,
    )


def _packed_tensors(packed: PackedSequence) -> list[Tensor]:
    return [part for part in packed if part is not None]


def _packed_shape(packed: PackedSequence) -> str:
    return f"(packed, {tuple(packed.data.shape)})"


PACKED_SEQUENCE = BatchType(
    role="rows",
    rows=_packed_rows,
    take=_take_packed,
    tensors=_packed_tensors,
    shape=_packed_shape,
)

register_batch_type(Tensor, TENSOR)
register_batch_type(np.ndarray, ARRAY)
register_batch_type(PackedSequence, PACKED_SEQUENCE)

"""The one door to private torch: every private name of torch that the package uses is taken here.

A new torch release that moves a name breaks this file and ``tests/test_torch_door.py``, nothing else.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "OutOfMemoryError",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

OutOfMemoryError: type[RuntimeError] = getattr(
    torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError
)
"""``torch.OutOfMemoryError``; before torch 2.5 it lives in ``torch.cuda``."""

"""Private names of torch around kernels that are registered for a while."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["registered_kernels"]


@contextmanager
def registered_kernels(
    kernels: Mapping[str, Callable[..., Any]], dispatch_key: str
) -> Iterator[None]:
    """Let ``kernels`` run for operators of ``aten``, in the whole process, until the context ends.

    Args:
        kernels: Functions by operator and overload (``"softmax.int"``).
        dispatch_key: For instance ``"AutogradCPU"``. Operators must have no kernel of their own for
            it; one that stands for all keys is covered and comes back.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, dispatch_key)
        yield
    finally:
        library._destroy()

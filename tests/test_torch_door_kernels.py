"""Private names of torch around kernels that are registered for a while."""

from __future__ import annotations

import pytest
import torch

from lightning_oom._torch import kernels as door


def test_a_kernel_is_there_as_long_as_the_context() -> None:
    """Also when it ends with an error; it can be entered again."""
    x = torch.ones(4, requires_grad=True)

    def twice(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return x * 2

    def fail_within() -> None:
        with door.registered_kernels({"dropout": twice}, "AutogradCPU"):
            assert torch.equal(torch.dropout(x, 0.0, train=True), 2 * x)
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail_within()
        assert torch.equal(torch.dropout(x, 0.0, train=True), x)

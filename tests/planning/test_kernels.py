"""What fake CPU tensors run when they stand for tensors on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from lightning_oom._torch.fake import fake_mode
from lightning_oom.planning.fake_step import FakeStep
from lightning_oom.planning.kernels import cuda_autocast, cuda_choices, use_foreach
from lightning_oom.planning.on_target import settings_on
from lightning_oom.planning.target import parse_target
from lightning_oom.reduction.checkpointing import install


class Attention(torch.nn.Module):
    """One layer of attention with dropout."""

    def __init__(self, head_dim: int = 16) -> None:
        super().__init__()
        self.project = torch.nn.Linear(2 * head_dim, 6 * head_dim)
        self.head_dim = head_dim

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attend with two heads."""
        parts = self.project(x).unflatten(-1, (3, 2, self.head_dim)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts, attn_mask=mask, dropout_p=0.1)


def operators(precision: str | None = None, head_dim: int = 16, **how) -> set[str]:
    """Return the operators of a step through attention, as CUDA would run it."""
    step = FakeStep(Attention(head_dim), torch.zeros(2, 64, 2 * head_dim))
    context = how.pop("context", lambda _: cuda_choices())
    trace = step.run(precision=precision, record_operators=True, context=context, **how)
    return {call.name for call in trace.operators}


def test_attention_in_float32_is_memory_efficient() -> None:
    """The CPU builds the matrix of scores where there is dropout."""
    efficient = "aten._scaled_dot_product_efficient_attention.default"
    assert efficient in operators()
    assert efficient not in operators(context=None)


def test_attention_in_half_precision_is_flash() -> None:
    """Without a mask; the widths of heads are at most 256."""
    flash = "aten._scaled_dot_product_flash_attention.default"
    assert flash in operators("16-true")
    assert flash not in operators("16-true", head_dim=264)


def test_attention_that_no_fused_kernel_takes_is_spelled_out() -> None:
    """Rows of heads that are not aligned."""
    assert not any("efficient" in name or "flash" in name for name in operators(head_dim=15))


def test_no_score_matrix_is_kept() -> None:
    """Which is what it is all about: 2 x 2 x 512 x 512 floats."""
    step = FakeStep(Attention(), torch.zeros(2, 512, 32))
    plain, fused = step.run(), step.run(context=lambda _: cuda_choices())
    assert plain.peak_bytes - fused.peak_bytes > 2 * 2 * 512 * 512 * 4


@pytest.mark.parametrize("mask_type", [torch.bool, torch.float32])
def test_a_mask_is_padded_to_aligned_rows(mask_type: torch.dtype) -> None:
    """61 columns become 64."""
    with fake_mode(), cuda_choices():
        inputs = [torch.empty(2, 2, 61, 16, requires_grad=True) for _ in range(3)]
        mask = torch.ones(61, 61, dtype=mask_type)
        result = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
        result.sum().backward()
    assert "Efficient" in type(result.grad_fn).__name__
    assert result.shape == (2, 2, 61, 16)


def test_dropout_keeps_one_byte_per_element() -> None:
    """The CPU keeps a mask as wide as the elements."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5))
    step = FakeStep(module, torch.zeros(128, 64))
    kept = {
        name: [e.num_bytes for e in step.run(context=context).events if e.phase == "forward"]
        for name, context in (("cpu", None), ("cuda", lambda _: cuda_choices()))
    }
    assert 128 * 64 in kept["cuda"]
    assert 128 * 64 not in kept["cpu"]


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_at_its_ends(p: float) -> None:
    """Nothing is kept where nothing is dropped."""
    with fake_mode(), cuda_choices():
        x = torch.empty(3, requires_grad=True)
        assert (F.dropout(x, p) is x) == (p == 0)


def test_real_tensors_keep_their_kernels() -> None:
    """Numbers of another thread do not change while an estimate runs."""
    x = torch.randn(2, 2, 8, 16, requires_grad=True)
    torch.manual_seed(0)
    expected = F.dropout(x, 0.5), F.scaled_dot_product_attention(x, x, x)
    torch.manual_seed(0)
    with cuda_choices():
        got = F.dropout(x, 0.5), F.scaled_dot_product_attention(x, x, x)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_follows_the_rules_of_cuda(dtype: torch.dtype) -> None:
    """Norms, softmax, powers and sums in float32; products and what follows them in half."""
    with fake_mode(), cuda_autocast(dtype):
        half = torch.empty(4, 8) @ torch.empty(8, 8)
        assert half.dtype is dtype
        assert F.gelu(half).dtype is dtype
        wide = [
            F.layer_norm(half, (8,)),
            F.group_norm(half, 2),
            half.softmax(-1),
            half.log_softmax(-1),
            half.sum(),
            half.sum(0),
            half.pow(2),
            half.exp(),
            F.cross_entropy(half, torch.zeros(4, dtype=torch.int64)),
        ]
        assert {value.dtype for value in wide} == {torch.float32}
        assert half.sum(dtype=torch.float64).dtype is torch.float64


def test_autocast_leaves_no_trace() -> None:
    """The CPU's rules come back."""
    with fake_mode(), cuda_autocast(torch.bfloat16):
        pass
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = torch.ones(4, 8) @ torch.ones(8, 8)
        assert F.layer_norm(half, (8,)).dtype is torch.bfloat16


def test_checkpointed_blocks_cast_the_same_in_the_backward() -> None:
    """A power is computed in float32 on CUDA, in bfloat16 on the CPU: also in the recomputation."""

    class Power(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x).pow(3.0))

    module = torch.nn.Sequential(Power(), Power())
    how = settings_on(parse_target("cuda"), "bf16-mixed")

    trace = FakeStep(module, torch.zeros(4, 8)).run(
        transform=lambda clone: install(clone, ["0", "1"]), optimizer=torch.optim.SGD, **how
    )

    assert trace.peak_bytes > 0


def test_optimizers_step_in_groups_where_torch_would() -> None:
    """A choice of the user stays."""
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    free = torch.optim.Adam(parameters)
    bound = torch.optim.Adam(parameters, foreach=False)
    fused = torch.optim.Adam(parameters, fused=True)
    other = torch.optim.LBFGS(parameters)
    use_foreach([free, bound, fused, other])
    chosen = [o.param_groups[0].get("foreach") for o in (free, bound, fused, other)]
    assert chosen == [True, False, None, None]

"""``memory_limit``: where it refuses, and what it counts."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.memory import read_memory, reset_peak
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.testing import memory_limit
from lightning_oom.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_oom.testing import MemoryLimit


def limited(limit: int | str) -> MemoryLimit:
    """A limit on the CPU, also on a machine with a GPU."""
    return memory_limit(limit, device="cpu")


@pytest.mark.parametrize(("limit_bytes", "refused"), [(4095, 1), (4096, 0), (4097, 0)])
def test_the_limit_itself_may_be_reached(limit_bytes: int, refused: int) -> None:
    """An allocation is refused when it would pass the limit, not when it reaches it."""
    with limited(limit_bytes) as limit:
        try:
            kept = torch.zeros(1024)
        except OutOfMemoryError:
            kept = None

        assert limit.num_refused == refused
        assert limit.live_bytes == (0 if kept is None else 4096)
        assert limit.peak_bytes == limit.live_bytes


def test_what_is_freed_can_be_had_again() -> None:
    """Bytes count from the allocation to the death of the last view."""
    with limited(6 * KIB) as limit:
        first = torch.zeros(1024)
        view = first[10:20]
        del first
        assert limit.live_bytes == 4096
        del view
        assert limit.live_bytes == 0
        torch.zeros(1024)

    assert limit.peak_bytes == 4096


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda x: x.view(2, 512).t()[0], id="view"),
        pytest.param(lambda x: x.mul_(2).add_(1), id="in place"),
        pytest.param(lambda x: torch.add(x, x, out=x), id="out"),
        pytest.param(lambda x: x.resize_(512), id="smaller"),
        pytest.param(lambda x: torch._foreach_add_([x], 1.0), id="foreach in place"),
        pytest.param(lambda x: x.detach().requires_grad_(), id="detach"),
        pytest.param(lambda x: x.numpy(), id="numpy"),
        pytest.param(lambda x: float(x[0]), id="item"),
        pytest.param(nn.Parameter, id="parameter"),
    ],
)
def test_what_allocates_nothing_counts_nothing(use: Callable[[torch.Tensor], Any]) -> None:
    """Views, in-place operators and outputs with room add no bytes."""
    with limited(4 * KIB) as limit:
        kept = torch.zeros(1024)
        result = use(kept)

        assert (limit.live_bytes, limit.num_refused) == (4096, 0)
    del result


@pytest.mark.parametrize(
    "grow",
    [
        pytest.param(lambda x: x.resize_(2048), id="tensor"),
        pytest.param(lambda x: x.untyped_storage().resize_(8192), id="storage"),
        pytest.param(lambda x: x.resize_as_(torch.empty(2048, device="meta")), id="resize_as"),
    ],
)
def test_growth_in_place_is_counted_and_refused(grow: Callable[[torch.Tensor], Any]) -> None:
    """A storage that grows counts what it holds; one that may not is left as it was."""
    with limited(8 * KIB) as limit:
        tensor = torch.ones(1024)
        grow(tensor)
        assert limit.live_bytes == 8192
        del tensor

        tensor = torch.ones(1024)
        other = torch.ones(512)
        with pytest.raises(OutOfMemoryError):
            grow(tensor)

        assert tensor.shape == (1024,)
        assert tensor.untyped_storage().nbytes() == 4096
        assert bool((tensor == 1).all())
        del other
    assert limit.live_bytes == 4096


def test_an_output_that_has_to_grow_is_counted() -> None:
    """``out=`` with an empty tensor allocates; refused, the tensor is empty again."""
    with limited(4 * KIB) as limit:
        out = torch.empty(0)
        torch.arange(512, out=out)
        assert limit.live_bytes == 2048

        out = torch.empty(0)
        with pytest.raises(OutOfMemoryError):
            torch.arange(4096, out=out)
        assert out.shape == (0,)
    assert "resize_" not in vars(torch.UntypedStorage)


def test_what_existed_before_counts_once_it_is_registered() -> None:
    """Modules, optimizers and tensors are counted once each, shared storages too."""
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    limit = limited("1 MiB")

    weights = 256 * 256 * 4

    assert limit.register(model) == 2 * weights  # and its gradient
    assert limit.register(optimizer, {"again": [model.weight]}) == weights
    assert limit.live_bytes == limit.peak_bytes == 3 * weights
    with limit, pytest.raises(OutOfMemoryError):
        torch.zeros(256, 256 + 1)


def test_a_refusal_keeps_nothing_alive() -> None:
    """Neither the refused tensor nor the operands live on while the error is handled."""
    with limited(8 * KIB) as limit:
        with pytest.raises(OutOfMemoryError) as caught:
            torch.zeros(512).add(1).repeat(5)

        assert limit.num_refused == 1
        assert limit.live_bytes == 0
    del caught


def test_the_error_reads_like_that_of_cuda() -> None:
    """Its class and its text are CUDA's, with the numbers of the limit."""
    with limited("1 MiB"):
        kept = torch.zeros(64 * KIB)
        with pytest.raises(OutOfMemoryError, match=r"^CUDA out of memory\. Tried") as caught:
            torch.zeros(1024, 1024)
        del kept

    cause = classify_oom(caught.value)

    assert cause is not None
    assert cause.scope == "device"
    assert cause.requested_bytes == 4 * MIB
    assert cause.limit_bytes == MIB
    assert cause.free_bytes == 768 * KIB
    assert cause.allocated_bytes == 256 * KIB


def test_a_backward_pass_can_run_out_alone() -> None:
    """What the forward pass fits into, the backward pass may not."""
    x = torch.ones(64, 256)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    with limited(200 * KIB) as limit:
        loss = model(x).sum()
        before = limit.num_refused
        with pytest.raises(OutOfMemoryError, match="operator aten"):
            loss.backward()

    assert (before, limit.num_refused) == (0, 1)


def test_sparse_gradients_are_counted() -> None:
    """Indices and values of a sparse tensor are storages like others."""
    table = nn.Embedding(100, 64, sparse=True)
    with limited("1 MiB") as limit:
        before = limit.live_bytes
        table(torch.arange(50)).sum().backward()

        assert limit.live_bytes - before >= 50 * 64 * 4
        table.zero_grad()
        gc.collect()
        assert limit.live_bytes < 50 * 64 * 4


def _foreach_calls() -> dict[str, Callable[[list[torch.Tensor]], Any]]:
    return {
        "add": lambda xs: torch._foreach_add_(xs, 1.0),
        "mul": lambda xs: torch._foreach_mul_(xs, 2.0),
        "sqrt": torch._foreach_sqrt_,
        "copy": lambda xs: torch._foreach_copy_(xs, [x + 1 for x in xs]),
        "zero": torch._foreach_zero_,
        "lerp": lambda xs: torch._foreach_lerp_(xs, [x + 1 for x in xs], 0.5),
        "addcdiv": lambda xs: torch._foreach_addcdiv_(xs, xs, [x + 1 for x in xs], 0.5),
        "one by one": lambda xs: [x.add_(1) for x in xs],
    }


@pytest.mark.parametrize("name", _foreach_calls())
def test_autograd_hears_of_changes_in_place_as_without_a_limit(name: str) -> None:
    """Version counters move under the mode exactly as they move without one."""
    change = _foreach_calls()[name]

    def versions(*, under_limit: bool) -> list[int]:
        tensors = [torch.ones(3), torch.ones(2)]
        if under_limit:
            with limited("1 MiB"):
                change(tensors)
        else:
            change(tensors)
        return [tensor._version for tensor in tensors]

    assert versions(under_limit=True) == versions(under_limit=False)
    assert versions(under_limit=True)[0] >= 1


def test_inference_tensors_pass() -> None:
    """Tensors without a version counter are changed in place as without a limit."""
    with torch.inference_mode():
        tensors = [torch.zeros(3), torch.zeros(2)]
        with limited("1 MiB"):
            torch._foreach_add_(tensors, 1.0)

    assert [tensor.sum().item() for tensor in tensors] == [3.0, 2.0]


def test_collectives_allocate_nothing() -> None:
    """A collective returns its input: it is not counted."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        tensor = torch.ones(1024)
        with limited("1 MiB") as limit:
            torch.distributed.all_reduce(tensor)
            torch.distributed.broadcast(tensor, src=0)
            assert limit.peak_bytes == 0
    finally:
        torch.distributed.destroy_process_group()


def test_other_threads_are_not_limited() -> None:
    """The limit holds for this thread and the backward passes that it starts."""
    made: list[torch.Tensor] = []
    with limited("1 KiB"):
        thread = threading.Thread(target=lambda: made.append(torch.zeros(4096)))
        thread.start()
        thread.join()

    assert len(made) == 1


def test_limits_can_be_nested_and_the_smaller_one_refuses() -> None:
    """Each limit counts for itself; the reading shows the inner one."""
    with limited("1 MiB") as outer:
        kept = torch.zeros(1024)
        with limited("8 KiB") as inner:
            assert read_memory("cpu").limit_bytes == 8 * KIB
            with pytest.raises(OutOfMemoryError):
                torch.zeros(4096)
            assert (inner.num_refused, outer.num_refused) == (1, 0)
        assert read_memory("cpu").limit_bytes == MIB
        assert outer.live_bytes == 4096
    del kept


def test_a_limit_is_entered_once_at_a_time() -> None:
    """Entering an active limit is an error; entering it again later is not."""
    limit = limited("1 MiB")
    with limit, pytest.raises(RuntimeError, match="already active"), limit:
        pass
    with limit:
        torch.zeros(10)


def test_readings_show_an_active_limit() -> None:
    """``read_memory`` and ``reset_peak`` speak of the limit while it is active, and not after."""
    physical = read_memory("cpu").limit_bytes
    with limited("1 MiB"):
        kept = torch.zeros(1024)
        torch.zeros(2048)
        reading = read_memory("cpu")
        assert reading.allocated_bytes == 4096
        assert reading.peak_allocated_bytes == 4096 + 8192
        assert reading.headroom_bytes == MIB - 4096 - 8192
        assert reading.free_bytes == MIB - 4096
        reset_peak("cpu")
        assert read_memory("cpu").peak_allocated_bytes == 4096
    del kept

    after = read_memory("cpu")

    assert (after.limit_bytes, after.peak_allocated_bytes) == (physical, None)


@pytest.mark.parametrize("limit", [0, "0 MiB", -1, "64 MB", "much", None])
def test_a_limit_without_sense_is_refused(limit: Any) -> None:
    """A limit is an amount of memory above 0."""
    with pytest.raises(ValueError, match=r"amount of memory|unknown unit|above 0"):
        memory_limit(limit, device="cpu")


def test_a_device_that_is_not_there_is_refused() -> None:
    """The message names the device."""
    if torch.xpu.is_available():
        pytest.skip("this machine has an XPU")
    with pytest.raises(ValueError, match="xpu is not available"):
        memory_limit("1 MiB", device="xpu")

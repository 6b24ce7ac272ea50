"""What is known about torch's optimizers is what they do."""

from __future__ import annotations

import pytest
import torch
from optimizer_trainings import OPTIMIZERS, Training

from lightning_oom.recovery.update_kinds import find_kind, num_bytes
from lightning_oom.testing import memory_limit

EQUAL_SHAPES = tuple((64, 64) for _ in range(8))
EQUAL_BYTES = 64 * 64 * 4
SCALARS_BYTES = 1024


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("step", [0, 1])
def test_what_a_step_needs_is_known(name: str, step: int) -> None:
    """The estimate is no less than what is measured, and at most twice as much."""
    kind, options = OPTIMIZERS[name]
    running = Training(kind, options, shapes=EQUAL_SHAPES).start()
    for _ in range(step + 1):
        running.make_gradients()
        needed_bytes = running.guard._needed_bytes()
        with memory_limit("1 GiB", device="cpu") as limit:
            running.optimizer.step()
    slack = 2 * EQUAL_BYTES  # what the parameter before has left, and scalars
    assert limit.peak_bytes <= needed_bytes + SCALARS_BYTES
    assert needed_bytes <= 2 * limit.peak_bytes + slack


def test_every_optimizer_of_torch_is_known() -> None:
    """Each class that updates in one go has an entry, so that a new one is noticed."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    unknown = set()
    for name in dir(torch.optim):
        kind = getattr(torch.optim, name)
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            continue
        if kind not in (torch.optim.Optimizer, torch.optim.LBFGS):
            known = find_kind(kind([weight], lr=0.1))
            if known is find_kind(torch.optim.LBFGS([weight])):
                unknown.add(name)
    assert unknown == set()


def test_a_sparse_gradient_has_the_bytes_of_its_parts() -> None:
    """Indices and values count, not the shape."""
    places = torch.tensor([[0, 2]])
    sparse = torch.sparse_coo_tensor(places, torch.ones(2, 4), (100, 4), check_invariants=True)
    assert num_bytes(sparse) == 2 * 8 + 8 * 4

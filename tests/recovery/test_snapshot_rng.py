# ruff: noqa: NPY002, S311 - the global generators are what is tested
"""Random state: put back exactly, several times, at the cost of a few microseconds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_oom.recovery.snapshot import RandomState, mersenne


def draws() -> list[float]:
    """One number of each kind that a step may draw, cached Gaussians too."""
    return [
        random.random(),
        random.gauss(0.0, 1.0),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def test_every_generator_repeats_after_restore() -> None:
    """The same numbers come again, after each of several restores."""
    saved = RandomState().take()
    first = draws()

    for _ in range(3):
        assert saved.restore() == ()
        assert draws() == first


def test_a_cached_gaussian_belongs_to_the_state() -> None:
    """Python and numpy draw Gaussians in pairs; the second of a pair moves no word of the twister."""
    random.gauss(0.0, 1.0)
    np.random.randn()
    saved = RandomState().take()
    second = random.gauss(0.0, 1.0), np.random.randn()

    saved.restore()

    assert (random.gauss(0.0, 1.0), np.random.randn()) == second


def test_reading_does_not_draw() -> None:
    """Taking a snapshot leaves the state of every generator as it was."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()

    RandomState().take()

    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_bytes_of_the_twisters_are_where_they_are_expected() -> None:
    """On this interpreter and numpy the fast way is used."""
    assert isinstance(mersenne.read_python()[0], bytes)
    assert isinstance(mersenne.read_numpy()[0], bytes)


def test_slow_states_are_understood_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the layout is not known the public functions serve."""
    monkeypatch.setattr(mersenne, "_python_layout_known", lambda: False)
    monkeypatch.setattr(mersenne, "_numpy_layout_known", lambda: False)
    saved = RandomState().take()
    first = draws()

    saved.restore()

    assert draws() == first


def test_another_bit_generator_is_read_by_its_own_state() -> None:
    """``numpy.random.set_bit_generator`` may have put something else than a Mersenne Twister."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        saved = RandomState().take()
        first = np.random.rand()
        saved.restore()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(before)


def test_devices_without_random_state_are_left_out() -> None:
    """The host counts once, and a backend that draws nothing of its own not at all."""
    assert RandomState(["cpu", "cpu", "meta"]).take().restore() == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_state_of_a_cuda_device_repeats() -> None:
    """Its sibling without a GPU is :func:`test_every_generator_repeats_after_restore`."""
    torch.zeros(1, device="cuda")
    saved = RandomState(["cuda:0"]).take()
    first = torch.rand(4, device="cuda:0")

    saved.restore()

    assert torch.equal(torch.rand(4, device="cuda:0"), first)

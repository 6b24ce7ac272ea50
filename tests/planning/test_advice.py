"""Advice: what is planted in a model is found, with a figure that the changed model confirms."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_oom.planning.advice import advise
from lightning_oom.planning.advice.copies import CopyWatch
from lightning_oom.planning.fake_step import FakeStep, trace_step
from lightning_oom.reduction.drop_ins import (
    chunked_cross_entropy,
    replace_with_separable,
    tie_weights,
)


class Planted(nn.Module):
    """Copies, as people make them."""

    def __init__(self, *, needless: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.needless = needless

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Clone, transpose twice, and change the dtype and back."""
        x = self.first(x)
        if self.needless:
            x = x.clone()  # line A
            x = (x * 2).t().contiguous().t()  # line B
            x = x.double().float() * x  # line C
        else:
            x = (x * 2) * (x * 2)
        return self.second(x).tanh()


class Language(nn.Module):
    """A model whose output layer and attention outweigh the rest."""

    def __init__(self, *, vocabulary: int = 9000, chunked: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.head = nn.Linear(16, vocabulary, bias=False)
        self.chunked = chunked

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Predict each token from itself."""
        hidden = self.embedding(tokens)
        if self.chunked:
            return chunked_cross_entropy(hidden, self.head.weight, tokens)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Attention(nn.Module):
    """Attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Weigh values by the softmax of scores."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def entries(module, batch, **how):
    """Title -> entry."""
    found = advise(module, batch, optimizer=torch.optim.AdamW, device="cpu", **how)
    return found, {entry.title: entry for entry in found.entries}


def peak(module, batch, **how):
    """Peak of the fake step."""
    return trace_step(module, batch, optimizer=torch.optim.AdamW, **how).peak_bytes


def language_loss(module, batch):
    """The loss of a :class:`Language`."""
    return module.loss(batch)


def test_each_planted_copy_is_found_with_its_line_and_bytes():
    """Clone, contiguous and dtype changes, each where it stands; 128 KiB or 256 KiB each."""
    watch = CopyWatch()
    trace = FakeStep(Planted(needless=True), torch.zeros(512, 64)).run(
        context=watch.watching, record_operators=True
    )

    lines = {line.what: line for line in watch.lines(trace)}

    assert set(lines) == {
        "copies a tensor",
        "makes a tensor contiguous",
        "changes the dtype or device of a tensor",
    }
    first = min(int(line.place.rpartition(":")[2]) for line in lines.values())
    assert all(line.place.startswith(__file__) for line in lines.values())
    assert int(lines["makes a tensor contiguous"].place.rpartition(":")[2]) == first + 1
    assert len(lines["copies a tensor"].storages) == 2  # one a step


def test_a_model_without_copies_has_no_such_advice():
    """No false alarm; and the advice of the planted one is what leaving the line out saves."""
    found, _ = entries(Planted(needless=False), torch.zeros(512, 64))

    assert not [entry for entry in found.entries if entry.title.startswith("a line that")]


def test_a_large_vocabulary_is_advised_to_run_in_chunks_and_the_figure_holds():
    """The recount is within 10 % of a dry run of the rewritten model."""
    tokens = torch.zeros(8, 256, dtype=torch.long)
    _, by_title = entries(Language(), tokens, loss=language_loss)

    entry = by_title["cross-entropy of 9,000 classes in chunks"]

    real = peak(Language(chunked=True), tokens, loss=language_loss)
    assert entry.peak_bytes == pytest.approx(real, rel=0.1)
    assert entry.basis == "recount"


def test_equal_tables_are_advised_to_be_tied_and_tied_ones_are_not():
    """The dry run is that of the tied model."""
    tokens = torch.zeros(2, 8, dtype=torch.long)
    _, by_title = entries(Language(), tokens, loss=language_loss)
    entry = by_title["tie two weights of equal shape"]
    tied = Language()
    tie_weights(tied, ["embedding.weight", "head.weight"])

    _, of_tied = entries(tied, tokens, loss=language_loss)

    assert entry.peak_bytes == peak(tied, tokens, loss=language_loss)
    assert entry.effect == "another model"
    assert "tie two weights of equal shape" not in of_tied


def test_large_convolutions_are_advised_to_be_separable():
    """Small ones are not; the figure is that of the replaced model."""
    model = nn.Sequential(nn.Conv2d(3, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3))
    image = torch.zeros(1, 3, 8, 8)
    _, by_title = entries(model, image)
    entry = by_title["depthwise-separable convolutions"]
    replaced = nn.Sequential(nn.Conv2d(3, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3))
    replace_with_separable(replaced, "2")

    assert entry.place == "1 convolutions, 2 to 2"
    assert entry.peak_bytes == peak(replaced, image)


def test_attention_that_is_written_out_is_found():
    """Scores and weights of 128 x 128 are most of this step."""
    _, by_title = entries(Attention(), torch.zeros(8, 128, 32))

    entry = by_title["attention without its score matrix"]

    assert entry.effect == "rounding"
    assert entry.saved_bytes > 8 * 128 * 128 * 4


def test_half_the_rows_are_a_dry_run_with_accumulation():
    """As is every other setting of the step."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    _, by_title = entries(model, torch.zeros(1024, 64))

    entry = by_title["run 512 rows at a time and accumulate"]

    assert entry.peak_bytes == peak(model, torch.zeros(1024, 64), rows=512, accumulate=2)


def test_fewer_rows_change_the_numbers_of_batch_normalisation():
    """OOMRecovery would refuse to split such a batch, so it is not named."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    _, by_title = entries(model, torch.zeros(1024, 64))

    entry = by_title["run 512 rows at a time and accumulate"]

    assert entry.effect == "other numbers"
    assert "OOMRecovery" not in entry.how
    assert "batch normalisation" in entry.cost


def test_manual_optimization_is_not_advised_what_stands_aside_there():
    """Neither accumulation nor an early zero_grad."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model.automatic_optimization = False
    found, _ = entries(model, torch.zeros(1024, 64))

    assert not any("GradientAccumulation" in entry.how for entry in found.entries)
    assert not any("EarlyZeroGrad" in entry.how for entry in found.entries)


def test_frozen_weights_and_optimizer_state_are_counted_in_fewer_bits():
    """Half of what is frozen; a quarter of what Adam holds, and the block scales."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    model[0].requires_grad_(requires_grad=False)
    found, by_title = entries(model, torch.zeros(2, 512))
    weights = 512 * 512 * 4

    frozen, state = by_title["frozen weights in 16 bits"], by_title["optimizer state in 8 bits"]

    assert frozen.saved_bytes == pytest.approx(weights / 2, rel=0.02)
    assert state.saved_bytes == pytest.approx(2 * weights * 0.746, rel=0.02)
    assert found.peak_bytes > 0


def test_only_what_saves_a_hundredth_is_shown_and_exact_advice_comes_first():
    """Order and threshold, on a model for which everything is possible."""
    found, _ = entries(Language(), torch.zeros(8, 256, dtype=torch.long), loss=language_loss)
    order = ["same numbers", "rounding", "other numbers", "another model"]

    effects = [order.index(entry.effect) for entry in found.entries]

    assert effects == sorted(effects)
    assert all(entry.saved_bytes >= 0.01 * found.peak_bytes for entry in found.entries)
    assert all(entry.saved_bytes == found.peak_bytes - entry.peak_bytes for entry in found.entries)


def test_on_a_gpu_the_optimizer_s_copies_are_seen():
    """The multi-tensor optimizer of CUDA holds a copy of all gradients; the CPU's does not."""
    model, batch = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), torch.zeros(2, 256)
    title = "an optimizer without copies of all gradients"

    on_gpu = advise(model, batch, optimizer=torch.optim.AdamW, device="cuda")
    on_host, _ = entries(model, batch)

    assert title in [entry.title for entry in on_gpu.entries]
    assert title not in [entry.title for entry in on_host.entries]


def test_advice_changes_nothing():
    """Weights, gradients and random state are as before."""
    model = Language()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()

    advise(model, torch.zeros(2, 8, dtype=torch.long), loss=language_loss)

    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_effective_batch_is_that_of_all_devices():
    """GradientAccumulation counts over ranks."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    _, by_title = entries(model, torch.zeros(1024, 64), num_devices=4)

    entry = by_title["run 512 rows at a time and accumulate"]

    assert "effective_batch_size=4096" in entry.how

"""Leaner parts: the chunked loss is the plain one, the others do what they say and can be undone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_oom.reduction.drop_ins import (
    chunked_cross_entropy,
    replace_with_separable,
    tie_weights,
)
from lightning_oom.testing import memory_limit


def tensors(*, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Make hidden states, an output layer of 37 classes, and targets of which two are ignored."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(37, (3, 7), generator=generator)
    target[0, :2] = -100
    return {
        "hidden": torch.randn(3, 7, 5, generator=generator, dtype=dtype, requires_grad=True),
        "weight": torch.randn(37, 5, generator=generator, dtype=dtype, requires_grad=True),
        "bias": torch.randn(37, generator=generator, dtype=dtype, requires_grad=True),
        "class_weight": torch.rand(37, generator=generator, dtype=dtype),
        "target": target,
    }


@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 21, 1000])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"class_weight": True}, {"smooth": True}])
def test_the_chunked_loss_is_the_plain_loss(tokens_per_chunk, reduction, options) -> None:
    """Value and gradients agree in float64, whatever the chunks, and with ignored tokens."""
    given = tensors()
    bias = given["bias"] if "bias" in options else None
    class_weight = given["class_weight"] if "class_weight" in options else None
    smoothing = 0.1 if "smooth" in options else 0.0
    wanted = [given["hidden"], given["weight"], *([bias] if bias is not None else [])]

    plain = functional.cross_entropy(
        functional.linear(given["hidden"], given["weight"], bias).flatten(0, 1),
        given["target"].flatten(),
        weight=class_weight,
        label_smoothing=smoothing,
        reduction=reduction,
    )
    chunked = chunked_cross_entropy(
        given["hidden"],
        given["weight"],
        given["target"],
        bias=bias,
        class_weight=class_weight,
        label_smoothing=smoothing,
        reduction=reduction,
        tokens_per_chunk=tokens_per_chunk,
    )

    torch.testing.assert_close(chunked, plain)
    torch.testing.assert_close(
        torch.autograd.grad(chunked, wanted), torch.autograd.grad(plain, wanted)
    )


def test_the_logits_of_the_batch_never_live() -> None:
    """A step whose logits alone exceed the limit passes."""
    hidden = torch.randn(1024, 16, requires_grad=True)
    weight = torch.randn(2000, 16, requires_grad=True)
    target = torch.randint(2000, (1024,))
    with memory_limit("4 MiB"):  # the logits are 7.8 MiB
        chunked_cross_entropy(hidden, weight, target, tokens_per_chunk=64).backward()
    with memory_limit("4 MiB"), pytest.raises(RuntimeError, match="out of memory"):
        functional.cross_entropy(hidden @ weight.T, target)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens_per_chunk": 0}, "tokens_per_chunk is at least 1, got 0"),
        ({"label_smoothing": 2.0}, r"label_smoothing is in \[0, 1\], got 2.0"),
        ({"reduction": "none"}, "reduction is 'mean' or 'sum', got 'none'"),
        ({"target": torch.zeros(3, dtype=torch.long)}, r"target \(\*\); got"),
    ],
)
def test_what_cannot_be_meant_is_said(change, text) -> None:
    """Wrong arguments are named with their range."""
    given = {name: tensors()[name] for name in ("hidden", "weight", "target")}
    with pytest.raises(ValueError, match=text):
        chunked_cross_entropy(**{**given, **change})


class Tied(nn.Module):
    """An embedding and a head that could share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give logits."""
        return self.head(self.embedding(tokens))


def test_tied_weights_are_one_parameter_with_both_gradients() -> None:
    """One parameter less, keys as before, the gradient is the sum; the undo gives both back."""
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.randint(11, (6,))
    model(tokens).square().sum().backward()

    undo = tie_weights(model, ["embedding.weight", "head.weight"])

    assert len(list(model.parameters())) == 1
    assert model.state_dict().keys() == before.keys()
    torch.testing.assert_close(model.head.weight, before["embedding.weight"])
    undo()
    undo()
    assert len(list(model.parameters())) == 2
    torch.testing.assert_close(dict(model.state_dict()), before)


def test_the_undo_leaves_what_somebody_else_has_put_there() -> None:
    """A parameter that was exchanged after the tying stays."""
    model = Tied()
    undo = tie_weights(model, ["embedding.weight", "head.weight"])
    model.head.weight = other = nn.Parameter(torch.ones(11, 4))

    undo()

    assert model.head.weight is other


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["embedding.weight"], "two or more different names"),
        ("head.weight", "two or more different names"),
        (["embedding.weight", "tail.weight"], "no parameter 'tail.weight'"),
        (["embedding.weight", "head.in_features"], "'head.in_features' is not a parameter"),
        (["embedding.weight", "norm.weight"], "only equal ones can be tied"),
    ],
)
def test_only_equal_parameters_are_tied(names, text) -> None:
    """The message names what is wrong; nothing is changed."""
    model = Tied()
    model.norm = nn.LayerNorm(3)
    with pytest.raises(ValueError, match=text):
        tie_weights(model, names)
    assert len(list(model.parameters())) == 4


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(6, 10, 3, stride=2, padding=1), (2, 6, 12)),
        (nn.Conv2d(6, 10, (3, 5), padding="same", padding_mode="reflect"), (2, 6, 9, 9)),
        (nn.Conv2d(6, 10, 3, dilation=2, bias=False), (2, 6, 9, 9)),
        (nn.Conv3d(6, 10, 2), (1, 6, 4, 4, 4)),
    ],
)
def test_a_separable_layer_gives_the_same_shape_from_fewer_weights(layer, shape) -> None:
    """Also: no random number is drawn, and the undo brings the very layer back."""
    model = nn.Sequential(layer, nn.ReLU())
    random_state = torch.get_rng_state()

    undo = replace_with_separable(model, "0")

    assert torch.equal(torch.get_rng_state(), random_state)
    assert model(torch.ones(shape)).shape == layer(torch.ones(shape)).shape
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in layer.parameters())
    undo()
    assert model[0] is layer


def test_a_layer_that_is_separable_already_is_met_exactly() -> None:
    """A convolution made from one filter per channel and a mix of channels is recovered."""
    depth, mix = torch.randn(6, 1, 3, 3), torch.randn(10, 6, 1, 1)
    layer = nn.Conv2d(6, 10, 3)
    layer.weight.data.copy_(mix * depth.transpose(0, 1))
    model = nn.Sequential(layer)
    image = torch.randn(2, 6, 8, 8)
    expected = layer(image)

    replace_with_separable(model, "0")

    torch.testing.assert_close(model(image), expected, atol=1e-5, rtol=1e-4)


def test_frozen_layers_stay_frozen_and_fresh_ones_are_drawn() -> None:
    """What was frozen, in evaluation mode, and of another dtype stays so."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3)).double().eval()
    model.requires_grad_(requires_grad=False)

    replace_with_separable(model, "0", initialize="fresh")

    assert not model[0].training
    assert all(p.dtype == torch.float64 and not p.requires_grad for p in model.parameters())
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("1", "'1' is not a convolution"),
        ("", "'' is not a convolution"),
        ("2", "nothing to separate: groups=4"),
        ("3", "nothing to separate: groups=1"),
    ],
)
def test_only_full_convolutions_are_replaced(name, text) -> None:
    """Grouped and pointwise convolutions, and other layers, are refused by name."""
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 1)
    )
    with pytest.raises(ValueError, match=text):
        replace_with_separable(model, name)
    with pytest.raises(ValueError, match="initialize is"):
        replace_with_separable(model, "0", initialize="magic")

"""A model whose blocks are checkpointed trains as without: the same bits, names and random state."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from checkpoint_cases import CASES, Net, batches, end_of_training, layers, make
from torch import nn

from lightning_oom.errors import CheckpointingWarning
from lightning_oom.reduction.checkpointing import CheckpointedForward, find_blocks, install


def checkpointed(case: str) -> nn.Module:
    """The model of a case with all of its blocks checkpointed."""
    model = make(case)
    blocks = find_blocks(model)
    assert len(blocks) > 1
    install(model, [block.path for block in blocks])
    return model


class Counted(nn.Module):
    """Counts its calls; passes on whatever it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *args, **kwargs):
        """Call the inner module."""
        self.calls += 1
        return self.inner(*args, **kwargs)


def assert_same(one: dict, other: dict) -> None:
    """Compare two ends of training bit by bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_training_ends_with_the_same_bits(case: str) -> None:
    """Losses, weights, buffers and the random state are those of the plain run."""
    data = batches(case, 3)

    plain, ours = end_of_training(make(case), data), end_of_training(checkpointed(case), data)

    if case == "gpt2, cache":  # a cache, which is not used, rounds differently
        plain = end_of_training(make("gpt2"), data)
    if case == "t5":  # the position bias gathers its gradients in another order
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    else:
        assert_same(ours, plain)


@pytest.mark.parametrize("case", ["mlp", "cnn", "gpt2"])
def test_accumulated_gradients_are_the_same(case: str) -> None:
    """Two batches for one optimizer step."""
    data = batches(case, 4)
    plain = end_of_training(make(case), data, accumulate=2)
    assert_same(end_of_training(checkpointed(case), data, accumulate=2), plain)


@pytest.mark.parametrize("case", ["mlp", "cnn", "bert"])
def test_autocast_is_the_same_in_the_recomputation(case: str) -> None:
    """Under bfloat16 autocast, entered for the forward only."""

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    data = batches(case, 2)
    plain = end_of_training(make(case), data, loss=loss)
    assert_same(end_of_training(checkpointed(case), data, loss=loss), plain)


@pytest.mark.parametrize("case", ["cnn", "cnn, cumulative", "spectral norm"])
def test_a_forward_without_a_backward_updates_buffers_once(case: str) -> None:
    """As where a loss is only looked at in train mode."""
    plain, ours = make(case), checkpointed(case)
    for batch in batches(case, 2):
        plain(batch), ours(batch)
    assert_same(dict(ours.state_dict()), dict(plain.state_dict()))


def test_two_walks_over_one_graph_see_the_same_buffers() -> None:
    """Spectral norm iterates in each forward: a second recomputation starts where the first did."""
    (batch,) = batches("spectral norm", 1)
    gradients = []
    for model in make("spectral norm"), checkpointed("spectral norm"):
        loss = model(batch)
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_same(*gradients)


def test_double_backward_is_the_same() -> None:
    """A gradient penalty."""

    def penalty(model, batch):
        batch = batch.clone().requires_grad_()
        loss = model(batch)
        (gradient,) = torch.autograd.grad(loss, batch, create_graph=True)
        return loss + gradient.square().sum()

    data = batches("mlp", 2)
    plain = end_of_training(make("mlp"), data, loss=penalty)
    assert_same(end_of_training(checkpointed("mlp"), data, loss=penalty), plain)


@pytest.mark.parametrize("modes", ["first frozen", "later frozen"])
def test_layers_that_change_mode_are_followed(modes: str) -> None:
    """A BatchNorm that was in eval mode at first updates its statistics once when it trains."""

    def run(model: nn.Module) -> dict:
        ends = {}
        for index, batch in enumerate(batches("cnn", 3)):
            frozen = (index == 0) == (modes == "first frozen")
            model.blocks[1].inner[1].train(not frozen)
            ends[index] = end_of_training(model, [batch])
        return ends

    assert_same(run(checkpointed("cnn")), run(make("cnn")))


def test_a_buffer_that_changes_late_is_changed_once_and_said() -> None:
    """What no earlier forward has changed is found by its version."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))
            self.is_late = False

        def forward(self, x):
            if self.is_late:
                self.count += 1
            return self.linear(x).tanh()

    block = Late()
    install(nn.ModuleDict({"block": block}), ["block"])
    x = torch.ones(2, 4)
    block(x).sum().backward()
    block.is_late = True
    with pytest.warns(CheckpointingWarning, match="'count' of a Late"):
        block(x).sum().backward()
    assert block.count == 1
    block(x).sum().backward()
    assert block.count == 2


def test_eval_mode_and_no_grad_run_plainly() -> None:
    """One call each, and a graph of the usual kind."""
    block = Counted(nn.Linear(4, 4))
    install(nn.ModuleDict({"block": block}), ["block"])
    with torch.no_grad():
        block(torch.ones(2, 4))
    block.eval()
    block(torch.ones(2, 4)).sum().backward()
    assert block.calls == 2
    block.train()
    block(torch.ones(2, 4)).sum().backward()
    assert block.calls == 4


def test_arguments_and_outputs_of_any_kind_pass_through() -> None:
    """Keyword arguments, dictionaries, strings and ``None``."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, *, mask=None, name="", extra=None):
            y = self.linear(x["x"]).tanh()
            return {"y": y if mask is None else y * mask, "name": name, "extra": (None, extra)}

    block = Odd()
    x = torch.ones(2, 4, requires_grad=True)
    plain = block({"x": x}, mask=torch.ones(4), name="odd")
    install(nn.ModuleDict({"block": block}), ["block"])
    out = block({"x": x}, mask=torch.ones(4), name="odd")
    assert out["name"], out["extra"] == ("odd", (None, None))
    assert_same(*(torch.autograd.grad(one["y"].sum(), x) for one in (plain, out)))


def test_shared_and_repeated_blocks_are_the_same() -> None:
    """One block called three times, and weights that two blocks share."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        first, second = layers(), layers()
        second.inner[0].weight = first.inner[0].weight
        return Net([first, second, first, first], nn.Linear(4, 8), nn.Linear(8, 2)).train()

    ours, data = build(), batches("mlp", 2)
    install(ours, [block.path for block in find_blocks(ours)])
    assert_same(end_of_training(ours, data), end_of_training(build(), data))


def test_names_classes_and_keys_stay() -> None:
    """Nothing is wrapped."""
    plain, ours = make("cnn"), checkpointed("cnn")
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in ours.named_modules()] == [n for n, _ in plain.named_modules()]
    assert list(map(type, ours.modules())) == list(map(type, plain.modules()))


@pytest.mark.parametrize("case", ["cnn", "gpt2"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_checkpoint_their_own_modules(way: str, case: str) -> None:
    """An EMA copy, a pickled and a saved module train like the plain one, apart from the original."""
    ours = checkpointed(case)
    if way == "deepcopy":
        copied = copy.deepcopy(ours)
    elif way == "pickle":
        copied = pickle.loads(pickle.dumps(ours))  # noqa: S301 our own bytes
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    state = copy.deepcopy(ours.state_dict())
    data = batches(case, 2)

    end = end_of_training(copied, data)

    assert_same(end, end_of_training(make(case), data))
    assert_same(dict(ours.state_dict()), dict(state))


def test_hooks_on_the_block_run_once() -> None:
    """Those of the user, forward and backward."""
    model, calls = checkpointed("mlp"), []
    model.blocks[0].register_forward_hook(lambda *_: calls.append("forward"))
    model.blocks[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    model(batches("mlp", 1)[0]).backward()
    assert calls == ["forward", "backward"]


def test_the_undo_leaves_nothing_behind() -> None:
    """Every module's own dictionary is as before, and training as without."""
    for case in "cnn", "gpt2":
        model, data = make(case), batches(case, 2)
        before = [dict(vars(module)) for module in model.modules()]
        undo = install(model, [block.path for block in find_blocks(model)])
        undo()
        undo()
        assert [vars(module).keys() for module in model.modules()] == [own.keys() for own in before]
        assert_same(end_of_training(model, data), end_of_training(make(case), data))


def test_what_others_put_over_ours_stays() -> None:
    """A forward that was replaced after us is not clobbered, and ours below it does nothing more."""
    block = Counted(nn.Linear(4, 4))
    root = nn.ModuleDict({"block": block})
    undo = install(root, ["block"])
    ours = block.forward
    block.forward = lambda x: ours(x) * 2
    theirs = vars(block)["forward"]

    undo()
    block(torch.ones(2, 4)).sum().backward()

    assert vars(block)["forward"] is theirs
    assert block.calls == 1


def test_a_forward_of_the_instance_is_kept() -> None:
    """Somebody who patched before us is called, and comes back with the undo."""
    block = nn.Linear(4, 4)
    block.forward = lambda x: type(block).forward(block, x) * 2
    theirs, x = vars(block)["forward"], torch.ones(2, 4)
    expected = block(x)
    undo = install(nn.ModuleDict({"block": block}), ["block"])
    assert isinstance(vars(block)["forward"], CheckpointedForward)
    assert torch.equal(block(x), expected)
    undo()
    assert vars(block)["forward"] is theirs


def test_an_unknown_path_changes_nothing() -> None:
    """What was installed before the error is taken off."""
    model = make("mlp")
    with pytest.raises(AttributeError):
        install(model, ["blocks.0", "blocks.9"])
    assert "forward" not in vars(model.blocks[0])


def test_transformers_use_no_cache_and_get_it_back() -> None:
    """``use_cache`` is not touched where the layers have a switch; evaluation has its cache."""
    model, (tokens,) = make("gpt2, cache"), batches("gpt2", 1)
    undo = install(model, [block.path for block in find_blocks(model)])
    assert model.inner.config.use_cache
    assert cache_of(model.inner(tokens)) is None
    assert cache_of(model.eval().inner(tokens)) is not None
    undo()
    assert cache_of(model.train().inner(tokens)) is not None


def cache_of(output):
    """The cache that a model of transformers returns, under whichever name."""
    return output.get("cache", output.get("past_key_values"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_checkpointed() -> None:
    """Compiled above the patch: the numbers of the plain compiled model."""
    torch.compiler.reset()
    (batch,) = batches("mlp", 1)
    ends = []
    for model in make("mlp"), checkpointed("mlp"):
        for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
            dropout.p = 0.0
        torch.compile(model, backend="eager")(batch).backward()
        ends.append([parameter.grad for parameter in model.parameters()])
    torch.compiler.reset()
    assert_same(*ends)


@pytest.mark.filterwarnings("ignore")
def test_compiled_batchnorm_is_refused() -> None:
    """Its statistics would be updated twice."""
    torch.compiler.reset()
    model = torch.compile(checkpointed("cnn"), backend="eager")
    with pytest.raises(Exception, match="buffers that its forward may change"):
        model(batches("cnn", 1)[0])
    torch.compiler.reset()

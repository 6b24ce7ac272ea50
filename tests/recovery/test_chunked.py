"""Children that treat rows one by one run in chunks, and give what the whole call gives."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch._dynamo  # the first checkpoint loads it, which sets warnings filters for good
from chunk_cases import ROWS, WIDTH, Body, Encoded, Net, Pair, compare, x
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.chunked import chunked_children
from lightning_oom.recovery.chunked.chunk_gain import estimate_chunk_gain

ROWWISE = {
    "tensor": lambda self, h, x: h,
    "dict": lambda self, h, x: {"hidden": h, "norm": h.norm(dim=1), "none": None, "name": "a"},
    "tuple": lambda self, h, x: (h, [h * 2, None]),
    "namedtuple": lambda self, h, x: Pair(h, x),
    "dataclass": lambda self, h, x: Encoded(h, h.mean(1)),
    "other-dim": lambda self, h, x: h.t(),
    "hidden-like": lambda self, h, x: (h, h[None].expand(2, -1, -1)),
    "row-count": lambda self, h, x: (h, len(h)),
    "list-per-row": lambda self, h, x: [row * 2 for row in h],
    "scale": lambda self, h, x: (h, self.up.weight.norm()),
    "argmax": lambda self, h, x: (h, h.argmax(1)),
}


@pytest.mark.parametrize("kind", ROWWISE)
@pytest.mark.parametrize("chunk", [1, 3, 9])
def test_row_by_row_outputs_are_joined(kind, chunk):
    """Outputs, gradients of parameters and of inputs are those of the whole call."""
    report = compare(Net(Body(ROWWISE[kind])), x(grad=True), chunk=chunk)

    assert report.chunked == {"body": 1}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_join_their_hidden_state(kind):
    """The hidden state has its rows in dimension 1."""
    report = compare(Net(kind(4, 5, num_layers=2, batch_first=True)), x(ROWS, 7, 4, grad=True))

    assert report.chunked == {"body": 1}


def test_keyword_arguments_and_shared_ones():
    """Tensors with rows are cut wherever they are; masks, flags and numbers are shared."""

    def finish(self, h, x, *, mask, lengths, scale, options):
        rows = torch.tensor(lengths, dtype=h.dtype)[:, None]
        return h * mask * scale + rows + options["bias"]

    kwargs = {
        "mask": torch.ones(WIDTH),
        "lengths": list(range(ROWS)),
        "scale": 2.0,
        "options": {"bias": x(ROWS, WIDTH), "flag": True, "none": None},
    }
    report = compare(Net(Body(finish)), x(), **kwargs)
    only = compare(Net(Body()), call=lambda net, **kw: net.body(**kw), x=x())

    assert report.chunked == {"body": 1}
    assert only.chunked == {"body": 1}


def test_calls_without_the_batch_run_as_they_are():
    """A child called with another number of rows is left alone."""
    net = Net(Body())
    with chunked_children(net, ROWS, 3) as report:
        net.body(x(4, WIDTH))

    assert report.chunked == {}


def test_children_called_several_times_and_in_each_other():
    """Each outermost call is chunked; what it calls inside belongs to its chunks."""

    class Wrapper(nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.inner, self.out = inner, nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.out(self.inner(x))

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()
            self.outer = Wrapper(self.body)
            self.again = self.body

    report = compare(Nested(), x(), call=lambda net, x: net.outer(net.body(x) + net.again(x)))

    assert report.chunked == {"body": 2, "outer": 1}


def test_a_model_with_its_own_loss_passes_chunking_on_to_its_children():
    """The encoder inside is chunked although the model returns a scalar loss."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Body(), nn.Linear(WIDTH, 3)

        def forward(self, x, labels):
            logits = self.head(self.encoder(x))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    net = Net(WithLoss())
    report = compare(net, x(), torch.arange(ROWS) % 3)

    assert report.chunked == {"body.encoder": 1}
    assert "forward" not in vars(net.body.encoder)


def test_no_grad_and_single_layers_pass_through():
    """Nothing is kept there that chunks could save."""
    net = nn.Module()
    net.body, net.head = Body(), nn.Linear(WIDTH, 3)
    with chunked_children(net, ROWS, 3) as report, torch.no_grad():
        net.head(net.body(x()))

    assert report.chunked == {}
    assert "single layer" in report.whole["head"]


def test_unverified_children_are_trusted():
    """``verify=False`` calls a child once per chunk and nothing else."""
    calls = []
    net = Net(Body(lambda self, h, x: (calls.append(len(x)), h)[1]))
    with chunked_children(net, ROWS, 4, verify=False) as report:
        net.body(x())

    assert calls == [4, 3, 3]
    assert report.chunked == {"body": 1}


def test_everything_is_put_back_after_an_error():
    """Shadows come off, an own ``forward`` comes back, and an OOM passes through."""

    def fail(self, h, x):
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    net = nn.Module()
    net.body, net.other = Body(fail), Body()
    own = net.other.forward
    net.other.forward = own
    with pytest.raises(OutOfMemoryError), chunked_children(net, ROWS, 3):
        net.body(x())

    assert "forward" not in vars(net.body)
    assert vars(net.other)["forward"] is own


def test_activations_live_chunk_by_chunk():
    """Between forward and backward nothing of the hidden activations is alive."""
    alive = []

    def finish(self, h, x):
        hidden = torch.tanh(h)
        alive.append(weakref.ref(hidden))
        return hidden * 2

    net = Net(Body(finish))
    with chunked_children(net, ROWS, 2, verify=False):
        output = net.body(x())
        gc.collect()
        between = sum(ref() is not None for ref in alive)
        output.sum().backward()

    assert len(alive) == 5
    assert between == 0


def test_nothing_stays_alive_afterwards():
    """Module, input and output die with their last reference."""
    net = Net(Body())
    batch = x()
    verdicts = {}
    with chunked_children(net, ROWS, 3, verdicts=verdicts) as report:
        output = net.body(batch)
        output.sum().backward()
    refs = [weakref.ref(thing) for thing in (net.body, batch, output)]
    del net, batch, output
    gc.collect()

    assert report.chunked == {"body": 1}
    assert [ref() for ref in refs] == [None] * 3


def test_hooks_on_the_child_see_the_whole_call():
    """A forward hook of a child runs once, with all rows."""
    seen = []
    net = Net(Body())
    net.body.register_forward_hook(
        lambda module, args, output: seen.append((len(args[0]), len(output)))
    )
    with chunked_children(net, ROWS, 3) as report:
        net.body(x())

    assert report.chunked == {"body": 1}
    assert seen == [(ROWS, ROWS)]


@pytest.mark.parametrize(("rows", "max_rows"), [(0, 3), (10, 0)])
def test_bad_numbers_are_refused(rows, max_rows):
    """The error names both numbers."""
    with (
        pytest.raises(ValueError, match=f"got {rows} and {max_rows}"),
        chunked_children(Net(Body()), rows, max_rows),
    ):
        pass


def test_gain_is_small_where_outputs_dominate():
    """A large head outside of the children's inside leaves little to save."""
    deep, wide = nn.Module(), nn.Module()
    deep.body = nn.Sequential(
        *[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    )
    wide.body = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4096))
    batch = torch.randn(4, 64)
    gains = [
        estimate_chunk_gain(net, lambda net=net: F.log_softmax(net.body(batch), -1).exp().sum())
        for net in (deep, wide)
    ]

    assert gains[0].kept_fraction(32, 8) < 0.6
    assert gains[1].kept_fraction(32, 8) > 0.9
    assert all(not child._forward_hooks for child in (deep.body, wide.body))

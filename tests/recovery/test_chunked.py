"""Children that treat rows one by one run in chunks, everything else runs whole."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo  # the first checkpoint loads it, which sets warnings filters for good
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.chunk_gain import estimate_chunk_gain
from lightning_oom.recovery.chunked import chunked_children

ROWS, WIDTH = 10, 6
Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - the plain kind is what is tested


@dataclass
class Encoded:
    """An output in a dataclass."""

    hidden: torch.Tensor
    pooled: torch.Tensor
    note: str = "kept"


class Body(nn.Module):
    """A block with hidden activations; ``finish`` makes its output."""

    def __init__(self, finish=lambda self, h, x: h) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.finish = finish

    def forward(self, x, *args, **kwargs):
        """Run the block."""
        return self.finish(self, self.down(torch.tanh(self.up(x))), x, *args, **kwargs)


class Net(nn.Module):
    """A module with one child."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body


def leaves(output):
    """Return all tensors of an output."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    elif isinstance(output, Encoded):
        output = [output.hidden, output.pooled]
    return [
        t
        for part in output
        if part is not None and not isinstance(part, (str, int))
        for t in leaves(part)
    ]


def compare(net, *args, chunk=3, call=None, **kwargs):
    """Run whole and chunked; return the report after checking outputs and gradients."""
    call = call or (lambda net, *args, **kwargs: net.body(*args, **kwargs))
    reference = copy.deepcopy(net)

    def run(module):
        output = call(module, *args, **kwargs)
        loss = sum((t.float() ** 2).sum() * (i + 1) for i, t in enumerate(leaves(output)))
        if loss.requires_grad:
            loss.backward()
        return output

    expected = run(reference)
    inputs = [a.grad.clone() for a in args if isinstance(a, torch.Tensor) and a.grad is not None]
    for a in args:
        if isinstance(a, torch.Tensor):
            a.grad = None
    with chunked_children(net, ROWS, chunk) as report:
        output = run(net)

    assert type(output) is type(expected)
    for a, b in zip(leaves(output), leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    again = [a.grad for a in args if isinstance(a, torch.Tensor) and a.grad is not None]
    for a, b in zip(again, inputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert "forward" not in vars(net.body)
    for a, b in zip(net.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    return report


def x(*shape, grad=False):
    """Return random input."""
    return torch.randn(*(shape or (ROWS, WIDTH)), requires_grad=grad)


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


COUPLED = {
    "similarities": (lambda self, h, x: h @ h.t(), "no rows"),
    "attention-in-batch": (lambda self, h, x: (h @ h.t()).softmax(-1) @ h, "depend on each other"),
    "centred": (lambda self, h, x: h - h.mean(0), "depend on each other"),
    "loss": (
        lambda self, h, x: F.cross_entropy(h, torch.zeros(len(h), dtype=torch.long)),
        "no rows",
    ),
    "loss-and-output": (
        lambda self, h, x: {"loss": h.mean(), "logits": h},
        r"\['loss'\] has no rows",
    ),
    "pooled": (lambda self, h, x: h.sum(0, keepdim=True), "no rows"),
    "flattened": (lambda self, h, x: h.flatten(), "no rows"),
    "text": (lambda self, h, x: (h, f"{len(h)} rows"), "depends on the rows"),
    "object": (lambda self, h, x: (h, object()), "is a object"),
    "zero-loss": (lambda self, h, x: (h, h.sum() * 0), "no rows"),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_anything_else_runs_whole(kind):
    """The reason says what is wrong with the output."""
    finish, words = COUPLED[kind]
    net = Net(Body(finish))
    with chunked_children(net, ROWS, 3) as report:
        output = net.body(x())

    assert report.chunked == {}
    assert re.search(words, report.whole["body"])
    assert output is not None


def test_batch_norm_in_training_mode_runs_whole():
    """Statistics are updated once, by the whole batch; in eval mode it is chunked."""
    net = Net(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, WIDTH)))
    report = compare(net, x())
    frozen = compare(Net(copy.deepcopy(net.body).eval()), x())

    assert "batch normalisation" in report.whole["body"]
    assert int(net.body[1].num_batches_tracked) == 1
    assert frozen.chunked == {"body": 1}


class Stateful(Body):
    """A block whose ``finish`` may use a buffer, a counter and a list."""

    def __init__(self, finish) -> None:
        super().__init__(finish)
        self.register_buffer("total", torch.zeros(()))
        self.calls, self.seen, self.cached = 0, [], None


def _count(self, h, x):
    self.calls += 1
    return h


def _sum(self, h, x):
    self.total += h.detach().sum()
    return h


def _collect(self, h, x):
    self.seen.append(h.detach())
    return h


def _stash(self, h, x):
    self.cached = h
    return h


def _initialise(self, h, x):
    if self.cached is None:
        self.cached = h.detach().mean()
    return h - self.cached


def _replace_buffer(self, h, x):
    self.total = self.total + 1
    return h


@pytest.mark.parametrize(
    "finish",
    [_count, _sum, _collect, _stash, _initialise, _replace_buffer],
    ids=lambda f: f.__name__,
)
def test_children_that_leave_a_trace_run_whole(finish):
    """State is touched once, by the whole call, as without chunking."""
    net, plain = Net(Stateful(finish)), Net(Stateful(finish))
    plain.load_state_dict(net.state_dict())
    batch = x()
    plain.body(batch)
    with chunked_children(net, ROWS, 3) as report:
        net.body(batch)

    assert report.chunked == {}
    assert "forward" in report.whole["body"]
    assert net.body.calls == plain.body.calls
    assert torch.equal(net.body.total, plain.body.total)
    assert [t.shape for t in net.body.seen] == [t.shape for t in plain.body.seen]
    if plain.body.cached is not None:
        assert torch.equal(net.body.cached, plain.body.cached)


def test_a_table_built_on_first_use_is_no_trace():
    """What does not depend on the rows may be cached in an attribute."""

    def rotate(self, h, x):
        if self.cached is None:
            self.cached = torch.linspace(0, 1, WIDTH)
        return h * self.cached

    assert compare(Net(Stateful(rotate)), x()).chunked == {"body": 1}


def test_spectral_norm_runs_whole():
    """Its power iteration moves a buffer in every forward."""
    body = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 8)), nn.ReLU(), nn.Linear(8, WIDTH)
    )
    report = compare(Net(body), x())

    assert "forward changes" in report.whole["body"]


def test_weight_norm_is_chunked():
    """A parametrisation without state treats rows one by one."""
    body = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 8)), nn.ReLU(), nn.Linear(8, WIDTH)
    )

    assert compare(Net(body), x()).chunked == {"body": 1}


def test_input_that_is_written_to_runs_whole():
    """The caller's tensor is written to once, over all rows."""

    def in_place(self, h, x):
        x.add_(1)
        return h + x

    net = Net(Body(in_place))
    batch = x()
    expected = batch + 1
    with chunked_children(net, ROWS, 3) as report:
        net.body(batch)

    assert "input in place" in report.whole["body"]
    assert torch.equal(batch, expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_join_their_hidden_state(kind):
    """The hidden state has its rows in dimension 1."""
    report = compare(Net(kind(4, 5, num_layers=2, batch_first=True)), x(ROWS, 7, 4, grad=True))

    assert report.chunked == {"body": 1}


def test_recurrent_layers_with_time_first_run_whole():
    """As many time steps as rows do not make time steps rows."""
    net = Net(nn.LSTM(4, 5))
    with chunked_children(net, ROWS, 3) as report:
        net.body(x(ROWS, 3, 4))

    assert report.chunked == {}


def test_a_hidden_state_handed_in_is_not_cut_wrongly():
    """Its rows are in dimension 1; the call runs whole and says why."""
    net = Net(nn.GRU(4, 5, batch_first=True))
    with chunked_children(net, ROWS, 3) as report:
        net.body(x(ROWS, 7, 4), torch.zeros(1, ROWS, 5))

    assert "fails on a few rows" in report.whole["body"]


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


def test_a_square_mask_as_long_as_the_batch_is_not_cut_wrongly():
    """Ten positions and ten rows: the slice shows that the mask is not one per row."""

    def finish(self, h, x, mask):
        return (mask @ h) + h

    net = Net(Body(finish))
    mask = torch.rand(ROWS, ROWS).tril()
    batch = x(ROWS, ROWS, WIDTH)
    expected = net.body(batch, mask)
    with chunked_children(net, ROWS, 3) as report:
        output = net.body(batch, mask)

    assert torch.equal(output, expected)
    assert report.chunked == {}


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


def test_metrics_beside_and_inside_children():
    """A metric is never touched, and a child that holds one runs whole."""

    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()
            self.accuracy = MulticlassAccuracy(3)
            self.group = MetricCollection([MeanMetric()])
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
            self.inner.add_module("mean", MeanMetric())

    net = Measured()
    with chunked_children(net, ROWS, 3) as report:
        net.body(x())

    assert report.whole["accuracy"] == report.whole["group"] == "it is a metric"
    assert report.whole["inner"] == "it holds a metric"


def test_no_grad_and_single_layers_pass_through():
    """Nothing is kept there that chunks could save."""
    net = nn.Module()
    net.body, net.head = Body(), nn.Linear(WIDTH, 3)
    with chunked_children(net, ROWS, 3) as report, torch.no_grad():
        net.head(net.body(x()))

    assert report.chunked == {}
    assert "single layer" in report.whole["head"]


def test_dropout_is_no_coupling():
    """Random masks do not keep a child from being chunked, and half of the entries survive."""
    net = Net(nn.Sequential(nn.Linear(WIDTH, 400), nn.Dropout(0.5), nn.Identity()))
    with chunked_children(net, ROWS, 3) as report:
        output = net.body(x())
        output.sum().backward()

    assert report.chunked == {"body": 1}
    assert 0.4 < (output == 0).float().mean() < 0.6


def test_the_check_leaves_random_states_alone():
    """The masks of a child that runs whole are those of the run without chunking."""
    net = Net(Body(lambda self, h, x: F.dropout(h, 0.5) - h.mean(0)))
    batch = x()
    torch.manual_seed(3)
    expected = net.body(batch)
    torch.manual_seed(3)
    with chunked_children(net, ROWS, 3):
        output = net.body(batch)

    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_keeps_gradients_of_all_weights(dtype):
    """The check runs without gradients but leaves no casts behind in autocast's cache."""
    net = Net(Body())
    with chunked_children(net, ROWS, 3) as report, torch.autocast("cpu", dtype=dtype):
        loss = net.body(x()).float().square().mean()
        loss.backward()

    assert report.chunked == {"body": 1}
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_a_child_is_tried_once_per_run():
    """Verdicts are shared between steps by their caller; other modes and calls are new."""
    calls = []
    net, verdicts = Net(Body(lambda self, h, x: (calls.append(len(x)), h)[1])), {}
    counts = []
    for _ in range(3):
        calls.clear()
        with chunked_children(net, ROWS, 5, verdicts=verdicts):
            net.body(x())
        counts.append(len(calls))

    assert counts == [5, 2, 2]
    assert len(verdicts) == 1


def test_equal_rows_settle_nothing():
    """The first batch is all zeros: it runs whole, and the next one is tried again."""
    net, verdicts = Net(Body()), {}
    with chunked_children(net, ROWS, 5, verdicts=verdicts) as blind:
        net.body(torch.zeros(ROWS, WIDTH))
    with chunked_children(net, ROWS, 5, verdicts=verdicts) as seeing:
        net.body(x())

    assert "all equal" in blind.whole["body"]
    assert seeing.chunked == {"body": 1}


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

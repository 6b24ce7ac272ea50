"""Children that do not treat rows one by one are found out, and run whole."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch._dynamo  # the first checkpoint loads it, which sets warnings filters for good
from chunk_cases import ROWS, WIDTH, Body, Net, compare, x
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_oom.recovery.chunked import chunked_children

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


def test_hooks_inside_a_child_are_not_run_once_per_chunk():
    """A child whose inside is watched by user code runs whole; torch's own hooks do not count."""
    watched, normed = Net(Body()), Net(nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)))
    seen = []
    watched.body.up.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(normed.body[0])
    with chunked_children(watched, ROWS, 3) as report, chunked_children(normed, ROWS, 3) as other:
        watched.body(x())
        normed.body(x())

    assert seen == [ROWS]
    assert "hook inside" in report.whole["body"]
    assert other.chunked == {"body": 1}

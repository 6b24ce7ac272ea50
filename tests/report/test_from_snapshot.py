"""A memory snapshot is a pickle from somewhere: it is read, never run."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest

from lightning_oom.report.from_snapshot import load_plain_pickle, read_snapshot
from lightning_oom.report.remedies import with_advice
from lightning_oom.units import GIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

FRAMES = [
    {"filename": "??", "name": "at::empty", "line": 0},
    {"filename": "/site-packages/torch/nn/functional.py", "name": "linear", "line": 5},
    {"filename": "/home/me/model.py", "name": "forward", "line": 12},
    {
        "filename": "/site-packages/lightning/pytorch/strategies/strategy.py",
        "name": "training_step",
        "line": 3,
    },
]


def snapshot(*, events: bool = True) -> dict:
    """What ``torch.cuda.memory._snapshot`` gives for device 1 of 2, cut down."""
    blocks = [
        {"address": 0, "size": 6 * GIB, "state": "active_allocated", "frames": FRAMES},
        {"address": 6 * GIB, "size": 2 * GIB, "state": "inactive", "frames": []},
        {"address": 8 * GIB, "size": 1 * GIB, "state": "active_allocated", "frames": []},
    ]
    segments = [
        {"device": 0, "total_size": MIB, "allocated_size": 0, "blocks": []},
        {
            "device": 1,
            "total_size": 9 * GIB,
            "allocated_size": 7 * GIB,
            "blocks": blocks,
        },
    ]
    oom = {"action": "oom", "size": GIB, "device_free": 64 * MIB, "frames": FRAMES, "time_us": 5}
    trace = [{"action": "alloc", "size": 512, "frames": []}, *([oom] if events else [])]
    return {
        "segments": segments,
        "device_traces": [[], trace],
        "allocator_settings": {"expandable_segments": False},
    }


def test_the_last_oom_of_a_snapshot_is_explained() -> None:
    """Device, request, what was held, the line, and the cause that follows."""
    report = with_advice(read_snapshot(pickle.dumps(snapshot())))

    assert (report.device, report.requested_bytes) == ("cuda:1", GIB)
    assert (report.allocated_bytes, report.reserved_bytes) == (7 * GIB, 9 * GIB)
    assert report.phase == "forward"
    assert report.tensors[0].made_at == "model.py:12 in forward"
    assert report.tensors[0].num_bytes == 6 * GIB
    assert report.diagnoses[0].cause == "fragmentation"


def test_a_snapshot_without_an_oom_says_so() -> None:
    """What was held is told all the same."""
    report = with_advice(read_snapshot(pickle.dumps(snapshot(events=False))))

    assert "No out-of-memory event" in report.cause.message
    assert report.requested_bytes is None
    assert report.diagnoses


class Runs:
    """Would make a folder if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        """Ask for a function."""
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path, protocol) -> None:
    """In every protocol, also when it hides inside of a good snapshot."""
    target = tmp_path / "made"
    content = pickle.dumps({**snapshot(), "extra": Runs(target)}, protocol=protocol)

    with pytest.raises(ValueError, match=r"refused: it wants \w+\.mkdir"):
        read_snapshot(content)
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04cbuiltins\neval\n(S'1/0'\ntR.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"(i__main__\nX\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x04Pid\n.",
        b"\x80\x04",
        b"\x80\x04]" + b"]" * 50 + b".",
        b"",
        b"not a pickle",
        pickle.dumps(OrderedDict(a=1)),
        pickle.dumps(bytearray(3)),
    ],
    ids=[
        "eval",
        "system",
        "instance",
        "extension registry",
        "persistent id",
        "cut off",
        "no snapshot",
        "empty",
        "text",
        "class of the library",
        "builtin class",
    ],
)
def test_what_is_no_plain_snapshot_is_a_value_error(content) -> None:
    """Whatever is in the file, the answer is one error with a reason."""
    with pytest.raises(ValueError, match="pickle"):
        read_snapshot(content)


@pytest.mark.parametrize(
    "change",
    [
        {"segments": [1]},
        {"segments": [{"device": 1}]},
        {"segments": [{"device": 1, "total_size": "x", "blocks": []}]},
        {"device_traces": [[{"action": "oom"}]]},
        {"device_traces": 5},
    ],
)
def test_a_snapshot_of_another_form_is_a_value_error(change) -> None:
    """A later torch may change it: no traceback, a reason."""
    with pytest.raises(ValueError, match="another form"):
        read_snapshot(pickle.dumps({**snapshot(), **change}))


def test_plain_values_are_read_as_they_are() -> None:
    """Containers and primitives need no class."""
    value = {"a": [1, 2.5, None, True, ("x", b"y")], "b": {1, 2}}

    assert load_plain_pickle(pickle.dumps(value)) == value

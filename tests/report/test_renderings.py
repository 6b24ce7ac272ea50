"""One record, several renderings: text, a page, and what TensorBoard shows."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from report_cases import cuda_report, steps

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.memory.nvml import ProcessMemory
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.report.charts import draw_bar, draw_timeline
from lightning_oom.report.html import render_html
from lightning_oom.report.record import (
    BatchLeaf,
    CodeLine,
    FailedAttempt,
    LiveTensor,
    OOMReport,
)
from lightning_oom.report.remedies import with_advice
from lightning_oom.report.tensorboard import draw_figure, write_tensorboard
from lightning_oom.report.text import render_text
from lightning_oom.report.timeline import TimelineKeeper
from lightning_oom.report.words import GONE_LABEL, kind_rows, one_line
from lightning_oom.units import GIB

HOSTILE = "<script>alert('x')</script>&\"[bold]"


def rich_report() -> OOMReport:
    """A report with something in every section, some of it hostile."""
    return with_advice(
        cuda_report(
            timeline=steps([5 * GIB, 6 * GIB, 6 * GIB]),
            epoch=2,
            batch_index=7,
            module_path=f"model.{HOSTILE}",
            lines=(CodeLine(path="model.py", line=3, function="forward"),),
            batch=(BatchLeaf(path=f"batch[{HOSTILE!r}]", shape=(64, 3), dtype="float32"),),
            tensors=(
                LiveTensor(
                    owner=HOSTILE, kind="activations", shape=(64,), dtype="float32", num_bytes=GIB
                ),
            ),
            processes=(ProcessMemory(pid=5, name=HOSTILE, used_bytes=GIB),),
            attempts=(FailedAttempt(what=HOSTILE, phase="forward", seconds=0.5),),
            declined=(HOSTILE,),
            memory_summary=HOSTILE,
        )
    )


def bare_report() -> OOMReport:
    """A report that knows nothing but an error without amounts."""
    cause = classify_oom(OutOfMemoryError("out of memory"))
    assert cause is not None
    return OOMReport(cause=cause)


class Page(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        """Note the tag."""
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        """Note the tag."""
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag) -> None:
        """Match it with the last that is open."""
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        """Note the text."""
        self.words.append(data)


@pytest.mark.parametrize("make", [rich_report, bare_report])
def test_the_page_is_whole_and_needs_nothing_else(make) -> None:
    """No script, no link, no image, no address that a browser would fetch; every tag is closed."""
    text = render_html(make())
    page = Page()
    page.feed(text)

    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in {"src", "href", "onload", "onclick"}]
    assert not re.search(r"https?://|url\((?!#)|@import", text)


def test_every_text_in_the_page_is_escaped() -> None:
    """Names of modules, processes, leaves and attempts cannot become markup."""
    text = render_html(rich_report())

    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 6


def test_the_page_knows_light_and_dark() -> None:
    """Colours follow the reader's setting."""
    assert "prefers-color-scheme: dark" in render_html(bare_report())


def test_text_is_plain_unless_colours_are_asked_for() -> None:
    """Escape codes only on request; markup in names is text."""
    report = rich_report()

    assert "\x1b" not in render_text(report)
    assert "\x1b" in render_text(report, color=True)
    assert "[bold]" in render_text(report)


@pytest.mark.parametrize("width", [60, 100, 160])
def test_text_fits_its_width(width) -> None:
    """No line is longer than asked for."""
    assert max(map(len, render_text(rich_report(), width=width).splitlines())) <= width


@pytest.mark.parametrize("make", [rich_report, bare_report])
def test_text_names_cause_and_remedy(make) -> None:
    """The first diagnosis and the first remedy are in it, and in the one line the diagnosis."""
    report = make()
    if not report.diagnoses:
        report = with_advice(report)
    text = " ".join(render_text(report).split())

    assert report.diagnoses[0].title in text
    assert " ".join(report.remedies[0].action.split()) in text
    assert report.diagnoses[0].title in one_line(report)
    assert "\n" not in one_line(report)


def test_the_bar_covers_what_is_allocated_reserved_and_free() -> None:
    """Parts lie side by side up to the limit; the refused request begins where the used part ends."""
    bar = draw_bar(cuda_report())
    assert bar is not None
    parts = {part.name: part for part in bar.parts}
    edges = [part.left + part.width for part in bar.parts if part.name != "request"]
    starts = [part.left for part in bar.parts if part.name != "request"]

    assert starts[1:] == pytest.approx(edges[:-1])
    assert edges[-1] == pytest.approx(bar.limit)
    assert parts["request"].left == pytest.approx(parts["free"].left)
    assert all(0 <= part.left <= part.left + part.width <= 1 + 1e-9 for part in bar.parts)


def test_what_was_freed_before_it_could_be_counted_is_shown() -> None:
    """The breakdown is made after the error came up; the rest of what its text counts has a row."""
    report = cuda_report(allocated=22 * GIB)
    assert report.kinds is not None
    report = report.but(kinds=replace(report.kinds, activations_bytes=GIB))
    rows = {label: (amount, share) for label, amount, share in kind_rows(report)}
    bar = draw_bar(report)
    assert bar is not None

    assert rows[GONE_LABEL] == ("16.00 GiB", "73%")
    assert sum(part.num_bytes for part in bar.parts if part.name != "request") == pytest.approx(
        24 * GIB, rel=0.1
    )
    assert GONE_LABEL in render_html(report)
    assert "--gone:" in render_html(report)


ODD = {
    "no breakdown": {"kinds": None},
    "no counters": {"reading": None, "kinds": None},
    "unknown device": {"device": "weird:7"},
    "no device": {"device": None},
    "no rows": {"rows": 0},
    "unknown phase and stage": {"phase": "dreaming", "stage": "dreaming"},
    "a version of no form": {"torch_version": "main"},
    "a reason without words": {"declined": ("split: ",), "has_recovery": True},
    "an attempt of unknown length": {"attempts": (FailedAttempt(what="whole", phase="forward"),)},
    "a deep and wide batch": {
        "batch": (BatchLeaf(path="batch" + "[0]" * 200, shape=(1,) * 200, dtype="float32"),) * 100
    },
    "sanity check": {"stage": "sanity_check", "uses_graph": False},
}


@pytest.mark.parametrize("facts", ODD.values(), ids=ODD)
def test_odd_records_can_be_shown(facts) -> None:
    """In every rendering, with a diagnosis and without a saving of nothing."""
    report = with_advice(cuda_report(**facts))
    page = Page()
    page.feed(render_html(report))

    assert page.open == []
    assert render_text(report)
    assert "\n" not in one_line(report)
    assert report.diagnoses
    assert all(r.saving_bytes is None or r.saving_bytes > 0 for r in report.remedies)
    assert OOMReport.from_json(report.to_json()) == report


def test_the_timeline_ends_at_the_error() -> None:
    """Its last point is what was allocated then; the request stands on it."""
    report = cuda_report(timeline=steps([5 * GIB, 6 * GIB, 6 * GIB]))
    timeline = draw_timeline(report)
    assert timeline is not None
    assert timeline.request is not None

    assert timeline.allocated[-1] == (1.0, pytest.approx(timeline.request[0]))
    assert timeline.x_ticks[-1][1] == "step 7 (OOM)"
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in timeline.allocated)
    assert timeline.y_ticks[0][1] == "10.00 GiB"


def test_pictures_need_amounts() -> None:
    """Without numbers there is no picture, and no error."""
    assert draw_bar(bare_report()) is None
    assert draw_timeline(bare_report()) is None
    assert draw_figure(bare_report()) is None


def test_the_timeline_stays_small_and_even() -> None:
    """However long the run: evenly spaced points, from the first to nearly the last step."""
    from lightning_oom.memory import MemoryReading

    keeper = TimelineKeeper(capacity=16)
    taken = 0
    for step in range(10_000):
        if keeper.wants(step):
            taken += 1
            keeper.add(step, MemoryReading(device="cuda:0", allocated_bytes=step))
    found = [point.step for point in keeper.points]

    assert 8 <= len(found) <= 16
    assert {later - earlier for earlier, later in pairwise(found)} == {keeper.stride}
    assert found[0] == 0
    assert found[-1] >= 10_000 - keeper.stride
    assert taken < 120


def test_tensorboard_gets_text_and_picture(tmp_path) -> None:
    """Both can be read back from the event file."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    write_tensorboard(writer, rich_report(), step=7)
    writer.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0, "images": 0})
    events.Reload()

    (image,) = events.Images("oom/memory")
    assert (image.step, image.width) == (7, 1100)
    (text,) = events.Tensors("oom/report/text_summary")
    assert b"Out of memory on cuda:0" in text.tensor_proto.string_val[0]

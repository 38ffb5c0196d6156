import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree.ElementTree import Element, fromstring, tostring

import pytest

from p2p_trainer.rehearsal.charts import Axis, BarRow, Point, Segment, Track, bars, curve, round_step
from p2p_trainer.rehearsal.markup import element, percent, to_html
from p2p_trainer.rehearsal.rehearsal_page import rehearsal_page
from p2p_trainer.rehearsal.rehearsed_peer import LineCount, PeerRecord, PlayedLife
from p2p_trainer.rehearsal.report import RehearsedRun, Report, build_report
from p2p_trainer.rehearsal.round_chart import MAX_COLUMNS, round_chart, rounds_of_a_column

RUN = RehearsedRun(seconds=60.0, fragments=2, tick_seconds=1.0)
HOSTILE = """<script>alert("1")</script>&amp;'"<img src=x onerror=alert(1)>"""
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Text, tags and attributes of a page; fails on a tag that is never closed or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def event(time: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": name, **fields}


def record(
    name: str = "8", *, rounds: int = 50, evaluations: int = 3, outcomes: str = "committed", **more: Any
) -> PeerRecord:
    """A peer of 10 samples/s that trains from 100 s on, a round every second. ``outcomes``, in turn."""
    kinds = outcomes.split()
    events = [
        event(90.0, "throughput", phase="solo", samples_per_second=10.0),
        event(95.0, "join", run_id="words-0123", processed_samples=0),
        event(100.0, "training_started", processed_samples=0),
    ]
    for tick in range(100, 100 + rounds):
        fields = {"fragment": tick % 2, "outcome": kinds[tick % len(kinds)], "weight": 8.0, "group_size": 2}
        fields |= {"version": tick // 2, "digest": "aa", "seconds": 0.5, "bytes_sent": 1000, "bytes_received": 2000}
        reason = "" if fields["outcome"] == "committed" else more.get("reason", "no group came together")
        events.append(event(tick + 0.5, "round", tick=tick, reason=reason, **fields))
    events += [
        event(101.0 + 10 * number, "eval", samples=100 * number, loss=5.0 - number) for number in range(evaluations)
    ]
    events.append(
        event(
            100.0 + rounds,
            "leave",
            training_ended=100.0 + rounds,
            processed_samples=10 * rounds,
            credited_samples=10.0 * rounds,
            exact=True,
        )
    )
    life = more.get("life", PlayedLife(joins=[0.0]))
    return PeerRecord(
        name=name, events=events, link=more.get("link", ""), life=life, line_count=more.get("line_count"), exit_code=0
    )


def report_of(*records: PeerRecord) -> Report:
    return build_report(RUN, records)


def page_of(*records: PeerRecord) -> Page:
    return Page(rehearsal_page(report_of(*records)))


def marks(root: Element) -> Counter[str]:
    return Counter(
        rect.get("class", "") for rect in root.iter("rect") if (rect.get("class") or "").startswith("round ")
    )


def test_a_page_needs_nothing_but_itself() -> None:
    page = page_of(record("4090"), record("8", outcomes="committed carried"))
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == page.tags["iframe"] == 0
    assert page.tags["html"] == page.tags["body"] == page.tags["main"] == page.tags["h1"] == 1
    assert not [value for name, value in page.attributes if name in ("src", "href") or name.startswith("on")]
    policy = [value for name, value in page.attributes if name == "content" and "default-src" in (value or "")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    text = rehearsal_page(report_of(record()))
    assert (
        text.startswith("<!doctype html>")
        and "url(" not in text
        and "@import" not in text
        and "http" not in text.replace("http-equiv", "")
    )
    assert "prefers-color-scheme: dark" in text


def test_a_page_says_what_the_terminal_says() -> None:
    report = report_of(
        record("4090", link="10M/60ms", line_count=LineCount(sent_bytes=10**6, received_bytes=10**6, seconds=60.0))
    )
    text = Page(rehearsal_page(report)).text
    assert "Rehearsal of words" in text
    assert "Good" in text and "put 100.0 % of what they do alone" in text
    assert "4090 on 10 Mbit/s took part in 100 % of its rounds and contributed 100 %; its line carried 60 MB up" in text
    assert "by its network interface" in text
    lonely = page_of(record("8", outcomes="skipped", evaluations=1)).text
    assert "Not good" in lonely and "no round was committed, so nothing was averaged" in lonely
    assert "Of rounds alone" in lonely


def test_what_a_peer_is_called_never_becomes_markup() -> None:
    plain = page_of(record("plain", outcomes="committed carried", reason="plain"))
    hostile = page_of(record(HOSTILE, outcomes="committed carried", reason=HOSTILE))
    assert hostile.tags == plain.tags
    assert {name for name, _ in hostile.attributes} == {name for name, _ in plain.attributes}
    assert HOSTILE in "".join(hostile.texts)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [PeerRecord(name="8", events=[], life=PlayedLife(joins=[5.0], kills=[6.0]), killed=True)],
        [record(rounds=0, evaluations=0)],
        [record(rounds=0, evaluations=1)],
        [record(evaluations=0)],
        [record(rounds=1, evaluations=2)],
        [record("a" * 200), record("8")],
    ],
    ids=["nobody", "never trained", "nothing", "one loss", "no loss", "one round", "long name"],
)
def test_there_is_a_page_whatever_is_missing(records: list[PeerRecord]) -> None:
    page = page_of(*records)
    assert page.tags["section"] == 6
    assert "nan" not in {value for _, value in page.attributes} and "nan%" not in {
        value for _, value in page.attributes
    }


def test_what_is_missing_is_said() -> None:
    text = page_of(record(rounds=0, evaluations=0)).text
    assert "No peer came to a round." in text and "No held-out loss was evaluated." in text


def test_twelve_peers_and_hundreds_of_rounds_stay_small() -> None:
    reason = "reducer abcdef did not answer: " + 80 * "x"
    many = [
        record(f"peer-{number}", rounds=600, outcomes="committed carried skipped", reason=reason)
        for number in range(12)
    ]
    assert len(rehearsal_page(report_of(*many)).encode()) < 2_000_000


def test_every_round_has_a_mark_and_its_words() -> None:
    report = report_of(record("8", rounds=40, outcomes="committed committed carried skipped"))
    chart = round_chart(report.timeline, RUN.tick_seconds)
    assert marks(chart) == {"round in": 20, "round carried": 10, "round skipped": 10}
    titles = [title.text or "" for title in chart.iter("title")]
    assert titles[0] == "8: 20 in, 10 carried, 10 skipped"
    assert sum("no group came together" in title for title in titles) == 20


def test_a_life_is_shown() -> None:
    life = PlayedLife(joins=[0.0, 20.0], kills=[10.0], leaves=[30.0], freezes=[5.0], frozen_at=[(105.0, 107.0)])
    chart = round_chart(report_of(record(life=life)).timeline, RUN.tick_seconds)
    classes = [one.get("class") for one in chart.iter()]
    assert [kind for kind in classes if kind and kind.startswith("glyph")] == [
        "glyph killed",
        "glyph joined",
        "glyph left",
    ]
    assert classes.count("frozen") == 1 and classes.count("there") == 1
    assert "frozen at 5 s; killed at 10 s; joined at 20 s; left at 30 s" in "".join(
        one.text or "" for one in chart.iter("desc")
    )


def test_a_base_that_is_behind_is_no_part_of_the_curve() -> None:
    slow = record("slow", evaluations=0)
    old = replace(slow, events=[*slow.events, event(115.0, "eval", samples=0, loss=5.0)])
    text = rehearsal_page(report_of(record(evaluations=3), old))
    assert text.count("<polyline") == 2 and "behind the newest" in text
    assert Page(text).attributes.count(("class", "point aside")) == 2
    assert all(points.count(",") == 3 for points in re.findall(r'<polyline points="([^"]*)"', text))
    assert "behind the newest" not in rehearsal_page(report_of(record(evaluations=3)))


@pytest.mark.parametrize(("rounds", "peers"), [(1, 1), (400, 12), (5000, 1), (100, 1000), (10**6, 1000)])
def test_columns_are_never_too_many(rounds: int, peers: int) -> None:
    together = rounds_of_a_column(rounds, peers)
    assert rounds / together * peers <= MAX_COLUMNS
    assert (rounds, peers) != (400, 12) or together == 1


def test_rounds_of_one_column_are_sorted_and_counted() -> None:
    report = report_of(record("8", rounds=2000, outcomes="committed carried"))
    chart = round_chart(report.timeline, RUN.tick_seconds)
    together = rounds_of_a_column(2001, 1)
    assert together > 1
    assert sum(marks(chart).values()) <= 2 * 2000 / together + 4
    titles = [title.text or "" for title in chart.iter("title")]
    assert any(re.fullmatch(r"\d+ to \d+ s: 1 in, 2 carried", title) for title in titles)


def test_charts_are_trees_that_xml_reads_back() -> None:
    points = [Point(x=0.0, y=1.0, title="<&>"), Point(x=1.0, y=0.5, title='"')]
    x, y = Axis.around([0.0, 1.0], "x"), Axis.around([0.5, 1.0], "y")
    drawn = fromstring(tostring(curve(points, x, y, title="a < b", description="&")))
    assert [one.text for one in drawn if one.tag in ("title", "desc")] == ["a < b", "&"]
    assert drawn.get("role") == "img" and drawn.get("viewBox")
    assert len(drawn.findall("circle")) == 2
    bar = Segment(start=0.25, stop=0.75, kind="up", title="half")
    table = bars(
        [BarRow(name="<8>", tracks=(Track(segments=(bar,), marker=0.5),), texts=("50 %",))],
        caption="c",
        headings=("a", "b", "c"),
    )
    rect = next(one for one in table.iter("rect") if one.get("class") == "up")
    assert (rect.get("x"), rect.get("width")) == ("25%", "50%")
    assert "<8>" in [one.text for one in table.iter("span")]


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([1.68, 5.34], ["1", "2", "3", "4", "5", "6"]),
        ([0.0, 97.0], ["0", "20", "40", "60", "80", "100"]),
        ([3.0], ["3.0", "3.5"]),
        ([0.0], ["0", "1"]),
        ([-0.2, 0.1], ["-0.20", "-0.15", "-0.10", "-0.05", "0.00", "0.05", "0.10"]),
        ([0.0123, 0.0127], ["0.0123", "0.0124", "0.0125", "0.0126", "0.0127"]),
    ],
)
def test_an_axis_is_round_and_has_room_for_everything(values: list[float], written: list[str]) -> None:
    axis = Axis.around(values, "x")
    assert axis.low <= min(values) + 1e-9 and max(values) <= axis.high + 1e-9
    assert [axis.write(tick) for tick in axis.ticks] == written


@pytest.mark.parametrize(
    ("last", "written"),
    [
        (104.0, ["0", "20", "40", "60", "80", "100"]),
        (3.1, ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0"]),
        (0.0, ["0", "1"]),
    ],
)
def test_an_axis_from_zero_ends_where_its_values_do(last: float, written: list[str]) -> None:
    axis = Axis.around([min(2.0, last), last], "x", from_zero=True)
    assert (axis.low, axis.high) == (0.0, last or 1.0)
    assert [axis.write(tick) for tick in axis.ticks] == written


def test_a_peer_that_came_and_never_trained_is_seen_to_start() -> None:
    ended = PeerRecord(name="a", events=[], life=PlayedLife(joins=[5.0], kills=[6.0]), killed=True)
    waits = PeerRecord(name="b", events=[], life=PlayedLife(joins=[30.0]))
    chart = round_chart(report_of(record(), ended, waits).timeline, RUN.tick_seconds)
    lines = [one for one in chart.iter("line") if one.get("class") == "starting"]
    assert [(one.get("x1"), one.get("x2")) for one in lines] == [("9.8%", "11.76%"), ("58.82%", "100%")]


def test_a_step_is_round() -> None:
    assert [round_step(0, high) for high in (1, 7, 97, 0.03)] == [0.2, 2, 20, pytest.approx(0.005)]


def test_markup_escapes_text_and_attributes() -> None:
    made = element("p", "a<b", element("b", "&"), "c>d", class_="x", aria_label='"<', width=1 / 3)
    assert (
        to_html(made)
        == '<!doctype html>\n<p class="x" aria-label="&quot;<" width="0.33">a&lt;b<b>&amp;</b>c&gt;d</p>\n'
    )
    assert percent(0.12345) == "12.35%"


def test_the_report_of_a_changed_name_is_a_changed_page() -> None:
    report = report_of(record())
    assert rehearsal_page(report) == rehearsal_page(report)
    assert rehearsal_page(replace(report, run_id="")) != rehearsal_page(report)

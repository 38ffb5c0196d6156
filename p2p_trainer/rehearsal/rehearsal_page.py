"""A rehearsal's report as one page for people: nothing is fetched, no script runs, and a file is all it needs.

What it shows is in the report already; this module chooses words, tables and charts for it. Names of peers, runs and
reasons are text to it, whatever they contain (``markup``), and the page forbids itself everything but its own style.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.resources import files
from itertools import accumulate
from xml.etree.ElementTree import Element

from p2p_trainer.rehearsal.charts import Axis, BarRow, Point, Segment, Track, bars, curve, swatches
from p2p_trainer.rehearsal.forecast import forecast, life_in_words, megabytes
from p2p_trainer.rehearsal.markup import Child, element, to_html
from p2p_trainer.rehearsal.report import Report, problems, verdict
from p2p_trainer.rehearsal.round_chart import counted, legend, round_chart

REASONS_SHOWN = 10
TOLD_PART = 0.005
"""Of a peer's time: what is less is in no text."""
_TIME_WORDS = {
    "credited": "computing what came into bases",
    "pending": "computing what waits for its next round",
    "rejected": "computing what was dropped, or lost with a kill",
    "waiting": "not computing: a wait for a round, an evaluation, a busy computer",
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def rehearsal_page(report: Report) -> str:
    """The whole page."""
    name = report.run_id.rpartition("-")[0] or report.run_id or "a run"
    style = files("p2p_trainer.rehearsal").joinpath("rehearsal_page.css").read_text()
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"Rehearsal of {name}"),
        element("style", style),
    )
    body = element(
        "body",
        element("main", _header(report, name), *_verdict(report), *_sections(report)),
        element(
            "footer", "Made by p2p-trainer rehearse. The machines were emulated on one computer; the training was real."
        ),
    )
    return to_html(element("html", head, body, lang="en"))


def _sections(report: Report) -> list[Element]:
    return [
        _section("What each machine is to the swarm", element("ul", *_forecasts(report), class_="forecasts")),
        _section("Rounds", *_rounds(report)),
        _section("Held-out loss", *_losses(report)),
        _section("Shares and speed", element("div", _shares(report), _rates(report), class_="pair")),
        _section("Where time and bytes went", element("div", _times(report), _traffic(report), class_="pair")),
        _section("Peers", *_peers(report)),
    ]


def _section(heading: str, *content: Child) -> Element:
    return element("section", element("h2", heading), *content)


# ---------------------------------------------------------------------- words


def _header(report: Report, name: str) -> Element:
    count = len(report.peers)
    facts = [f"{count} peer{'' if count == 1 else 's'}", f"{report.seconds:g} s of training"]
    facts.append(
        f"{report.fragments} fragment{'' if report.fragments == 1 else 's'}, a tick of {report.tick_seconds:g} s"
    )
    if began := report.timeline.began_unix_seconds:
        facts.append(f"{datetime.fromtimestamp(began, timezone.utc):%Y-%m-%d %H:%M} UTC")
    return element(
        "header",
        element("h1", f"Rehearsal of {name}"),
        element("p", " · ".join(facts)),
        element("p", element("code", report.run_id or "run unknown")),
    )


def _verdict(report: Report) -> list[Element]:
    found = problems(report)
    if found:
        words = element("div", element("strong", "Not good"), element("ul", *(element("li", one) for one in found)))
    else:
        words = element("div", element("strong", "Good"), element("p", verdict(report).removeprefix("Good. ")))
    mark = element("span", "!" if found else "✓", aria_hidden="true", class_="mark")
    losses = report.held_out_loss
    figures = [
        ("efficiency", f"{100 * report.efficiency:.1f} %", "of what the peers do alone"),
        ("credited", f"{100 * report.credited_efficiency:.1f} %", "the rest waits for its next round"),
        ("digests", _digests(report), f"{report.digests_compared} bases compared"),
    ]
    if losses:
        figures.append(("held-out loss", f"{losses[-1][1]:.3f}", f"from {losses[0][1]:.3f}"))
    return [
        element("div", mark, words, class_=f"verdict {'bad' if found else 'good'}"),
        element(
            "dl",
            *(
                element("div", element("dt", name), element("dd", element("b", value), element("small", note)))
                for name, value, note in figures
            ),
            class_="figures",
        ),
    ]


def _digests(report: Report) -> str:
    if report.digest_conflicts:
        return "differ"
    return "agree" if report.digests_compared else "alone" if report.digests_agree else "none"


def _forecasts(report: Report) -> list[Element]:
    found = []
    for peer in report.peers:
        text = forecast(peer)
        found.append(element("li", element("strong", peer.name), text.removeprefix(peer.name)))
    return found


# ---------------------------------------------------------------------- plots


def _rounds(report: Report) -> list[Element]:
    timeline = report.timeline
    if not any(peer.rounds for peer in timeline.peers):
        return [_nothing("No peer came to a round.")]
    found = [legend(), _scrolling(round_chart(timeline, report.tick_seconds), "Rounds of each peer over time")]
    reasons = Counter((one.state, one.reason) for peer in timeline.peers for one in peer.rounds if one.reason)
    if reasons:
        rows = [[f"{times}", state, reason] for (state, reason), times in reasons.most_common(REASONS_SHOWN)]
        more = len(reasons) - len(rows)
        caption = "Why rounds were not simply in" + (
            f" (the {len(rows)} most frequent of {len(reasons)})" if more else ""
        )
        found.append(_details("Reasons", _table(caption, ["rounds", "state", "reason"], rows, numbers=range(1))))
    rows = [
        [peer.name, counted(peer.rounds), life_in_words(row) or "there all the time"]
        for peer, row in zip(timeline.peers, report.peers, strict=True)
    ]
    found.append(_details("The same as a table", _table("Rounds of each peer", ["peer", "rounds", "life"], rows)))
    return found


def _losses(report: Report) -> list[Element]:
    evaluations = report.timeline.evaluations
    if not evaluations:
        return [_nothing("No held-out loss was evaluated.")]
    loss = Axis.around([one.loss for one in evaluations], "loss")
    seconds = Axis.around([one.at_seconds for one in evaluations], "seconds of training", from_zero=True)
    samples = Axis.around(
        [one.samples for one in evaluations], "samples credited", from_zero=True, write=lambda value: f"{value:,.0f}"
    )
    # A peer that fell behind evaluates an older base than others have by then.
    newest = list(accumulate((one.samples for one in evaluations), max))
    behind = [one.samples < most for one, most in zip(evaluations, newest, strict=True)]
    words = [
        f"{one.loss:.3f} after {one.at_seconds:.0f} s, {one.samples:,} samples\nby {one.peer}" for one in evaluations
    ]
    shown = list(zip(evaluations, words, behind, strict=True))
    description = f"From {evaluations[0].loss:.3f} to {evaluations[-1].loss:.3f} in {len(evaluations)} evaluations."
    rows = [[f"{one.at_seconds:.0f}", f"{one.samples:,}", f"{one.loss:.3f}", one.peer] for one in evaluations]
    return [
        element(
            "div",
            curve(
                [Point(x=one.at_seconds, y=one.loss, title=text, aside=late) for one, text, late in shown],
                seconds,
                loss,
                title="Held-out loss against time",
                description=description,
            ),
            curve(
                [Point(x=one.samples, y=one.loss, title=text, aside=late) for one, text, late in shown],
                samples,
                loss,
                title="Held-out loss against credited samples",
                description=description,
            ),
            class_="pair",
        ),
        *([element("p", "Small grey points: a peer whose base was behind the newest.")] if any(behind) else []),
        _details(
            "The same as a table",
            _table("Held-out loss of the base", ["seconds", "samples", "loss", "evaluated by"], rows, numbers=range(3)),
        ),
    ]


def _shares(report: Report) -> Element:
    speed = sum(peer.solo_samples_per_second for peer in report.peers)
    most = max((max(peer.share, _part(peer.solo_samples_per_second, speed)) for peer in report.peers), default=0.0)
    rows = []
    for peer in report.peers:
        expected = _part(peer.solo_samples_per_second, speed)
        title = f"{peer.name}: {_percent(peer.share)} of all credited samples, {_percent(expected)} of all speed"
        bar = Segment(start=0.0, stop=_part(peer.share, most), kind="swarm", title=title)
        marker = _part(expected, most)
        track = Track(segments=(bar,), marker=marker)
        rows.append(BarRow(name=peer.name, tracks=(track,), texts=(_percent(peer.share),)))
    return bars(
        rows,
        caption="Share of all credited samples. The thin line is the peer's share of all speed: a peer that was away, "
        "or whose work did not count, stays below it.",
        headings=("peer", "share", "%"),
    )


def _rates(report: Report) -> Element:
    most = max((max(peer.solo_samples_per_second, peer.swarm_samples_per_second) for peer in report.peers), default=0.0)
    return bars(
        [
            _two_bars(
                peer.name,
                most,
                ("alone", peer.solo_samples_per_second, f"{peer.solo_samples_per_second:.1f} alone"),
                ("swarm", peer.swarm_samples_per_second, f"{peer.swarm_samples_per_second:.1f} swarm"),
            )
            for peer in report.peers
        ],
        caption="Samples per second: alone, as measured before it joined, and in the swarm while it was there.",
        headings=("peer", "rate", "samples/s"),
    )


def _traffic(report: Report) -> Element:
    most = max((max(peer.bytes_sent_per_hour, peer.bytes_received_per_hour) for peer in report.peers), default=0.0)
    counted_on_line = any(peer.bytes_counted == "line" for peer in report.peers)
    return bars(
        [
            _two_bars(
                peer.name,
                most,
                ("up", peer.bytes_sent_per_hour, f"{megabytes(peer.bytes_sent_per_hour)} up"),
                ("down", peer.bytes_received_per_hour, f"{megabytes(peer.bytes_received_per_hour)} down"),
            )
            for peer in report.peers
        ],
        caption="Bytes an hour. "
        + (
            "Everything that crossed its line, by its network interface: rounds, fetches, the DHT."
            if counted_on_line
            else "Of rounds alone, by each peer's own count: there was no interface of its own to ask."
        ),
        headings=("peer", "bytes", "an hour"),
    )


def _times(report: Report) -> Element:
    rows = []
    for peer in report.peers:
        parts = asdict(peer.time)
        ends = list(accumulate(parts.values()))
        segments = (
            Segment(start=end - parts[kind], stop=end, kind=kind, title=f"{_percent(parts[kind])} {words}")
            for (kind, words), end in zip(_TIME_WORDS.items(), ends, strict=True)
        )
        rest = (f"{_percent(part)} {kind}" for kind, part in parts.items() if kind != "credited" and part >= TOLD_PART)
        tracks = (Track(segments=tuple(segments)),)
        rows.append(BarRow(name=peer.name, tracks=tracks, texts=(_percent(peer.time.credited),), note=" · ".join(rest)))
    chart = bars(
        rows,
        caption="What each peer's time went into, by its speed alone; the figure is what was credited.",
        headings=("peer", "time", "credited"),
    )
    return element("div", chart, swatches([(kind, f"{kind}: {words}") for kind, words in _TIME_WORDS.items()]))


def _two_bars(name: str, most: float, *values: tuple[str, float, str]) -> BarRow:
    """:param values: kind, value, text"""
    segments = (
        Segment(start=0.0, stop=_part(value, most), kind=kind, title=f"{name}: {text}") for kind, value, text in values
    )
    return BarRow(
        name=name,
        tracks=tuple(Track(segments=(segment,)) for segment in segments),
        texts=tuple(text for _, _, text in values),
    )


# --------------------------------------------------------------------- tables


def _peers(report: Report) -> list[Element]:
    headings = [
        "peer",
        "line",
        "alone",
        "swarm",
        "processed",
        "credited",
        "pending",
        "dropped",
        "committed",
        "carried",
        "skipped",
        "share",
    ]
    rows = [
        [
            peer.name,
            peer.link or ("unlimited" if peer.bytes_counted == "line" else "loopback"),
            f"{peer.solo_samples_per_second:.1f}",
            f"{peer.swarm_samples_per_second:.1f}",
            f"{peer.processed_samples:,}",
            f"{peer.credited_samples:,.1f}",
            f"{peer.pending_samples:,.1f}",
            f"{peer.dropped_samples:,.1f}",
            f"{peer.rounds_committed}",
            f"{peer.rounds_carried}",
            f"{peer.rounds_skipped}",
            _percent(peer.share),
            _seconds(peer.seconds_to_first_credit),
        ]
        for peer in report.peers
    ]
    caption = "alone, swarm: samples/s · processed to dropped: samples · committed to skipped: rounds"
    table = _table(caption, [*headings, "first credit"], rows, numbers=range(2, len(headings) + 1))
    return [_scrolling(table, "What each peer did")]


def _table(
    caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: range = range(0)
) -> Element:
    """A table of text. :param numbers: the columns that are numbers"""
    kinds = ["number" if position in numbers else "text" for position in range(len(headings))]
    return element(
        "table",
        element("caption", caption),
        element(
            "thead",
            element(
                "tr", *(element("th", one, scope="col", class_=kind) for one, kind in zip(headings, kinds, strict=True))
            ),
        ),
        element(
            "tbody",
            *(
                element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
                for row in rows
            ),
        ),
    )


def _scrolling(content: Element, label: str) -> Element:
    # Reachable by keyboard, or who uses no mouse could not scroll it.
    return element("div", content, class_="scrolling", tabindex="0", role="region", aria_label=label)


def _details(summary: str, content: Element) -> Element:
    return element("details", element("summary", summary), _scrolling(content, summary))


def _nothing(words: str) -> Element:
    return element("p", words)


def _part(value: float, whole: float) -> float:
    return value / whole if whole else 0.0


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.095 or not part else f"{100 * part:.1f} %"


def _seconds(value: float | None) -> str:
    return f"{value:.1f} s" if value is not None else "never"

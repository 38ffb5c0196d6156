"""The rounds of a rehearsal as a time line: a row for each peer, a mark for each of its rounds.

What came of a round is told by the height of its mark and by its colour. Where rounds are many, a column stands for
some of one peer's that follow each other, sorted by what came of them, so that a page stays small and its marks wide
enough to be seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from xml.etree.ElementTree import Element

from p2p_trainer.rehearsal.charts import Axis, round_step, row_name
from p2p_trainer.rehearsal.markup import element, percent
from p2p_trainer.rehearsal.timeline import HappeningKind, PeerRound, PeerTimeline, RoundState, Timeline

MARK_HEIGHTS: dict[RoundState, int] = {"in": 20, "alone": 20, "late": 14, "carried": 9, "skipped": 4, "resting": 2}
ROW_HEIGHT, FLOOR, BAND_HEIGHT = 30, 25, 2
MAX_COLUMNS = 5000
"""On the page: some 200 bytes each."""
MAX_COLUMNS_OF_A_ROW = 800
COLUMN_PIXELS = 3
"""A time line is never narrower than its columns need; a narrow screen scrolls."""
MARK_PART = 0.75
"""Of a round's time, so that marks stand apart."""

STATE_WORDS: dict[RoundState, str] = {
    "in": "its work is in the new base",
    "late": "parts closed without its work, which comes with the next round",
    "alone": "nobody else was there; the base is its own",
    "carried": "no new base for it; its work comes with the next round",
    "skipped": "it did not take part",
    "resting": "not its turn: its line carries every n-th round",
}
_GLYPHS: dict[HappeningKind, str] = {
    "joined": "M-3,-5 L4,0 L-3,5 Z",
    "left": "M3,-5 L-4,0 L3,5 Z",
    "killed": "M-4,-4 L4,4 M-4,4 L4,-4",
}


def round_chart(timeline: Timeline, tick_seconds: float) -> Element:
    """A table with a row for each peer and the time above it."""
    whole = max(timeline.seconds + tick_seconds, tick_seconds)
    columns = math.ceil(whole / tick_seconds)
    together = rounds_of_a_column(columns, len(timeline.peers))
    step = round_step(0.0, whole, 8)
    axis = Axis(
        label="seconds since training began",
        low=0.0,
        high=whole,
        ticks=tuple(number * step for number in range(math.floor(whole / step) + 1)),
        write=lambda value: f"{value:g} s",
    )
    width = f"min-width: {COLUMN_PIXELS * math.ceil(columns / together)}px"
    rows = [
        element(
            "tr",
            row_name(peer.name),
            element("td", _row(peer, axis, together * tick_seconds, tick_seconds, width)),
        )
        for peer in timeline.peers
    ]
    head = element("tr", element("th", "peer", scope="col"), element("th", _times(axis, width), scope="col"))
    caption = "Every mark is one round of one peer, at the time of its tick."
    if together > 1:
        caption = f"Every column is {together} rounds of one peer, sorted by what came of them."
    caption += " Point at it for details."
    if any(peer.happenings or peer.frozen for peer in timeline.peers):
        caption += f" The scene's own seconds count from {timeline.scene_began_seconds:.0f} s, when all had begun."
    return element(
        "table",
        element("caption", caption),
        element("thead", head),
        element("tbody", *rows),
        class_="rounds",
    )


def rounds_of_a_column(rounds: int, peers: int) -> int:
    """How many rounds of one peer share a column."""
    return max(1, math.ceil(rounds / MAX_COLUMNS_OF_A_ROW), math.ceil(rounds * peers / MAX_COLUMNS))


def legend() -> Element:
    """What marks mean."""
    entries: list[tuple[Element, str, str]] = [
        (_mark(state, "2", "8", words), state, f": {words}") for state, words in STATE_WORDS.items()
    ]
    frozen = element("rect", x="0", y=3, width="100%", height=FLOOR - 3, class_="frozen")
    starting = element("line", x1="0", x2="100%", y1=FLOOR, y2=FLOOR, class_="starting")
    entries += [(starting, "starting", ": measuring itself, fetching the model"), (frozen, "frozen", "")]
    entries += [(_glyph(what, "50%", what), what, "") for what in _GLYPHS]
    return element(
        "ul",
        *(
            element(
                "li",
                element("svg", drawing, width=16, height=ROW_HEIGHT, aria_hidden="true"),
                element("span", element("b", name), words),
            )
            for drawing, name, words in entries
        ),
        class_="legend",
    )


def counted(rounds: Sequence[PeerRound]) -> str:
    """Such as ``12 in, 1 late``."""
    counts = Counter(one.state for one in rounds)
    return ", ".join(f"{counts[state]} {state}" for state in STATE_WORDS if counts[state]) or "no round"


def _row(peer: PeerTimeline, axis: Axis, column_seconds: float, tick_seconds: float, width: str) -> Element:
    return element(
        "svg",
        element("title", f"{peer.name}: {counted(peer.rounds)}"),
        element("desc", _life_in_words(peer)),
        *_grid(axis),
        *(
            element("line", x1=_at(axis, begin), x2=_at(axis, end), y1=FLOOR + 1, y2=FLOOR + 1, class_="starting")
            for begin, end in _starting(peer, axis.high)
        ),
        *(
            element(
                "rect", x=_at(axis, begin), y=FLOOR, width=_wide(axis, begin, end), height=BAND_HEIGHT, class_="there"
            )
            for begin, end in peer.trained
        ),
        *(
            element(
                "rect",
                element("title", f"frozen from {begin:.0f} to {end:.0f} s"),
                x=_at(axis, begin),
                y=3,
                width=_wide(axis, begin, end),
                height=FLOOR - 3,
                class_="frozen",
            )
            for begin, end in peer.frozen
        ),
        *_marks(peer.rounds, axis, column_seconds, tick_seconds),
        *(
            _glyph(one.what, _at(axis, one.at_seconds), f"{one.what} at {one.at_seconds:.0f} s")
            for one in peer.happenings
        ),
        role="img",
        height=ROW_HEIGHT,
        style=width,
    )


def _marks(rounds: Sequence[PeerRound], axis: Axis, column_seconds: float, tick_seconds: float) -> Iterator[Element]:
    inside = sorted((one for one in rounds if axis.low <= one.at_seconds <= axis.high), key=lambda one: one.at_seconds)
    order = list(MARK_HEIGHTS)
    for _, column in groupby(inside, key=lambda one: math.floor(one.at_seconds / column_seconds)):
        those = list(column)
        begins, title = those[0].at_seconds, _column_in_words(those)
        those.sort(key=lambda one: order.index(one.state))
        for state, group in groupby(those, key=lambda one: one.state):
            ends = begins + tick_seconds * len(list(group))
            yield _mark(state, _at(axis, begins), _wide(axis, begins, ends - (1 - MARK_PART) * tick_seconds), title)
            begins = ends


def _mark(state: RoundState, x: str, width: str, title: str) -> Element:
    height = MARK_HEIGHTS[state]
    return element(
        "rect", element("title", title), x=x, y=FLOOR - height, width=width, height=height, class_=f"round {state}"
    )


def _glyph(what: HappeningKind, x: str, title: str) -> Element:
    # An SVG of its own: its place is a part of the width, its size is not.
    return element(
        "svg",
        element("g", element("title", title), element("path", d=_GLYPHS[what]), class_=f"glyph {what}"),
        x=x,
        y=ROW_HEIGHT // 2,
        overflow="visible",
    )


def _grid(axis: Axis) -> list[Element]:
    return [
        element("line", x1=_at(axis, tick), x2=_at(axis, tick), y1="0", y2="100%", class_="grid") for tick in axis.ticks
    ]


def _times(axis: Axis, width: str) -> Element:
    texts = [
        element("text", axis.write(tick), x=_at(axis, tick), y=14, class_="first" if not tick else "middle")
        for tick in axis.ticks
        if axis.part(tick) < 0.97
    ]
    return element("svg", *texts, height=18, style=width, role="img", aria_label=axis.label)


def _starting(peer: PeerTimeline, until: float) -> Iterator[tuple[float, float]]:
    """From each time it was started to the moment when it trained, or to what happened instead."""
    for one in peer.happenings:
        if one.what == "joined":
            later = [begin for begin, _ in peer.trained] + [other.at_seconds for other in peer.happenings]
            yield one.at_seconds, min((at for at in later if at > one.at_seconds), default=until)


def _life_in_words(peer: PeerTimeline) -> str:
    happened = [(one.at_seconds, one.what) for one in peer.happenings] + [(begin, "frozen") for begin, _ in peer.frozen]
    return "; ".join(f"{what} at {at:.0f} s" for at, what in sorted(happened)) or "there all the time"


def _column_in_words(rounds: Sequence[PeerRound]) -> str:
    first, last = rounds[0], rounds[-1]
    if len(rounds) > 1:
        return f"{first.at_seconds:.0f} to {last.at_seconds:.0f} s: {counted(rounds)}"
    words = [
        f"{first.at_seconds:.0f} s, fragment {first.fragment}, tick {first.tick}",
        f"{first.state}: {STATE_WORDS[first.state]}",
    ]
    if first.reason:
        words.append(first.reason)
    if first.group_size > 1:
        words.append(f"group of {first.group_size}, {first.samples:.0f} samples, {first.took_seconds:.1f} s")
    return "\n".join(words)


def _at(axis: Axis, seconds: float) -> str:
    return percent(min(1.0, max(0.0, axis.part(seconds))))


def _wide(axis: Axis, begin: float, end: float) -> str:
    return percent(min(1.0, max(0.0, axis.part(end))) - min(1.0, max(0.0, axis.part(begin))))

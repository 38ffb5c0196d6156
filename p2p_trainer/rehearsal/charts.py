"""Charts as inline SVG, from plain values: a curve, bars, and marks along a time line.

Curves scale with the page. Bars and time lines stretch: their lengths are percentages and their text stays as it is,
so that they can be read on a telephone. Colours, also those for dark pages, are classes of ``rehearsal_page.css``;
nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from p2p_trainer.rehearsal.markup import element, percent

CURVE_WIDTH, CURVE_HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 44, 22, 26, 40
"""Around a curve, for its labels."""
TRACK_HEIGHT, BAR_HEIGHT = 20, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What a direction of a chart shows."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    write: Callable[[float], str]

    @classmethod
    def around(
        cls,
        values: Sequence[float],
        label: str,
        *,
        write: Callable[[float], str] | None = None,
        from_zero: bool = False,
    ) -> Axis:
        """An axis that has room for all values, from one round number to another.

        :param from_zero: from 0 to the last value instead
        """
        low, high = (0.0 if from_zero else min(values)), max(values)
        step = round_step(low, high)
        first, last = math.floor(low / step), math.ceil(high / step)
        last = max(last, first + 1)
        end = high if from_zero and high > 0 else last * step
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return cls(
            label=label,
            low=first * step,
            high=end,
            ticks=tuple(number * step for number in range(first, last + 1) if number * step <= end),
            write=write or (lambda value: f"{value:.{decimals}f}"),
        )

    def part(self, value: float) -> float:
        """Where a value lies, 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def round_step(low: float, high: float, steps: int = 5) -> float:
    """1, 2 or 5 times a power of ten, so that about so many steps lead from low to high."""
    rough = (high - low) / steps
    if not rough > 0:
        rough = abs(high) / steps or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.75 * rough)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value of a curve."""

    x: float
    y: float
    title: str
    """Shown when a person points at it."""
    aside: bool = False
    """Drawn, but no part of the line."""


def curve(points: Sequence[Point], x: Axis, y: Axis, *, title: str, description: str) -> Element:
    """A line through points, in their order. There must be one."""
    width, height = CURVE_WIDTH - LEFT - RIGHT, CURVE_HEIGHT - TOP - BOTTOM
    right, bottom = LEFT + width, TOP + height
    places = [(LEFT + width * x.part(point.x), bottom - height * y.part(point.y)) for point in points]
    line = [place for point, place in zip(points, places, strict=True) if not point.aside]
    return _image(
        title,
        description,
        *(
            element("line", x1=LEFT, x2=right, y1=at, y2=at, class_="grid")
            for at in (bottom - height * y.part(tick) for tick in y.ticks)
        ),
        *(
            element("text", y.write(tick), x=LEFT - 8, y=bottom - height * y.part(tick) + 4, class_="end")
            for tick in y.ticks
        ),
        *(
            element("text", x.write(tick), x=LEFT + width * x.part(tick), y=bottom + 17, class_="middle")
            for tick in x.ticks
        ),
        element("text", y.label, x=0, y=12, class_="axis"),
        element("text", x.label, x=right, y=CURVE_HEIGHT - 4, class_="axis end"),
        element("polyline", points=" ".join(f"{left:.1f},{top:.1f}" for left, top in line), class_="curve"),
        *(
            element(
                "circle",
                element("title", point.title),
                cx=left,
                cy=top,
                r=2.5 if point.aside else 3.5,
                class_="point aside" if point.aside else "point",
            )
            for point, (left, top) in zip(points, places, strict=True)
        ),
        viewBox=f"0 0 {CURVE_WIDTH} {CURVE_HEIGHT}",
        class_="plot",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a bar."""

    start: float
    """0 to 1 of what the chart is wide, as ``stop``."""
    stop: float
    kind: str
    """Its colour: a class of the style sheet."""
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One bar."""

    segments: tuple[Segment, ...]
    marker: float | None = None
    """Where a thin line stands for comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    """The bars of one name, and lines of text at their end."""

    name: str
    tracks: tuple[Track, ...]
    texts: tuple[str, ...]
    note: str = ""
    """Below the bars."""


def bars(rows: Sequence[BarRow], *, caption: str, headings: tuple[str, str, str]) -> Element:
    """A table with a bar in every row: who cannot see the bars reads the same in the text."""
    return element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *(element("th", heading, scope="col") for heading in headings))),
        element("tbody", *(_bar_row(row) for row in rows)),
        class_="bars",
    )


def _bar_row(row: BarRow) -> Element:
    height = TRACK_HEIGHT * len(row.tracks)
    drawing = element("svg", width="100%", height=height, aria_hidden="true")
    for number, track in enumerate(row.tracks):
        top = TRACK_HEIGHT * number + (TRACK_HEIGHT - BAR_HEIGHT) / 2
        drawing.append(element("rect", x=0, y=top, width="100%", height=BAR_HEIGHT, rx=2, class_="rail"))
        drawing.extend(_bar(segment, top) for segment in track.segments if segment.stop > segment.start)
        if track.marker is not None:
            at = percent(track.marker)
            drawing.append(element("line", x1=at, x2=at, y1=top - 3, y2=top + BAR_HEIGHT + 3, class_="marker"))
    return element(
        "tr",
        row_name(row.name),
        element("td", drawing, *([element("small", row.note)] if row.note else [])),
        element("td", *(element("div", text) for text in row.texts)),
    )


def row_name(name: str) -> Element:
    """The heading of a chart's row; a long name takes several lines."""
    return element("th", element("span", name), scope="row")


def swatches(kinds: Sequence[tuple[str, str]]) -> Element:
    """What the colours of bars mean. :param kinds: class and words"""
    return element(
        "ul",
        *(
            element(
                "li",
                element(
                    "svg",
                    element("rect", width=12, height=12, rx=2, class_=kind),
                    width=12,
                    height=12,
                    aria_hidden="true",
                ),
                words,
            )
            for kind, words in kinds
        ),
        class_="legend",
    )


def _bar(segment: Segment, top: float) -> Element:
    return element(
        "rect",
        element("title", segment.title),
        x=percent(segment.start),
        y=top,
        width=percent(segment.stop - segment.start),
        height=BAR_HEIGHT,
        class_=segment.kind,
    )


def _image(title: str, description: str, *children: Element, **attributes: str) -> Element:
    return element("svg", element("title", title), element("desc", description), *children, role="img", **attributes)

"""HTML and SVG as trees: the serialiser escapes, so no text of a peer, a manifest or a log can become markup."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

Child = str | Element
"""Text is escaped when it is written."""


def element(tag: str, *children: Child, **attributes: str | float) -> Element:
    """Make an element with its content.

    :param attributes: names as Python has them: ``class_`` is class, ``aria_label`` is aria-label; numbers are written
        to a hundredth, which is a percent of a pixel or less
    """
    made = Element(tag, {name.strip("_").replace("_", "-"): _written(value) for name, value in attributes.items()})
    add(made, children)
    return made


def add(parent: Element, children: Iterable[Child]) -> None:
    """Append text and elements in their order."""
    for child in children:
        if isinstance(child, Element):
            parent.append(child)
        elif len(parent):
            parent[-1].tail = (parent[-1].tail or "") + child
        else:
            parent.text = (parent.text or "") + child


def percent(part: float) -> str:
    """A part, 0 to 1, as a length of SVG and CSS."""
    return f"{_written(100 * part)}%"


def to_html(root: Element) -> str:
    """A whole document."""
    return f"<!doctype html>\n{tostring(root, encoding='unicode', method='html')}\n"


def _written(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.2f}".rstrip("0").rstrip(".")

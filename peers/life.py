"""The life of a peer: what it is doing and why, and what may come next.

``transition`` decides (pure); the averaging process keeps the one ``Life`` of its peer. Whatever the peer says of
itself, in its record, its metrics and its live line, is this state, and rounds are held in ``training`` alone. What it
does not show: a part of the peer that died or hangs, which ends it from any state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

State = Literal["joining", "measuring", "syncing", "training", "serving", "isolated", "leaving"]
"""``serving`` is what ``training`` is to a bootstrap peer. In ``syncing`` a peer may train already, on its own."""
What = Literal[
    "found", "measured", "caught up", "opened", "left out", "stood still", "silent", "answered", "given up", "stopped"
]
STATES: tuple[State, ...] = get_args(State)
WHATS: tuple[What, ...] = get_args(What)


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happened to a peer; ``about`` is what its words leave open, such as for how long."""

    what: What
    about: str = ""


class Step(NamedTuple):
    """The state that a peer is in now and, in words for a person, why. No words: nothing came of what happened."""

    state: State
    reason: str


BIRTH = Step("joining", "looking for peers of the run")

_MOVES: Mapping[What, tuple[tuple[State, ...], State, str]] = {
    "found": (("joining",), "measuring", "the run is found"),
    "measured": (("joining", "measuring"), "syncing", "looking for the bases that others have"),
    "caught up": (("syncing",), "training", "its bases are those of the swarm"),
    "opened": (("syncing",), "serving", "its bases are here for whoever comes"),
    "left out": (("training",), "syncing", "{about}"),
    "stood still": (("training",), "syncing", "this peer stood still for {about}; looking at the swarm's bases first"),
    "silent": (("syncing", "training", "isolated"), "isolated", "nobody has answered for {about}"),
    "answered": (("isolated",), "syncing", "others answer again; looking at their bases first"),
    "given up": (("isolated",), "syncing", "nobody has answered for {about}: the others are taken to be gone"),
    "stopped": (tuple(state for state in STATES if state != "leaving"), "leaving", "{about}"),
}
"""From which states it leads, whereto, and the words."""


def transition(state: State, happening: Happening) -> Step:
    """What a peer does after something happened. What does not concern it in its state changes nothing."""
    sources, target, words = _MOVES[happening.what]
    if state not in sources:
        return Step(state, "")
    return Step(target, words.replace("{about}", happening.about) or happening.what)


class Life:
    """Where one peer is in its life.

    :param on_change: told of each new state: what it was, what it is, and why
    """

    def __init__(self, on_change: Callable[[State, State, str], None] = lambda before, state, reason: None) -> None:
        self._on_change = on_change
        self.state, self.reason = BIRTH

    @property
    def takes_part(self) -> bool:
        """Whether rounds may count on this peer."""
        return self.state in ("training", "serving")

    def happens(self, what: What, about: str = "") -> bool:
        """Returns whether this led to another state. The reason may change without."""
        before = self.state
        state, reason = transition(before, Happening(what, about))
        if reason:
            self.state, self.reason = state, reason
        if state != before:
            self._on_change(before, state, reason)
        return state != before


def duration(seconds: float) -> str:
    """A time in words, coarse enough to be said again and again."""
    if seconds < 120:
        return f"{max(0, int(seconds))} s"
    return f"{int(seconds // 60)} min" if seconds < 7200 else f"{int(seconds // 3600)} h"

"""What happens to whom in a soak, and when: a pure function of the seed, the minutes and the number of peers.

Every kind of fault has its turn before one comes twice. The first peer is spared, so that somebody is there all the
time; never is more than a third of the peers away at once, so that those who stay are a quorum; and everybody is back
for the last part, so that accounts can be closed. Partitions are not played: a line is down for less time than records
live, so nobody takes itself for alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal[
    "join",
    "leave",
    "kill",
    "kill_daemon",
    "kill_averaging",
    "freeze",
    "freeze_daemon",
    "freeze_averaging",
    "slow_line",
    "line_down",
]
SECONDS_OF: dict[Kind, tuple[float, float]] = {
    "join": (0.0, 0.0),
    "leave": (3.0, 20.0),
    "kill": (3.0, 20.0),
    "kill_daemon": (0.0, 0.0),
    "kill_averaging": (0.0, 0.0),
    "freeze": (5.0, 60.0),
    "freeze_daemon": (5.0, 60.0),
    "freeze_averaging": (5.0, 60.0),
    "slow_line": (10.0, 30.0),
    "line_down": (5.0, 20.0),
}
"""How long until it is undone, at least and at most; 0 where the peer has to help itself, or nothing can be undone."""
LINE_KINDS: frozenset[Kind] = frozenset({"slow_line", "line_down"})
REPEATED: tuple[Kind, ...] = tuple(kind for kind in SECONDS_OF if kind != "join")

LATE_PART = 0.25
"""Of the peers, so many join while the soak runs."""
AWAY_PART = 1 / 3
CALM_PART, CALM_SECONDS = 0.15, (15.0, 60.0)
"""Of the time, before the first fault: what the swarm does when nothing happens. And its limits."""
END_PART, END_SECONDS = 0.25, (30.0, 90.0)
"""Of the time, after everything was undone."""
GAP_SECONDS = (6.0, 20.0)
COMEBACK_SECONDS = 30.0
"""A peer has this long to come back before it is struck again."""
LONGEST_PART = 0.3
"""A fault of a short soak lasts no longer than this part of its faulty time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is done to one peer, in seconds since all the first peers trained."""

    kind: Kind
    peer: str
    at: float
    until: float
    """When it is undone: started again, thawed, connected; ``at`` where nothing is to be undone."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A soak before it is played."""

    seed: int
    minutes: float
    first: tuple[str, ...]
    """Peers that are there from the beginning; the first of them is spared."""
    late: tuple[str, ...]
    calm_seconds: float
    faults: tuple[Fault, ...]
    """In order of time."""

    @property
    def seconds(self) -> float:
        return 60 * self.minutes

    def actions(self) -> list[tuple[float, bool, Fault]]:
        """What is to be done, in order: when, whether it undoes a fault, and which."""
        undone = [(fault.until, True, fault) for fault in self.faults if fault.until > fault.at]
        return sorted([*((fault.at, False, fault) for fault in self.faults), *undone], key=lambda one: one[:2])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def peer_names(peers: int) -> list[str]:
    return [f"peer{number:02d}" for number in range(1, peers + 1)]


def make_schedule(seed: int, minutes: float, peers: int) -> Schedule:
    """Draw a schedule. :raises ValueError: fewer than 4 peers, of which none could be away; or less than a minute"""
    if peers < 4:
        raise ValueError(f"{peers} peers are too few: at least 4, or a quorum would be lost with one of them")
    if minutes < 1:
        raise ValueError(f"{minutes:g} minutes are too few: at least 1")
    draw = random.Random(f"soak {seed} {minutes:g} {peers}")
    names = peer_names(peers)
    num_late = max(1, int(LATE_PART * peers)) if peers > 4 else 0
    first, late = names[: peers - num_late], names[peers - num_late :]
    seconds = 60 * minutes
    calm = min(max(CALM_PART * seconds, CALM_SECONDS[0]), CALM_SECONDS[1])
    over = seconds - min(max(END_PART * seconds, END_SECONDS[0]), END_SECONDS[1])
    faults = [Fault(kind="join", peer=name, at=at, until=at) for name in late if (at := draw.uniform(calm, over))]
    at, bag = calm, _Bag(draw)
    while at < over:
        able = [name for name in names[1:] if _is_free(name, at, faults, late)]
        if able and _num_away(at, faults) < int(AWAY_PART * peers):
            kind = bag.draw()
            low, high = SECONDS_OF[kind]
            lasts = draw.uniform(low, min(high, max(low, LONGEST_PART * (over - calm))))
            faults.append(Fault(kind=kind, peer=draw.choice(able), at=at, until=min(at + lasts, over)))
        at += draw.uniform(*GAP_SECONDS)
    return Schedule(
        seed=seed,
        minutes=minutes,
        first=tuple(first),
        late=tuple(late),
        calm_seconds=calm,
        faults=tuple(sorted((_rounded(fault) for fault in faults), key=lambda fault: (fault.at, fault.peer))),
    )


class _Bag:
    """Every kind once, in any order, before any comes again."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._left = draw, list[Kind]()

    def draw(self) -> Kind:
        if not self._left:
            self._left = list(REPEATED)
            self._draw.shuffle(self._left)
        return self._left.pop()


def _is_free(name: str, at: float, faults: Sequence[Fault], late: Sequence[str]) -> bool:
    """Whether a peer is there, and has had the time to come back from everything before."""
    own = [fault for fault in faults if fault.peer == name]
    has_come = name not in late or any(fault.kind == "join" and fault.at <= at for fault in own)
    return has_come and all(fault.until + COMEBACK_SECONDS < at for fault in own)


def _num_away(at: float, faults: Sequence[Fault]) -> int:
    """Peers that are struck, or may still be on their way back."""
    return len({one.peer for one in faults if one.kind != "join" and one.at <= at < one.until + COMEBACK_SECONDS / 2})


def _rounded(fault: Fault) -> Fault:
    return Fault(kind=fault.kind, peer=fault.peer, at=round(fault.at, 1), until=round(fault.until, 1))

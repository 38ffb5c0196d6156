"""When what happened in a rehearsal: every peer's stays and rounds, and the held-out loss, on one clock.

Pure functions of the peers' metrics, for ``report.html`` and for programs (``timeline`` in the JSON). Times are seconds
since the first peer began to train, to a hundredth; what happened before that is negative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from p2p_trainer.rehearsal.rehearsed_peer import Account, Event, number, of_kind

RoundState = Literal["in", "late", "alone", "carried", "skipped", "resting"]
"""What came of a round for one peer: its contribution is in the new base; the base was committed, but parts of it
closed without this contribution; it was alone and its base is its own work; no whole average came, so the contribution
waits for the next round; it did not take part, or was not meant to, by its cadence."""
HappeningKind = Literal["joined", "left", "killed"]
REGULAR_PART = 2 / 3
"""A peer keeps a cadence if this part of the gaps between its rounds are the same, and of such rounds it missed few."""
FEWEST_GAPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineClock:
    """Brings what the metrics and the scene say about time to seconds of the timeline."""

    zero: float
    """Unix seconds: when the first peer began to train."""
    scene_zero: float
    """Unix seconds: what a scene's joins, leaves and kills are counted from."""
    run_start: float
    """Unix seconds: when tick 0 of the run began."""
    tick_seconds: float

    def at(self, unix_seconds: float) -> float:
        return round(unix_seconds - self.zero, 2)

    def at_scene(self, seconds: float) -> float:
        return self.at(self.scene_zero + seconds)

    def at_tick(self, tick: int) -> float:
        """When a tick began. All peers share this machine's clock, so swarm time is its time."""
        return self.at(self.run_start + tick * self.tick_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRound:
    """One tick's round, as it was for one peer."""

    tick: int
    fragment: int
    at_seconds: float
    """When the tick began."""
    state: RoundState
    reason: str
    """In words, where it is not simply in; may be empty."""
    group_size: int
    samples: float
    """Its weight: samples it contributed, or would have."""
    took_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """What the scene did to a peer."""

    at_seconds: float
    what: HappeningKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimeline:
    """Everything that happened to one peer."""

    name: str
    trained: list[tuple[float, float]]
    """From, to; one for each start that came to training."""
    frozen: list[tuple[float, float]]
    happenings: list[Happening]
    rounds: list[PeerRound]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The held-out loss of a base."""

    at_seconds: float
    samples: int
    """Of all peers, credited in that base."""
    loss: float
    peer: str
    """Who evaluated it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A rehearsal on one clock."""

    began_unix_seconds: float
    """When the first peer began to train."""
    scene_began_seconds: float
    """When all peers that were there from the beginning had begun: a scene's own seconds count from there."""
    seconds: float
    """When the last thing happened."""
    peers: list[PeerTimeline]
    evaluations: list[Evaluation]
    """In order of time."""


def build_timeline(accounts: Sequence[Account], clock: TimelineClock) -> Timeline:
    """Put everything on one clock."""
    peers = [_peer_timeline(account, clock) for account in accounts]
    ends = [end for peer in peers for _, end in peer.trained]
    return Timeline(
        began_unix_seconds=clock.zero,
        scene_began_seconds=clock.at_scene(0.0),
        seconds=max([0.0, *ends, *(mark.at_seconds for peer in peers for mark in peer.rounds)]),
        peers=peers,
        evaluations=_evaluations(accounts, clock),
    )


def cadence(rounds: Sequence[PeerRound], fragments: int) -> int | None:
    """A peer commits every n-th round of a fragment: n, or None where there is no such rule to be seen."""
    gaps: Counter[int] = Counter()
    committed = [one for one in rounds if is_committed(one.state)]
    for fragment in range(fragments):
        ticks = sorted({one.tick for one in committed if one.fragment == fragment})
        gaps.update((after - before) // fragments for before, after in pairwise(ticks))
    if gaps.total() < FEWEST_GAPS:
        return None
    usual, times = gaps.most_common(1)[0]
    kept = times >= REGULAR_PART * gaps.total() and len(committed) * usual >= REGULAR_PART * len(rounds)
    return usual if kept else None


def is_committed(state: RoundState) -> bool:
    """Whether the peer has the new base."""
    return state in ("in", "late", "alone")


def _peer_timeline(account: Account, clock: TimelineClock) -> PeerTimeline:
    life = account.peer.life
    happened: list[tuple[float, HappeningKind]] = [
        # Who was there from the beginning did not come.
        *((at, "joined") for at in life.joins if at > 0),
        *((at, "left") for at in life.leaves),
        *((at, "killed") for at in [*life.kills, *life.out_of_memory]),
    ]
    return PeerTimeline(
        name=account.peer.name,
        trained=[(clock.at(stay.started), clock.at(stay.last_seen)) for stay in account.stays],
        frozen=[(clock.at(begin), clock.at(end)) for begin, end in life.frozen_at],
        happenings=[Happening(at_seconds=clock.at_scene(at), what=what) for at, what in sorted(happened)],
        rounds=[
            mark for event in of_kind(account.peer.events, "round") if (mark := _peer_round(event, clock)) is not None
        ],
    )


def _peer_round(event: Event, clock: TimelineClock) -> PeerRound | None:
    tick, fragment = event.get("tick"), event.get("fragment")
    state = _state(event)
    if state is None or not isinstance(tick, int) or not isinstance(fragment, int):
        return None
    return PeerRound(
        tick=tick,
        fragment=fragment,
        at_seconds=clock.at_tick(tick),
        state=state,
        reason=str(event.get("reason") or ""),
        group_size=int(number(event, "group_size") or 0),
        samples=number(event, "weight") or 0.0,
        took_seconds=round(number(event, "seconds") or 0.0, 2),
    )


def _state(event: Event) -> RoundState | None:
    outcome = event.get("outcome")
    if outcome == "carried":
        return "carried"
    if outcome == "skipped":
        return "resting" if event.get("due") is False else "skipped"
    if outcome != "committed":
        return None
    if number(event, "late_share"):
        return "late"
    return "alone" if number(event, "group_size") == 1 else "in"


def _evaluations(accounts: Sequence[Account], clock: TimelineClock) -> list[Evaluation]:
    found = [
        # An evaluation before training began counts as at its beginning.
        Evaluation(at_seconds=max(0.0, clock.at(at)), samples=int(samples), loss=loss, peer=account.peer.name)
        for account in accounts
        for event in of_kind(account.peer.events, "eval")
        if (at := number(event, "time")) is not None
        and (loss := number(event, "loss")) is not None
        and (samples := number(event, "samples")) is not None
    ]
    return sorted(found, key=lambda one: one.at_seconds)

"""What one peer of a rehearsal did, from its metrics: its stays, and the totals by its last book.

Pure functions of events. A peer that left or was killed and came back wrote one file in several starts; its own
counts go on from where its last checkpoint, or the swarm, knew them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dht_config.errors import RehearsalError
from p2p_trainer.rehearsal.memory_limits import MemoryUse

Event = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class PlayedLife:
    """What the rehearsal did to a peer before its end, in seconds after training began."""

    joins: list[float] = field(default_factory=list)
    """Its starts; 0 if it was there when training began."""
    leaves: list[float] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    freezes: list[float] = field(default_factory=list)
    out_of_memory: list[float] = field(default_factory=list)
    """When it ended because its memory did not suffice, 0 if before training began; it does not come back."""
    frozen_at: list[tuple[float, float]] = field(default_factory=list)
    """From, to, in unix seconds."""

    @property
    def was_away(self) -> bool:
        return bool(self.leaves or self.kills or self.out_of_memory or any(self.joins))

    def seconds_there(self, until: float) -> float:
        """From its starts to its ends, and to this moment if it was there then."""
        ends = sorted([*self.leaves, *self.kills, *self.out_of_memory, until])
        return sum(next((end for end in ends if end >= start), start) - start for start in self.joins)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCount:
    """Everything that crossed a peer's line while the rehearsal trained, headers and lost packets as well."""

    sent_bytes: int
    received_bytes: int
    seconds: float
    """How long the peer was there in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """One peer's metrics, oldest event first, of all its starts, and how its process ended."""

    name: str
    events: Sequence[Event]
    exit_code: int | None = None
    """Negative for a signal; None if it is not known."""
    killed: bool = False
    """The rehearsal meant to kill the process that ended with this code, or gave it too little memory."""
    link: str = ""
    """As ``LinkSpec`` writes it; empty if it had no line of its own."""
    behind_nat: bool = False
    memory: MemoryUse | None = None
    """None if it was not counted."""
    life: PlayedLife = field(default_factory=PlayedLife)
    line_count: LineCount | None = None
    """None where it had no line of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """What a peer did from one start to its end."""

    solo: float
    processed_before: float
    started: float
    ended: float
    window_seconds: float
    """Above zero, so that a peer that trained for no time at all is a rate of 0, not an error."""
    events: Sequence[Event]
    """From the moment training started."""
    book: Event
    """Its goodbye, or its last account if it ended without one; empty if there was none."""
    left: bool

    @classmethod
    def of(cls, before: Sequence[Event], events: Sequence[Event], frozen: Iterable[tuple[float, float]]) -> Stay:
        """:param before: from this start, but before training; :param events: from the moment training started"""
        started = number(events[0], "time") or 0.0
        leave = next((one for one in of_kind(events, "leave") if number(one, "training_ended") is not None), None)
        account = next(iter(of_kind(reversed(events), "account")), None)
        book = leave or account or {}
        # What came after the last account is in no book, so it is in no window either.
        ended = number(book, "training_ended" if leave else "time")
        if ended is None:
            ended = max(number(event, "time") or 0.0 for event in events)
        ended = max(ended, started)
        still = sum(max(0.0, min(end, ended) - max(begin, started)) for begin, end in frozen)
        solo = [speed for event in before if (speed := _solo(event))]
        joined = next(iter(of_kind(reversed(before), "join")), {})
        return cls(
            solo=solo[-1] if solo else 0.0,
            processed_before=number(joined, "processed_samples") or 0.0,
            started=started,
            ended=ended,
            window_seconds=max(ended - started - still, 1e-6),
            events=events,
            book=book,
            left=leave is not None,
        )

    @property
    def trained_share(self) -> float:
        """How much of the model the peer trained at a time, 0 to 1."""
        trained, fragments = (number(self.events[0], key) for key in ("trained_fragments", "fragments"))
        return trained / fragments if trained and fragments else 1.0

    @property
    def last_seen(self) -> float:
        """Unix seconds of the last thing that is known of it, also if that came into no book."""
        return max([self.ended, *(number(event, "time") or 0.0 for event in self.events)])

    @property
    def processed(self) -> float:
        """Its peer's total at the end, by the book."""
        booked = number(self.book, "processed_samples")
        return self.processed_before if booked is None else booked

    @property
    def seen(self) -> float:
        """Its peer's total as it was seen last, also if that came into no book."""
        samples = [number(event, "samples") or 0.0 for event in of_kind(self.events, "train")]
        return max([self.processed, *samples[-1:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """What a peer's window was used for, in parts of it that sum to 1; all 0 for a peer that never trained."""

    credited: float
    """Computing what came into bases."""
    pending: float
    """Computing what waits for its next round."""
    rejected: float
    """Computing what was dropped, or lost with a kill."""
    waiting: float
    """Not computing, by its speed alone: rounds, evaluations, and a machine that others use as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A peer's totals, by its last book."""

    peer: PeerRecord
    solo: float
    stays: tuple[Stay, ...]
    processed: int
    credited: float
    pending: float
    dropped: float
    inner_steps: int
    exact: bool
    trained_share: float
    """How much of the model it trained at a time, 0 to 1."""
    pending_by_fragment: tuple[tuple[float, float], ...]
    """(parameters, pending samples); one entry of weight 1 if fragments are not known."""

    @property
    def window_seconds(self) -> float:
        return sum(stay.window_seconds for stay in self.stays)

    @property
    def lost(self) -> float:
        """What every stay without a goodbye took with it."""
        kept = [*(stay.processed_before for stay in self.stays[1:]), self.credited + self.dropped]
        return sum(max(0.0, stay.seen - after) for stay, after in zip(self.stays, kept, strict=False) if not stay.left)

    @classmethod
    def of(cls, peer: PeerRecord) -> Account:
        solo = [speed for event in peer.events if (speed := _solo(event))]
        stays = _stays(peer)
        if (not solo or not stays) and not peer.life.was_away:
            raise RehearsalError(
                problem=f"Peer {peer.name} {'never trained' if solo else 'measured no throughput'}.",
                remedy="Look at its log.",
            )
        last: Event = next((stay.book for stay in reversed(stays) if stay.book), {})
        credited = number(last, "credited_samples") or 0.0
        pending = number(last, "pending_samples") or 0.0
        dropped = number(last, "dropped_samples") or 0.0
        processed = int(number(last, "processed_samples") or 0)
        trained = number(last, "trained_samples")
        trained = processed if trained is None else trained
        by_fragment = tuple(
            (number(fragment, "parameters") or 0.0, number(fragment, "pending_samples") or 0.0)
            for fragment in last.get("fragments") or ()
        )
        # Whoever was killed on purpose, or had no time to train, could not say goodbye; nor when killed and back again
        # without coming to training.
        back = len(peer.life.joins) > len(stays)
        excused = peer.killed or not stays or (peer.life.was_away and not last) or (bool(peer.life.kills) and back)
        vouched = excused if not last else (stays[-1].left or excused) and last.get("exact") is True
        return cls(
            peer=peer,
            solo=solo[0] if solo else 0.0,
            stays=stays,
            processed=processed,
            credited=credited,
            pending=pending,
            dropped=dropped,
            inner_steps=int(number(last, "inner_steps") or 0),
            # The peer's own verdict is over integers; sums of means over fragments are rounded.
            exact=vouched and math.isclose(credited + pending + dropped, trained, rel_tol=1e-9, abs_tol=1e-9),
            trained_share=stays[-1].trained_share if stays else 1.0,
            pending_by_fragment=by_fragment or ((1.0, pending),),
        )


def time_use(account: Account) -> TimeUse:
    """Where a peer's time went, from what it processed and how fast it is alone."""
    trained = sum(stay.processed - stay.processed_before for stay in account.stays)
    if not (account.stays and account.solo and trained > 0):
        return TimeUse(credited=0.0, pending=0.0, rejected=0.0, waiting=1.0 if account.stays else 0.0)
    # A peer that was faster than alone waited for nothing.
    whole = max(account.window_seconds, trained / account.solo) * account.solo
    # A step whose samples came into all fragments that it trained was put to use whole.
    credited, pending = (
        min(samples / account.trained_share, trained) / whole for samples in (account.credited, account.pending)
    )
    computing = trained / whole
    return TimeUse(
        credited=credited,
        pending=min(pending, computing - credited),
        rejected=max(0.0, computing - credited - pending),
        waiting=1.0 - computing,
    )


def _stays(peer: PeerRecord) -> tuple[Stay, ...]:
    """The starts that came to training, oldest first."""
    found: list[Stay] = []
    before: list[Event] = []
    training: list[Event] = []

    def close() -> None:
        if training:
            found.append(Stay.of(tuple(before), tuple(training), peer.life.frozen_at))
            before.clear()
            training.clear()

    for event in peer.events:
        kind = event.get("event")
        if training and (kind == "join" or _solo(event) or _left_untrained(event)):  # another start
            close()
        if kind == "training_started" and number(event, "time") is not None:
            close()
            training.append(event)
        else:
            (training or before).append(event)
    close()
    return tuple(found)


def _left_untrained(event: Event) -> bool:
    """The goodbye of a start that did not come to training."""
    return event.get("event") == "leave" and number(event, "training_ended") is None


def _solo(event: Event) -> float | None:
    """The speed that a peer measured before it joined, if this says so."""
    measured = event.get("event") == "throughput" and event.get("phase") == "solo"
    return number(event, "samples_per_second") if measured else None


def counted_samples(account: Account, cycle_seconds: float) -> float:
    """Credited samples, and those pending for less than a cycle when training ended, or so many as the peer's cadence.

    A fragment's samples wait for its next round: that is no loss, but it would be one to count more.
    """
    if not account.stays:
        return 0.0
    last = account.stays[-1]
    points = _progress(last)
    rounds = [cadence for event in of_kind(last.events, "round") if (cadence := number(event, "cadence"))]
    wait_seconds = cycle_seconds * (rounds[-1] if rounds else 1.0)
    recent = _processed_at(points, last.ended) - _processed_at(points, last.ended - wait_seconds)
    parameters = sum(weight for weight, _ in account.pending_by_fragment)
    if not parameters:
        return account.credited
    waiting = sum(weight * min(pending, recent) for weight, pending in account.pending_by_fragment)
    return account.credited + waiting / parameters


def _progress(stay: Stay) -> list[tuple[float, float]]:
    """(unix s, samples processed so far), rising in both."""
    points = [(stay.started, stay.processed_before)]
    for kind, field_name in (("train", "samples"), ("account", "processed_samples")):
        for event in of_kind(stay.events, kind):
            at, samples = number(event, "time"), number(event, field_name)
            if at is not None and samples is not None and at < stay.ended:
                points.append((at, samples))
    return [*sorted(points), (stay.ended, stay.processed)]


def _processed_at(points: Sequence[tuple[float, float]], at: float) -> float:
    """Samples processed by a moment: a line between the two points around it, level outside of them."""
    after = bisect_right(points, at, key=lambda point: point[0])
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (early, low), (late, high) = points[after - 1], points[after]
    return low + (high - low) * (at - early) / (late - early)


def of_kind(events: Iterable[Event], kind: str) -> Iterable[Event]:
    return (event for event in events if event.get("event") == kind)


def number(event: Event, key: str) -> float | None:
    """A field that is a finite number; NaN is written as null."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)

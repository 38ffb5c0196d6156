"""What rounds want of a peer's line, what it carries, and what follows: how strongly to encode, how often to take part.

A home line often carries ten times more down than up, so the two ways are kept apart: a stronger codec for what a peer
contributes helps the way up alone; averages and bases, which are the same for everyone, come down as they are.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Literal

from dht_config.manifest import AveragingSection
from peers.clock import Schedule
from peers.codecs import get_codec

CadenceValue = Literal[1, 2, 4]
CADENCES: tuple[CadenceValue, ...] = (1, 2, 4)
SHARE_OF_LINE = 0.8
"""Rounds and the fetching between them may take this much of a line's time."""
CAUTION = 0.8
"""What asks more of a line is chosen only if it would do at this part of the measured rate: not to and fro."""
LIMITING = 0.5
"""A rate below this part of the others' rates together is our own line's."""
MOST_MEGABITS_PER_SECOND = 1e6
"""What an announcement may say."""
MEASURABLE_BYTES = 1 << 20
"""Fewer bytes say more of a link's latency than of its rate."""
LEAST_SECONDS = 0.25
"""What came in a shorter time may have waited in buffers."""
MEASURABLE_UP_BYTES = 1 << 16
"""Fewer will do where the other side says how long they took."""
RECENT_ROUNDS = 32
ROUND_TRIPS = 3
"""Of a round, one after the other: its leader tells who is in it, a stream is opened, a part goes for its average."""
FORGOTTEN_ROUNDS = 128
"""A rate that was not measured for so long, as the way up with a codec that sends next to nothing, is to be tried."""
CodecName = Literal["int8", "int4", "sparse"]
CODECS: tuple[CodecName, ...] = ("int8", "int4", "sparse")
"""What a sender may choose from, the best first. At equal samples int8 cost no loss that was seen in nine seeds, int4
0.2 %, sparse 2 % (``codecs.py``): stronger ones are for lines that would skip rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRate:
    """Bytes a second; infinite where nothing is known to limit them."""

    up: float = math.inf
    down: float = math.inf
    round_trip_seconds: float = 0.0
    """To another peer and back; 0 where it was not measured."""

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.up) or math.isfinite(self.down)

    @property
    def megabits_per_second(self) -> float | None:
        """The slower way; None if neither is known."""
        return min(self.up, self.down) * 8 / 1e6 if self.is_known else None

    def at_most(self, other: LineRate) -> LineRate:
        return LineRate(
            up=min(self.up, other.up),
            down=min(self.down, other.down),
            round_trip_seconds=max(self.round_trip_seconds, other.round_trip_seconds),
        )

    def times(self, factor: float) -> LineRate:
        return replace(self, up=self.up * factor, down=self.down * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineUse:
    """What rounds want of a line."""

    up_bytes: int
    """Of one round."""
    down_bytes: int
    base_bytes: int
    """Of a base with its outer state, which is fetched after each round that was skipped."""
    tick_seconds: float
    cycle_seconds: float = math.inf
    """Between two rounds of one fragment."""

    def share(self, rate: LineRate, cadence: int) -> float:
        """The part of its time that a line is busy at this cadence; above 1 it cannot keep up."""
        return self._busy_seconds(rate, cadence) / (self.tick_seconds * cadence)

    def keeps_up(self, rate: LineRate, cadence: int) -> bool:
        """Whether the line has air, and a round is over before the fragment's next one that the peer takes part in.

        Rounds of other fragments go on meanwhile: a far peer's line is not busy while it waits.
        """
        seconds = self._busy_seconds(rate, cadence) + ROUND_TRIPS * rate.round_trip_seconds
        return self.share(rate, cadence) <= SHARE_OF_LINE and seconds <= SHARE_OF_LINE * self.cycle_seconds * cadence

    def least_cadence(self, rate: LineRate) -> CadenceValue:
        """The lowest at which a line keeps up; the highest if it never does."""
        return next((cadence for cadence in CADENCES if self.keeps_up(rate, cadence)), CADENCES[-1])

    def _busy_seconds(self, rate: LineRate, cadence: int) -> float:
        fetched = self.base_bytes if cadence > 1 else 0
        return max(self.up_bytes / rate.up, (self.down_bytes + fetched) / rate.down)


def line_use(averaging: AveragingSection, schedule: Schedule, *, codec: str, size: int, base_bytes: int) -> LineUse:
    """What a run's rounds of a fragment of ``size`` elements want of the line of a peer that encodes with ``codec``."""
    return LineUse(
        up_bytes=get_codec(codec).encoded_bytes(size),
        down_bytes=get_codec(averaging.answer_codec).encoded_bytes(size),
        base_bytes=base_bytes,
        tick_seconds=schedule.tick_seconds,
        cycle_seconds=schedule.cycle_seconds,
    )


def least_codec(rate: LineRate, use: Callable[[str], LineUse]) -> CodecName:
    """The best codec of those with which a line takes part most often."""
    return min(CODECS, key=lambda codec: use(codec).least_cadence(rate))


def next_codec(current: CodecName, rate: LineRate, use: Callable[[str], LineUse]) -> CodecName:
    """What to encode the next contribution with; a better codec than now only if the line has room to spare.

    Where nothing is known of the way up nothing speaks for another one.
    """
    if math.isinf(rate.up):
        return current
    needed = least_codec(rate, use)
    if CODECS.index(needed) >= CODECS.index(current):
        return needed
    cautious = least_codec(rate.times(CAUTION), use)
    return min(current, cautious, key=CODECS.index)


def announced_megabits(known: LineRate, allowed: LineRate) -> float | None:
    """What to tell others that our line carries each way; None as long as the way up is not known.

    They give us a share to reduce by it, and a line that comes down fast may be slow upwards.
    """
    rate = known.at_most(allowed)
    megabits = rate.megabits_per_second
    return min(MOST_MEGABITS_PER_SECOND, megabits) if megabits is not None and math.isfinite(rate.up) else None


def limiting(measured: LineRate, known: LineRate, others_kilobits: int) -> LineRate:
    """What is known to limit us: our line may be it only if it carried much less than the others' lines together do.

    :param measured: in this round
    :param known: of our line, the best of recent rounds
    :param others_kilobits: a second, the sum of what the other members announced
    """
    megabits = known.megabits_per_second
    if megabits is None or not measured.is_known or 1000 * megabits > LIMITING * others_kilobits:
        return LineRate()
    return known


class LinkRate:
    """What our line has carried in recent rounds.

    Down, the best of them: others' lines and stalls only ever lower it. Up, their median: it is what others say, and
    one of them may lie.

    :param before: as known from an earlier start; for each way, until this one has measured it, or as long as a rate
        is remembered
    """

    def __init__(self, before: LineRate = LineRate()) -> None:
        self._before = before
        self._rounds = 0
        self._up: deque[tuple[int, float]] = deque(maxlen=RECENT_ROUNDS)
        self._down: deque[tuple[int, float]] = deque(maxlen=RECENT_ROUNDS)

    def note(self, rate: LineRate) -> None:
        """:param rate: of a round; not finite where too little was moved to say"""
        self._rounds += 1
        if self._rounds >= FORGOTTEN_ROUNDS:
            self._before = LineRate()
        for recent, carried in ((self._up, rate.up), (self._down, rate.down)):
            if math.isfinite(carried):
                recent.append((self._rounds, carried))
            while recent and recent[0][0] <= self._rounds - FORGOTTEN_ROUNDS:
                recent.popleft()

    @property
    def measured(self) -> LineRate:
        """What this start has measured of it."""
        up = statistics.median(carried for _, carried in self._up) if self._up else math.inf
        return LineRate(up=up, down=max((carried for _, carried in self._down), default=math.inf))

    @property
    def rate(self) -> LineRate:
        """What is known of it."""
        measured, before = self.measured, self._before
        return LineRate(
            up=measured.up if math.isfinite(measured.up) else before.up,
            down=measured.down if math.isfinite(measured.down) else before.down,
        )

    @property
    def megabits_per_second(self) -> float | None:
        """Of the slower way; None before the first measurement."""
        known = self.rate.megabits_per_second
        return min(MOST_MEGABITS_PER_SECOND, known) if known is not None else None


class RateMeter:
    """What one round's traffic says of our line, and of nobody else's.

    *Up*: reducers say how long our parts took to arrive. When their averages come says nothing: they wait for others.
    What this does not stop: two reducers of a round that both say it took long make us encode more strongly.
    *Down*: the most that came in any stretch of it, since before and after it others may have kept us waiting.
    """

    def __init__(self) -> None:
        self._sent: dict[Hashable, tuple[int, float]] = {}
        self._came: deque[tuple[float, int]] = deque()
        self._held = 0
        """Bytes in ``_came``, without the first: that one's way began before its moment."""
        self._best_down = 0.0

    def arrived(self, reducer: Hashable, total_bytes: int, seconds: float) -> None:
        """A reducer has had so many bytes of ours, in so many seconds since our stream to it was open."""
        if seconds > 0:
            self._sent[reducer] = (total_bytes, seconds)

    def came(self, now: float, received_bytes: int) -> None:
        """Something came in."""
        if self._came:
            self._held += received_bytes
        self._came.append((now, received_bytes))
        came = self._came
        while len(came) > 1 and self._held - came[1][1] >= MEASURABLE_BYTES and now - came[1][0] >= LEAST_SECONDS:
            came.popleft()
            self._held -= came[0][1]
        if self._held >= MEASURABLE_BYTES and now - came[0][0] >= LEAST_SECONDS:
            self._best_down = max(self._best_down, self._held / (now - came[0][0]))

    @property
    def rate(self) -> LineRate:
        moved = sum(total_bytes for total_bytes, _ in self._sent.values())
        # They all went at once, over one line. Of many reducers one may lie about it, or have stalled.
        seconds = sorted(seconds for _, seconds in self._sent.values())
        longest = seconds[-2 if len(seconds) > 2 else -1] if seconds else 0.0
        up = moved / longest if moved >= MEASURABLE_UP_BYTES else math.inf
        return LineRate(up=up, down=self._best_down or math.inf)

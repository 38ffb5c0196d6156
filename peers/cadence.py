"""How often a peer takes part in rounds: in every one, every second or every fourth of a fragment.

A round goes at the pace of the slowest line in it, so a peer whose line needs most of a tick for a round skips some of
them, trains on, and fetches the base that the others made before its next one. Cadences are nested: whoever takes part
in every fourth round meets everybody who takes part in every second, and those all others. A version wants a majority
of all peers whatever they announce, so rounds are held as often as most of them take part: nobody decides alone, or
stops the others, by saying that it is fast.

Fragments are staggered, so that a slow line carries something all the time instead of everything at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
"""A cadence is lowered only if it would do at this part of the measured rate: not to and fro."""
PATIENCE_CYCLES = 1 / 3
"""A round has brought its base after this time, or has failed."""
LATE_IN_A_ROW = 3
"""Rounds that closed without a peer's contribution, or that it could not begin, before it takes part less often."""
PROBE_CYCLES, PROBE_DOUBLINGS = 8, 3
"""Cycles after which a peer tries a lower cadence although nothing speaks for it; each failure doubles them."""
IN_TIME_ROUNDS = 4
"""Rounds in time, none closed without it, before a peer takes part more often again."""
LIMITING = 0.5
"""A rate below this part of the others' rates together is our own line's."""


def is_due(schedule: Schedule, tick: int, cadence: int) -> bool:
    """Whether a peer of this cadence takes part in a tick's round."""
    return (tick // schedule.fragments + schedule.fragment(tick)) % cadence == 0


def pace(cadences: Collection[int]) -> int:
    """The lowest cadence that most peers keep to: how often a round has a majority."""
    ordered = sorted(cadences)
    return ordered[len(ordered) // 2] if ordered else 1


def steady(cadences: Mapping[str, int]) -> frozenset[str]:
    """Those that are in every round that has a majority: most of all."""
    most = pace(cadences.values())
    return frozenset(peer for peer, cadence in cadences.items() if cadence <= most)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineUse:
    """What rounds want of a line, and what it carries."""

    round_bytes: int
    """Of one round, in the direction that carries more."""
    base_bytes: int
    """Of a base with its outer state, which is fetched after each round that was skipped."""
    bytes_per_second: float
    tick_seconds: float

    def share(self, cadence: int) -> float:
        """The part of its time that the line is busy at this cadence; above 1 it cannot keep up."""
        fetched = self.base_bytes if cadence > 1 else 0
        return (self.round_bytes + fetched) / (self.bytes_per_second * self.tick_seconds * cadence)

    def least_cadence(self) -> CadenceValue:
        """The lowest at which the line keeps up; the highest if it never does."""
        return next((cadence for cadence in CADENCES if self.share(cadence) <= SHARE_OF_LINE), CADENCES[-1])


def line_use(
    averaging: AveragingSection, schedule: Schedule, *, size: int, base_bytes: int, bytes_per_second: float
) -> LineUse:
    """What a run's rounds of a fragment of ``size`` elements want of a line."""
    codecs = (get_codec(averaging.codec), get_codec(averaging.answer_codec))
    return LineUse(
        round_bytes=max(codec.encoded_bytes(size) for codec in codecs),
        base_bytes=base_bytes,
        bytes_per_second=bytes_per_second,
        tick_seconds=schedule.tick_seconds,
    )


class Cadence:
    """One peer's own cadence, as it announces it and as it keeps it.

    It is raised at once: the others wait for it once in vain at most. It is lowered only after everybody could read of
    it for a cycle, at a round in which this peer is due anyhow: it would come to rounds for which nobody waits.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._kept: CadenceValue = 1
        self._announced: CadenceValue = 1
        self._since_tick = 0
        self._late = self._in_time = 0
        self._patience_doublings = 0

    @property
    def announced(self) -> CadenceValue:
        return self._announced

    def take_turn(self, tick: int) -> bool:
        """Whether we take part in a tick's round. Asked once for each tick, in order: a lowered cadence begins here."""
        if not is_due(self._schedule, tick, self._kept):
            return False
        if tick >= self._since_tick + self._schedule.fragments:
            self._kept = self._announced
        return True

    def wants_base(self, fragment: int, known_since: float, now: float) -> bool:
        """Whether to fetch a better base of a fragment now: if our next round starts from it.

        :param known_since: when we heard of that base; before the fragment's last round, another is about to come
        """
        schedule = self._schedule
        if self._kept == 1:
            return True
        coming = schedule.next_tick(now)
        coming += (fragment - schedule.fragment(coming)) % schedule.fragments
        if not is_due(schedule, coming, self._kept):
            return False
        last = schedule.begins(coming - schedule.fragments)
        return known_since >= last or now >= last + PATIENCE_CYCLES * schedule.cycle_seconds

    def after_round(
        self,
        tick: int,
        bytes_per_second: float,
        *,
        best_megabits: float | None,
        others_kilobits: int,
        use: Callable[[float], LineUse],
    ) -> bool:
        """What a round's traffic says of our line; returns whether this changes our cadence.

        Our line may be what limited a round only if it carried much less than the others' lines together do.

        :param bytes_per_second: of this round; 0 if too little was moved to say
        :param best_megabits: a second, what the line is known to carry; None before that was measured
        :param others_kilobits: a second, the sum of what the other members announced
        :param use: what rounds want of a line of so many bytes a second
        """
        if best_megabits is None or bytes_per_second <= 0 or 1000 * best_megabits > LIMITING * others_kilobits:
            return self.unlimited(tick)
        return self.measured(use(best_megabits * 1e6 / 8), tick)

    def measured(self, use: LineUse, tick: int) -> bool:
        """What our line is known to carry, while its own rate is what limits it; returns whether this changes ours."""
        needed = use.least_cadence()
        cautious = replace(use, bytes_per_second=CAUTION * use.bytes_per_second).least_cadence()
        if needed > self._announced:
            return self._set(needed, tick)
        if cautious < self._announced and self._in_time:
            return self._set(cautious, tick)
        return False

    def took_part(self, tick: int, *, late: bool) -> bool:
        """A round is over, for us in time or not; returns whether this changes our cadence."""
        self._late, self._in_time = (self._late + 1, 0) if late else (0, self._in_time + 1)
        return self._after_lateness(tick)

    def missed(self, tick: int) -> bool:
        """A round of ours could not begin: its base is still on its way, or the one before goes on. As ``took_part``.

        Between rounds in time that is bad luck, as where a base came just too late.
        """
        self._late += 1
        return self._after_lateness(tick)

    def unlimited(self, tick: int) -> bool:
        """Nothing says that our line is what limits rounds; after some of them in time, take part more often."""
        if self._in_time >= IN_TIME_ROUNDS and self._announced > 1:
            self._patience_doublings = 0
            return self._set(_lower(self._announced), tick)
        return False

    def probe(self, tick: int) -> bool:
        """To be asked at every tick: whether it is time to see if we cannot take part more often after all.

        Each time that turns out wrong doubles the time until the next. Returns whether this changes our cadence.
        """
        wait_cycles = PROBE_CYCLES * 2**self._patience_doublings
        if self._announced == 1 or tick < self._since_tick + wait_cycles * self._schedule.fragments:
            return False
        self._patience_doublings = min(PROBE_DOUBLINGS, self._patience_doublings + 1)
        return self._set(_lower(self._announced), tick)

    def _after_lateness(self, tick: int) -> bool:
        position = CADENCES.index(self._announced)
        if self._late >= LATE_IN_A_ROW and position + 1 < len(CADENCES):
            return self._set(CADENCES[position + 1], tick)
        return False

    def _set(self, cadence: CadenceValue, tick: int) -> bool:
        self._announced, self._since_tick = cadence, tick
        self._kept = max(self._kept, cadence)
        self._late = self._in_time = 0
        return True


def _lower(cadence: CadenceValue) -> CadenceValue:
    return CADENCES[max(0, CADENCES.index(cadence) - 1)]

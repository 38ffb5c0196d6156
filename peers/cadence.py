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

from peers.clock import Schedule
from peers.line import CADENCES, CAUTION, CODECS, CadenceValue, CodecName, LineRate, LineUse, next_codec

PATIENCE_CYCLES = 1 / 3
"""A round has brought its base after this time, or has failed."""
LATE_IN_A_ROW = 3
"""Rounds that closed without a peer's contribution, or that it could not begin, before it takes part less often."""
PROBE_CYCLES, PROBE_DOUBLINGS = 8, 3
"""Cycles after which a peer tries a lower cadence although nothing speaks for it; each failure doubles them."""
IN_TIME_ROUNDS = 4
"""Rounds in time, none closed without it, before a peer takes part more often again."""


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


class Cadence:
    """One peer's own cadence, as it announces it and as it keeps it, and the codec of its contributions, if that is
    its own choice: a stronger one comes before a higher cadence.

    The cadence is raised at once: the others wait for it once in vain at most. It is lowered only after everybody could
    read of it for a cycle, at a round in which this peer is due anyhow: it would come to rounds for which nobody waits.

    A person may wish for either. What is measured of the line does not count then; rounds that close without this peer
    do, as the others wait for them: they make it take part less often than wished, until a probe finds that it can.

    :param codec: the run's
    :param wished_cadence: as a person chose; None leaves it to measurement
    :param wished_codec: the same; it counts where the run leaves the codec to its peers
    """

    def __init__(
        self,
        schedule: Schedule,
        codec: str = "float32",
        *,
        wished_cadence: CadenceValue | None = None,
        wished_codec: CodecName | None = None,
    ) -> None:
        self._schedule = schedule
        self._codec = codec
        self._is_wished = wished_cadence is not None
        self._least: CadenceValue = wished_cadence or CADENCES[0]
        self._choices: tuple[CodecName, ...] = (wished_codec,) if wished_codec is not None else CODECS
        self._chosen = self._choices[0]
        self._kept = self._least
        self._announced = self._least
        self._since_tick = self._changed_tick = 0
        self._late = self._in_time = 0
        self._patience_doublings = 0

    @property
    def codec(self) -> str:
        """How our contributions are encoded: the run's choice, or ours."""
        return self._chosen if self._codec == "auto" else self._codec

    @property
    def chosen_codec(self) -> CodecName:
        """Ours, which counts if the run leaves it to us."""
        return self._chosen

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

    def after_round(self, tick: int, rate: LineRate, use: Callable[[str], LineUse]) -> bool:
        """A round's traffic has been looked at; returns whether this changes our cadence. It may change our codec.

        :param rate: what limits us, as far as that is known
        :param use: what rounds want of our line with each codec
        """
        if self._codec == "auto" and len(self._choices) > 1:
            self._chosen = next_codec(self._chosen, rate, use)
        return self.measured(rate, use(self.codec), tick) if rate.is_known else self.unlimited(tick)

    def measured(self, rate: LineRate, use: LineUse, tick: int) -> bool:
        """What our line is known to carry, while its own rate is what limits it; returns whether this changes ours."""
        if self._is_wished:
            return False
        needed = use.least_cadence(rate)
        cautious = use.least_cadence(rate.times(CAUTION))
        if needed > self._announced:
            return self._set(needed, tick)
        if cautious < self._announced and self._in_time:
            return self._set(cautious, tick)
        return False

    def took_part(self, tick: int, *, late: bool) -> bool:
        """A round is over, for us in time or not; returns whether this changes our cadence."""
        self._late, self._in_time = (self._late + 1, 0) if late else (0, self._in_time + 1)
        stronger = self._choices[self._choices.index(self._chosen) + 1 :]
        if self._late >= LATE_IN_A_ROW and self._codec == "auto" and stronger:
            self._choose(stronger[0], tick)  # before it skips rounds
            return False
        return self._after_lateness(tick)

    def missed(self, tick: int) -> bool:
        """A round of ours could not begin: its base is still on its way, or the one before goes on. As ``took_part``.

        Between rounds in time that is bad luck, as where a base came just too late.
        """
        self._late += 1
        return self._after_lateness(tick)

    def unlimited(self, tick: int) -> bool:
        """Nothing says that our line is what limits rounds; after some of them in time, take part more often."""
        if self._in_time >= IN_TIME_ROUNDS and self._announced > 1 and not self._is_wished:
            self._patience_doublings = 0
            return self._set(_lower(self._announced), tick)
        return False

    def probe(self, tick: int) -> bool:
        """To be asked at every tick: whether it is time to see if we cannot take part more often after all.

        Or, in every round, with a better codec. Each time that turns out wrong doubles the time until the next.
        Returns whether this changes our cadence.
        """
        wait_cycles = PROBE_CYCLES * 2**self._patience_doublings
        best = self._announced == self._least and self._chosen == self._choices[0]
        if best or tick < self._changed_tick + wait_cycles * self._schedule.fragments:
            return False
        self._patience_doublings = min(PROBE_DOUBLINGS, self._patience_doublings + 1)
        if self._announced == self._least:
            self._choose(self._choices[self._choices.index(self._chosen) - 1], tick)
            return False
        return self._set(_lower(self._announced), tick)

    def _after_lateness(self, tick: int) -> bool:
        position = CADENCES.index(self._announced)
        if self._late >= LATE_IN_A_ROW and position + 1 < len(CADENCES):
            return self._set(CADENCES[position + 1], tick)
        return False

    def _choose(self, codec: CodecName, tick: int) -> None:
        self._chosen, self._changed_tick = codec, tick
        self._late = self._in_time = 0

    def _set(self, cadence: CadenceValue, tick: int) -> bool:
        self._announced, self._since_tick, self._changed_tick = cadence, tick, tick
        self._kept = max(self._kept, cadence)
        self._late = self._in_time = 0
        return True


def _lower(cadence: CadenceValue) -> CadenceValue:
    return CADENCES[max(0, CADENCES.index(cadence) - 1)]

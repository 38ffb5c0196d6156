"""Swarm time: every peer knows from the clock alone which tick it is.

A peer's clock may be wrong by minutes. It measures the offset of several other peers' corrected clocks, takes the
median and works in corrected time; a newcomer's own clock has no vote, later it votes with offset 0. No peer's claim
about "the current epoch" is ever believed. A minority of lying clocks cannot move the median beyond the honest ones;
a majority can, and where only one answers it moves ours halfway to its own.

Somebody may set the machine's clock while a peer runs: what is read of it is its time at the start of the program, and
from then on the time that has passed, which also counts while the machine is suspended. Where a system does not tell
that (a virtual machine that was halted), the clock is behind until the others are asked again.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import hivemind.averaging.matchmaking
import hivemind.dht.node
import hivemind.dht.protocol
import hivemind.utils.timed_storage  # noqa: F401  (all imported so that install() finds their clocks)


def passed_seconds() -> float:
    """Seconds since some moment before now, whatever is done to the machine's clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class SwarmClock:
    """This machine's clock plus the measured offset to the swarm's, in seconds since the epoch.

    :param wall: the machine's clock, asked once
    :param passed: counts seconds from then on
    """

    def __init__(self, wall: Callable[[], float] = time.time, passed: Callable[[], float] = passed_seconds) -> None:
        self._passed = passed
        self._origin = wall() - passed()
        self.offset_seconds = 0.0
        self.round_trip_seconds = 0.0
        """To another peer and back, as measured with the offset; 0 before that."""

    def now(self) -> float:
        """Corrected time, seconds since the epoch."""
        return self.uncorrected() + self.offset_seconds

    def uncorrected(self) -> float:
        """This machine's time, seconds since the epoch: as it was read once, and what has passed since."""
        return self._origin + self._passed()

    def passed(self) -> float:
        """Seconds since some moment before now, whatever the offset becomes: to measure how long something took."""
        return self._passed()

    def install(self) -> None:
        """Make hivemind's DHT and matchmaking expire their records by swarm time.

        hivemind binds ``get_dht_time = time.time`` by name into each of its modules (1.1.12,
        utils/timed_storage.py:12), so each binding is replaced.
        """
        for name, module in list(sys.modules.items()):
            if name.startswith("hivemind.") and hasattr(module, "get_dht_time"):
                setattr(module, "get_dht_time", self.now)  # noqa: B010


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSample:
    """One question to another clock: sent and received by ours, answered by theirs, in seconds."""

    sent: float
    answered: float
    received: float

    @property
    def round_trip_seconds(self) -> float:
        return self.received - self.sent

    @property
    def offset_seconds(self) -> float:
        """How far their clock is ahead of ours, if the way there took as long as the way back."""
        return self.answered - (self.sent + self.received) / 2


def best_offset(samples: Sequence[ClockSample]) -> float:
    """Offset of one peer: the sample with the shortest round trip errs least (Mills, RFC 5905 section 10)."""
    return min(samples, key=lambda sample: sample.round_trip_seconds).offset_seconds


def correction(peer_offsets: Sequence[float], *, newcomer: bool) -> float:
    """By how many seconds to correct our clock.

    Of two clocks each moves halfway, and again at the next look. If only the one that is ahead moved, one that is
    behind would stay so for ever where its only partner hears of many and follows them.

    :param newcomer: a peer that has no part in swarm time yet takes somebody's; later its own 0 votes too
    """
    if newcomer:
        return statistics.median_low(peer_offsets) if peer_offsets else 0.0
    return statistics.median([0.0, *peer_offsets])


async def measure_offset(
    ask: Callable[[], Awaitable[float | None]], now: Callable[[], float], attempts: int = 3
) -> float | None:
    """Offset of one peer's corrected clock to ours, in seconds; None if it never answered.

    :param now: our clock, one that is not corrected meanwhile
    :param ask: awaits the peer's reading, None for no answer. Then it is not asked again: over a bad line one reading
        is much better than none.
    """
    samples = []
    for _ in range(attempts):
        sent = now()
        answered = await ask()
        if answered is None:
            break
        samples.append(ClockSample(sent=sent, answered=answered, received=now()))
    return best_offset(samples) if samples else None


MAX_SAMPLES_PER_SECOND = 1e6
"""No peer is this fast: bounds what one can announce since the run began, so that totals stay countable."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tick k begins at ``start_seconds + k * tick_seconds`` of swarm time and is fragment ``k mod F``'s round."""

    start_seconds: float
    tick_seconds: float
    fragments: int

    @property
    def cycle_seconds(self) -> float:
        """Time between two rounds of one fragment."""
        return self.tick_seconds * self.fragments

    def tick_at(self, now: float) -> int:
        return int((now - self.start_seconds) // self.tick_seconds)

    def begins(self, tick: int) -> float:
        return self.start_seconds + tick * self.tick_seconds

    def fragment(self, tick: int) -> int:
        return tick % self.fragments

    def next_tick(self, after: float) -> int:
        """The first tick that begins strictly after ``after``, never a negative one."""
        return max(0, self.tick_at(after) + 1)

    def possible_versions(self, now: float) -> int:
        """How many rounds of one fragment can have been held by now: no honest base has a higher version."""
        return max(0, self.tick_at(now)) // self.fragments + 1

    def possible_samples(self, now: float) -> float:
        """More than this nobody can have processed by now."""
        return max(0.0, MAX_SAMPLES_PER_SECOND * (now - self.start_seconds))

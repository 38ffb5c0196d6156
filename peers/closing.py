"""When a round closes without somebody, from transfer times measured before, and whom not to trust as a reducer.

Two times count from the moment a round's members know each other. From the *grace* on, median plus three median
absolute deviations of the times at which contributions were complete in recent rounds, a reducer waits no longer for
the last tenth of the weight. At the *deadline* it waits for nobody. Training goes on meanwhile, so waiting costs
little, and being left out costs a peer a round: nobody is left out before the grace is over.

What this does not stop: a peer that arrives just before the deadline every time; it makes the others' rounds longer,
never their training slower.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

RECENT = 32
LEAST_SECONDS = 0.5
"""A busy machine needs it to answer at all."""
ENOUGH_WEIGHT = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingTimes:
    """Seconds since the members of a round knew each other."""

    grace_seconds: float
    deadline_seconds: float


class TransferTimes:
    """Recent transfers: how many bytes in how many seconds."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def note(self, transfer_bytes: int, seconds: float) -> None:
        self._recent.append((max(1, transfer_bytes), seconds))

    def expected_seconds(self, transfer_bytes: int) -> float | None:
        """Median plus three median absolute deviations for so many bytes; None before anything was measured.

        More bytes take proportionally longer; fewer do not take less, since latency stays.
        """
        if not self._recent:
            return None
        return usual_most([seconds * max(1.0, transfer_bytes / noted) for noted, seconds in self._recent])


def usual_most(values: Sequence[float]) -> float:
    """Median plus three median absolute deviations."""
    median = statistics.median(values)
    return median + 3 * statistics.median(abs(value - median) for value in values)


def closing_times(
    arrival_seconds: float | None, round_seconds: float | None, announced_seconds: float, cycle_seconds: float
) -> ClosingTimes:
    """When to close a round.

    The deadline is twice what rounds usually take at most, since one that takes longer was not seen yet; half a cycle
    before any measurement; never over one cycle.

    :param arrival_seconds: by when contributions usually are complete, None if that was never seen
    :param round_seconds: what whole rounds usually take at most, None if none was seen
    :param announced_seconds: what the slowest member's transfer takes at the rate that it announced
    :param cycle_seconds: between two rounds of one fragment
    """
    most = max(LEAST_SECONDS, cycle_seconds)
    if round_seconds is None:
        deadline = max(cycle_seconds / 2, 2 * announced_seconds)
    else:
        deadline = 2 * max(round_seconds, announced_seconds) + LEAST_SECONDS
    deadline = min(max(LEAST_SECONDS, deadline), most)
    grace = deadline if arrival_seconds is None else min(max(LEAST_SECONDS, arrival_seconds), deadline)
    return ClosingTimes(grace_seconds=grace, deadline_seconds=deadline)


def announced_seconds(transfers: Iterable[tuple[int, int]]) -> float:
    """What the slowest member needs for its transfer at the rate that it announced; 0 if nobody announced any.

    :param transfers: bytes, and kilobits a second, of each member; 0 for one that announced none
    """
    return max((moved / (rate * 125.0) for moved, rate in transfers if rate > 0), default=0.0)


def enough(there: float, expected: float) -> bool:
    """Whether what is missing is a small part of the weight that is expected."""
    return there >= ENOUGH_WEIGHT * expected


def last_seconds(deadline_seconds: float, groups: int) -> float:
    """When the last part is closed: reducers of another group wait for their members until they send their sum."""
    return deadline_seconds * (2.0 if groups > 1 else 1.0)


def longest_seconds(deadline_seconds: float, groups: int) -> float:
    """After this nobody can want anything of a round."""
    return last_seconds(deadline_seconds, groups) * 1.5 + 1.5


class Reliability:
    """Peers that failed us. Each failure in a row doubles the time for which we say so.

    :param seconds: after the first failure
    :param doublings: at most so many
    """

    def __init__(self, seconds: float, doublings: int) -> None:
        self._seconds, self._doublings = seconds, doublings
        self._failures: dict[bytes, int] = {}
        self._until: dict[bytes, float] = {}

    def failed(self, peer_id: bytes, now: float) -> None:
        count = self._failures.get(peer_id, 0)
        self._failures[peer_id] = min(self._doublings, count + 1)
        self._until[peer_id] = now + self._seconds * 2**count

    def answered(self, peer_id: bytes) -> None:
        self._failures.pop(peer_id, None)
        self._until.pop(peer_id, None)

    def judge(self, answered: Collection[bytes], failed: Collection[bytes], now: float) -> None:
        """Remember which reducers of a round answered and which did not; if none did, it may have been our own line."""
        for peer_id in answered:
            self.answered(peer_id)
        if answered or len(failed) == 1:
            for peer_id in failed:
                self.failed(peer_id, now)

    def distrusted(self, now: float) -> tuple[bytes, ...]:
        """Peer ids, sorted."""
        return tuple(sorted(peer_id for peer_id, until in self._until.items() if until > now))

    def forget(self, known: set[bytes], now: float) -> None:
        """Of peers that are gone, once their time is over."""
        for peer_id in [peer_id for peer_id, until in self._until.items() if until <= now and peer_id not in known]:
            self.answered(peer_id)

"""Which donors to ask, and whose announcements to believe: pure decisions on what they did before.

What this does not stop: a donor that says again and again that it is busy is asked again and again, between others.
"""

from __future__ import annotations

from collections.abc import Callable

BUSY_SECONDS = 2.0
"""A donor that serves too many at the moment is asked again after this."""
FAILURE_SECONDS = 10.0
"""One that failed, or has moved on, is not asked for the same base for this long: its record will say more by then."""
FAILURES_BELIEVED = 8
"""One that failed so often without a piece in between announces something that nobody gets, or cannot be reached."""
DISBELIEF_SECONDS = 60.0
FORGOTTEN_SECONDS = 600.0
"""After these a failure does not count any more."""
LIE_SECONDS = 600.0
"""One that sent false bytes can spoil one fetch in this time, unless it takes a new identity."""


class DonorRecords:
    """What became of asking each donor (base58 peer id).

    :param now: seconds
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._postponed: dict[tuple[str, bytes], float] = {}
        self._liars: dict[str, float] = {}
        self._disbelieved: dict[str, float] = {}
        self._failures: dict[str, tuple[int, float]] = {}
        """In a row, and when the last one was."""

    def usable(self, donor: str, digest: bytes) -> bool:
        """Whether it may be asked for this base now."""
        now = self._now()
        return self._liars.get(donor, now) <= now and self._postponed.get((donor, digest), now) <= now

    def believed(self, donor: str) -> bool:
        """Whether its announcement counts."""
        now = self._now()
        return self._liars.get(donor, now) <= now and self._disbelieved.get(donor, now) <= now

    def was_busy(self, donor: str, digest: bytes) -> None:
        self._postpone(donor, digest, BUSY_SECONDS)

    def failed(self, donor: str, digest: bytes) -> None:
        self._postpone(donor, digest, FAILURE_SECONDS)
        now = self._now()
        recent = {other: noted for other, noted in self._failures.items() if now - noted[1] < FORGOTTEN_SECONDS}
        count = recent.pop(donor, (0, now))[0] + 1
        if count >= FAILURES_BELIEVED:
            self._disbelieved = self._with(self._disbelieved, donor, DISBELIEF_SECONDS)
        else:
            recent[donor] = count, now
        self._failures = recent

    def lied(self, donor: str) -> None:
        self._liars = self._with(self._liars, donor, LIE_SECONDS)

    def delivered(self, donor: str) -> None:
        """It sent a piece."""
        self._failures.pop(donor, None)
        self._disbelieved.pop(donor, None)

    def _with(self, until: dict[str, float], donor: str, seconds: float) -> dict[str, float]:
        """One more, without those whose time is over."""
        now = self._now()
        return {**{other: end for other, end in until.items() if end > now}, donor: now + seconds}

    def _postpone(self, donor: str, digest: bytes, seconds: float) -> None:
        now = self._now()
        self._postponed = {key: until for key, until in self._postponed.items() if until > now}
        self._postponed[donor, digest] = now + seconds

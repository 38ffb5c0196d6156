"""Whether training goes as planned: a rate that is not what was measured, a micro-batch that did not fit."""

from __future__ import annotations

from collections.abc import Callable

DRIFT = 0.2
"""A rate that differs from the measured one by more than this part of it means that it holds no longer."""
DRIFT_SECONDS = 60.0
"""For so long: other programs come and go."""


class RealityWatch:
    """Told by the training loop what happens; tells of each change once.

    :param planned: samples a second that were measured; None if no rate is to be watched
    :param on_drift: given the rate as it is now
    :param on_shrunk: given the micro-batch that ran out of memory and the one that fitted
    """

    def __init__(
        self, planned: float | None, *, on_drift: Callable[[float], None], on_shrunk: Callable[[int, int], None]
    ) -> None:
        self._planned, self._on_drift, self._on_shrunk = planned, on_drift, on_shrunk
        self._off_since: float | None = None

    def rate(self, samples_per_second: float, now: float) -> None:
        """What training makes of late.

        :param now: seconds on a clock that does not jump
        """
        if self._planned is None:
            return
        if abs(samples_per_second - self._planned) <= DRIFT * self._planned:
            self._off_since = None
        elif self._off_since is None:
            self._off_since = now
        elif now - self._off_since >= DRIFT_SECONDS:
            self._planned, self._off_since = samples_per_second, None
            self._on_drift(samples_per_second)

    def micro_batch(self, before: int, after: int) -> None:
        """What a step began and ended with."""
        if after < before:
            self._on_shrunk(before, after)

"""When the members of a tick's round look for each other, and when they meet again after they lost a reducer (pure).

What this does not stop: a peer that is asleep at these moments. It finds nobody, and its contribution is carried on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEET_AGAIN_LEADS = 2
"""Matchmaking times after a tick's beginning at which those that lost a reducer can meet again (``next_attempt``)."""
ATTEMPTS = 3
"""Of one tick's round: a group that lost a reducer re-forms without it while there is time."""
LEAST_LEAD = 0.25
"""Of the matchmaking time: enough for a snapshot and to find who leads, who begins at the tick."""
DEFERENCE_SECONDS = 0.25
"""Who found nobody offers to begin the next group so much later, and so follows whoever leads."""
ANNOUNCEMENT_BYTES = 800
"""About: what a member announces, as its leader passes it on."""
TELLING_SHARE = 0.2
"""Of the matchmaking time: whoever needs longer to tell all members of all members would rather follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTimes:
    """When a peer offers to begin a group, and when it gives up; swarm time, seconds."""

    scheduled: float
    deadline: float


def search_times(
    begins: float,
    lead_seconds: float,
    cycle_seconds: float,
    *,
    found_nobody: bool,
    can_be_dialled: bool = True,
    telling_seconds: float = 0.0,
) -> SearchTimes:
    """The times of one search.

    :param begins: the tick's beginning, or the moment of another attempt
    :param lead_seconds: how long before it peers begin to look (the manifest's ``matchmaking_seconds``)
    :param found_nobody: the last time
    :param can_be_dialled: who cannot be can only follow, and offers later than all others
    :param telling_seconds: see the function of that name
    """
    defers = found_nobody or telling_seconds > TELLING_SHARE * lead_seconds
    deference_seconds = DEFERENCE_SECONDS if defers else 0.0
    return SearchTimes(
        scheduled=begins + (deference_seconds if can_be_dialled else 2 * DEFERENCE_SECONDS),
        deadline=begins + min(lead_seconds, cycle_seconds / 4),
    )


def telling_seconds(members: int, up_bytes_per_second: float) -> float:
    """How long a leader's line takes to tell each member what all members announce.

    :param up_bytes_per_second: infinite where it is not known
    """
    return members * members * ANNOUNCEMENT_BYTES / up_bytes_per_second


def next_attempt(
    begins: float, now: float, lead_seconds: float, cycle_seconds: float, usual_seconds: float
) -> float | None:
    """When all that lost a reducer in these moments meet again; None if the fragment's next round is too near.

    Moments a matchmaking's length apart, counted from the tick's beginning: whoever fails between two of them, on
    whatever peer, comes to the same one.

    :param begins: the tick's beginning
    :param usual_seconds: what rounds usually take
    """
    again = begins + lead_seconds * math.ceil((now - begins) / lead_seconds + 1.0)
    return again if again + usual_seconds + lead_seconds <= begins + cycle_seconds else None

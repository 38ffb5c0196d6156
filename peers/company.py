"""Whether a peer that hears of nobody is alone or cut off.

A peer may make versions by itself if nobody else trains. When the records of the others run out, that can be because
they ended, or because our line is down and they train on without us; then a version of ours would be a rival of theirs,
and what is credited in it would be lost when the two meet. The difference is who was heard of last: as long as somebody
is heard of, whose record ran out is gone; where nobody is, those that were there at the last news may still be.

What it does not stop: a part of the swarm that is cut off as a group. Its members hear of each other, take the rest for
gone once their records have run out, and make versions of their own (``lineage``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from peers.membership import Member

GONE_SECONDS = 1800.0
"""Whoever has heard of nobody for so long goes on alone: they may have ended without a word, all of them."""


class Company:
    """The training peers that the last news told of, and when that was.

    :param heard_at: seconds, by a clock that is never corrected; minus infinity if nobody was ever heard of
    """

    def __init__(self, heard_at: float) -> None:
        self.heard_at = heard_at
        self.members: dict[str, Member] = {}
        """As they were told of last."""

    def news(self, members: Mapping[str, Member], now: float) -> None:
        """Somebody was heard of. :param members: everybody whose record stands"""
        self.heard_at = now
        self.members = {peer: member for peer, member in members.items() if member.profile.status == "training"}

    def lost(self, dead: Iterable[str]) -> frozenset[str]:
        """Who may train on without us: was there at the last news, did not leave, is not known to have ended."""
        return frozenset(self.members) - frozenset(dead)

    def silent_seconds(self, now: float) -> float:
        """Since the last news."""
        return now - self.heard_at

    def give_up(self, now: float) -> bool:
        """Whether the others are taken to be gone from now on."""
        if self.silent_seconds(now) < GONE_SECONDS:
            return False
        self.members = {}
        return True

"""Which base is the swarm's, and who may move it on: pure decisions on what peers announce.

Bases form a line of versions. If a partition or a lost message made two of one version, the one with more samples
wins and the others fetch it. What this does not stop: a majority of announcers that lie together, and in a swarm of
fewer than five a single one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from peers.cadence import steady

MANY_MEMBERS = 5
"""From so many members of a round on, a single liar among them is in a minority that the others can do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A peer's announcement for one fragment: version, digest (32 bytes) and total samples of the lineage."""

    version: int
    digest: bytes
    total_samples: int

    @property
    def rank(self) -> tuple[int, int, bytes]:
        """Order of lineages: more samples win; the rest only makes the order total."""
        return (self.total_samples, self.version, self.digest)


def choose_base(
    own: Claim | None,
    claims: Mapping[str, Claim],
    *,
    possible_versions: int,
    groupmates: Collection[str] = (),
    backers: Collection[str] = (),
    ancestors: Collection[bytes] = (),
    has_vote: bool = True,
    round_size: int = 0,
    origin: Collection[str] = (),
) -> Claim | None:
    """The base this peer should fetch, or None if it holds the right one (or nobody announces any).

    A newcomer takes the claim that most peers announce. A peer with a base moves to a better claim if as many peers
    announce it as stand behind its own, or if one of its ``groupmates`` does, from a round whose answers it missed.
    A peer whose line most peers have left (or never followed) joins the majority even if its own has more samples,
    since alone it could make no further version. Versions above ``possible_versions`` (from the clock) are ignored.

    After a round of many a claim needs two announcers: one member could announce anything as what the others missed.
    Except a rival of our own version: whoever gave each member another average leaves them on a base each. What is in
    that one says whether to believe it (``rivals.py``).

    Who fetched its base goes on with those from whom it has it: many newcomers at once outvote nobody.

    :param claims: by peer id, without our own
    :param ancestors: digests of earlier bases in our own line, which are no reason to go back
    :param backers: peers that made our base with us; each stands behind it until its record tells of a later one
    :param has_vote: whether our own base counts against a better one. Not that of a peer that does not train: where it
        serves those who cannot reach each other, it and a newcomer would keep each other on a base of the past
    :param round_size: members of the round that made our base, or of one whose answers we missed
    :param origin: the training peers that announced our base when we fetched it
    """
    plausible = {peer: claim for peer, claim in claims.items() if claim.version <= possible_versions}
    votes = Counter(plausible.values())
    if own is None:
        if not votes:
            return None
        return max(votes, key=lambda claim: (votes[claim], claim.rank))
    waiting = [peer for peer in backers if peer not in plausible or plausible[peer].version < own.version]
    support_of_own = votes[own] + 1 + len(waiting)
    needed = support_of_own if has_vote else support_of_own - 1
    missed = {plausible[peer] for peer in groupmates if peer in plausible}
    moved_on = {plausible.get(peer) for peer in origin}
    least = 2 if round_size >= MANY_MEMBERS and len(plausible) >= MANY_MEMBERS - 1 else 1
    better = [
        claim
        for claim, count in votes.items()
        if claim.rank > own.rank
        and (count >= least or claim.version == own.version)
        and (count >= needed or (claim in missed and claim.version == own.version + 1) or moved_on == {claim})
    ]
    everyone = sum(votes.values()) + 1
    better += [
        claim
        for claim, count in votes.items()
        if 2 * count > everyone and count > support_of_own and claim != own and claim.digest not in ancestors
    ]
    return max(better, key=lambda claim: (votes[claim], claim.rank), default=None)


def in_step(claims: Mapping[str, Claim], cadences: Mapping[str, int]) -> dict[str, Claim]:
    """The claims that say where the swarm is: without those of peers that skip rounds and so are behind.

    Most peers are in every round that has a majority. What this does not stop: those decide for the ones that skip
    rounds, if they lie together.

    :param claims: without versions that cannot be yet
    :param cadences: of the same peers
    """
    deciding = steady(cadences)
    newest = max((claims[peer].version for peer in deciding), default=0)
    return {peer: claim for peer, claim in claims.items() if peer in deciding or claim.version >= newest}


def held_again(
    version: int, total_samples: int, claims: Iterable[Claim], *, possible_versions: int, round_size: int
) -> bool:
    """Whether members of a round have a base that it did not make: they gave it up, and met again without somebody.

    After a round of many two must say so: of one that lies, nobody would commit a round again.

    :param version: what the round makes, and with how many samples in its lineage
    :param claims: of its other members
    :param possible_versions: from the clock; higher ones do not count
    :param round_size: its members, ourselves included
    """
    others = sum(
        claim.version > version or (claim.version == version and claim.total_samples != total_samples)
        for claim in claims
        if claim.version <= possible_versions
    )
    return others >= (2 if round_size >= MANY_MEMBERS else 1)


def has_quorum(members: Collection[str], present: Collection[str]) -> bool:
    """Whether a group may make the next version, so that no second group can make a rival one.

    More than half of all training peers, also of those that skip this round: a majority of whoever is due now would be
    no majority of whoever is due at the next tick, and one peer could make itself all that are due. Exactly half
    suffices for the half that holds the smallest peer id. At least two members, unless nobody else is there.

    :param members: the group, ourselves included
    :param present: all training peers that are known and reachable, ourselves included
    """
    everyone = set(present) | set(members)
    inside = len(set(members))
    if inside < 2:
        return inside == len(everyone) == 1
    return 2 * inside > len(everyone) or (2 * inside == len(everyone) and min(everyone) in members)

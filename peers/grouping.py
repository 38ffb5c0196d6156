"""Finding a group for a round: hivemind's matchmaking, on swarm time, with signed announcements and a quorum.

Peers declare until when they look: about the beginning of the tick. Whoever ends first leads and assembles the group
then. Who found nobody the last time, or has a line too slow to lead so many, ends a moment later, and follows. The
schema hash names fragment, version and digest, so that peers with different bases never meet. What this does not stop:
a leader that leaves out peers it does not like.

Overridden or relied on in hivemind 1.1.12: ``Matchmaking.min_group_size`` is read wherever a leader decides whether
to assemble; ``GroupKeyManager`` calls ``dht.store``/``dht.get`` with ``return_future=True`` and awaits the result;
a step is used through ``data_for_gather``, ``scheduled_time``, ``deadline`` and ``get_timeout()``;
``_request_join_group`` asks one leader, and through itself the one that it is sent to, and returns its group or None;
``follower_assemble_group`` takes a leader's group for ours.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hivemind.averaging.matchmaking import Matchmaking, MatchmakingException
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2

from dht_config.errors import RecordError
from dht_config.records import RoundAnnouncement, open_announcement
from peers.clock import passed_seconds
from peers.closing import Reliability
from peers.ledger import PendingSpan
from peers.lineage import Claim
from peers.messages import LEAST_GROUP_ID_BYTES, MAX_GROUP_SIZE, MOST_GROUP_ID_BYTES
from peers.round_plan import GroupMember
from peers.transport import TRANSPORT_ERRORS

logger = logging.getLogger(__name__)

AWAKE_SECONDS = 1.0
"""Whoever notices an end later than this was asleep itself, and cannot say who was silent."""
SILENT_SECONDS = 0.1
"""A leader that has said nothing so shortly before the deadline is one that never begins."""
POLL_SECONDS = 0.15
"""Least time between two looks at one matchmaking key; hivemind asks again without a pause (a core per peer)."""
LEADERS_POLLS = 3
"""Looks, while a group is looked for, of the peer that will lead it as far as the records tell."""
DECLARED_LEADERS = 3
"""So many peers, first in the order in which groups are led, declare themselves in the DHT; the others will follow."""
_UNKNOWN_PLACE = (0, POLL_SECONDS)
LEAST_DECLARED_SECONDS = 0.3
"""A declaration that ends sooner anyhow is not withdrawn."""
MOST_REDIRECTS = 4
"""A leader that has found one itself sends us there. Leaders that send us to each other are not followed for ever."""


class NodeAsDHT:
    """hivemind's ``DHT`` interface, as far as matchmaking uses it, over a DHTNode in this very event loop.

    Every look brings the declarations of all from several holders, and costs a call to each of them. So only a few
    declare themselves, and who will lead, as far as the records tell, does not look all the time for somebody else.

    :param now: swarm time, seconds
    """

    def __init__(self, node: DHTNode, now: Callable[[], float]) -> None:
        self._node, self._now = node, now
        self.peer_id = node.peer_id
        self._looked: dict[str, float] = {}
        self._places: dict[str, tuple[int, float]] = {}

    def begin(self, key: str, place: int, seconds: float) -> None:
        """A search under this key begins.

        :param place: how many peers are known that would rather lead
        :param seconds: how long it lasts
        """
        self._places[key] = place, max(POLL_SECONDS, seconds / LEADERS_POLLS)
        # Whoever will follow need not look before the others can have declared themselves.
        self._looked[key] = asyncio.get_running_loop().time()

    async def store(
        self, key: str, value: Any, expiration_time: float, subkey: Any = None, return_future: bool = True
    ) -> bool:
        place, _ = self._places.get(key, _UNKNOWN_PLACE)
        if place >= DECLARED_LEADERS or (not value and expiration_time - self._now() < LEAST_DECLARED_SECONDS):
            return True
        return bool(await self._node.store(key, value, expiration_time, subkey=subkey))

    async def get(self, key: str, latest: bool = False, return_future: bool = True) -> Any:
        now = asyncio.get_running_loop().time()
        place, leaders_pause = self._places.get(key, _UNKNOWN_PLACE)
        pause = POLL_SECONDS if place else leaders_pause
        await asyncio.sleep(max(0.0, self._looked.get(key, 0.0) + pause - now))
        self._looked[key] = asyncio.get_running_loop().time()
        return await self._node.get(key, latest=latest)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSearch:
    """One search for a group, with the attributes that hivemind reads from its StepControl (times in swarm time)."""

    scheduled_time: float
    deadline: float
    data_for_gather: bytes
    now: Callable[[], float]
    fragment: int
    tick: int
    attempt: int
    claim: Claim
    passed: Callable[[], float] = passed_seconds
    """Seconds, by a clock that is never corrected: for how long somebody is not followed."""
    follows: bool = False
    """Whether this peer would rather not lead."""

    def get_timeout(self) -> float:
        return max(0.0, self.deadline - self.now())

    @property
    def schema_hash(self) -> bytes:
        """Peers meet only if this is equal: same fragment, same version, same bits, same attempt."""
        return hashlib.sha256(
            struct.pack("<IQI", self.fragment, self.claim.version, self.attempt) + self.claim.digest
        ).digest()


class FragmentMatchmaking(Matchmaking):  # type: ignore[misc]  # hivemind ships no types
    """hivemind's matchmaking for one fragment's rounds. In ``client_mode`` we only follow: others cannot dial us.

    :param size: elements of the fragment
    :param possible_samples: more than this nobody can have processed by now
    :param is_quorum: whether peers, as base58 ids with ourselves, may make the next version
    :param auxiliary: whether we do not train: no quorum counts us
    :param silent_leaders: those that accepted us and never began, or began nonsense, are not followed for a while
    :param likely_members: peers that, by their records, look for a tick's group and could lead it, by their ids
    """

    def __init__(
        self,
        p2p: P2P,
        dht: NodeAsDHT,
        *,
        run_id: str,
        prefix: str,
        servicer_type: type[ServicerBase],
        matchmaking_seconds: float,
        size: int,
        is_quorum: Callable[[Collection[str]], bool],
        possible_samples: Callable[[], float],
        silent_leaders: Reliability,
        likely_members: Callable[[int], Collection[bytes]] = lambda tick: (),
        auxiliary: bool = False,
    ) -> None:
        self._dht, self._likely_members = dht, likely_members
        self._is_quorum = is_quorum
        self._ourselves = {str(p2p.peer_id)} if auxiliary else set()
        self._auxiliary = self._ourselves
        """Members of the group that we lead which no quorum counts."""
        self._silent_leaders = silent_leaders
        self._absent: frozenset[bytes] = frozenset()
        """Likely members that were not in the last group. Who never leads must not silence those who would."""
        self._size = size
        self._possible_samples = possible_samples
        self._run_id = run_id
        self._search: GroupSearch | None = None
        self._asking = 0
        super().__init__(
            p2p,
            b"-",
            dht,
            servicer_type=servicer_type,
            prefix=prefix,
            target_group_size=None,
            min_group_size=2,
            min_matchmaking_time=matchmaking_seconds,
            request_timeout=matchmaking_seconds * 0.9,
            client_mode=False,
        )

    @property
    def min_group_size(self) -> int:
        """As many as are here if they are a quorum, else one more than are here."""
        members = {str(self.peer_id), *(str(peer) for peer in self.current_followers)}
        return len(members) if len(members) > 1 and self._is_quorum(members - self._auxiliary) else len(members) + 1

    @min_group_size.setter
    def min_group_size(self, value: int) -> None:
        """hivemind's constructor assigns a constant; the quorum decides instead."""

    async def find(self, search: GroupSearch) -> tuple[bytes, tuple[GroupMember, ...]] | None:
        """A group for this round: its id and its members in the leader's order, or None if there is none in time."""
        self._search = search
        self._auxiliary = set(self._ourselves)
        self.schema_hash = search.schema_hash
        self._dht.begin(self.group_key_manager.current_key, self._place(search), search.get_timeout())
        self._absent = frozenset(self._likely_members(search.tick))
        try:
            group = await self.look_for_group(search)
        except (MatchmakingException, AssertionError, *TRANSPORT_ERRORS):
            return None  # the DHT failed, or hivemind's matchmaking came to a state that it does not expect
        finally:
            self._search = None
        members = self._members(group.peer_ids, group.gathered, search) if group is not None else None
        if group is None or members is None:
            return None
        self._absent -= {member.peer_id.to_bytes() for member in members}
        if not self._is_quorum({str(member.peer_id) for member in members if not member.auxiliary}):
            return None  # the leader's word is not enough: a group of too few could make a rival base
        return group.group_id, members

    def _place(self, search: GroupSearch) -> int:
        """How many others would rather lead: of equal deadlines the lower peer id goes first."""
        others = set(self._likely_members(search.tick)) - set(self._silent_leaders.distrusted(search.passed()))
        own_id: bytes = self.peer_id.to_bytes()
        before = {peer_id for peer_id in others if peer_id < own_id}
        place = len(before - self._absent)
        return max(1, place) if search.follows or before else place

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Admit only followers whose signed announcement is valid and for this very round."""
        search = self._search
        if search is not None:
            announcement = self._valid_announcement(context.remote_id, request.gather, search)
            if announcement is None:
                yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
                return
            if announcement.auxiliary:
                self._auxiliary.add(str(context.remote_id))
        if len(self.current_followers) + 1 >= MAX_GROUP_SIZE:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.GROUP_IS_FULL)
            return
        async for message in super().rpc_join_group(request, context):
            yield message

    async def _request_join_group(self, leader: PeerID) -> Any:
        search, leader_id = self._search, leader.to_bytes()
        if search is None or leader_id in self._silent_leaders.distrusted(search.passed()):
            return None
        if self._asking > MOST_REDIRECTS:
            return None
        group, nonsense = None, False
        self._asking += 1
        try:
            group = await super()._request_join_group(leader)
        except (MatchmakingException, ValueError) as error:  # ValueError: a message code that does not exist
            logger.debug("Leader %s answered nonsense: %r", leader, error)
            nonsense = True
        except TRANSPORT_ERRORS as error:
            logger.debug("Leader %s could not be asked: %r", leader, error)
        finally:
            self._asking -= 1
            # One that has too few followers says so when the tick begins.
            if group is not None:
                self._silent_leaders.answered(leader_id)
            elif nonsense or search.deadline - SILENT_SECONDS <= search.now() <= search.deadline + AWAKE_SECONDS:
                self._silent_leaders.failed(leader_id, search.passed())
        return group

    async def follower_assemble_group(self, leader: PeerID, msg: averaging_pb2.MessageFromLeader) -> Any:
        """:raises MatchmakingException: nonsense; it must not become our group, or nobody else's could any more"""
        peer_ids = [PeerID(peer_id) for peer_id in msg.ordered_peer_ids]
        valid = (
            LEAST_GROUP_ID_BYTES <= len(msg.group_id) <= MOST_GROUP_ID_BYTES
            and self.peer_id in peer_ids
            and self._search is not None
            and self._members(peer_ids, msg.gathered, self._search) is not None
        )
        if not valid:
            raise MatchmakingException("the group is none, or its members' announcements are not valid")
        return await super().follower_assemble_group(leader, msg)

    def _members(
        self, peer_ids: Sequence[PeerID], blobs: Sequence[bytes], search: GroupSearch
    ) -> tuple[GroupMember, ...] | None:
        """The members of a group with the announcements that they signed, or None if it is not what it should be."""
        if len(peer_ids) != len(blobs) or len(set(peer_ids)) < len(peer_ids) or len(peer_ids) > MAX_GROUP_SIZE:
            return None
        members = []
        for peer_id, blob in zip(peer_ids, blobs, strict=True):
            announcement = self._valid_announcement(peer_id, blob, search)
            if announcement is None:
                return None
            members.append(_member(peer_id, announcement))
        return tuple(members)

    def _valid_announcement(self, peer_id: PeerID, blob: bytes, search: GroupSearch) -> RoundAnnouncement | None:
        try:
            announcement = open_announcement(peer_id.to_bytes(), blob, self._run_id)
        except RecordError:
            return None
        same_round = (announcement.fragment, announcement.tick, announcement.attempt) == (
            search.fragment,
            search.tick,
            search.attempt,
        )
        same_base = (announcement.version, announcement.digest) == (search.claim.version, search.claim.digest)
        whole = bool(announcement.spans) and announcement.spans[-1][1] == self._size
        possible = announcement.samples_total <= self._possible_samples()
        return announcement if same_round and same_base and whole and possible else None


def _member(peer_id: PeerID, announcement: RoundAnnouncement) -> GroupMember:
    return GroupMember(
        peer_id=peer_id,
        spans=tuple(
            PendingSpan(start=start, stop=stop, samples=samples, steps=steps)
            for start, stop, samples, steps in announcement.spans
        ),
        samples=announcement.samples_total,
        steps=announcement.steps_total,
        kilobits_per_second=int(1000 * (announcement.megabits_per_second or 0.0)),
        distrusted=announcement.distrusted,
        can_be_dialled=announcement.can_be_dialled,
        cadence=announcement.cadence,
        codec=announcement.codec,
        auxiliary=announcement.auxiliary,
    )

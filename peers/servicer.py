"""What other peers can call: the run's remote procedures, each passed on to the part that answers it.

What is long, contributions to rounds and bases, does not come this way but through ``transport.py``.
"""

from __future__ import annotations

import re
from typing import AsyncIterator, Protocol  # noqa: UP035  (ServicerBase recognises typing's AsyncIterator only)

from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.p2p.servicer import StubBase
from hivemind.proto import averaging_pb2

from dht_config.keys import rpc_namespace
from peers.clock import SwarmClock
from peers.dial_back import DialBackDesk, not_tried
from peers.grouping import FragmentMatchmaking
from peers.messages import Ask, Clock, ClockHeader, DialBack, DialedBack, News, NewsAsk, NewsHeader


class RoundDesk(Protocol):
    """Answers what belongs to rounds."""

    def matchmaking_for(self, group_key: str) -> FragmentMatchmaking | None: ...


class PresenceDesk(Protocol):
    """Is told that somebody's records have changed, and tells others of everybody's."""

    def look(self, peer: PeerID) -> None: ...

    def answer_news(self, request: NewsAsk, asker: PeerID) -> News: ...


class SwarmServicer(ServicerBase):  # type: ignore[misc]  # hivemind ships no types
    """What other peers can call. ``rounds``, ``presence`` and ``dial_back`` are set once there are any."""

    def __init__(self, clock: SwarmClock) -> None:
        self._clock = clock
        self.rounds: RoundDesk | None = None
        self.presence: PresenceDesk | None = None
        self.dial_back: DialBackDesk | None = None

    @classmethod
    def get_stub(cls, p2p: P2P, peer: PeerID, *, namespace: str | None = None) -> StubBase:
        """All fragments share the run's handlers: matchmaking's per-fragment prefix is cut off."""
        prefix = re.fullmatch(r"(.+-[0-9a-f]{16})-f\d{1,3}", namespace or "")
        return super().get_stub(p2p, peer, namespace=rpc_namespace(prefix.group(1)) if prefix else namespace)

    async def rpc_time(self, request: Ask, context: P2PContext) -> Clock:
        return Clock(ClockHeader(seconds=self._clock.now()))

    async def rpc_look(self, request: Ask, context: P2PContext) -> Clock:
        if self.presence is not None:
            self.presence.look(context.remote_id)
        return Clock(ClockHeader(seconds=self._clock.now()))

    async def rpc_news(self, request: NewsAsk, context: P2PContext) -> News:
        if self.presence is None:
            return News(NewsHeader())
        return self.presence.answer_news(request, context.remote_id)

    async def rpc_dial_back(self, request: DialBack, context: P2PContext) -> DialedBack:
        if self.dial_back is None:
            return not_tried()
        return await self.dial_back.answer(request, context.remote_id)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        matchmaking = self.rounds.matchmaking_for(request.group_key) if self.rounds is not None else None
        if matchmaking is None:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.BAD_GROUP_KEY)
            return
        async for message in matchmaking.rpc_join_group(request, context):
            yield message

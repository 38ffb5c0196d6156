"""Which call belongs to which round: a groupmate may call a moment before its round is known here.

A caller names a group id, and anybody can name any. What a peer can make us remember by it is bounded: a few ids that
we do not know, each for a few seconds. What this does not stop: many false identities.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from hivemind.p2p import PeerID

from peers.messages import Average, Part
from peers.round import Round, RoundVoid

REGISTER_SECONDS = 5.0
"""How long a groupmate's call may come before its round is known here."""
ROUNDS_UNKNOWN_PER_PEER = 4


class RoundRegister:
    """The rounds under way here, and the calls that wait for one."""

    def __init__(self) -> None:
        self._rounds: dict[bytes, asyncio.Future[Round]] = {}
        self._guessing: Counter[PeerID] = Counter()

    def __len__(self) -> int:
        """Group ids in memory, known and unknown."""
        return len(self._rounds)

    def add(self, current: Round) -> None:
        """From now on calls for this round reach it, until nobody can want anything of it. :raises RoundVoid:"""
        loop, group_id = asyncio.get_running_loop(), current.plan.group_id
        waiting = self._rounds.setdefault(group_id, loop.create_future())
        if waiting.done():
            raise RoundVoid("the leader used a group id twice")
        waiting.set_result(current)
        ending = loop.call_later(current.longest_seconds + REGISTER_SECONDS, current.end)

        def forget(_: object) -> None:
            self._rounds.pop(group_id, None)
            ending.cancel()  # it would hold the round, and all that it sent, until the last deadline

        current.over.add_done_callback(forget)

    async def answer(self, stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
        """A groupmate sends its contribution; its first part says of which round."""
        try:
            first = await asyncio.wait_for(stream.__aiter__().__anext__(), REGISTER_SECONDS)
        except (StopAsyncIteration, asyncio.TimeoutError):
            return
        if first.header is None:
            return
        current = await self._round_of(first.header.group_id, remote_id)
        if current is None:
            return
        # Closed here and not at some later time: its reader must be gone before the stream that it reads is closed.
        async with aclosing(current.answer(_chain(first, stream), remote_id)) as answers:
            async for answer in answers:
                yield answer

    async def _round_of(self, group_id: bytes, remote_id: PeerID) -> Round | None:
        """The round of a group, waited for a moment if we do not know of it yet; a few such waits per peer."""
        waiting = self._rounds.get(group_id)
        if waiting is not None and waiting.done():
            return waiting.result()
        if self._guessing[remote_id] >= ROUNDS_UNKNOWN_PER_PEER:
            return None
        if waiting is None:
            waiting = self._rounds[group_id] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(2 * REGISTER_SECONDS, self._forget, group_id)
        self._guessing[remote_id] += 1
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), REGISTER_SECONDS)
        except asyncio.TimeoutError:
            return None
        finally:
            self._guessing[remote_id] -= 1
            if not self._guessing[remote_id]:
                del self._guessing[remote_id]

    def _forget(self, group_id: bytes) -> None:
        """Of a group id that somebody named but that never became a round here."""
        waiting = self._rounds.get(group_id)
        if waiting is not None and not waiting.done():
            del self._rounds[group_id]


async def _chain(first: Part, rest: AsyncIterator[Part]) -> AsyncIterator[Part]:
    yield first
    async for part in rest:
        yield part

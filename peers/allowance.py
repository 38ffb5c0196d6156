"""What a volunteer lets rounds and bases move: so much a second upwards, so much a day both ways together.

A limit is kept in two ways. What it leaves counts as what the line carries, so that a peer encodes more strongly and
takes part in fewer rounds; and every body waits here until it may go. A day's allowance that is used up ends the day
for rounds: the peer trains on alone, announces that nobody should count on it, and comes back after midnight (UTC).

Counted are the bodies of contributions, averages, bases and news; news does not wait. What this does not bound: the
DHT, matchmaking and headers, some kilobytes a tick.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from datetime import datetime, timezone
from pathlib import Path

from hivemind.p2p import PeerID

from peers.line import LineRate
from peers.messages import WireMessage
from peers.notes import write_note
from peers.transport import Handler, Received, Sent, Transport

DAY_SECONDS = 86_400.0
KEPT_BYTES = 1 << 24
"""Counted between two writes of the day's count to disk: a crash forgets no more."""


class Allowance:
    """Counts, and says what may still move.

    :param up_bytes_per_second: None for no limit
    :param daily_bytes: None for no limit
    :param path: where the day's count survives a restart
    :param now: seconds since 1970, as days go by
    """

    def __init__(
        self,
        path: Path,
        now: Callable[[], float],
        *,
        up_bytes_per_second: float | None = None,
        daily_bytes: int | None = None,
    ) -> None:
        self._path, self._now = path, now
        self._up, self._daily = up_bytes_per_second, daily_bytes
        self._day, self._moved = self._read()
        self._kept = self._moved
        self._free_at = 0.0

    @property
    def is_used_up(self) -> bool:
        """Whether nothing more may move today."""
        return self._daily is not None and self._moved_today() >= self._daily

    @property
    def rate(self) -> LineRate:
        """What may move, on average, until midnight."""
        up = self._up if self._up is not None else math.inf
        if self._daily is None:
            return LineRate(up=up)
        left_seconds = DAY_SECONDS - self._now() % DAY_SECONDS
        each_way = max(1.0, (self._daily - self._moved_today()) / 2 / max(1.0, left_seconds))
        return LineRate(up=min(up, each_way), down=each_way)

    def moved(self, count: int) -> None:
        """So many bytes went or came."""
        if self._daily is None:
            return
        before = self._moved_today()
        self._moved = before + count
        if self._moved - self._kept >= KEPT_BYTES or before < self._daily <= self._moved:
            self.keep()  # once when the day's is used up: news goes on, several times a second

    def keep(self) -> None:
        """Write the day's count to disk; a full disk loses it."""
        if self._daily is None:
            return
        write_note(self._path, {"day": self._day, "bytes": self._moved})
        self._kept = self._moved

    async def may_send(self, count: int) -> None:
        """Wait until so many bytes may go; they count."""
        self.moved(count)
        if self._up is None:
            return
        now = asyncio.get_running_loop().time()
        begins = max(now, self._free_at)
        self._free_at = begins + count / self._up
        await asyncio.sleep(begins - now)

    def _moved_today(self) -> int:
        today = self._today()
        if today != self._day:
            self._day, self._moved, self._kept = today, 0, 0
        return self._moved

    def _today(self) -> str:
        return datetime.fromtimestamp(self._now(), timezone.utc).date().isoformat()

    def _read(self) -> tuple[str, int]:
        with suppress(OSError, ValueError):
            match json.loads(self._path.read_text()):
                case {"day": str() as day, "bytes": int() as count} if count >= 0 and day == self._today():
                    return day, count
        return self._today(), 0


class MeteredTransport:
    """A ``Transport`` under an allowance.

    :param transport: what carries the bytes
    """

    def __init__(self, transport: Transport, allowance: Allowance) -> None:
        self._transport, self._allowance = transport, allowance

    async def call(
        self, peer: PeerID, name: str, requests: AsyncIterator[Sent], answer_type: type[Received]
    ) -> AsyncGenerator[Received, None]:
        """See ``Transport``."""
        return self._counted(await self._transport.call(peer, name, self._in_turn(requests), answer_type))

    async def serve(self, name: str, handler: Handler[Received], request_type: type[Received]) -> None:
        """See ``Transport``. Nobody is answered when the day's allowance is used up."""

        async def answer(stream: AsyncIterator[Received], remote_id: PeerID) -> AsyncGenerator[WireMessage, None]:
            if self._allowance.is_used_up:
                return
            async with aclosing(self._counted(stream)) as counted, aclosing(handler(counted, remote_id)) as answers:
                async for message in answers:
                    await self._allowance.may_send(len(message.body))
                    yield message

        await self._transport.serve(name, answer, request_type)

    async def _in_turn(self, messages: AsyncIterator[Sent]) -> AsyncGenerator[Sent, None]:
        async for message in messages:
            await self._allowance.may_send(len(message.body))
            yield message

    async def _counted(self, messages: AsyncIterator[Received]) -> AsyncGenerator[Received, None]:
        try:
            async for message in messages:
                self._allowance.moved(len(message.body))
                yield message
        finally:
            if isinstance(messages, AsyncGenerator):
                await messages.aclose()

"""Serving bases: one snapshot for everybody who fetches the same version, quotas, and nothing kept at rest.

A base is read where it lies. Who fetches it may need longer than a cycle: when it is about to change, what somebody is
fetching is copied, and served from the copy. Memory is bounded by the number of snapshots, and by time: they go when
nobody has asked for a while. A base's owner can be slowed down by requests, but
only as far as the limits below go. What they do not stop: many false identities that take all streams or snapshots.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable

import msgpack

from peers.messages import (
    MAX_HEADER_BYTES,
    BaseAnswer,
    BaseHeader,
    BasePieceHeader,
    BaseRefusalHeader,
    BaseRequest,
    BaseRequestHeader,
    extend_history,
)
from peers.transfer import MOST_PIECE_BYTES, FrozenBase

STREAMS_PER_PEER = 6
"""Twice the fragments that a newcomer fetches at once: one whose line failed calls anew before we know that it did. On
the way of a stream are one piece and what the transport has not sent, 2 MiB at most: so this bounds a requester's bytes
in flight as well, to 12 MiB."""
STREAMS_AT_ONCE = 24
"""An uplink of 5 Mbit/s still gives each of so many a piece of 64 KiB in three seconds: nobody gives up for it."""
SNAPSHOTS_AT_ONCE = 6
"""Two newcomers that began at different versions, each with as many fragments as it fetches at once."""
IDLE_SECONDS = 30.0
"""A snapshot that nobody fetches is kept this long: a line that failed may be back. A stream on which nothing is asked
for ends after the same time."""
OLD_SECONDS = 3600.0
"""A version that has passed is served no longer than this after it was frozen, however slow the line."""
RECEIPT_BYTES = MAX_HEADER_BYTES // 2
"""The newest receipts that fit are sent: of a big group, all that are kept would make a header nobody accepts."""


class _Snapshot:
    """A frozen base, and who uses it."""

    def __init__(self, frozen: FrozenBase, now: float) -> None:
        self.frozen, self.frozen_at, self.used_at = frozen, now, now
        self.users = 0


class BaseServer:
    """Serves bases to other peers.

    :param holds: whether the base that a request names is this peer's current one
    :param freeze: awaits a fragment's current base. Called once per version, not once per request. Before the base
        changes, ``before_change`` must be awaited.
    :param now: seconds
    """

    def __init__(
        self,
        holds: Callable[[BaseRequestHeader], bool],
        freeze: Callable[[int], Awaitable[FrozenBase]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holds, self._freeze, self._now = holds, freeze, now
        self._snapshots: dict[bytes, _Snapshot] = {}
        self._freezing = asyncio.Lock()
        self._streams: Counter[Hashable] = Counter()
        self.bytes_sent = 0

    @property
    def snapshots(self) -> int:
        """How many versions are served at the moment."""
        return len(self._snapshots)

    async def before_change(self, digest: bytes) -> None:
        """The base of this digest gives way to another: copy it if somebody is fetching it, else serve it no more."""
        snapshot = self._snapshots.pop(digest, None)
        if snapshot is not None and snapshot.users:
            snapshot.frozen = await asyncio.to_thread(snapshot.frozen.copied)
            self._snapshots[digest] = snapshot

    async def answer(
        self, requests: AsyncIterator[BaseRequest], requester: Hashable
    ) -> AsyncGenerator[BaseAnswer, None]:
        """Send the pieces of one base that are asked for, one after the other; a refusal ends it."""
        if self._streams[requester] >= STREAMS_PER_PEER or self._streams.total() >= STREAMS_AT_ONCE:
            yield BaseAnswer(BaseRefusalHeader(busy=True))
            return
        self._streams[requester] += 1
        snapshot: _Snapshot | None = None
        try:
            async for header in _wellformed(requests):
                if snapshot is None:
                    found = await self._snapshot(header)
                    if isinstance(found, BaseRefusalHeader):
                        yield BaseAnswer(found)
                        return
                    snapshot = found
                    snapshot.users += 1
                frozen = snapshot.frozen
                if header.digest != frozen.digest or header.stop > len(frozen.payload):
                    return
                if self._now() - snapshot.frozen_at > OLD_SECONDS and not self._holds(header):
                    yield BaseAnswer(BaseRefusalHeader(busy=False))
                    return
                snapshot.used_at = self._now()
                if header.start == header.stop:
                    yield BaseAnswer(_described(frozen))
                else:
                    body = frozen.payload[header.start : header.stop]
                    self.bytes_sent += len(body)
                    yield BaseAnswer(BasePieceHeader(start=header.start), body)
        finally:
            self._streams[requester] -= 1
            if not self._streams[requester]:
                del self._streams[requester]
            if snapshot is not None:
                snapshot.users -= 1
                snapshot.used_at = self._now()
                asyncio.get_running_loop().call_later(IDLE_SECONDS, self.release_idle)

    async def _snapshot(self, header: BaseRequestHeader) -> _Snapshot | BaseRefusalHeader:
        """The base that a request names, frozen now if it was not."""
        async with self._freezing:
            if header.digest not in self._snapshots:
                if not self._holds(header):
                    return BaseRefusalHeader(busy=False)
                if not self._make_room():
                    return BaseRefusalHeader(busy=True)
                frozen = await self._freeze(header.fragment)
                if frozen.digest != header.digest:
                    return BaseRefusalHeader(busy=False)  # the next version came in between
                self._snapshots[frozen.digest] = _Snapshot(frozen, self._now())
            return self._snapshots[header.digest]

    def _make_room(self) -> bool:
        """Whether there is room for one more, if need be in place of one that nobody fetches at the moment."""
        if len(self._snapshots) < SNAPSHOTS_AT_ONCE:
            return True
        idle = [digest for digest, snapshot in self._snapshots.items() if not snapshot.users]
        if not idle:
            return False
        del self._snapshots[min(idle, key=lambda digest: self._snapshots[digest].used_at)]
        return True

    def release_idle(self) -> None:
        """Give back the memory of what nobody has fetched for a while."""
        oldest = self._now() - IDLE_SECONDS
        for digest, snapshot in list(self._snapshots.items()):
            if not snapshot.users and snapshot.used_at <= oldest:
                del self._snapshots[digest]


async def _wellformed(requests: AsyncIterator[BaseRequest]) -> AsyncGenerator[BaseRequestHeader, None]:
    """The requests up to the first one that is malformed, too big or too late."""
    while True:
        try:
            request = await asyncio.wait_for(requests.__anext__(), IDLE_SECONDS)
        except (StopAsyncIteration, asyncio.TimeoutError):
            return
        header = request.header
        if header is None or not 0 <= header.stop - header.start <= MOST_PIECE_BYTES:
            return
        yield header


def _described(frozen: FrozenBase) -> BaseHeader:
    """The header of a base with its newest receipts, oldest first, as many as fit.

    Older ones than a peer knows are sent as well: they show it where its own line left this one.
    """
    fitting = len(frozen.receipts)
    room_bytes = RECEIPT_BYTES
    for receipt in reversed(frozen.receipts):
        room_bytes -= len(msgpack.packb(receipt.model_dump()))
        if room_bytes < 0:
            break
        fitting -= 1
    history = frozen.history_before
    for receipt in frozen.receipts[:fitting]:
        history = extend_history(history, receipt)
    return BaseHeader(
        version=frozen.version,
        total_element_samples=frozen.total_element_samples.to_bytes(16, "little"),
        history=history,
        receipts=list(frozen.receipts[fitting:]),
    )

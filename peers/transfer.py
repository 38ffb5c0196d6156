"""Bases on the wire: serving one frozen snapshot per version, and fetching one, verified by its digest.

A donor is believed in nothing: parameters, outer optimizer state, total samples and the history of receipts must hash
to the digest that was asked for. What this does not stop: peers that agree on a false base.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import msgpack
import numpy as np
import torch

from peers.lineage import Claim
from peers.messages import (
    MAX_HEADER_BYTES,
    BaseAnswer,
    BaseChunkHeader,
    BaseHeader,
    BaseRequestHeader,
    Receipt,
    extend_history,
)
from peers.outer import base_digest
from peers.reducer import FLOAT32

CHUNK_BYTES = 1 << 20
STREAMS_AT_ONCE = 4
SNAPSHOTS_KEPT = 4
RECEIPT_BYTES = MAX_HEADER_BYTES // 2
"""The newest receipts that fit are sent: of a big group, all that are kept would make a header nobody accepts."""


class TransferFailed(Exception):
    """A donor did not deliver the base that was asked for; the text says why. Another donor may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenBase:
    """The bytes of one base (parameters, then outer optimizer state, float32 little endian) and what belongs to it."""

    version: int
    digest: bytes
    total_element_samples: int
    history: bytes
    payload: bytes
    receipts: tuple[Receipt, ...]
    """Of consecutive versions, the last one this base's."""
    history_before: bytes
    """The history before the first of the receipts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBase:
    """A verified base: float32 ``(size,)``, its outer state ``(states, size)``, the receipts of the versions before."""

    claim: Claim
    total_element_samples: int
    history: bytes
    history_before: bytes
    base: torch.Tensor
    outer_state: torch.Tensor
    receipts: tuple[Receipt, ...]
    donor: str
    bytes_received: int


class BaseServer:
    """Serves bases to other peers, from at most a few frozen snapshots, at most four streams at once.

    :param freeze: awaits a copy of a fragment's current base. Called once per version, not once per request.
    """

    def __init__(self, freeze: Callable[[int], Awaitable[FrozenBase]]) -> None:
        self._freeze = freeze
        self._frozen: dict[int, FrozenBase] = {}
        self._freezing = asyncio.Lock()
        self._streams = asyncio.Semaphore(STREAMS_AT_ONCE)
        self.bytes_sent = 0

    def holds(self, request: BaseRequestHeader) -> bool:
        """Whether the base that is asked for is frozen already."""
        frozen = self._frozen.get(request.fragment)
        return frozen is not None and frozen.digest == request.digest

    async def answer(self, request: BaseRequestHeader) -> AsyncIterator[BaseAnswer]:
        """Stream the base that was asked for; nothing at all if it is not the current one."""
        async with self._streams:
            async with self._freezing:
                if not self.holds(request):
                    frozen = await self._freeze(request.fragment)
                    if frozen.digest != request.digest:
                        return
                    self._frozen.pop(request.fragment, None)
                    self._frozen[request.fragment] = frozen
                    while len(self._frozen) > SNAPSHOTS_KEPT:
                        del self._frozen[next(iter(self._frozen))]
                frozen = self._frozen[request.fragment]
            history, news = _newest_that_fit(frozen)
            yield BaseAnswer(
                BaseHeader(
                    version=frozen.version,
                    total_element_samples=frozen.total_element_samples.to_bytes(16, "little"),
                    history=history,
                    receipts=news,
                )
            )
            payload = memoryview(frozen.payload)
            for offset in range(0, len(payload), CHUNK_BYTES):
                body = payload[offset : offset + CHUNK_BYTES]
                self.bytes_sent += len(body)
                yield BaseAnswer(BaseChunkHeader(offset=offset), body)


def _newest_that_fit(frozen: FrozenBase) -> tuple[bytes, list[Receipt]]:
    """The newest receipts, oldest first, and the history before them.

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
    return history, list(frozen.receipts[fitting:])


async def receive_base(
    answers: AsyncIterator[BaseAnswer],
    *,
    fragment: int,
    size: int,
    states: int,
    claim: Claim,
    donor: str,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> FetchedBase:
    """Take a base from a donor's stream and verify it.

    :param size: elements of the fragment; the stream may not bring a byte more than belongs to it
    :param states: vectors of outer optimizer state
    :param donor: whom the stream is from, for the record
    :param on_bytes: told of every chunk's length as it arrives
    :raises TransferFailed: when the donor ends early, sends anything malformed, or other bytes than announced
    """
    header: BaseHeader | None = None
    expected = (1 + states) * size * FLOAT32.itemsize
    buffer = bytearray(expected)
    received = 0
    async for answer in answers:
        if isinstance(answer.header, BaseHeader) and header is None:
            header = answer.header
            if header.version != claim.version:
                raise TransferFailed(f"sent version {header.version} instead of {claim.version}")
            first = claim.version + 1 - len(header.receipts)
            if [receipt.version for receipt in header.receipts] != list(range(first, claim.version + 1)):
                raise TransferFailed("sent receipts of other versions")
        elif isinstance(answer.header, BaseChunkHeader) and header is not None:
            end = received + len(answer.body)
            if answer.header.offset != received or not answer.body or end > expected:
                raise TransferFailed("sent a chunk out of order or too much")
            buffer[received:end] = answer.body
            received = end
            on_bytes(len(answer.body))
        else:
            raise TransferFailed("sent a malformed message")
    if header is None:
        raise TransferFailed("does not serve this version any more")
    if received != expected:
        raise TransferFailed(f"ended after {received} of {expected} bytes")
    values = torch.from_numpy(np.frombuffer(buffer, dtype=FLOAT32).astype(np.float32, copy=False))
    base, outer_state = values[:size], values[size:].view(states, size)
    total = int.from_bytes(header.total_element_samples, "little")
    if total // size != claim.total_samples:
        raise TransferFailed(f"sent a base of {total // size} samples instead of {claim.total_samples}")
    history = header.history
    for receipt in header.receipts:
        history = extend_history(history, receipt)
    digest = await asyncio.to_thread(
        base_digest,
        fragment=fragment,
        version=claim.version,
        total_element_samples=total,
        history=history,
        base=base,
        outer_state=outer_state,
    )
    if digest != claim.digest:
        raise TransferFailed("sent bytes that do not match the announced digest")
    return FetchedBase(
        claim=claim,
        total_element_samples=total,
        history=history,
        history_before=header.history,
        base=base,
        outer_state=outer_state,
        receipts=tuple(header.receipts),
        donor=donor,
        bytes_received=received,
    )

"""How the bytes of a round travel: messages with large bodies between two peers, in order, both ways at once.

``Transport`` is the seam: rounds know nothing else of how a peer is reached. ``DaemonTransport`` uses streams of the
p2p daemon, which authenticates the other side; ``direct.py`` has another. hivemind's own way of sending messages
through the daemon copies every body three times on each side and makes a task for every message; here a body is read
from the socket into the memory that the arithmetic then uses, and written from where it lies.

A message on the wire: length of the header, length of the body (uint32, little endian), header, body. A header length
of 0 is the end. The caller closes the stream: the daemon and TLS both drop what was not read when the other side
leaves. The receiver reads one message, and up to ``PREFETCHED`` ahead once a second one was asked for; until then the
handler may still refuse the call. Longer messages than ``messages.py`` allows are refused before anything is
allocated. What this does not stop: a peer that sends slowly; rounds have deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from peers.messages import MAX_BODY_BYTES, MAX_HEADER_BYTES, WireMessage

logger = logging.getLogger(__name__)

TRANSPORT_ERRORS = (
    P2PDaemonError,
    P2PHandlerError,
    ControlFailure,
    OSError,
    EOFError,
    asyncio.TimeoutError,
    TypeError,  # hivemind's word for an unknown message marker
    DecodeError,
)
"""What a call to another peer can end in, its answer being no answer at all included."""
PREFETCHED = 4
CALLS_PER_PEER = 16
CALLS_AT_ONCE = 512
UNSENT_BYTES = 1 << 20
"""More than this is not handed to the socket at once; enough for it to have something to send at any time."""
CHUNK_BYTES = 1 << 18
"""Long bodies are handed over in pieces of this size, so that reading and, with TLS, encrypting take turns."""
SCRATCH_BYTES = 1 << 16
_LENGTHS = struct.Struct("<II")
_END = _LENGTHS.pack(0, 0)

Sent = TypeVar("Sent", bound=WireMessage)
Received = TypeVar("Received", bound=WireMessage)
Handler = Callable[[AsyncIterator[Received], PeerID], AsyncGenerator[WireMessage, None]]


class Transport(Protocol):
    """Calls other peers, and passes their calls on."""

    async def call(
        self, peer: PeerID, name: str, requests: AsyncIterator[Sent], answer_type: type[Received]
    ) -> AsyncGenerator[Received, None]:
        """Send every request; the answers as they come. Closing them ends the call."""

    async def serve(self, name: str, handler: Handler[Received], request_type: type[Received]) -> None:
        """From now on answer calls of ``name``."""


class Calls:
    """Answers the calls that come in over streams, a bounded number for each peer and in all.

    :param write_seconds: a peer that does not take a message within this time is given up
    """

    def __init__(self, write_seconds: float) -> None:
        self._write_seconds = write_seconds
        self._answering: Counter[PeerID] = Counter()

    async def answer(
        self,
        peer: PeerID,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handler: Handler[Received],
        request_type: type[Received],
    ) -> None:
        """One call, from its first request until the caller has closed the stream. Never raises for network trouble.

        :param peer: who is known to be at the other end
        """
        if self._answering[peer] >= CALLS_PER_PEER or self._answering.total() >= CALLS_AT_ONCE:
            writer.close()
            return
        self._answering[peer] += 1
        channel = _Channel(reader, writer, self._write_seconds)
        try:
            async with aclosing(handler(channel.messages(request_type), peer)) as answers:
                async for answer in answers:
                    await channel.send(answer)
            await channel.finish()
            await channel.closed_by_the_other()
        except (OSError, EOFError, asyncio.TimeoutError, P2PDaemonError) as error:
            logger.debug("A call of %s ended early: %r", peer, error)
        finally:
            channel.close()
            self._answering[peer] -= 1
            if not self._answering[peer]:
                del self._answering[peer]


def converse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    requests: AsyncIterator[Sent],
    answer_type: type[Received],
    write_seconds: float,
) -> AsyncGenerator[Received, None]:
    """The caller's side of a call: sends the requests in the background; closing the answers closes the stream.

    :raises OSError, EOFError: while reading the answers: the other side is gone
    """
    channel = _Channel(reader, writer, write_seconds)
    sending = asyncio.create_task(channel.send_all(requests))

    async def answers() -> AsyncGenerator[Received, None]:
        try:
            async for answer in channel.messages(answer_type):
                yield answer
        finally:
            sending.cancel()
            channel.close()

    return answers()


class DaemonTransport:
    """Over streams of the p2p daemon.

    :param write_seconds: a peer that does not take a message within this time is given up
    """

    def __init__(self, p2p: P2P, namespace: str, write_seconds: float) -> None:
        self._p2p, self._namespace, self.write_seconds = p2p, namespace, write_seconds
        self.calls = Calls(write_seconds)

    async def call(
        self, peer: PeerID, name: str, requests: AsyncIterator[Sent], answer_type: type[Received]
    ) -> AsyncGenerator[Received, None]:
        """:raises OSError, EOFError, P2PDaemonError: the peer cannot be reached; also while reading the answers"""
        _, reader, writer = await self._p2p.call_binary_stream_handler(peer, self._full(name))
        return converse(reader, writer, requests, answer_type, self.write_seconds)

    async def serve(self, name: str, handler: Handler[Received], request_type: type[Received]) -> None:
        async def serve_stream(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self.calls.answer(info.peer_id, reader, writer, handler, request_type)

        await self._p2p.add_binary_stream_handler(self._full(name), serve_stream)

    def _full(self, name: str) -> str:
        return f"{self._namespace}::{name}"


class _Channel(asyncio.BufferedProtocol):
    """Takes over a socket from asyncio's stream reader and writer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, write_seconds: float) -> None:
        self._write_seconds = write_seconds
        self._arrived: deque[tuple[memoryview, memoryview]] = deque()
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = self._lost = self._gone = self._second_asked = False
        self._scratch: memoryview | None = None
        self._error: Exception | None = None
        self._stage = 0
        self._header = memoryview(b"")
        self._expect(memoryview(bytearray(_LENGTHS.size)))
        self._writer = writer  # it closes the socket when nobody holds it
        transport: Any = writer.transport
        self._transport = transport
        transport.pause_reading()
        self._before = bytes(reader._buffer)  # type: ignore[attr-defined]
        self._lost = reader._eof or reader.exception() is not None  # type: ignore[attr-defined]
        transport.set_protocol(self)
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._read_on()

    # Reading

    def _read_on(self) -> None:
        """Take what had arrived before the take-over, then what comes, as long as there is room."""
        self.buffer_updated(0)
        while self._before and not self._full():
            taken = min(len(self._before), len(self._wanted) - self._filled)
            self._wanted[self._filled : self._filled + taken] = self._before[:taken]
            self._before = self._before[taken:]
            self.buffer_updated(taken)
        if not self._full() and not self._lost:
            self._transport.resume_reading()

    def _expect(self, wanted: memoryview) -> None:
        self._wanted, self._filled = wanted, 0

    def _full(self) -> bool:
        ahead = PREFETCHED if self._second_asked else 1
        return len(self._arrived) >= ahead or self._ended or self._error is not None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._wanted[self._filled :] if self._scratch is None else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._scratch is not None:
            return
        self._filled += nbytes
        while self._filled == len(self._wanted) and not self._full():
            self._advance()
        if self._full():
            self._transport.pause_reading()

    def _advance(self) -> None:
        """What was wanted is here: the lengths, a header, or a body."""
        if self._stage == 0:
            header_bytes, body_bytes = _LENGTHS.unpack(self._wanted)
            if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
                self._error = ConnectionAbortedError(f"a message of {header_bytes} + {body_bytes} bytes")
                self._news.set()
            elif header_bytes == 0:
                self._ended = True
                self._news.set()
            else:
                self._body_bytes = body_bytes
                self._expect(memoryview(bytearray(header_bytes)))
                self._stage = 1
        elif self._stage == 1:
            self._header = self._wanted
            # Not a bytearray: that is filled with zeros first.
            self._expect(np.empty(self._body_bytes, dtype=np.uint8).data)
            self._stage = 2
        else:
            self._arrived.append((self._header, self._wanted))
            self._news.set()
            self._expect(memoryview(bytearray(_LENGTHS.size)))
            self._stage = 0

    def eof_received(self) -> bool:
        self._lost = True
        self._news.set()
        # What we still have to say may be sent; TLS closes both directions at once.
        return self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = self._gone = True
        self._news.set()
        self._writable.set()

    async def messages(self, kind: type[Received]) -> AsyncGenerator[Received, None]:
        """Until the end mark. :raises EOFError: there was none :raises OSError: too long a message"""
        while True:
            while not self._arrived:
                if self._ended:
                    return
                if self._error is not None:
                    raise self._error
                if self._lost:
                    raise EOFError("the stream ended early")
                self._news.clear()
                await self._news.wait()
            header, body = self._arrived.popleft()
            if self._second_asked:
                self._read_on()
            yield kind.from_parts(header, body)
            if not self._second_asked:
                self._second_asked = True
                self._read_on()

    async def closed_by_the_other(self) -> None:
        """Wait for it for as long as a write may take; what still comes is thrown away. :raises TimeoutError:"""

        async def lost() -> None:
            while not self._lost:
                self._news.clear()
                await self._news.wait()

        if not self._lost:
            self._scratch = memoryview(bytearray(SCRATCH_BYTES))
            self._transport.resume_reading()
            await asyncio.wait_for(lost(), self._write_seconds)

    # Writing

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def _write(self, piece: bytes | memoryview) -> None:
        if self._gone or self._transport.is_closing():
            raise ConnectionResetError("the stream is closed")
        self._transport.write(piece)
        if not self._writable.is_set():
            await asyncio.wait_for(self._writable.wait(), self._write_seconds)

    async def send(self, message: WireMessage) -> None:
        """Returns when little enough of it is unsent. :raises OSError, TimeoutError: it cannot be sent"""
        header, body = message.packed_header(), message.body
        await self._write(_LENGTHS.pack(len(header), len(body)) + header)
        whole = memoryview(body)
        for start in range(0, len(body), CHUNK_BYTES):
            await self._write(whole[start : start + CHUNK_BYTES])

    async def finish(self) -> None:
        """Nothing more comes from us."""
        await self._write(_END)

    async def send_all(self, messages: AsyncIterator[WireMessage]) -> None:
        """All of them and the end mark; whoever reads notices if that fails."""
        try:
            async for message in messages:
                await self.send(message)
            await self.finish()
        except Exception as error:  # also of whoever makes the messages: the other side must not wait for the rest
            logger.debug("A call could not be sent whole: %r", error)
            self._transport.abort()

    def close(self) -> None:
        """What was written is still sent, for as long as a write may take."""
        if self._transport.is_closing():
            return
        unsent = self._transport.get_write_buffer_size()
        self._transport.close()
        if unsent:
            asyncio.get_running_loop().call_later(self._write_seconds, self._transport.abort)

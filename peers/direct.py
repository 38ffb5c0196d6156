"""Rounds without the daemon in between: TCP and TLS straight from one averaging process to another.

The daemon encrypts, multiplexes and copies everything once more, in another process: most of a round's time on a good
line. So a peer listens on a port of its own, with a certificate made at its start. Whoever wants to call it asks over
the daemon, whose streams are authenticated by the libp2p identities, and is told the port, the certificate's
fingerprint and a ticket: 32 random bytes that stand for the asker. It dials the address at which its daemon is
connected with that peer, compares the certificate before it sends anything, and shows the ticket. Then messages
travel as in ``transport.py``. There is no cryptography of our own in it, only TLS 1.3 and random numbers.

No call waits for this, and none fails for want of it. As long as no way to a peer is known, calls go through the
daemon while one is looked for. A way that failed is avoided for a while.

What it does not stop: a peer that names a port on which something else listens at its address (it gets a TLS greeting
and no more); a peer that lends its ticket to another, which it could as well relay for; connections that are opened
only to occupy the few places for those that have not shown a ticket yet (then everyone uses the daemon).
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import ipaddress
import logging
import secrets
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hivemind.p2p import P2P, PeerID

from peers.daemon import hosts_of
from peers.messages import Ask, AskHeader, DirectOffer, DirectOfferHeader
from peers.transport import TRANSPORT_ERRORS, DaemonTransport, Handler, Received, Sent, converse

logger = logging.getLogger(__name__)

OFFER = "direct"
"""Name of the call, through the daemon, that asks how to come in directly."""
TICKET_BYTES = 32
TICKET_SECONDS = 3600.0
TICKETS = 1024
"""One a peer; whoever comes when so many are out uses the daemon."""
WAY_SECONDS = TICKET_SECONDS / 2
"""A way is used for less long than its ticket is good for."""
AVOID_SECONDS = 300.0
"""How long a peer is not tried again that could not be reached directly, or whose call broke off."""
DIAL_SECONDS = 2.0
"""For TCP, TLS and the ticket together."""
IDENTIFY_SECONDS = 5.0
"""The other side has so long for TLS and its ticket."""
STRANGERS_AT_ONCE = 32
"""Connections that have not shown a ticket yet; more wait in the kernel."""
ACCEPT_PAUSE_SECONDS = 0.5
CLOSE_SECONDS = 1.0
"""Leaving has only seconds; what is being answered ends in milliseconds."""
_WELCOME = b"\x01"
_PATIENT_READER_BYTES = 1024
"""What may wait unread before the ticket is checked."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class NotAdmitted(ConnectionError):
    """The other side is not who it must be; the text says why."""


class Tickets:
    """Which peer a ticket stands for.

    :param now: a clock that only goes forward, seconds
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._out: dict[PeerID, tuple[bytes, float]] = {}

    def give(self, peer: PeerID) -> bytes | None:
        """A ticket for ``peer``, its last one unless that is half used up; None if too many are out."""
        now = self._now()
        self._out = {holder: (ticket, until) for holder, (ticket, until) in self._out.items() if until > now}
        held = self._out.get(peer)
        if held is not None and held[1] - now > TICKET_SECONDS / 2:
            return held[0]
        if held is None and len(self._out) >= TICKETS:
            return None
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._out[peer] = ticket, now + TICKET_SECONDS
        return ticket

    def holder(self, shown: bytes) -> PeerID | None:
        """Whose ticket this is, if it is still good."""
        now = self._now()
        for peer, (ticket, until) in self._out.items():
            if hmac.compare_digest(ticket, shown):
                return peer if until > now else None
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How a peer is reached directly; without an offer: not at all, so do not try."""

    host: str = ""
    offer: DirectOfferHeader | None = None
    until: float
    """On the loop's clock."""


class DirectTransport:
    """Calls peers directly where that is possible, through the daemon elsewhere.

    :param daemon: for everything else, and to tell each other how to come in
    :param listener: a TCP socket that listens; closed by ``close``
    """

    def __init__(self, p2p: P2P, daemon: DaemonTransport, listener: socket.socket) -> None:
        self._p2p, self._daemon, self._listener = p2p, daemon, listener
        listener.setblocking(False)
        self._server_context, self._fingerprint = _certified_context()
        self._tickets = Tickets()
        self._handlers: dict[str, tuple[Handler[Any], type[Any]]] = {}
        self._ways: dict[PeerID, _Way] = {}
        self._strangers = asyncio.Semaphore(STRANGERS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Admit others from now on, and tell them how."""
        self._spawn(self._accept())
        await self._daemon.serve(OFFER, self._answer_offer, Ask)

    async def close(self) -> None:
        """End every call that is being answered, and listen no longer."""
        tasks = {*self._tasks}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        self._listener.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Calling

    async def call(
        self, peer: PeerID, name: str, requests: AsyncIterator[Sent], answer_type: type[Received]
    ) -> AsyncGenerator[Received, None]:
        """:raises OSError, EOFError, P2PDaemonError: the peer cannot be reached; also while reading the answers"""
        now = asyncio.get_running_loop().time()
        way = self._ways.get(peer)
        if way is None or way.until <= now:
            self._avoid(peer)  # until it is found: one search at a time
            self._spawn(self._find_way(peer))
        elif way.offer is not None:
            try:
                stream = await asyncio.wait_for(_enter(way.host, way.offer, name), DIAL_SECONDS)
            except (OSError, EOFError, asyncio.TimeoutError) as error:
                logger.debug("%s is not reached directly any more: %r", peer, error)
                self._avoid(peer)
            else:
                answers = converse(*stream, requests, answer_type, self._daemon.write_seconds)
                return self._watched(peer, answers)
        return await self._daemon.call(peer, name, requests, answer_type)

    async def _watched(self, peer: PeerID, answers: AsyncGenerator[Received, None]) -> AsyncGenerator[Received, None]:
        """Pass the answers on; a call that breaks off or is given up may have to do with the way."""
        async with aclosing(answers):
            try:
                async for answer in answers:
                    yield answer
            except (OSError, EOFError, asyncio.CancelledError):
                self._avoid(peer)
                raise

    def _avoid(self, peer: PeerID) -> None:
        now = asyncio.get_running_loop().time()
        self._ways = {other: way for other, way in self._ways.items() if way.until > now}
        self._ways[peer] = _Way(until=now + AVOID_SECONDS)

    def forget(self, peer: str) -> None:
        """A peer, by its base58 id, is elsewhere now: the next call looks for a way again."""
        self._ways.pop(PeerID.from_base58(peer), None)

    async def _find_way(self, peer: PeerID) -> None:
        """Ask the peer how to come in, and see whether that works."""
        try:
            offer = await self._ask(peer)
            hosts = await hosts_of(self._p2p, peer)
        except TRANSPORT_ERRORS as error:
            logger.debug("%s does not say how to reach it directly: %r", peer, error)
            return
        if offer is None:
            return
        for host in hosts:
            try:
                _, writer = await asyncio.wait_for(_dial(host, offer), DIAL_SECONDS)
            except (OSError, EOFError, asyncio.TimeoutError) as error:
                logger.debug("%s is not reached directly at %s: %r", peer, host, error)
                continue
            writer.close()
            until = asyncio.get_running_loop().time() + WAY_SECONDS
            self._ways[peer] = _Way(host=host, offer=offer, until=until)
            logger.debug("%s is reached directly at %s port %d", peer, host, offer.port)
            return

    async def _ask(self, peer: PeerID) -> DirectOfferHeader | None:
        async def question() -> AsyncIterator[Ask]:
            yield Ask(AskHeader())

        async with aclosing(await self._daemon.call(peer, OFFER, question(), DirectOffer)) as answers:
            async for answer in answers:
                return answer.header
        return None

    # Being called

    async def serve(self, name: str, handler: Handler[Received], request_type: type[Received]) -> None:
        self._handlers[name] = handler, request_type
        await self._daemon.serve(name, handler, request_type)

    async def _answer_offer(self, stream: AsyncIterator[Ask], remote_id: PeerID) -> AsyncGenerator[DirectOffer, None]:
        async for _ in stream:
            ticket = self._tickets.give(remote_id)
            if ticket is not None:
                port = self._listener.getsockname()[1]
                yield DirectOffer(DirectOfferHeader(port=port, fingerprint=self._fingerprint, ticket=ticket))
            return

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._strangers.acquire()
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # it was closed already, or we have no descriptors left
                self._strangers.release()
                logger.debug("A connection was not accepted: %r", error)
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            self._spawn(self._answer(connection))

    async def _answer(self, connection: socket.socket) -> None:
        try:
            identified = await asyncio.wait_for(self._identify(connection), IDENTIFY_SECONDS)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError) as error:
            logger.debug("A connection was not admitted: %r", error)
            return
        finally:
            self._strangers.release()
        peer, name, (reader, writer) = identified
        await self._daemon.calls.answer(peer, reader, writer, *self._handlers[name])

    async def _identify(self, connection: socket.socket) -> tuple[PeerID, str, Stream]:
        """TLS, the ticket and the call's name. :raises OSError, EOFError, ValueError: it is nobody we know"""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_PATIENT_READER_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._server_context, ssl_handshake_timeout=IDENTIFY_SECONDS
            )
        except BaseException:
            connection.close()
            raise
        try:
            peer = self._tickets.holder(await reader.readexactly(TICKET_BYTES))
            if peer is None:
                raise NotAdmitted("an unknown ticket")
            name = (await reader.readexactly((await reader.readexactly(1))[0])).decode("ascii")
            if name not in self._handlers:
                raise NotAdmitted("an unknown call")
            transport.write(_WELCOME)
        except BaseException:
            transport.abort()
            raise
        return peer, name, (reader, asyncio.StreamWriter(transport, protocol, reader, loop))


async def _enter(host: str, offer: DirectOfferHeader, name: str) -> Stream:
    """A stream on which a call of ``name`` may begin. :raises OSError, EOFError: there is none"""
    reader, writer = await _dial(host, offer)
    try:
        writer.write(offer.ticket + bytes([len(name)]) + name.encode("ascii"))
        if await reader.readexactly(len(_WELCOME)) != _WELCOME:
            raise NotAdmitted("not a welcome")
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


async def _dial(host: str, offer: DirectOfferHeader) -> Stream:
    """A TLS stream to whoever has the certificate that was announced. :raises OSError: it does not come about"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nobody has signed it: it is compared below, before anything is sent
    reader, writer = await asyncio.open_connection(host, offer.port, ssl=context, ssl_handshake_timeout=DIAL_SECONDS)
    try:
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if not hmac.compare_digest(hashlib.sha256(certificate).digest(), offer.fingerprint):
            raise NotAdmitted("another certificate")
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


def listen_next_to(host: str, port: int) -> socket.socket:
    """A listening TCP socket on ``port`` if that is free, else on any free one.

    :param host: IP address
    :param port: 0 for any
    :raises OSError: this machine has no such address
    """
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    with suppress(OSError):
        return socket.create_server((host, port), family=family)
    return socket.create_server((host, 0), family=family)


def _certified_context() -> tuple[ssl.SSLContext, bytes]:
    """A server's TLS context with a new key, and the SHA-256 of its certificate: the only thing anybody looks at."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "peer")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes a session
    with tempfile.NamedTemporaryFile() as file:  # ssl reads files only; this one is ours alone and gone in a moment
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        file.write(certificate.public_bytes(serialization.Encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.fingerprint(hashes.SHA256())

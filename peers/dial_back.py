"""Can others reach this machine? Only others can say, so they are asked to dial back.

Whoever wants to know listens on the port in question, asks a peer over the daemon, and says a word of 16 random bytes
to everyone who connects. The peer dials and tells whether it heard that word, and at which address it sees the asker:
one that the asker does not have itself means that there is a router in between (NAT). A peer whose daemon listens on
that port already asks without a word (``door.hosts_reached``): that it is connected with is answer enough.

Nobody can have a peer dial a third party: it dials only the address at which the asker's own, authenticated connection
comes in, at most DIALS times in WINDOW_SECONDS for one address and AT_ONCE for all, and it tells nothing of what it
finds there but whether the word came. What this does not stop: a peer that lies about what it found, so several are
asked; an asker that looks for open ports of machines which share its own public address, a few a minute.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hivemind.p2p import PeerID

from dht_config.errors import AddressError
from peers.daemon import check_port_free
from peers.messages import DialBack, DialBackHeader, DialedBack, DialedBackHeader
from peers.transport import TRANSPORT_ERRORS

logger = logging.getLogger(__name__)

WORD_BYTES = 16
DIAL_SECONDS = 3.0
"""For connecting and for the word together."""
HOSTS = 2
"""A peer may be connected over IPv4 and IPv6."""
DIALS = 6
WINDOW_SECONDS = 60.0
AT_ONCE = 4
REMEMBERED_HOSTS = 1024
ANSWER_SECONDS = 12.0


class DialBackDesk:
    """Answers askers.

    :param hosts_of: IP addresses at which a peer is connected with us
    :param now: a clock that only goes forward, seconds
    """

    def __init__(
        self, hosts_of: Callable[[PeerID], Awaitable[Sequence[str]]], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._hosts_of, self._now = hosts_of, now
        self._dialled: dict[str, list[float]] = {}
        self._under_way = 0

    async def answer(self, request: DialBack, remote_id: PeerID) -> DialedBack:
        """Dial whoever asks; nobody, if the request does not parse or too many ask at once."""
        if request.header is None or self._under_way >= AT_ONCE:
            return not_tried()
        self._under_way += 1
        try:
            return await self._dial(request.header, await self._hosts_of(remote_id))
        except TRANSPORT_ERRORS as error:
            logger.debug("Where %s is connected from is not known: %r", remote_id, error)
            return not_tried()
        finally:
            self._under_way -= 1

    async def _dial(self, asked: DialBackHeader, hosts: Sequence[str]) -> DialedBack:
        answer = not_tried()
        for host in hosts[:HOSTS]:
            if self._may_dial(host):
                reached = await hears(host, asked.port, asked.word)
                answer = DialedBack(DialedBackHeader(host=host, reached=reached))
                if reached:
                    break
        return answer

    def _may_dial(self, host: str) -> bool:
        since = self._now() - WINDOW_SECONDS
        recent = {one: [at for at in times if at > since] for one, times in self._dialled.items()}
        self._dialled = {one: times for one, times in recent.items() if times}
        times = self._dialled.get(host, [])
        if len(times) >= DIALS or (not times and len(self._dialled) >= REMEMBERED_HOSTS):
            return False
        self._dialled[host] = [*times, self._now()]
        return True


def not_tried() -> DialedBack:
    return DialedBack(DialedBackHeader(host="", reached=None))


async def hears(host: str, port: int, word: bytes | None) -> bool:
    """Whether somebody at an address says the word, or takes a connection at all if there is none."""

    async def listen() -> bool:
        reader, writer = await asyncio.open_connection(host, port, limit=WORD_BYTES)
        try:
            return word is None or hmac.compare_digest(await reader.readexactly(WORD_BYTES), word)
        finally:
            writer.transport.abort()

    try:
        return await asyncio.wait_for(listen(), DIAL_SECONDS)
    except (OSError, EOFError, asyncio.TimeoutError):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What one peer says of our port."""

    peer_id: str
    host: str
    """The IP address at which it sees us; empty if it does not say."""
    reached: bool | None
    """None if it did not try."""


async def ask_to_dial_back(
    stub: Callable[[PeerID], Any], peers: Sequence[PeerID], host: str, port: int
) -> list[Reached]:
    """Listen on a port and ask peers to dial it. A peer that does not answer is left out.

    :param host: IP address to listen on
    :raises PortInUseError, AddressError: we cannot listen there
    """
    check_port_free(host, port)
    word = secrets.token_bytes(WORD_BYTES)

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(word)
            await writer.drain()
        writer.close()

    async def ask(peer: PeerID) -> Reached | None:
        try:
            answer = await stub(peer).rpc_dial_back(
                DialBack(DialBackHeader(port=port, word=word)), timeout=ANSWER_SECONDS
            )
        except TRANSPORT_ERRORS as error:
            logger.debug("%s does not dial back: %r", peer, error)
            return None
        if answer.header is None:
            return None
        return Reached(peer_id=str(peer), host=checked_host(answer.header.host), reached=answer.header.reached)

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = await asyncio.start_server(say, host, port, family=family)
    except OSError as error:
        raise AddressError(
            f"Cannot listen on {host} port {port}: {error.strerror}.", "Check --host and --port."
        ) from error
    async with server:
        answers = await asyncio.gather(*(ask(peer) for peer in peers))
    return [answer for answer in answers if answer is not None]


def checked_host(host: str) -> str:
    """An IP address that somebody else wrote, or nothing."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ""

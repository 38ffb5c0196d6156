"""The p2p daemon: started so that it dies with us, dialled so that failures can be told apart.

hivemind starts ``p2pd`` without a parent-death signal, in our process group, with sockets straight in /tmp, and
lets it dial the initial peers once within 15 s or die. Here the daemon starts alone, gets a parent-death signal and
a session of its own, keeps its sockets in a directory that is removed whole, and peers are dialled afterwards.

It asks the home's router for a port (UPnP, NAT-PMP), which ``contact`` has others try. Its relays and hole punching
stay off; measured with two masqueraded peers and hivemind 1.1.12: beside one public peer the relay is there after
180 s, a connection through it is reset after 128 KiB, and no hole is punched, since four others must have seen a peer's
address before the daemon tries. Beside six public peers both work at once (10 s, and half a second more), but there
every round has peers that can be dialled, and needs no other way.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from dht_config.address import Address, Transport
from dht_config.errors import AddressError, LimitsError, PortInUseError
from dht_config.network import NetworkSettings

START_SECONDS = 60.0
DIAL_SECONDS = 10.0
STRAGGLER_SECONDS = 2.0
LOOK_SECONDS = 0.1
RESOLVE_SECONDS = 3.0
REFUSAL_SECONDS = 2.0
SOCKET_DIRECTORY_PREFIX = "p2p-trainer-"
DAEMON_PROCESSORS = 1
"""Cores that the daemon runs on at once, unless GOMAXPROCS says otherwise.

One carries about 400 MB/s in each direction. With more, Go's idle threads look for work all the time: a quarter more
CPU for the same bytes (tests/benchmarks/allreduce.py), which training would have used.
"""
_PR_SET_PDEATHSIG = 1


def die_with_parent(death_signal: signal.Signals) -> None:
    """Ask the kernel to send this process ``death_signal`` when its parent ends (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal)


def make_socket_directory(remembered_in: Path) -> Path:
    """A private directory for the daemon's Unix sockets, written down so that the next start can reap it.

    Unix socket paths are at most 107 bytes, so it lies in the system's temporary directory, not in the run's.
    """
    reap_socket_directory(remembered_in)
    directory = Path(tempfile.mkdtemp(prefix=_socket_directory_prefix(remembered_in)))
    try:
        # Replaced, not written to: a note that another user left may not be.
        partial = remembered_in.with_name(f".{remembered_in.name}.partial")
        partial.write_text(str(directory))
        os.replace(partial, remembered_in)
    except OSError:
        directory.rmdir()
        raise
    return directory


def reap_socket_directory(remembered_in: Path) -> None:
    """Remove the socket directory that a killed peer left behind; it must be one that was made for this very note.

    In a copied run directory the note names the sockets of the original, which may be in use.
    """
    try:
        directory = Path(remembered_in.read_text().strip())
    except (OSError, UnicodeDecodeError):
        return
    if directory.name.startswith(_socket_directory_prefix(remembered_in)):
        shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        remembered_in.unlink()


def _socket_directory_prefix(remembered_in: Path) -> str:
    """Names the run directory by its inode, which a copy of it does not share."""
    return f"{SOCKET_DIRECTORY_PREFIX}{remembered_in.parent.stat().st_ino & 0xFFFFFFFF:x}-"


def check_port_free(host: str, port: int) -> None:
    """libp2p listens with SO_REUSEPORT and would share a taken port silently.

    :raises AddressError: this machine has no such address
    :raises PortInUseError: the port is taken, or this user may not have it
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            raise AddressError(
                f"This machine has no address {host} to listen on.",
                "Give --host 0.0.0.0 for every interface, or one of the addresses that `ip address` lists. The address "
                "of a router that forwards to this machine goes into --announce.",
            ) from error
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"Port {port} is in use by another program.",
                "Choose another with --port, or 0 for any free one.",
            ) from error
        raise PortInUseError(
            f"Cannot listen on {host} port {port}: {error.strerror}.",
            "Choose another port with --port (below 1024 they are the administrator's), or 0 for any free one.",
        ) from error


@contextlib.contextmanager
def _as_our_child() -> Iterator[None]:
    """While active, children started by asyncio get a session of their own, a parent-death signal and few cores."""
    original = asyncio.subprocess.create_subprocess_exec

    def prepare() -> None:
        os.setsid()
        die_with_parent(signal.SIGKILL)

    async def create_subprocess_exec(*command: Any, env: dict[str, str], **options: Any) -> asyncio.subprocess.Process:
        environment = {"GOMAXPROCS": str(DAEMON_PROCESSORS), **env}
        return await original(*command, env=environment, preexec_fn=prepare, **options)

    replacement: Any = create_subprocess_exec
    asyncio.subprocess.create_subprocess_exec = replacement
    try:
        yield
    finally:
        asyncio.subprocess.create_subprocess_exec = original


async def start_daemon(network: NetworkSettings, identity_path: Path | None, socket_directory: Path) -> P2P:
    """Start p2pd and connect to it; it listens but knows nobody yet.

    :param identity_path: key file, or None for a throw-away identity
    :raises LimitsError: when the daemon does not come up
    """
    check_port_free(network.host, network.port)
    P2P._UNIX_SOCKET_PREFIX = f"/unix{socket_directory}/"
    try:
        with _as_our_child():
            return await P2P.create(
                host_maddrs=network.listen_maddrs(),
                announce_maddrs=list(network.announce) or None,
                identity_path=None if identity_path is None else str(identity_path),
                check_if_identity_free=False,
                startup_timeout=START_SECONDS,
            )
    except (P2PDaemonError, ControlFailure, OSError) as error:
        raise LimitsError(
            f"The p2p daemon did not start: {_one_line(error)}.",
            "Check free memory, the open-file limit (ulimit -n) and that the temporary directory is writable.",
        ) from error


class DialOutcome(Enum):
    """What became of an attempt to reach an address."""

    CONNECTED = "connected"
    WRONG_PEER_ID = "answers under another peer id"
    REFUSED = "nobody listens there"
    TIMED_OUT = "no answer"
    NOT_FOUND = "the host name is unknown"
    NO_ROUTE = "no way leads there from this network"
    NOT_A_PEER = "something that is not a peer answers"
    FAILED = "not reachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class DialReport:
    """One address, what became of it, and who answered instead if somebody else did."""

    address: Address
    outcome: DialOutcome
    actual_peer_id: str = ""

    def __str__(self) -> str:
        other = f" ({self.actual_peer_id})" if self.actual_peer_id else ""
        return f"{self.address.text}: {self.outcome.value}{other}"


async def dial(p2p: P2P, address: Address, timeout_seconds: float = DIAL_SECONDS) -> DialReport:
    """Connect the daemon to one address; never raises for network trouble."""
    transport = Multiaddr(address.text.rpartition("/p2p/")[0])
    try:
        await asyncio.wait_for(p2p._client.connect(PeerID.from_base58(address.peer_id), [transport]), timeout_seconds)
    except asyncio.TimeoutError:
        return DialReport(address=address, outcome=DialOutcome.TIMED_OUT)
    except (ControlFailure, P2PDaemonError, OSError, EOFError) as error:
        transports = await _resolved(address.transport)
        if not transports:
            return DialReport(address=address, outcome=DialOutcome.NOT_FOUND)
        return _classify(address, transports, str(error))
    return DialReport(address=address, outcome=DialOutcome.CONNECTED)


async def _resolved(transport: Transport) -> list[str]:
    """A name's addresses, by which alone the daemon speaks of it: none if it has none. Others are as they are."""
    families = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}
    if transport.protocol not in families:
        return [transport.text]
    lookup = asyncio.get_running_loop().getaddrinfo(
        transport.host, transport.port, family=families[transport.protocol], type=socket.SOCK_STREAM
    )
    try:
        found = await asyncio.wait_for(lookup, RESOLVE_SECONDS)
    except (OSError, asyncio.TimeoutError):
        return []
    return [
        f"/{'ip6' if family == socket.AF_INET6 else 'ip4'}/{where[0]}/tcp/{transport.port}"
        for family, _, _, _, where in found
    ]


def _classify(address: Address, transports: Sequence[str], message: str) -> DialReport:
    """Read the daemon's answer; it lists every address it remembers for the peer, ours in brackets."""
    lines = [line for line in message.splitlines() if any(f"[{one}]" in line for one in transports)] or [message]
    ours = lines[0]
    mismatch = re.search(r"remote key matches (\w+)", ours)
    if mismatch:
        return DialReport(address=address, outcome=DialOutcome.WRONG_PEER_ID, actual_peer_id=mismatch.group(1))
    for marks, outcome in (
        (("connection refused",), DialOutcome.REFUSED),
        (("deadline exceeded", "i/o timeout", "timed out"), DialOutcome.TIMED_OUT),
        (("no good addresses", "no such host", "failed to resolve"), DialOutcome.NOT_FOUND),
        (("network is unreachable", "no route to host", "host is down"), DialOutcome.NO_ROUTE),
        (("failed to negotiate",), DialOutcome.NOT_A_PEER),
    ):
        if any(mark in ours for mark in marks):
            return DialReport(address=address, outcome=outcome)
    return DialReport(address=address, outcome=DialOutcome.FAILED)


async def dial_all(p2p: P2P, addresses: Sequence[Address]) -> list[DialReport]:
    """Dial all at once. When one has answered, the others have a moment left: a dead IPv6 route is silent for long."""
    dials = [asyncio.ensure_future(dial(p2p, address)) for address in addresses]
    pending: set[asyncio.Future[DialReport]] = set(dials)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if any(one.result().outcome is DialOutcome.CONNECTED for one in done):
            if pending:
                _, pending = await asyncio.wait(pending, timeout=STRAGGLER_SECONDS)
            break
    for late in pending:
        late.cancel()
    return [
        DialReport(address=address, outcome=DialOutcome.TIMED_OUT) if one in pending else one.result()
        for address, one in zip(addresses, dials, strict=True)
    ]


async def refuses(address: Address, timeout_seconds: float = REFUSAL_SECONDS) -> bool:
    """Whether the machine at an address answers that nobody listens on the port. Silence is not refusal."""
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(address.transport.host, address.transport.port), timeout_seconds
        )
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return False


async def answers_elsewhere(p2p: P2P, addresses: Sequence[Address], socket_directory: Path) -> bool:
    """Whether another daemon than ours answers under our peer id at one of the addresses: a copied identity.

    Asked through a throw-away daemon, since a daemon cannot dial its own identity. If it is ours that it gets, as where
    a router leads our own address back to us, ours knows it.
    """
    stranger = await start_daemon(NetworkSettings(host="127.0.0.1"), None, socket_directory)
    try:
        own = str(p2p.peer_id)
        reports = await dial_all(stranger, [address for address in addresses if address.peer_id == own])
        if not any(report.outcome is DialOutcome.CONNECTED for report in reports):
            return False
        return not await _comes_in(p2p, stranger.peer_id)
    finally:
        await stranger.shutdown()


async def _comes_in(p2p: P2P, peer: PeerID) -> bool:
    """Whether a peer that has just been connected with somebody was connected with our daemon."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + STRAGGLER_SECONDS
    while not await hosts_of(p2p, peer):
        if loop.time() >= give_up:
            return False
        await asyncio.sleep(LOOK_SECONDS)
    return True


async def hosts_of(p2p: P2P, peer: PeerID) -> list[str]:
    """IP addresses at which our daemon is connected with a peer's; none for a peer behind a relay."""
    found = {
        host: None
        for info in await p2p.list_peers()
        if info.peer_id == peer
        for address in info.addrs
        if (host := ip_in(str(address))) is not None
    }
    return list(found)


def ip_in(multiaddr: str) -> str | None:
    """The IP address in a connection's address; None if it goes through a relay or is of another kind."""
    parts = multiaddr.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6") or "p2p-circuit" in parts:
        return None
    return parts[2]


def limit_message_size(size_bytes: int) -> None:
    """Refuse longer messages before they are read: hivemind buffers whatever length a peer declares. Idempotent.

    hivemind's ``P2P.receive_raw_data`` believes the header (1.1.12, p2p_daemon.py:381).
    """

    async def receive_raw_data(reader: asyncio.StreamReader) -> bytes:
        length = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
        if length > size_bytes:
            raise ConnectionAbortedError(f"a message of {length} bytes")
        return await reader.readexactly(length)

    P2P.receive_raw_data = staticmethod(receive_raw_data)


def limit_write_time(seconds: float) -> None:
    """Bound every write of a message: a peer that stops reading would hold its handler for ever.

    hivemind's ``P2P.send_protobuf`` has no timeout (1.1.12, p2p_daemon.py:374 and 450). Idempotent.
    """
    if getattr(P2P.send_protobuf, "bounded", False):
        return
    original = P2P.send_protobuf

    async def send_protobuf(protobuf: object, writer: asyncio.StreamWriter) -> None:
        await asyncio.wait_for(original(protobuf, writer), seconds)

    send_protobuf.bounded = True  # type: ignore[attr-defined]
    P2P.send_protobuf = staticmethod(send_protobuf)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]

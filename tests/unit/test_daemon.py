"""The p2p daemon, with real ones: dialling, ports, sockets, and that it dies with its parent."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hivemind.p2p import P2P, P2PDaemonError

from dht_config.address import Address, parse_address
from dht_config.errors import AddressError, LimitsError, PortInUseError
from dht_config.identity import load_or_create_identity
from dht_config.network import NetworkSettings
from peers import daemon
from peers.daemon import (
    SOCKET_DIRECTORY_PREFIX,
    DialOutcome,
    DialReport,
    _classify,
    answers_elsewhere,
    check_port_free,
    dial,
    dial_all,
    make_socket_directory,
    reap_socket_directory,
    start_daemon,
)

PATIENCE_SECONDS = 60.0
LOOPBACK = NetworkSettings(host="127.0.0.1")
STRANGER = "QmZtmD2qt6fJot32nabSP3CUjicnypEBz7bHVDhPQt9aAy"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < give_up, f"{what} did not happen"
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short path: Unix socket names are at most 107 bytes."""
    prefix = P2P._UNIX_SOCKET_PREFIX
    directory = Path(tempfile.mkdtemp(prefix=SOCKET_DIRECTORY_PREFIX))
    yield directory
    P2P._UNIX_SOCKET_PREFIX = prefix
    shutil.rmtree(directory)


def with_daemons(sockets: Path, scene: Callable[[P2P, P2P, Address], Awaitable[None]]) -> None:
    """Run ``scene`` with two daemons and an address of the first."""
    identity = load_or_create_identity(sockets / "identity.key")

    async def run() -> None:
        first = await start_daemon(LOOPBACK, identity.path, sockets)
        try:
            second = await start_daemon(LOOPBACK, None, sockets)
            try:
                (address,) = [parse_address(str(maddr)) for maddr in await first.get_visible_maddrs()]
                await scene(first, second, address)
            finally:
                await second.shutdown()
        finally:
            await first.shutdown()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_SECONDS))


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_dialling_tells_who_is_there_who_is_not_and_who_is_somebody_else(sockets: Path) -> None:
    async def scene(first: P2P, second: P2P, address: Address) -> None:
        transport = address.text.rpartition("/p2p/")[0]
        nobody = parse_address(f"/ip4/127.0.0.1/tcp/{unused_port()}/p2p/{STRANGER}")
        somebody_else = parse_address(f"{transport}/p2p/{STRANGER}")
        connected, refused = await dial_all(second, [address, nobody])
        assert connected.outcome is DialOutcome.CONNECTED
        assert refused.outcome is DialOutcome.REFUSED
        assert "nobody listens there" in str(refused)
        wrong = await dial(second, somebody_else)
        assert wrong.outcome is DialOutcome.WRONG_PEER_ID
        assert wrong.actual_peer_id == str(first.peer_id)
        assert str(first.peer_id) in str(wrong)
        assert (await dial(second, address)).outcome is DialOutcome.CONNECTED

    with_daemons(sockets, scene)


def test_a_silent_address_does_not_hold_up_the_one_that_answers(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "STRAGGLER_SECONDS", 0.05)

    async def scene(first: P2P, second: P2P, address: Address) -> None:
        connect = second._client.connect

        async def connect_or_wait(peer_id: object, transports: list[object]) -> None:
            if "/ip6/" in str(transports[0]):
                await asyncio.Event().wait()
            await connect(peer_id, transports)

        second._client.connect = connect_or_wait
        silent = parse_address(f"/ip6/2001:db8::77/tcp/31337/p2p/{address.peer_id}")
        reports = await dial_all(second, [silent, address, silent])
        assert [report.address for report in reports] == [silent, address, silent]
        outcomes = [report.outcome for report in reports]
        assert outcomes == [DialOutcome.TIMED_OUT, DialOutcome.CONNECTED, DialOutcome.TIMED_OUT]

    with_daemons(sockets, scene)


def test_a_name_is_told_from_the_addresses_that_it_has(sockets: Path) -> None:
    async def scene(first: P2P, second: P2P, address: Address) -> None:
        shut = unused_port()
        named = parse_address(f"/dns4/localhost/tcp/{shut}/p2p/{STRANGER}")
        unknown = parse_address(f"/dns4/no-such-host.invalid/tcp/{shut}/p2p/{STRANGER}")
        reports = [await dial(second, one) for one in (named, unknown)]
        assert [report.outcome for report in reports] == [DialOutcome.REFUSED, DialOutcome.NOT_FOUND]

    with_daemons(sockets, scene)


def test_a_program_that_is_no_peer_is_told_from_a_shut_port(sockets: Path) -> None:
    async def scene(first: P2P, second: P2P, address: Address) -> None:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            report = await dial(second, parse_address(f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER}"))
        assert report.outcome is DialOutcome.NOT_A_PEER

    with_daemons(sockets, scene)


def test_a_dial_that_takes_too_long_is_an_outcome(sockets: Path) -> None:
    async def scene(first: P2P, second: P2P, address: Address) -> None:
        async def for_ever(*arguments: object) -> None:
            await asyncio.Event().wait()

        second._client.connect = for_ever
        assert (await dial(second, address, timeout_seconds=0.01)).outcome is DialOutcome.TIMED_OUT

    with_daemons(sockets, scene)


def test_a_copied_identity_is_found_where_it_answers(sockets: Path, tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "identity.key")

    async def scene() -> None:
        twin = await start_daemon(LOOPBACK, identity.path, sockets)
        try:
            assert twin.peer_id == identity.peer_id, "the daemon takes the identity from the file"
            (address,) = [parse_address(str(maddr)) for maddr in await twin.get_visible_maddrs()]
            ours = await start_daemon(LOOPBACK, identity.path, sockets)
            try:
                assert await answers_elsewhere(ours, [address], sockets)
                gone = parse_address(f"/ip4/127.0.0.1/tcp/{unused_port()}/p2p/{address.peer_id}")
                assert not await answers_elsewhere(ours, [gone], sockets)
            finally:
                await ours.shutdown()
            assert not await answers_elsewhere(twin, [address], sockets), "a router led our own address back to us"
        finally:
            await twin.shutdown()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_SECONDS))


def test_the_daemon_listens_where_it_is_told_and_its_sockets_lie_in_our_directory(sockets: Path) -> None:
    port = unused_port()

    async def scene() -> None:
        p2p = await start_daemon(NetworkSettings(host="127.0.0.1", port=port), None, sockets)
        try:
            assert any(sockets.iterdir())
            assert await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), PATIENCE_SECONDS)
            with pytest.raises(PortInUseError):
                await start_daemon(NetworkSettings(host="127.0.0.1", port=port), None, sockets)
            assert os.getsid(p2p._child.pid) == p2p._child.pid, "Ctrl-C must not reach it before us"
        finally:
            await p2p.shutdown()
        assert has_ended(p2p._child.pid)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_SECONDS))


# The keeper holds the daemon's pipes and sockets open: it learns of its parent's end by the signal alone.
PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from dht_config.network import NetworkSettings
from peers.daemon import make_socket_directory, start_daemon

async def live():
    sockets = make_socket_directory(Path(sys.argv[1]))
    p2p = await start_daemon(NetworkSettings(host="127.0.0.1"), None, sockets)
    keeper = os.fork()
    if keeper == 0:
        signal.pause()
    print(p2p._child.pid, keeper, sockets, flush=True)
    await asyncio.Event().wait()

asyncio.run(live())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_the_daemon_dies_with_a_killed_parent_and_the_next_start_reaps_its_sockets(tmp_path: Path) -> None:
    note = tmp_path / "sockets.path"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(note)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as parent:
        try:
            assert parent.stdout is not None
            pid_text, keeper_text, directory_text = parent.stdout.readline().split()
            pid, keeper, directory = int(pid_text), psutil.Process(int(keeper_text)), Path(directory_text)
            assert "p2pd" in psutil.Process(pid).name()
            assert any(directory.iterdir())
        finally:
            parent.send_signal(signal.SIGKILL)
        try:
            wait_until(lambda: has_ended(pid), "the end of the daemon")
        finally:
            keeper.kill()
    fresh = make_socket_directory(note)
    assert not directory.exists()
    assert fresh.is_dir() and note.read_text() == str(fresh)
    reap_socket_directory(note)
    assert not fresh.exists() and not note.exists()


def test_a_socket_directory_is_private_and_short() -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = make_socket_directory(Path(place) / "sockets.path")
        try:
            assert directory.stat().st_mode & 0o077 == 0
            longest = f"{directory}/p2pclient-{'x' * 16}.sock"
            assert len(longest) <= 107
        finally:
            directory.rmdir()


@pytest.mark.parametrize("content", ["", "nonsense", "{precious}", "/does/not/exist/p2p-trainer-x"])
def test_only_a_directory_of_ours_is_reaped(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a relative path can do no harm
    precious = tmp_path / "precious"
    precious.mkdir()
    note = tmp_path / "sockets.path"
    note.write_text(content.format(precious=precious))
    reap_socket_directory(note)
    assert precious.is_dir()
    assert not note.exists()


def test_a_copied_note_does_not_remove_the_sockets_of_the_original(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    sockets = make_socket_directory(original / "sockets.path")
    shutil.copytree(original, copy)
    reap_socket_directory(copy / "sockets.path")
    assert sockets.is_dir()
    reap_socket_directory(original / "sockets.path")
    assert not sockets.exists()


@pytest.mark.parametrize("damage", ["missing", "a directory", "not text"])
def test_reaping_survives_a_damaged_note(damage: str, tmp_path: Path) -> None:
    note = tmp_path / "sockets.path"
    if damage == "a directory":
        note.mkdir()
    elif damage == "not text":
        note.write_bytes(b"\xff\xfe\xfa")
    reap_socket_directory(note)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_port_in_use_is_named(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"{host} cannot be listened on here")
    with server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"Port {port} is in use") as raised:
            check_port_free(host, port)
        assert "--port" in raised.value.remedy
    check_port_free(host, port)


@pytest.mark.parametrize("port", [0, 1024])
@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7"])
def test_port_zero_is_always_free_but_not_at_an_address_that_is_not_ours(host: str, port: int) -> None:
    check_port_free("127.0.0.1", 0)
    with pytest.raises(AddressError, match=f"This machine has no address {host} to listen on") as raised:
        check_port_free(host, port)
    assert "--host 0.0.0.0" in raised.value.remedy and "--announce" in raised.value.remedy


def test_a_daemon_that_does_not_start_is_said_in_one_line(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(**arguments: object) -> None:
        raise P2PDaemonError("out of\n  everything")

    monkeypatch.setattr(P2P, "create", broken)
    original = asyncio.subprocess.create_subprocess_exec
    with pytest.raises(LimitsError, match="did not start: out of everything"):
        asyncio.run(start_daemon(LOOPBACK, None, sockets))
    assert asyncio.subprocess.create_subprocess_exec is original, "other children are started as always"


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        ("failed to dial: * [{transport}] dial tcp4: connect: connection refused", DialOutcome.REFUSED),
        ("failed to dial: * [{transport}] dial tcp4: i/o timeout", DialOutcome.TIMED_OUT),
        ("context deadline exceeded", DialOutcome.TIMED_OUT),
        ("no good addresses", DialOutcome.NOT_FOUND),
        ("* [{transport}] dial tcp4: connect: no route to host", DialOutcome.NO_ROUTE),
        ("* [{transport}] dial tcp6: connect: network is unreachable", DialOutcome.NO_ROUTE),
        ("* [{transport}] failed to negotiate security protocol: EOF", DialOutcome.NOT_A_PEER),
        ("something new", DialOutcome.FAILED),
        (
            "* [/ip4/10.0.0.1/tcp/1] connect: connection refused\n* [{transport}] dial tcp4: i/o timeout",
            DialOutcome.TIMED_OUT,
        ),
        (
            "* [{transport}] failed to negotiate: remote key matches QmOther but expected QmThis",
            DialOutcome.WRONG_PEER_ID,
        ),
    ],
)
def test_the_daemons_answer_is_read_for_the_address_that_was_asked(message: str, outcome: DialOutcome) -> None:
    transport = "/ip4/203.0.113.7/tcp/31337"
    address = parse_address(f"{transport}/p2p/{STRANGER}")
    report = _classify(address, [transport], message.format(transport=transport))
    assert report.outcome is outcome
    assert (report.actual_peer_id == "QmOther") is (outcome is DialOutcome.WRONG_PEER_ID)
    assert isinstance(report, DialReport) and str(report).startswith(address.text)

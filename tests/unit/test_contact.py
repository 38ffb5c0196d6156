"""The search for anybody: libp2p is asked to dial where somebody opens, and nowhere else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

import peers.contact
from dht_config.address import Address, parse_address
from dht_config.network import NetworkSettings
from peers.clock import Schedule
from peers.company import GONE_SECONDS
from peers.contact import ASK_AGAIN_SECONDS, Contact
from peers.daemon import DialOutcome, DialReport
from peers.membership import Member
from peers.tasks import Tasks
from peers.ways_in import ADDRESSES_PER_PEER

ONE, OTHER = (PeerID(b"\x12\x20" + bytes([number]) * 32) for number in (1, 2))
TICK_SECONDS = 3.0
OLD_HOST = "198.18.0.1"


class Line:
    """A daemon, a DHT and a clock that do what the test says, and note what they are asked."""

    def __init__(
        self,
        tmp_path: Path,
        addresses: list[str],
        answers: Callable[[PeerID, int], bool],
        *,
        can_be_dialled: bool = True,
    ) -> None:
        self.dialled: list[str] = []
        self.nodes: dict[PeerID, object] = {}
        """Of the DHT, as far as it knows."""
        self.disconnected: list[PeerID] = []
        self.forgiven: list[PeerID] = []
        self.clock_asked: list[PeerID] = []
        self.now = 100.0
        pings: list[PeerID] = []

        async def call_ping(peer: PeerID) -> object | None:
            pings.append(peer)
            return object() if answers(peer, pings.count(peer)) else None

        async def disconnect(peer: PeerID) -> None:
            self.disconnected.append(peer)

        remembered = tmp_path / "peers.json"
        remembered.write_text(json.dumps(addresses))
        self.run: Any = SimpleNamespace(
            p2p=SimpleNamespace(peer_id="own", _client=SimpleNamespace(disconnect=disconnect)),
            addresses=[f"/ip4/{OLD_HOST}/tcp/1"] if can_be_dialled else [],
            node=SimpleNamespace(
                protocol=SimpleNamespace(
                    wait_timeout=0.75,
                    call_ping=call_ping,
                    routing_table=SimpleNamespace(get=lambda *, peer_id: self.nodes.get(peer_id)),
                ),
                blacklist=SimpleNamespace(register_success=self.forgiven.append),
            ),
            settings=SimpleNamespace(addresses=(), network=NetworkSettings(), remembered_peers_path=remembered),
            schedule=Schedule(start_seconds=0.0, tick_seconds=TICK_SECONDS, fragments=2),
            clock=SimpleNamespace(passed=lambda: self.now),
            stub=None,
            tasks=SimpleNamespace(spawn=lambda coroutine: coroutine.close()),
        )
        self.told: list[None] = []
        self.asked: list[str] = []

        async def ask(peer: str) -> bool:
            self.asked.append(peer)
            return True

        self.moved: list[str] = []
        self.contact = Contact(self.run, lambda: self.told.append(None), ask, self.moved.append)

    def search(self, monkeypatch: pytest.MonkeyPatch) -> bool:
        async def dial(p2p: object, address: Address) -> DialReport:
            self.dialled.append(address.peer_id)
            return DialReport(address=address, outcome=DialOutcome.CONNECTED)

        async def set_clock(clock: object, stub: object, peers: list[PeerID], *, newcomer: bool, lost: bool) -> None:
            assert lost and not newcomer
            self.clock_asked += peers

        monkeypatch.setattr(peers.contact, "dial", dial)
        monkeypatch.setattr(peers.contact, "set_clock", set_clock)
        self.told.clear()
        self.clock_asked.clear()
        answered = asyncio.run(self.contact.search(silent=True))
        assert len(self.told) == len(self.clock_asked) and answered == bool(self.told)
        return answered


def listening(test: Callable[[int], Awaitable[None]]) -> None:
    """Run a test beside somebody who accepts connections on a port."""

    async def scene() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            await test(server.sockets[0].getsockname()[1])

    asyncio.run(scene())


def test_where_nobody_opens_libp2p_is_not_asked_to_dial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(tmp_path, [f"/ip4/127.0.0.1/tcp/1/p2p/{ONE}"], lambda peer, ping: True)
    assert not line.search(monkeypatch)
    assert not line.dialled and not line.clock_asked


def test_a_door_that_opens_is_knocked_at(tmp_path: Path) -> None:
    async def test(port: int) -> None:
        assert await peers.contact.knock(parse_address(f"/ip4/127.0.0.1/tcp/{port}/p2p/{ONE}"), 5.0)

    listening(test)


def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dial(p2p: object, address: Address) -> DialReport:
        return DialReport(address=address, outcome=DialOutcome.CONNECTED)

    monkeypatch.setattr(peers.contact, "dial", dial)

    async def knock(address: Address, timeout_seconds: float) -> bool:
        return True

    monkeypatch.setattr(peers.contact, "knock", knock)


def test_who_answers_is_believed_again_and_asked_for_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(monkeypatch)
    addresses = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for port, peer in ((1, ONE), (2, OTHER))]
    line = Line(tmp_path, addresses, lambda peer, ping: peer == ONE)
    assert line.search(monkeypatch)
    assert line.forgiven == line.clock_asked == [ONE]
    assert line.asked == [str(ONE)], "for everybody's records"


@pytest.mark.parametrize(("answers_take", "waited"), [(0.75, 1.0), (3.0, 3.0), (24.0, 5.0)])
def test_a_door_is_knocked_at_anew_as_soon_as_an_answer_would_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers_take: float, waited: float
) -> None:
    """What was sent while the line was down may be on its way for seconds, or from an address that is none any more."""
    given: list[float] = []

    async def knock(address: Address, timeout_seconds: float) -> bool:
        given.append(timeout_seconds)
        return False

    monkeypatch.setattr(peers.contact, "knock", knock)
    line = Line(tmp_path, [f"/ip4/127.0.0.1/tcp/1/p2p/{ONE}"], lambda peer, ping: False)
    line.run.node.protocol.wait_timeout = answers_take
    line.search(monkeypatch)
    assert given == [waited]


def test_a_connection_that_broke_with_the_line_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(monkeypatch)
    line = Line(tmp_path, [f"/ip4/127.0.0.1/tcp/1/p2p/{ONE}"], lambda peer, ping: ping > 1)
    assert line.search(monkeypatch)
    assert line.disconnected == [ONE] and line.dialled == [str(ONE)] * 2


@pytest.mark.parametrize(("tick_seconds", "longest"), [(0.5, 1.0), (3.0, 1.5), (10.0, 5.0), (60.0, 15.0)])
def test_who_has_nobody_knocks_again_within_half_a_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tick_seconds: float, longest: float
) -> None:
    line = Line(tmp_path, [f"/ip4/127.0.0.1/tcp/1/p2p/{ONE}"], lambda peer, ping: False)
    line.run.schedule = Schedule(start_seconds=0.0, tick_seconds=tick_seconds, fragments=2)
    line.contact = Contact(line.run, line.run.tasks.spawn, line.contact._ask)
    for _ in range(6):
        line.search(monkeypatch)
    line.now += longest
    assert line.contact.is_time_to_search(line.now, silent=True)
    line.now -= longest / 2
    assert not line.contact.is_time_to_search(line.now, silent=True)


@pytest.mark.parametrize(
    ("before", "now", "moved"),
    [
        (["9.9.9.1"], ["9.9.9.2"], True),
        (["9.9.9.1", "192.168.0.4"], ["9.9.9.2", "192.168.0.4"], True),
        (["192.168.0.4"], ["192.168.0.5"], True),
        (["9.9.9.1", "192.168.0.4"], ["192.168.0.4"], False),
        (["192.168.0.4"], ["9.9.9.1", "192.168.0.4"], True),
        (["9.9.9.1"], ["9.9.9.2", "9.9.9.1"], True),
        (["9.9.9.1"], [], False),
        ([], ["9.9.9.1"], False),
    ],
)
@pytest.mark.parametrize("vanished", [False, True])
def test_connections_with_a_peer_that_is_elsewhere_now_are_not_used_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[str], now: list[str], moved: bool, vanished: bool
) -> None:
    """libp2p would go on with the one that broke, although the peer has come in by another."""
    opened(monkeypatch)
    line = Line(tmp_path, [], lambda peer, ping: True)
    line.run.training = SimpleNamespace(send=lambda message: None)

    async def meet() -> None:
        line.run.tasks = tasks = Tasks()
        for hosts in (before, None, now) if vanished else (before, now, now):
            members: dict[str, Any] = {}
            if hosts is not None:
                addresses = tuple(f"/ip4/{host}/tcp/1/p2p/{ONE}" for host in hosts)
                members[str(ONE)] = SimpleNamespace(profile=SimpleNamespace(status="training", addresses=addresses))
            line.contact.meet(members, ())
            await tasks.settle(10.0)

    asyncio.run(meet())
    assert line.disconnected == [ONE] * moved and line.moved == [str(ONE)] * moved


def renewed(line: Line, monkeypatch: pytest.MonkeyPatch, listens: str, seen_at: str) -> list[str]:
    async def get_visible_maddrs(latest: bool) -> list[str]:
        return [f"/ip4/{listens}/tcp/1/p2p/{OTHER}"]

    async def hosts_reached(stub: object, peers: list[PeerID], port: int) -> tuple[str, ...]:
        assert peers == [ONE] and port == 1
        return (seen_at,)

    line.run.p2p.get_visible_maddrs = get_visible_maddrs
    monkeypatch.setattr(peers.contact, "hosts_reached", hosts_reached)
    asyncio.run(line.contact.renew_addresses([str(ONE)]))
    return [address.split("/")[2] for address in line.run.addresses]


def test_a_line_that_comes_back_with_another_address_is_announced_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(tmp_path, [], lambda peer, ping: False)
    assert renewed(line, monkeypatch, "192.168.0.4", "9.9.9.9") == [OLD_HOST], "what was found out at the start"
    assert renewed(line, monkeypatch, "192.168.0.4", "9.9.9.9") == [OLD_HOST]
    line.contact.came_back()
    assert renewed(line, monkeypatch, "192.168.0.4", "9.9.9.9") == ["9.9.9.9", "192.168.0.4"]
    assert renewed(line, monkeypatch, "198.18.0.9", "198.18.0.9") == ["198.18.0.9"], "another network"
    assert len(line.told) == 2, "once for each change"
    line.contact.came_back()
    assert renewed(line, monkeypatch, "198.18.0.9", "198.18.0.7") == ["198.18.0.9", "198.18.0.7"], "not noticed here"
    assert renewed(line, monkeypatch, "198.18.0.7", "198.18.0.7") == ["198.18.0.7"], "noticed: the old one is given up"
    assert len(line.told) == 4


def test_who_could_not_be_dialled_announces_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(tmp_path, [], lambda peer, ping: False, can_be_dialled=False)
    line.contact.came_back()
    assert renewed(line, monkeypatch, "198.18.0.9", "198.18.0.9") == []


OPEN_PORT, SHUT_PORT = 54083, 54084
"""Of a router, the first leading to us."""


class Home:
    """A peer behind a router: ports that it names, and what others say who try them.

    ``tried`` holds the ports in the order in which others were asked.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announces: tuple[str, ...] = ()) -> None:
        self.line = Line(tmp_path, [], lambda peer, ping: False, can_be_dialled=False)
        self.line.run.addresses[:] = [f"/ip4/{host}/tcp/1/p2p/{OTHER}" for host in announces]
        self.ports: list[int] = []
        self.named, self.seen_at = "11.0.0.9", "9.9.9.9"
        """The router's public address, as it says itself and as others see it."""
        self.somebody_tries = True
        self.untried: set[int] = set()
        self.tried: list[int] = []
        self.known_in_dht = 0
        self.said: list[str] = []

        async def get_visible_maddrs(latest: bool) -> list[str]:
            ways = [(self.named, port) for port in self.ports] + [("127.0.0.1", 1), ("192.168.0.4", 1)]
            return [f"/ip4/{host}/tcp/{port}/p2p/{OTHER}" for host, port in ways]

        async def hosts_reached(
            stub: object, peers: list[PeerID], port: int, *, inside: set[str]
        ) -> tuple[str, ...] | None:
            assert peers == [ONE] and inside == {"127.0.0.1", "192.168.0.4"}
            self.tried.append(port)
            if not self.somebody_tries or port in self.untried:
                return ()
            return (self.seen_at,) if port == OPEN_PORT else None

        async def become_known_in_dht(node: object) -> None:
            self.known_in_dht += 1

        self.line.run.p2p.get_visible_maddrs = get_visible_maddrs
        self.line.run.training = SimpleNamespace(send=lambda message: self.said.append(message.text))
        monkeypatch.setattr(peers.contact, "hosts_reached", hosts_reached)
        monkeypatch.setattr(peers.contact, "become_known_in_dht", become_known_in_dht)

    def renewed(self) -> list[str]:
        """Hosts and ports that are announced after a look."""
        asyncio.run(self.line.contact.renew_addresses([str(ONE)]))
        return [":".join(address.split("/")[2:5:2]) for address in self.line.run.addresses]


def test_a_port_that_a_router_has_opened_by_now_is_announced_once_others_have_reached_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path, monkeypatch)
    assert home.renewed() == [] and not home.tried, "nothing to try yet"
    home.ports = [OPEN_PORT]
    found = [f"9.9.9.9:{OPEN_PORT}", "192.168.0.4:1"]
    assert home.renewed() == found, "where they reached us, not what the router takes for its address"
    assert home.known_in_dht == 1 and f"port {OPEN_PORT}" in home.said[0]
    home.line.now += 10 * ASK_AGAIN_SECONDS
    assert home.renewed() == found and home.tried == [OPEN_PORT], "asked once"
    home.ports = []
    assert home.renewed() == [] and "not" not in home.said[0] and "any more" in home.said[1]
    assert len(home.said) == len(home.line.told) == 2


def test_a_router_that_has_another_address_by_now_is_asked_about_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Providers give a home another one every night, in a moment in which nobody is missed."""
    home = Home(tmp_path, monkeypatch)
    home.ports = [OPEN_PORT]
    assert home.renewed()[0] == f"9.9.9.9:{OPEN_PORT}"
    home.named = home.seen_at = "9.9.9.10"
    assert home.renewed() == [f"9.9.9.10:{OPEN_PORT}", "192.168.0.4:1"]
    assert home.renewed() == [f"9.9.9.10:{OPEN_PORT}", "192.168.0.4:1"] and home.tried == [OPEN_PORT] * 2


def test_a_router_that_lies_costs_a_question_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path, monkeypatch)
    home.ports = [SHUT_PORT]
    for _ in range(3):
        assert home.renewed() == []
    assert home.tried == [SHUT_PORT]
    home.line.now += ASK_AGAIN_SECONDS
    assert home.renewed() == [] and home.tried == [SHUT_PORT] * 2
    home.ports = [SHUT_PORT, OPEN_PORT]
    assert home.renewed() == [f"9.9.9.9:{OPEN_PORT}", "192.168.0.4:1"]
    assert len(home.said) == 1, "nobody is told of what did not come about"


def test_who_is_reached_inside_its_network_alone_tries_the_routers_port_and_loses_nothing_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path, monkeypatch, announces=("192.168.0.4",))
    home.ports = [SHUT_PORT]
    assert home.renewed() == ["192.168.0.4:1"] and home.tried == [SHUT_PORT] and not home.said
    home.ports = [OPEN_PORT]
    assert home.renewed() == [f"9.9.9.9:{OPEN_PORT}", "192.168.0.4:1"]
    home.ports = []
    for _ in range(2):
        assert home.renewed() == ["192.168.0.4:1"] and "inside" in home.said[-1], "those inside reach it as before"
    home.ports = [OPEN_PORT]
    assert home.renewed() == [f"9.9.9.9:{OPEN_PORT}", "192.168.0.4:1"], "a router that started anew"
    public = Home(tmp_path, monkeypatch, announces=("8.8.8.8",))
    public.ports = [OPEN_PORT]
    assert public.renewed() == ["8.8.8.8:1"] and not public.tried


def test_where_nobody_could_try_a_port_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path, monkeypatch)
    home.ports, home.somebody_tries = [OPEN_PORT], False
    assert home.renewed() == []
    home.somebody_tries = True
    assert home.renewed() == [], "a moment later"
    home.line.now += ASK_AGAIN_SECONDS
    assert len(found := home.renewed()) == 2
    home.line.contact.came_back()
    home.somebody_tries = False
    assert home.renewed() == found and len(home.said) == 1


def test_a_port_that_nobody_could_try_is_not_lost_by_another_one_that_is_shut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path, monkeypatch)
    home.ports = [OPEN_PORT]
    found = home.renewed()
    home.ports, home.untried = [OPEN_PORT, SHUT_PORT], {OPEN_PORT}
    assert home.renewed() == found and home.tried == [OPEN_PORT, OPEN_PORT, SHUT_PORT]
    home.untried, home.ports = set(), [SHUT_PORT]
    assert home.renewed() == [], "nobody reaches it"


def heard_of(line: Line, **statuses: str) -> None:
    """These peers, at a port each, and no others."""
    names = {"one": ONE, "other": OTHER}
    members: dict[str, Any] = {}
    for name, status in statuses.items():
        address = f"/ip4/127.0.0.1/tcp/{list(names).index(name) + 1}/p2p/{names[name]}"
        members[str(names[name])] = SimpleNamespace(profile=SimpleNamespace(status=status, addresses=(address,)))
    line.contact.meet(members, ())


def test_of_those_that_answered_only_those_are_remembered_who_are_known(tmp_path: Path) -> None:
    line = Line(tmp_path, [], lambda peer, ping: True)
    line.contact._answered = {str(ONE), str(OTHER)}
    heard_of(line, one="training")
    assert line.contact._answered == {str(ONE)}


def test_who_vanished_is_looked_for_although_others_are_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two halves of a swarm would stay apart when the network is whole again."""
    opened(monkeypatch)
    line = Line(tmp_path, [], lambda peer, ping: True)
    heard_of(line, one="training", other="training")
    assert not line.contact.is_time_to_search(line.now, silent=False)
    heard_of(line, one="training")
    assert line.contact.is_time_to_search(line.now, silent=False)
    assert asyncio.run(line.contact.search(silent=False))
    assert line.asked == [str(OTHER)] and not line.clock_asked, "time is what those say that are heard of"
    line.now += 2.0
    assert line.contact.is_time_to_search(line.now, silent=False), "until it is heard of"
    heard_of(line, one="training", other="training")
    assert not line.contact.is_time_to_search(line.now, silent=False)


def test_who_has_left_or_is_gone_for_long_is_not_looked_for(tmp_path: Path) -> None:
    line = Line(tmp_path, [], lambda peer, ping: True)
    heard_of(line, one="training", other="leaving")
    heard_of(line, one="training")
    assert not line.contact.is_time_to_search(line.now, silent=False)
    heard_of(line)
    assert line.contact.is_time_to_search(line.now, silent=False)
    line.now += GONE_SECONDS
    heard_of(line)
    assert not line.contact.is_time_to_search(line.now, silent=False)


def test_many_that_vanish_have_nobody_knock_at_more_than_a_few_doors_and_at_none_of_a_strangers(tmp_path: Path) -> None:
    line = Line(tmp_path, [], lambda peer, ping: False)
    members: dict[str, Any] = {}
    for number in range(2 * peers.contact.MOST_MISSING):
        peer = PeerID(b"\x12\x20" + number.to_bytes(32, "big"))
        texts = [f"/ip4/9.9.9.9/tcp/{port}/p2p/{peer}" for port in range(1, 17)]
        foreign = f"/ip4/9.9.9.9/tcp/99/p2p/{ONE}"
        addresses = (foreign, ",".join(texts[:2]), *texts[2:])
        members[str(peer)] = SimpleNamespace(profile=SimpleNamespace(status="training", addresses=addresses))
    line.run.tasks = SimpleNamespace(spawn=lambda coroutine: coroutine.close())
    line.contact.meet(members, ())
    line.contact.meet({}, ())
    wanted = line.contact._wanted()
    assert 0 < len(wanted) <= peers.contact.SOUGHT_AT_ONCE * ADDRESSES_PER_PEER
    assert not [address for address in wanted if address.peer_id == str(ONE)]
    assert len(line.contact._missing) <= peers.contact.MOST_MISSING


def test_an_address_of_an_interface_that_nobody_can_use_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(tmp_path, [], lambda peer, ping: False)
    line.contact.came_back()

    async def get_visible_maddrs(latest: bool) -> list[str]:
        return [f"/ip6zone/eth0/ip6/fe80::1/tcp/1/p2p/{OTHER}", f"/ip4/198.18.0.9/tcp/1/p2p/{OTHER}"]

    async def hosts_reached(stub: object, peers: list[PeerID], port: int) -> tuple[str, ...]:
        return ()

    line.run.p2p.get_visible_maddrs = get_visible_maddrs
    monkeypatch.setattr(peers.contact, "hosts_reached", hosts_reached)
    asyncio.run(line.contact.renew_addresses([]))
    assert [address.split("/")[2] for address in line.run.addresses] == ["198.18.0.9"]


def test_whoever_has_other_addresses_all_the_time_is_dialled_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One peer must not have us dial without end, and everybody else wait behind it."""
    line = Line(tmp_path, [], lambda peer, ping: False)
    dialled: list[str] = []

    async def meet() -> None:
        free = asyncio.Event()

        async def dial(p2p: object, address: Address) -> DialReport:
            dialled.append(address.transport.host)
            await free.wait()
            return DialReport(address=address, outcome=DialOutcome.TIMED_OUT)

        def with_host(number: int) -> dict[str, Member]:
            profile: Any = SimpleNamespace(status="training", addresses=(f"/ip4/9.9.9.{number}/tcp/1/p2p/{ONE}",))
            return {str(ONE): Member(profile=profile, expires=1e9)}

        monkeypatch.setattr(peers.contact, "dial", dial)
        line.run.tasks = tasks = Tasks()
        for number in (1, 2, 3):
            line.contact.meet(with_host(number), ())
            await asyncio.sleep(0)
        free.set()
        await tasks.settle(10.0)
        line.contact.meet(with_host(3), ())
        line.contact.meet(with_host(3), ())
        await tasks.settle(10.0)

    asyncio.run(meet())
    assert dialled == ["9.9.9.1", "9.9.9.3"], "the newest ones, once there is time"


def test_pauses_between_searches_for_anybody_grow_up_to_half_a_tick_until_somebody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(monkeypatch)
    answers = [False] * 5
    line = Line(tmp_path, [f"/ip4/127.0.0.1/tcp/1/p2p/{ONE}"], lambda peer, ping: answers[0])
    pauses = []
    for _ in range(5):
        assert line.contact.is_time_to_search(line.now, silent=True)
        line.search(monkeypatch)
        began = line.now
        while not line.contact.is_time_to_search(line.now, silent=True):
            line.now += 0.5
        pauses.append(line.now - began)
    assert pauses == [1.0, *[TICK_SECONDS / 2] * 4]
    answers[0] = True
    line.search(monkeypatch)
    assert line.contact.is_time_to_search(line.now + 1.0, silent=True)


@pytest.mark.parametrize(
    ("known", "in_table", "pings", "forgiven"),
    [
        (True, False, True, [ONE]),  # forgotten, and back
        (True, False, False, []),  # its DHT does not answer
        (True, True, True, []),  # never forgotten
        (False, False, True, []),  # nobody can dial it: it is no node that others could ask
    ],
)
def test_who_answers_and_was_forgotten_by_the_dht_is_put_back(
    tmp_path: Path, known: bool, in_table: bool, pings: bool, forgiven: list[PeerID]
) -> None:
    line = Line(tmp_path, [], lambda peer, ping: pings)
    line.nodes = {ONE: object()} if in_table else {}
    line.contact._known = {str(ONE): ("/ip4/127.0.0.1/tcp/1",) if known else ()}
    asyncio.run(line.contact.keep_in_dht(str(ONE)))
    assert line.forgiven == forgiven

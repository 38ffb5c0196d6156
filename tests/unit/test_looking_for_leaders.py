"""How often a peer looks in the DHT for somebody who leads, and who declares itself there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peers import grouping
from peers.grouping import DECLARED_LEADERS, LEAST_DECLARED_SECONDS, FragmentMatchmaking, GroupSearch, NodeAsDHT
from peers.lineage import Claim

KEY = "run-f0.0b"


class Node:
    """A DHT node that counts."""

    def __init__(self) -> None:
        self.peer_id = "own"
        self.looks, self.stores = 0, 0

    async def get(self, key: str, latest: bool) -> None:
        self.looks += 1

    async def store(self, key: str, value: Any, expiration_time: float, subkey: Any) -> bool:
        self.stores += 1
        return True


def looks_in(seconds: float, place: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Looks of a peer that looks all the time, as hivemind does, on a clock that its sleeps move."""
    clock = SimpleNamespace(now=0.0)

    async def sleep(duration: float) -> None:
        clock.now += duration

    loop = SimpleNamespace(time=lambda: clock.now)
    monkeypatch.setattr(grouping, "asyncio", SimpleNamespace(sleep=sleep, get_running_loop=lambda: loop))
    node: Any = Node()
    dht = NodeAsDHT(node, lambda: 0.0)

    async def search() -> None:
        dht.begin(KEY, place, seconds)
        while clock.now < seconds - 1e-6:
            await dht.get(KEY)

    asyncio.run(search())
    return int(node.looks)


def test_who_will_lead_looks_seldom_and_the_others_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks_in(3.0, 0, monkeypatch) == grouping.LEADERS_POLLS
    assert looks_in(3.0, 1, monkeypatch) == round(3.0 / grouping.POLL_SECONDS)


@pytest.mark.parametrize(
    ("place", "value", "expires", "stored"),
    [
        (0, True, 10.0, True),
        (DECLARED_LEADERS - 1, True, 10.0, True),
        (DECLARED_LEADERS, True, 10.0, False),  # it will follow one of those before it
        (0, False, 10.0, True),  # it leaves: nobody must wait for it
        (0, False, LEAST_DECLARED_SECONDS / 2, False),  # over in a moment anyhow
    ],
)
def test_only_those_who_may_lead_declare_themselves(place: int, value: bool, expires: float, stored: bool) -> None:
    node: Any = Node()
    dht = NodeAsDHT(node, lambda: 0.0)

    async def declare() -> bool:
        dht.begin(KEY, place, 1.0)
        return await dht.store(KEY, value, expires, subkey=b"own")

    assert asyncio.run(declare())
    assert node.stores == int(stored)


@pytest.mark.parametrize(
    ("others", "distrusted", "absent", "follows", "place"),
    [
        ([], [], [], False, 0),
        ([b"a", b"b", b"z"], [], [], False, 2),
        ([b"a", b"b", b"z"], [b"a"], [], False, 1),  # its groups never began
        ([b"z"], [], [], True, 1),  # nobody can dial it, or nobody came the last time: it looks for others
        ([b"a", b"b"], [], [], True, 2),
        ([b"a", b"b", b"c"], [], [b"a", b"b"], False, 1),  # not there the last time
        ([b"a", b"b"], [], [b"a", b"b"], False, 1),  # they may be there again: it looks for them
    ],
)
def test_the_place_in_the_order_of_leaders(
    others: list[bytes], distrusted: list[bytes], absent: list[bytes], follows: bool, place: int
) -> None:
    matchmaking: Any = FragmentMatchmaking.__new__(FragmentMatchmaking)
    matchmaking.peer_id = SimpleNamespace(to_bytes=lambda: b"m")
    matchmaking._likely_members = lambda tick: others
    matchmaking._silent_leaders = SimpleNamespace(distrusted=lambda now: tuple(distrusted))
    matchmaking._absent = frozenset(absent)
    assert matchmaking._place(searching(follows=follows)) == place


def test_peers_that_would_rather_lead_and_never_come_silence_the_others_once() -> None:
    """Three identities with low ids, in no group and declared nowhere, would keep everybody from meeting for ever."""
    matchmaking: Any = FragmentMatchmaking.__new__(FragmentMatchmaking)
    matchmaking.peer_id = SimpleNamespace(to_bytes=lambda: b"m")
    matchmaking._likely_members = lambda tick: [b"a", b"b", b"c", b"d"]
    matchmaking._silent_leaders = SimpleNamespace(distrusted=lambda now: ())
    matchmaking._absent = frozenset()
    matchmaking._ourselves = set()
    matchmaking.group_key_manager = SimpleNamespace(current_key=KEY)
    places: list[int] = []
    matchmaking._dht = SimpleNamespace(begin=lambda key, place, seconds: places.append(place))

    async def look_for_group(search: GroupSearch) -> None:
        return None

    matchmaking.look_for_group = look_for_group
    assert asyncio.run(matchmaking.find(searching())) is None
    assert asyncio.run(matchmaking.find(searching())) is None
    assert places[0] >= DECLARED_LEADERS > places[1]


def searching(*, follows: bool = False) -> GroupSearch:
    return GroupSearch(
        scheduled_time=1.0,
        deadline=1.0,
        data_for_gather=b"",
        now=lambda: 0.0,
        fragment=0,
        tick=0,
        attempt=0,
        claim=Claim(version=0, digest=b"", total_samples=0),
        follows=follows,
    )

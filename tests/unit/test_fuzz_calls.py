"""Every short call between peers, with anything in it: asked, a peer answers what parses; answered, it goes on."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
from hivemind.p2p import PeerID
from hostile import anything, pack, play
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_profile import profile

from dht_config.identity import Identity, load_or_create_identity
from dht_config.news import PeerNews, _message, sign_news
from dht_config.records import seal
from peers.allowance import Allowance
from peers.clock import SwarmClock
from peers.dial_back import DialBackDesk, ask_to_dial_back
from peers.door import hosts_reached, set_clock
from peers.gossip import Gossip
from peers.messages import Ask, Clock, DialBack, DialedBack, News, NewsAsk, WireMessage
from peers.news import Newsroom
from peers.servicer import SwarmServicer

RUN = "digits-0123456789abcdef"
NOW = 1000.0
ASKER = PeerID(b"\x12\x20" + bytes(32))

headers = st.fixed_dictionaries(
    {},
    optional={
        "have": st.binary(max_size=64),
        "seconds": st.floats() | st.integers(-(2**63), 2**63),
        "host": st.sampled_from(["", "127.0.0.1", "::1", "999.1.1.1", "\x1b[2J"]) | st.text(max_size=50),
        "reached": st.none() | st.booleans(),
        "port": st.integers(-1, 70_000),
        "word": st.none() | st.binary(min_size=15, max_size=17),
    },
)


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    directory: Path = tmp_path_factory.mktemp("identities")
    return [load_or_create_identity(directory / f"{number}.key") for number in range(2)]


@st.composite
def bodies(draw: st.DrawFn, identity: Identity) -> bytes:
    """News that is signed and says anything, lists of it, and bytes."""
    peer_id, good = identity.peer_id.to_bytes(), profile().to_payload()
    fields = [
        draw(st.just(peer_id) | anything),
        draw(st.just(NOW + 30.0) | st.floats() | anything),
        draw(st.just(good) | anything.map(msgpack.packb)),
        draw(st.just(b"") | anything.map(msgpack.packb)),
    ]
    payload = msgpack.packb(fields[: draw(st.sampled_from([4, 4, 4, 3]))], use_bin_type=True)
    sealed = seal(identity, payload, _message(RUN, payload))
    raw = draw(st.just(sealed) | st.binary(max_size=60) | anything.map(msgpack.packb))
    return draw(st.just(raw) | st.just(msgpack.packb([sealed, raw], use_bin_type=True)))


def messages(identity: Identity) -> st.SearchStrategy[bytes]:
    return st.builds(pack, headers | anything, bodies(identity)) | st.binary(max_size=80)


class Desk:
    """A peer that is asked."""

    def __init__(self, identity: Identity) -> None:
        self.clock = SwarmClock(wall=lambda: NOW, passed=lambda: 0.0)
        self.room = Newsroom(RUN, identity.peer_id.to_bytes(), self.clock.now, fragments=1)
        own = PeerNews(peer_id=identity.peer_id.to_bytes(), expires=NOW + 30.0, profile=profile(), state=None)
        self.room.announce(own, sign_news(identity, own, RUN))
        self.lines: dict[PeerID, Any] = {}
        self.gossip = Gossip(
            self.room,
            cast(Any, self.lines.__getitem__),
            self.clock.now,
            lambda: 1.0,
            Allowance(Path(os.devnull, "traffic.json"), lambda: NOW, daily_bytes=2**40),
        )
        self.looked: list[PeerID] = []

        async def hosts_of(peer: PeerID) -> list[str]:
            return []

        self.servicer = SwarmServicer(self.clock)
        self.servicer.presence = SimpleNamespace(look=self.looked.append, answer_news=self.gossip.answer)
        self.servicer.dial_back = DialBackDesk(hosts_of)


CALLS: dict[str, tuple[type[WireMessage], type[WireMessage]]] = {
    "rpc_time": (Ask, Clock),
    "rpc_look": (Ask, Clock),
    "rpc_news": (NewsAsk, News),
    "rpc_dial_back": (DialBack, DialedBack),
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_asked_the_answer_parses_and_only_signed_news_is_kept(
    identities: list[Identity], name: str, data: st.DataObject
) -> None:
    request_type, answer_type = CALLS[name]
    ours, theirs = identities
    desk, context = Desk(ours), SimpleNamespace(remote_id=ASKER)

    async def scene() -> None:
        for raw in data.draw(st.lists(messages(theirs), min_size=1, max_size=4)):
            request = request_type.FromString(raw)
            answer = await getattr(desk.servicer, name)(request, context)
            assert answer_type.FromString(answer.SerializeToString()).header is not None

    play(scene())
    assert set(desk.room.members()) <= {str(theirs.peer_id)}


class Answering:
    """A peer that answers every call with the same bytes."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(request: WireMessage, timeout: float) -> WireMessage:
            return CALLS[name][1].FromString(self._raw)

        return call


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_is_answered_time_is_a_number_hosts_are_addresses_and_only_signed_news_is_kept(
    identities: list[Identity], data: st.DataObject
) -> None:
    ours, theirs = identities
    desk = Desk(ours)
    answering = Answering(data.draw(messages(theirs)))
    desk.lines[theirs.peer_id] = answering

    async def scene() -> None:
        await desk.gossip.ask(str(theirs.peer_id))
        for newcomer in (True, False):
            for lost in (True, False):
                await set_clock(desk.clock, lambda peer: answering, [theirs.peer_id], newcomer=newcomer, lost=lost)
            assert math.isfinite(desk.clock.now())
        for host in await hosts_reached(lambda peer: answering, [theirs.peer_id], 1) or ():
            ipaddress.ip_address(host)

    play(scene())
    assert set(desk.room.members()) <= {str(theirs.peer_id)}


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_whatever_is_answered_to_a_doctor_it_has_addresses_or_nothing(
    identities: list[Identity], data: st.DataObject
) -> None:
    answering = Answering(data.draw(messages(identities[1])))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for said in asyncio.run(ask_to_dial_back(lambda peer: answering, [ASKER], "127.0.0.1", port)):
        assert not said.host or ipaddress.ip_address(said.host)

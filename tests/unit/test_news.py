"""Everybody's records, passed on from peer to peer: they reach everybody, and nobody else's word is taken for them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest
from hivemind.p2p import PeerID
from hypothesis import given
from hypothesis import strategies as st
from peer_profile import profile

from dht_config.identity import Identity, load_or_create_identity
from dht_config.news import MAX_NEWS_BYTES, PeerNews, open_news, sign_news
from dht_config.records import FragmentClaim, SwarmState
from dht_config.validators import PEER_RECORD_LIFETIME_SECONDS
from peers import news as newsrooms
from peers.allowance import Allowance
from peers.gossip import (
    ANSWERED_BYTES,
    ANSWERS,
    WINDOW_SECONDS,
    Askers,
    Gossip,
    choose_partners,
    dht_publishing_seconds,
    dht_reading_seconds,
)
from peers.membership import Member
from peers.messages import News, NewsAsk, NewsAskHeader
from peers.news import HAVE_BYTES, MOST_ANSWERED_BYTES, MOST_PEERS, Newsroom, newest
from peers.own_records import RECORD_SECONDS

RUN = "digits-0123456789abcdef"
NOW = 1000.0
COUNT = 6
ASKER, OTHER_ASKER = (PeerID(b"\x12\x20" + bytes([number]) * 32) for number in (1, 2))
EVERYTHING = NewsAsk(NewsAskHeader(have=b""))


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    directory: Path = tmp_path_factory.mktemp("identities")
    return [load_or_create_identity(directory / f"{number}.key") for number in range(COUNT)]


def news_of(identity: Identity, expires: float = NOW + 30.0, version: int = 3) -> PeerNews:
    claim = FragmentClaim(version=version, digest=bytes(32), total_samples=10)
    return PeerNews(
        peer_id=identity.peer_id.to_bytes(), expires=expires, profile=profile(), state=SwarmState(fragments=(claim,))
    )


def sealed(identity: Identity, expires: float = NOW + 30.0, version: int = 3, run: str = RUN) -> bytes:
    return sign_news(identity, news_of(identity, expires, version), run)


def newsroom(identity: Identity) -> Newsroom:
    return Newsroom(RUN, identity.peer_id.to_bytes(), lambda: NOW, fragments=1)


def exchange(asker: Newsroom, asked: Newsroom) -> int:
    """One question and its answer; returns how many records travelled."""
    asked.take_one(asker.own)
    answer = asked.newer_than(asker.have())
    asker.take(answer)
    return len(msgpack.unpackb(answer))


def test_what_each_peer_knows_reaches_everybody_and_hardly_any_of_it_twice(identities: list[Identity]) -> None:
    rooms = [newsroom(identity) for identity in identities]
    for identity, room in zip(identities, rooms, strict=True):
        room.announce(news_of(identity), sealed(identity))
    chosen, travelled, rounds = random.Random(0), 0, 0
    while any(len(room.members()) < COUNT - 1 for room in rooms):
        rounds += 1
        for room in rooms:
            travelled += exchange(room, chosen.choice([other for other in rooms if other is not room]))
    assert rounds <= COUNT
    assert travelled <= COUNT * (COUNT - 1), "each record goes to each peer once, or came with a question"
    assert all(exchange(room, other) == 0 for room in rooms for other in rooms if room is not other)


def test_of_two_the_one_that_expires_later_counts(identities: list[Identity]) -> None:
    own, other = identities[:2]
    room = newsroom(own)
    assert room.take_one(sealed(other, NOW + 20.0, version=4))
    assert not room.take_one(sealed(other, NOW + 10.0, version=3))
    assert room.take_one(sealed(other, NOW + 25.0, version=5))
    (member,) = room.members().values()
    assert (member.expires, member.claims[0].version) == (NOW + 25.0, 5)


@pytest.mark.parametrize(
    ("expires", "why"),
    [
        (NOW, "it has expired"),
        (NOW + PEER_RECORD_LIFETIME_SECONDS + 1.0, "it stands for too long"),
        (float("inf"), "for ever"),
        (float("nan"), "no time"),
    ],
)
def test_news_out_of_time_is_left_out(identities: list[Identity], expires: float, why: str) -> None:
    own, other = identities[:2]
    room = newsroom(own)
    assert not room.take_one(sealed(other, expires)), why
    assert not room.members()


def test_nobody_speaks_for_another_peer_or_another_run(identities: list[Identity]) -> None:
    own, other, liar = identities[:3]
    room = newsroom(own)
    assert not room.take_one(sign_news(liar, news_of(other), RUN)), "signed by somebody else"
    assert not room.take_one(sealed(other, run="digits-fedcba9876543210")), "of another run"
    assert not room.take_one(sign_news(liar, news_of(own), RUN)), "about ourselves"
    assert not room.take_one(sealed(own)), "ourselves, from others: a copied identity does not speak here"
    payload, key, signature = msgpack.unpackb(sealed(other))
    assert not room.take_one(msgpack.packb([payload + b"\x00", key, signature])), "changed on its way"
    assert not room.members()
    assert room.take_one(sealed(other))


def test_what_expires_is_forgotten_and_not_passed_on(identities: list[Identity]) -> None:
    own, other = identities[:2]
    now = [NOW]
    room = Newsroom(RUN, own.peer_id.to_bytes(), lambda: now[0], fragments=1)
    assert room.take_one(sealed(other))
    assert len(room.have()) == HAVE_BYTES and room.newer_than(b"") != msgpack.packb([])
    now[0] = NOW + 31.0
    assert room.newer_than(b"") == msgpack.packb([])
    assert not room.members() and not room.have()


def test_an_answer_has_its_limit_and_the_rest_comes_with_the_next(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    asker, asked = newsroom(identities[0]), newsroom(identities[1])
    for identity in identities[2:]:
        assert asked.take_one(sealed(identity))
    monkeypatch.setattr(newsrooms, "MOST_ANSWERED_BYTES", 2 * len(sealed(identities[2])) + 10)
    assert [exchange(asker, asked) for _ in range(3)] == [2, 2, 0]


def test_there_is_room_for_a_limited_number_of_peers(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newsrooms, "MOST_PEERS", 3)
    room = newsroom(identities[0])
    assert [room.take_one(sealed(identity)) for identity in identities[1:4]] == [True, True, False]
    assert room.take_one(sealed(identities[1], NOW + 60.0)), "whom we know is heard"
    room.announce(news_of(identities[0]), sealed(identities[0]))
    assert len(room.have()) == 3 * HAVE_BYTES, "what it has fits into a question, itself included"


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.binary(max_size=80)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=300) | junk.map(msgpack.packb) | st.lists(junk.map(msgpack.packb)).map(msgpack.packb))
def test_whatever_comes_nothing_breaks_and_nothing_is_believed(packed: bytes) -> None:
    room = Newsroom(RUN, b"own-peer-id", lambda: NOW, fragments=1)
    assert room.take(packed) == 0
    assert not room.take_one(packed)
    assert room.newer_than(packed) == msgpack.packb([])
    assert not room.members()


def test_news_that_is_too_big_is_not_looked_at() -> None:
    room = Newsroom(RUN, b"own-peer-id", lambda: NOW, fragments=1)
    assert not room.take_one(bytes(MAX_NEWS_BYTES + 1))


def test_nobody_claims_more_fragments_than_the_run_has(identities: list[Identity]) -> None:
    """Some thousands of false identities with hundreds of claims each would take a gigabyte."""
    honest = news_of(identities[1])
    assert honest.state is not None
    swollen = replace(honest, state=SwarmState(fragments=honest.state.fragments * 2))
    room = newsroom(identities[0])
    assert not room.take_one(sign_news(identities[1], swollen, RUN))
    assert room.take_one(sign_news(identities[1], honest, RUN))


def test_an_unwanted_signature_is_not_verified(identities: list[Identity]) -> None:
    broken = msgpack.packb([*msgpack.unpackb(sealed(identities[0]))[:2], b"no signature"])
    assert open_news(broken, RUN, lambda peer_id, expires: False) is None


def members(**addresses: Iterable[str]) -> dict[str, Member]:
    return {name: Member(profile=profile(addresses=tuple(found)), expires=NOW) for name, found in addresses.items()}


def test_those_are_asked_who_can_be_dialled_and_have_answered() -> None:
    found = members(dialled=["/ip4/203.0.113.7/tcp/1"], silent=["/ip4/203.0.113.8/tcp/1"], nat=[])
    found["left"] = Member(profile=profile("leaving", addresses=("/ip4/203.0.113.9/tcp/1",)), expires=NOW)
    assert choose_partners(found, {"silent"}, 1) == ["dialled"]
    assert choose_partners(found, {"silent"}, 3) == ["dialled", "nat"]
    assert choose_partners(members(nat=[]), (), 2) == ["nat"], "there is nobody else"


def test_the_dht_is_read_more_seldom_by_more_peers() -> None:
    assert dht_reading_seconds(1) == 10.0
    assert dht_reading_seconds(100) == 100.0
    assert dht_reading_seconds(10_000) == 300.0


def test_records_are_stored_again_long_before_they_expire() -> None:
    assert [dht_publishing_seconds(peers) for peers in (1, 80, 10_000)] == [5.0, 8.0, 10.0]
    assert 2 * dht_publishing_seconds(10_000) < RECORD_SECONDS


def test_of_several_views_the_newest_record_counts() -> None:
    old, new = Member(profile=profile(), expires=1.0), Member(profile=profile(), expires=2.0)
    assert newest({"a": old}, {"a": new, "b": old}, {"a": old}) == {"a": new, "b": old}


class Line:
    """A stub's other end: another peer's gossip, or nobody."""

    def __init__(self, gossip: Gossip | None) -> None:
        self._gossip = gossip

    async def rpc_news(self, request: NewsAsk, timeout: float) -> News:
        if self._gossip is None:
            raise asyncio.TimeoutError
        asked = NewsAsk.FromString(request.SerializeToString())
        assert isinstance(asked, NewsAsk)
        answer = News.FromString(self._gossip.answer(asked, ASKER).SerializeToString())
        assert isinstance(answer, News)
        return answer


def gossip_of(room: Newsroom, lines: dict[PeerID, Line], daily_bytes: int | None = None) -> Gossip:
    stub: Any = lines.__getitem__
    allowance = Allowance(Path(os.devnull, "traffic.json"), lambda: NOW, daily_bytes=daily_bytes)
    return Gossip(room, stub, lambda: NOW, lambda: 1.0, allowance)


def test_asking_tells_both_and_who_is_silent_is_left_alone_for_a_while(identities: list[Identity]) -> None:
    asker_id, asked_id, gone_id = identities[:3]
    asker, asked = newsroom(asker_id), newsroom(asked_id)
    asker.announce(news_of(asker_id), sealed(asker_id))
    asked.announce(news_of(asked_id), sealed(asked_id))
    lines = {asked_id.peer_id: Line(gossip_of(asked, {})), gone_id.peer_id: Line(None)}
    answered: list[str] = []
    gossip = gossip_of(asker, cast(Any, lines))
    gossip._on_answer = answered.append
    assert asyncio.run(gossip.ask_some([str(gone_id.peer_id), str(asked_id.peer_id)]))
    assert set(asker.members()) == {str(asked_id.peer_id)}
    assert set(asked.members()) == {str(asker_id.peer_id)}
    assert not asyncio.run(gossip.ask(str(gone_id.peer_id)))
    assert answered == [str(asked_id.peer_id)]
    known = {str(peer.peer_id): Member(profile=profile(), expires=NOW) for peer in (asked_id, gone_id)}
    assert gossip.partners(known, ()) == [str(asked_id.peer_id)]
    assert not gossip.partners(known, {str(asked_id.peer_id)}), "known to be dead"


def test_a_malformed_question_gets_an_empty_answer(identities: list[Identity]) -> None:
    room = newsroom(identities[0])
    assert room.take_one(sealed(identities[1]))
    assert gossip_of(room, {}).answer(NewsAsk(), ASKER).body == b""
    everything = gossip_of(room, {}).answer(NewsAsk(NewsAskHeader(have=b"17 bytes, not 16.")), ASKER)
    assert len(msgpack.unpackb(bytes(everything.body))) == 1, "what it has cannot be read: it gets all"


def test_who_asks_all_the_time_gets_empty_answers_until_its_window_is_over(identities: list[Identity]) -> None:
    room = newsroom(identities[0])
    assert room.take_one(sealed(identities[1]))
    gossip, now = gossip_of(room, {}), [NOW]
    gossip._askers = Askers(lambda: now[0])
    full = [bool(gossip.answer(EVERYTHING, ASKER).body) for _ in range(ANSWERS + 5)]
    assert full == [True] * ANSWERS + [False] * 5
    assert gossip.answer(EVERYTHING, OTHER_ASKER).body, "others are answered"
    now[0] += WINDOW_SECONDS
    assert gossip.answer(EVERYTHING, ASKER).body


def test_what_one_peer_may_have_is_bounded_in_bytes_and_peers_in_number() -> None:
    now = [NOW]
    askers = Askers(lambda: now[0])
    for _ in range(ANSWERED_BYTES // MOST_ANSWERED_BYTES):
        assert askers.may_ask(ASKER)
        askers.note(ASKER, MOST_ANSWERED_BYTES)
    assert not askers.may_ask(ASKER)
    for number in range(MOST_PEERS - 1):
        askers.note(PeerID(b"\x12\x20" + number.to_bytes(32, "big")), 0)
    assert not askers.may_ask(OTHER_ASKER), "many false identities are not kept"
    now[0] += WINDOW_SECONDS
    assert askers.may_ask(OTHER_ASKER)


def test_news_counts_as_a_days_traffic_and_nobody_is_answered_when_that_is_used_up(identities: list[Identity]) -> None:
    asker_id, asked_id = identities[:2]
    asker, asked = newsroom(asker_id), newsroom(asked_id)
    asker.announce(news_of(asker_id), sealed(asker_id))
    asked.announce(news_of(asked_id), sealed(asked_id))
    answering = gossip_of(asked, {}, daily_bytes=10**6)
    asking = gossip_of(asker, cast(Any, {asked_id.peer_id: Line(answering)}), daily_bytes=10**6)
    assert asyncio.run(asking.ask(str(asked_id.peer_id)))
    least = len(sealed(asker_id)) + len(sealed(asked_id))
    assert least <= asking._allowance._moved_today() == answering._allowance._moved_today() < least + 100
    answering._allowance.moved(10**6)
    assert not answering.answer(EVERYTHING, ASKER).body

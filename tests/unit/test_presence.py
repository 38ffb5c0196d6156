"""Being there: whom a round waits for, and when a peer may go on alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hivemind.p2p import PeerID
from peer_profile import Status, profile

from dht_config.address import Address
from peers.allowance import Allowance
from peers.cadence import CADENCES
from peers.clock import Schedule
from peers.company import GONE_SECONDS
from peers.gossip import ANSWERS, Gossip
from peers.life import Life
from peers.lineage import Claim
from peers.membership import Member, View
from peers.messages import NewsAsk, NewsAskHeader
from peers.own_records import RECORD_SECONDS
from peers.presence import LOOKS_AT_ONCE, Presence, refresh_seconds
from peers.round import RoundVoid
from peers.settings import Role
from peers.tasks import Tasks

ASKER = PeerID(b"\x12\x20" + bytes(32))
SCHEDULE = Schedule(start_seconds=0.0, tick_seconds=1.0, fragments=2)


def member(status: Status = "training", cadence: Literal[1, 2, 4] = 1, expires: float = 1e9) -> Member:
    return Member(profile=profile(status, cadence=cadence), expires=expires)


class Records(Presence):
    """Presence whose records are what the test says."""

    def __init__(self, *, neighbours_answer: bool = True, role: Role = "training") -> None:
        self.now, self.offset = 100.0, 0.0

        async def ping(peer: object) -> bool:
            return neighbours_answer

        async def store(*_: Any, **__: Any) -> bool:
            return True

        protocol = SimpleNamespace(
            routing_table=SimpleNamespace(uid_to_peer_id={"neighbour": "neighbour"}), call_ping=ping
        )
        run = SimpleNamespace(
            clock=SimpleNamespace(now=lambda: self.now + self.offset, passed=lambda: self.now),
            life=Life(),
            tasks=Tasks(),
            schedule=SCHEDULE,
            manifest=SimpleNamespace(averaging=SimpleNamespace(codec="float32")),
            node=SimpleNamespace(protocol=protocol, store=store),
            settings=SimpleNamespace(
                run_id="digits-0123456789abcdef",
                restart=0,
                role=role,
                identity=SimpleNamespace(peer_id="own", public_key=b"key", sign=lambda message: b"signature"),
                wished_cadence=None,
                wished_codec=None,
            ),
            training=SimpleNamespace(
                begun=None,
                progress=SimpleNamespace(samples_per_second=1.0, samples=0, credited_samples=0.0, trained=None),
            ),
            addresses=(),
            own_id=b"own",
            can_be_dialled=True,
            stub=None,
            allowance=Allowance(Path(os.devnull, "traffic.json"), lambda: self.now),
            fragments=(SimpleNamespace(version=-1),),
        )
        super().__init__(run, heard_from_others=True)  # type: ignore[arg-type]
        self.read: list[list[str]] = []
        """Readings of the DHT, and who was asked besides."""

    def others(self, **members: Member) -> None:
        self.view = View(read_at=self.now, members=members)

    async def refresh(self, ask: Collection[str] = ()) -> None:
        """The records are as they are."""
        self.read.append(sorted(ask))


def alone(records: Records) -> bool:
    try:
        asyncio.run(records.confirm_alone(begins=0.0))
    except RoundVoid:
        return False
    return True


def test_a_round_waits_for_those_who_take_part_in_it() -> None:
    records = Records()
    records.others(fast=member(), slow=member(cadence=4), new=member("syncing"), door=member("serving"))
    assert records.expected(0) == {"fast", "slow"}
    assert records.expected(2) == {"fast"}, "fragment 0, a cycle later"
    assert records.present() == {"fast", "slow"}


def test_a_round_is_held_if_most_peers_take_part_in_it() -> None:
    records = Records()
    records.others(one=member(), slow=member(cadence=4))
    assert records.is_held(0) and records.is_held(2), "two of three"
    assert records.pace() == 1
    records.others(one=member(), slow=member(cadence=4), slower=member(cadence=4), slowest=member(cadence=4))
    assert records.is_held(0) and not records.is_held(2)
    assert records.pace() == 4


def test_whatever_one_peer_announces_the_others_go_on_without_it() -> None:
    records = Records()
    for cadence in CADENCES:
        records.others(silent=member(cadence=cadence), two=member(cadence=2), three=member(cadence=2))
        assert records.is_quorum({"own", "two", "three"})
        assert not records.is_quorum({"silent"})


def test_nobody_is_alone_while_others_skip_a_round() -> None:
    records = Records()
    records.others(slow=member(cadence=4))
    assert not records.expected(2)
    assert not alone(records)


@pytest.mark.parametrize("answers", [True, False])
def test_who_hears_of_nobody_is_alone_only_if_somebody_answers(answers: bool) -> None:
    assert alone(Records(neighbours_answer=answers)) == answers


def test_who_has_said_goodbye_makes_no_base_alone() -> None:
    """Two peers that leave at once each read that the other is gone: both would make a next version."""
    records = Records()
    records.others(other=member("leaving"))
    assert alone(records)
    records._run.life.happens("stopped")
    asyncio.run(records.own.publish())
    assert not alone(records)


class Heard(Gossip):
    """Gossip whose partners answer, or do not."""

    def __init__(self, answers: bool) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []

    def partners(self, members: Mapping[str, Member], dead: Collection[str]) -> list[str]:
        return sorted(members)[:2]

    async def ask_some(self, peers: Iterable[str]) -> bool:
        self.asked.append(sorted(peers))
        return self.answers

    async def ask(self, peer: str) -> bool:
        self.asked.append([peer])
        return self.answers


def hearing(answers: bool = True) -> tuple[Records, Heard]:
    records = Records()
    records.others(one=member(), two=member(), three=member())
    records._gossip = gossip = Heard(answers)
    records._read_dht_at = 95.0
    records._see = lambda found: None  # type: ignore[method-assign]
    return records, gossip


def test_others_are_asked_for_news_and_the_dht_only_now_and_then() -> None:
    records, gossip = hearing()
    asyncio.run(records.hear())
    assert (gossip.asked, records.read) == ([["one", "three"]], [])
    records._read_dht_at = 85.0
    asyncio.run(records.hear())
    assert len(gossip.asked) == 1 and records.read == [[]], "it is time"


def test_where_nobody_answers_the_dht_is_read() -> None:
    records, gossip = hearing(answers=False)
    asyncio.run(records.hear())
    assert gossip.asked and records.read == [[]]


def test_whose_records_have_changed_is_asked_itself() -> None:
    records, gossip = hearing()
    two = PeerID(b"\x12\x20" + bytes(32))
    records.others(**{"one": member(), str(two): member()})
    records.look(two)
    assert records.changed.is_set()
    asyncio.run(records.hear())
    asyncio.run(records.hear())
    assert gossip.asked[0] == [str(two)] and gossip.asked[1] != gossip.asked[0]


def test_who_always_has_news_is_not_the_only_one_that_is_asked() -> None:
    records, gossip = hearing()
    noisy = PeerID(b"\x12\x20" + bytes(32))
    records.others(**{"one": member(), "three": member(), str(noisy): member()})

    async def hear() -> None:
        records.look(noisy)
        await records.hear()
        await records._run.tasks.settle(10.0)

    asyncio.run(hear())
    assert sorted(gossip.asked) == sorted([[str(noisy)], [str(noisy)], ["one"]])


def test_what_is_told_is_what_is_so_now() -> None:
    """A base of a moment ago must be heard of by whoever asks, before our records are next published."""
    records = Records()
    records.own.tell()
    before = records._newsroom.own
    assert records.answer_news(NewsAsk(NewsAskHeader(have=b"")), ASKER).body
    assert records._newsroom.own == before
    records.changed.set()
    held: Any = SimpleNamespace(version=0, claim=Claim(version=0, digest=bytes(32), total_samples=0))
    records._run.fragments = (held,)  # type: ignore[misc]
    records.answer_news(NewsAsk(NewsAskHeader(have=b"")), ASKER)
    told = records._newsroom._news[b"own"].state
    assert records._newsroom.own != before
    assert told is not None and told.fragments[0].version == 0


def test_who_asks_too_often_has_us_sign_nothing() -> None:
    """Every signature takes as long as many answers."""
    records, signed = Records(), []

    def sign(message: bytes) -> bytes:
        signed.append(message)
        return b"signature"

    records._run.settings.identity.sign = sign  # type: ignore[method-assign]
    records.own.tell()
    records.changed.set()
    for _ in range(ANSWERS + 5):
        records.answer_news(NewsAsk(NewsAskHeader(have=b"")), ASKER)
    assert len(signed) == 1 + ANSWERS


def test_who_may_lead_are_those_of_a_round_that_can_be_dialled_else_helpers() -> None:
    ids = {name: PeerID(b"\x12\x20" + bytes([number]) * 32) for number, name in enumerate(("open", "nat", "door"))}

    def of(name: str, status: Status, dialled: bool) -> tuple[str, Member]:
        found = member(status)
        addresses = ("/ip4/203.0.113.7/tcp/31337",) if dialled else ()
        profile = found.profile.model_copy(update={"addresses": addresses})
        return str(ids[name]), Member(profile=profile, expires=found.expires)

    door, nat = of("door", "serving", dialled=True), of("nat", "training", dialled=False)
    records = Records()
    records.others(**dict([door, nat, of("open", "training", dialled=True)]))
    assert records.likely_leaders(0) == {ids["open"].to_bytes()}
    records.others(**dict([door, nat]))
    assert records.likely_leaders(0) == {ids["door"].to_bytes()}, "the others cannot reach each other"


def trains_with(records: Records, **others: Member) -> None:
    records.others(**others)
    records._company.news(others, records.now)
    for what in ("found", "measured", "caught up"):
        records._run.life.happens(what)  # type: ignore[arg-type]


def hears_nobody(records: Records) -> None:
    """Every record has run out."""
    records.now += 10 * RECORD_SECONDS
    records.others()


@pytest.mark.parametrize("answers", [True, False])
def test_who_hears_of_nobody_any_more_makes_no_base_alone_whoever_answers_a_ping(answers: bool) -> None:
    """What answers may have forgotten the others for a moment as well; it is news of them that counts."""
    records = Records(neighbours_answer=answers)
    trains_with(records, one=member(), other=member())
    hears_nobody(records)
    assert not alone(records)


def test_who_hears_that_the_others_are_gone_goes_on_alone() -> None:
    records = Records()
    trains_with(records, one=member())
    hears_nobody(records)
    records.others(door=member("serving"))
    records._company.news(records.view.members, records.now)  # somebody who is heard of knows nobody else
    assert alone(records)


def test_who_saw_all_the_others_end_goes_on_alone() -> None:
    records = Records(neighbours_answer=False)
    trains_with(records, one=member(expires=120.0))
    hears_nobody(records)
    records._dead["one"] = 120.0
    assert alone(records)


def searches(records: Records, answered: bool) -> None:
    async def search(*, silent: bool) -> bool:
        return answered

    records._contact.search = search  # type: ignore[method-assign]
    asyncio.run(records._search(True))


def test_whose_search_finds_nobody_is_isolated_and_after_half_an_hour_alone() -> None:
    records = Records(neighbours_answer=False)
    trains_with(records, one=member())
    records.now += 40.0
    searches(records, True)
    assert records._run.life.state == "training"
    searches(records, False)
    assert (records._run.life.state, records._run.life.reason) == ("isolated", "nobody has answered for 40 s")
    hears_nobody(records)
    assert not alone(records)
    records.now = 100.0 + GONE_SECONDS
    searches(records, False)
    assert records._run.life.state == "syncing" and alone(records)


@pytest.mark.parametrize("heard_at", [100.0, float("-inf")])
def test_who_never_had_company_is_alone_not_isolated(heard_at: float) -> None:
    records = Records(neighbours_answer=False)
    trains_with(records, door=member("serving"))
    records._company.heard_at = heard_at
    records.now += 1000.0
    searches(records, False)
    assert records._run.life.state == "training"


def test_a_bootstrap_peer_without_volunteers_serves_on() -> None:
    records = Records(neighbours_answer=False, role="serving")
    records._company.news({"one": member()}, records.now)
    records.now += 1000.0
    searches(records, False)
    assert records._run.life.state == "joining"


def test_a_record_expires_later_than_the_one_before_unless_nobody_accepted_that() -> None:
    records = Records()
    records.now = 1000.0
    first = records.own._expiration(RECORD_SECONDS)
    records.now -= 5.0
    assert records.own._expiration(RECORD_SECONDS) > first
    records.now -= 600.0  # the clock was ahead, and has been corrected
    assert records.own._expiration(RECORD_SECONDS) == records.now + RECORD_SECONDS


@pytest.mark.parametrize("tick_seconds", [0.1, 1.0, 120.0, 3600.0])
def test_however_long_a_tick_is_records_are_renewed_before_they_run_out(tick_seconds: float) -> None:
    assert 2 * refresh_seconds(tick_seconds) < RECORD_SECONDS


def seeing(monkeypatch: pytest.MonkeyPatch) -> Records:
    """Presence that makes views, and does nothing else with them."""
    records = Records()
    monkeypatch.setattr(records, "_share", lambda: 0)
    monkeypatch.setattr(records._contact, "meet", lambda members, training: None)
    monkeypatch.setattr(records._contact, "is_time_to_search", lambda now, silent: False)
    records._run.training.send = lambda event: None  # type: ignore[method-assign]
    return records


def test_a_peers_own_word_counts_more_than_a_record_of_the_same_time_in_the_dht(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its profile may be in the DHT already, and its claims of a moment before: a rival base would not be seen."""
    records = seeing(monkeypatch)
    claim = Claim(version=2, digest=bytes(32), total_samples=9)
    told = Member(profile=member().profile, claims=(claim,), expires=200.0)
    monkeypatch.setattr(records._newsroom, "members", lambda: {"one": told})
    records._see({"one": member(expires=200.0)})
    assert records.view.claims(0) == {"one": claim}


class Ended(Exception):
    """The scene is over."""


@pytest.mark.parametrize(("slept", "corrected", "state"), [(0.0, 3600.0, "training"), (60.0, 0.0, "syncing")])
def test_a_corrected_clock_is_not_taken_for_a_time_asleep(
    slept: float, corrected: float, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records()
    trains_with(records, one=member())
    naps = [1.0 + slept]

    async def sleep(seconds: float) -> None:
        if not naps:
            raise Ended
        records.now += naps.pop()
        records.offset += corrected

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(Ended):
        asyncio.run(records.watch_time())
    assert records._run.life.state == state


@pytest.mark.parametrize(("shut", "dead"), [((1, 2), True), ((1,), False), ((), False)])
def test_many_who_may_be_dead_are_looked_at_a_few_at_a_time(
    shut: tuple[int, ...], dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of connections at once would leave none to open files and to answer others with."""
    at_once = most = 0

    async def refuses(address: Address) -> bool:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return address.transport.port in shut

    monkeypatch.setattr("peers.presence.refuses", refuses)
    records, members = Records(), {}
    for number in range(300):
        peer = str(PeerID(b"\x12\x20" + number.to_bytes(32, "big")))
        addresses = tuple(f"/ip4/192.0.2.1/tcp/{port}/p2p/{peer}" for port in (1, 2))
        found = member()
        members[peer] = Member(profile=found.profile.model_copy(update={"addresses": addresses}), expires=found.expires)
    records.others(**members)

    async def look() -> None:
        await asyncio.gather(records.look_for_dead(members), records.look_for_dead(members))

    asyncio.run(look())
    assert most <= LOOKS_AT_ONCE and records._dead.keys() == (members.keys() if dead else set())


def test_who_may_be_dead_is_looked_for_at_its_own_addresses_and_at_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    async def refuses(address: Address) -> bool:
        looked.append(address.transport.port)
        return True

    monkeypatch.setattr("peers.presence.refuses", refuses)
    peer, other = (str(PeerID(b"\x12\x20" + bytes([number]) * 32)) for number in (1, 2))
    texts = [f"/ip4/192.0.2.1/tcp/{port}/p2p/{peer}" for port in range(1, 9)]
    addresses = (f"/ip4/192.0.2.9/tcp/99/p2p/{other}", *(",".join(texts[at : at + 2]) for at in range(0, 8, 2)))
    found = member()
    records = Records()
    records.others(
        **{peer: Member(profile=found.profile.model_copy(update={"addresses": addresses}), expires=found.expires)}
    )
    asyncio.run(records.look_for_dead([peer]))
    assert looked == [1, 2, 3, 4] and peer in records._dead


def test_of_the_dead_only_those_are_remembered_who_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    records = seeing(monkeypatch)
    records._dead = {"one": 200.0, "gone": 50.0, "companion": 90.0}
    records._company.members = {"companion": member()}
    records._see({"one": member(expires=200.0)})
    assert records._dead.keys() == {"one"}, "the news was company as well"
    records._company.members = {"companion": member()}
    records._dead["companion"] = 90.0
    records._see({"one": member(expires=200.0)})
    assert records._dead.keys() == {"one", "companion"}


def test_everybody_is_told_by_ourselves_that_we_begin_to_train() -> None:
    """A newcomer that most do not know of yet could make a version with others that do not know of them."""
    records, gossip = hearing()
    records.others(one=member(), two=member("serving"), three=member("syncing"), left=member("leaving"))
    asyncio.run(records._tell_everybody())
    assert sorted(gossip.asked) == [["one"], ["three"], ["two"]]

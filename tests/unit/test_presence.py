"""Being there: whom a round waits for, and when a peer may go on alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from dht_config.records import PeerProfile
from peers.cadence import CADENCES
from peers.clock import Schedule
from peers.membership import Member, View
from peers.presence import Presence
from peers.round import RoundVoid
from peers.settings import Role

SCHEDULE = Schedule(start_seconds=0.0, tick_seconds=1.0, fragments=2)
Status = Literal["syncing", "training", "serving", "leaving"]


def member(status: Status = "training", cadence: Literal[1, 2, 4] = 1, expires: float = 1e9) -> Member:
    profile = PeerProfile(
        software_version="1",
        status=status,
        samples_per_second=1.0,
        processed_samples=0,
        credited_samples=0.0,
        micro_batch=1,
        device="",
        joined_at=0.0,
        restart=0,
        cadence=cadence,
    )
    return Member(profile=profile, expires=expires)


class Records(Presence):
    """Presence whose records are what the test says."""

    def __init__(self, *, neighbours_answer: bool = True, role: Role = "training") -> None:
        async def ping(peer: object) -> bool:
            return neighbours_answer

        async def store(*_: Any, **__: Any) -> bool:
            return True

        protocol = SimpleNamespace(
            routing_table=SimpleNamespace(uid_to_peer_id={"neighbour": "neighbour"}), call_ping=ping
        )
        run = SimpleNamespace(
            clock=SimpleNamespace(now=lambda: 100.0),
            schedule=SCHEDULE,
            manifest=SimpleNamespace(averaging=SimpleNamespace(codec="float32")),
            node=SimpleNamespace(protocol=protocol, store=store),
            settings=SimpleNamespace(
                run_id="digits-0123456789abcdef", restart=0, identity=SimpleNamespace(peer_id="own"), role=role
            ),
            training=SimpleNamespace(
                begun=None,
                progress=SimpleNamespace(samples_per_second=1.0, samples=0, credited_samples=0.0, trained=None),
            ),
            addresses=(),
            own_id=b"own",
            fragments=(SimpleNamespace(version=-1),),
        )
        super().__init__(run, heard_from_others=True)  # type: ignore[arg-type]

    def others(self, **members: Member) -> None:
        self.view = View(read_at=100.0, members=members)

    async def refresh(self) -> None:
        """The records are as they are."""


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
    asyncio.run(records.publish("leaving"))
    assert not alone(records)

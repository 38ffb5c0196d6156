"""What a run looks like from this machine, fact by fact: for whoever wants to know why joining would fail.

Facts come one at a time, so that what was found stands when something later fails. Everything is asked through a
daemon of our own with a throw-away identity; nothing is announced.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, PeerID

from dht_config.address import Address, parse_addresses
from dht_config.errors import P2PTrainerError
from dht_config.hardening import harden_msgpack
from dht_config.keys import profiles_key, rpc_namespace, states_key
from dht_config.network import NetworkSettings
from dht_config.records import SignedManifest
from dht_config.validators import SwarmRecordValidator
from peers.clock import SwarmClock
from peers.daemon import DialOutcome, DialReport, dial_all, start_daemon
from peers.dial_back import Reached, ask_to_dial_back
from peers.door import dial_until_answered, enter_dht, fetch_manifest, set_clock, wait_for_answer
from peers.membership import View, read_view
from peers.servicer import SwarmServicer

PEERS_ASKED = 4
"""To dial back. One may lie, or stand beside us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What to look at.

    :raises: nothing; addresses have been parsed
    """

    run_id: str
    organiser_public_key: bytes | None
    addresses: tuple[Address, ...]
    ours_json: str
    """The canonical manifest we came with, or empty."""
    host: str
    port: int
    """Where a peer of this machine would listen."""
    wait_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """What became of each address that we were given; at least one answered."""

    reports: tuple[DialReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockCompared:
    """By how much the swarm's time is ahead of this machine's clock; ``peers`` answered."""

    offset_seconds: float
    peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFound:
    signed: SignedManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class DialledBack:
    """What peers say of our port."""

    port: int
    answers: tuple[Reached, ...]
    asked: int
    hindrance: P2PTrainerError | None = None
    """Why we could not even listen."""


Fact = Dialled | ClockCompared | ManifestFound | Seen | DialledBack


async def examine(what: Examined, socket_directory: Path, on_waiting: Callable[[str], None]) -> AsyncIterator[Fact]:
    """Go as far in as a peer that joins, and ask to be dialled back.

    :param socket_directory: for the daemon; the caller removes it
    :raises P2PTrainerError: as for joining; no further facts follow
    """
    harden_msgpack()
    clock = SwarmClock()
    clock.install()
    p2p = await start_daemon(NetworkSettings(host="127.0.0.1"), None, socket_directory)
    try:
        async with aclosing(_facts(what, p2p, clock, on_waiting)) as facts:  # type: ignore[type-var]
            async for fact in facts:
                yield fact
    finally:
        await p2p.shutdown()


async def _facts(what: Examined, p2p: P2P, clock: SwarmClock, on_waiting: Callable[[str], None]) -> AsyncIterator[Fact]:
    reports = await dial_until_answered(
        p2p, what.addresses, may_start=False, wait_seconds=what.wait_seconds, on_waiting=on_waiting
    )
    yield Dialled(reports=tuple(reports))

    known = [report.address for report in reports if report.outcome is DialOutcome.CONNECTED]

    def stub(peer: PeerID) -> Any:
        return SwarmServicer.get_stub(p2p, peer, namespace=rpc_namespace(what.run_id))

    peers = list(dict.fromkeys(PeerID.from_base58(address.peer_id) for address in known))
    answered = await set_clock(clock, stub, peers, newcomer=True)
    yield ClockCompared(offset_seconds=clock.offset_seconds, peers=answered)

    validator = SwarmRecordValidator(what.run_id, None, now=clock.now, organiser_public_key=what.organiser_public_key)
    node = await enter_dht(p2p, validator, known, asks_only=True)
    answer = partial(wait_for_answer, node, peers, wait_seconds=what.wait_seconds, on_waiting=on_waiting)
    await answer()
    signed = await fetch_manifest(
        node, what.run_id, what.organiser_public_key, still_there=answer, ours_json=what.ours_json
    )
    yield ManifestFound(signed=signed)

    found = await node.get_many([profiles_key(what.run_id), states_key(what.run_id)], float("inf"))
    view = read_view(found, what.run_id, clock.now())
    yield Seen(view=view)

    more = await _others(p2p, view, peers)
    asked = [*peers, *more][:PEERS_ASKED]
    try:
        answers = await ask_to_dial_back(stub, asked, what.host, what.port)
    except P2PTrainerError as error:
        yield DialledBack(port=what.port, answers=(), asked=len(asked), hindrance=error)
        return
    yield DialledBack(port=what.port, answers=tuple(answers), asked=len(asked))


async def _others(p2p: P2P, view: View, known: Sequence[PeerID]) -> list[PeerID]:
    """Peers of the view that we reach besides those we came in through."""
    texts = [
        member.profile.addresses[0]
        for peer, member in view.members.items()
        if member.profile.addresses and PeerID.from_base58(peer) not in known
    ]
    addresses, _ = parse_addresses(texts[:PEERS_ASKED])
    reports = await dial_all(p2p, addresses)
    return [PeerID.from_base58(report.address.peer_id) for report in reports if report.outcome is DialOutcome.CONNECTED]

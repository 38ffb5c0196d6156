"""Getting in: dial addresses until somebody answers, set the clock, enter the DHT, find the manifest."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from pathlib import Path

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.servicer import StubBase
from hivemind.proto.dht_pb2 import NodeInfo
from hivemind.utils.auth import AuthRole, AuthRPCWrapper

from dht_config.address import Address, parse_addresses
from dht_config.errors import FingerprintError, RecordError, UnreachableError, WrongPeerIdError
from dht_config.keys import manifest_key, run_manifest_key
from dht_config.manifest import differing_fields
from dht_config.records import SignedManifest
from dht_config.validators import SwarmRecordValidator
from dht_config.versions import other_protocol
from peers.clock import SwarmClock, correction, measure_offset
from peers.daemon import DialOutcome, DialReport, dial_all
from peers.dial_back import checked_host
from peers.messages import Ask, AskHeader, DialBack, DialBackHeader, DialedBackHeader
from peers.notes import write_note
from peers.transport import TRANSPORT_ERRORS
from peers.ways_in import REMEMBERED_PEERS, nobody_answers

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0)
ALONE_AFTER_ATTEMPTS = 2
CLOCK_PEERS = 8
DIAL_PEERS = 3
CREDIBLE_OFFSET_SECONDS = 3600.0
"""In the swarm already, a clock that is further off than this is ignored, unless all are and nobody is heard of."""
RPC_WAIT_SECONDS = 12.0
"""For an answer while getting in: a door behind a round trip of 3 s, the most that libp2p bears, answers after 6 s."""
NEAR_WAIT_SECONDS = (0.5, 3.0)
FAR_WAIT_SECONDS = 24.0
"""Measured with 3 s and a loss of 20 %: half of the answers take up to 9 s, the slowest 26 s."""
ROUND_TRIPS = 4.0
"""What was measured may have been luck: three packets in a row that are lost and sent again."""

UNTRIED = DialedBackHeader(host="", reached=None)

Stub = Callable[[PeerID], StubBase]


def remembered_addresses(path: Path) -> list[Address]:
    """Peers met in earlier sessions, best first; a damaged file is as good as none."""
    try:
        texts = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    if not isinstance(texts, list):
        return []
    good, _ = parse_addresses([text for text in texts if isinstance(text, str)])
    return good[:REMEMBERED_PEERS]


def remember_addresses(path: Path, addresses: Iterable[str]) -> None:
    """Write down whom to ask next time; a full disk only costs the memory."""
    write_note(path, list(dict.fromkeys(addresses))[:REMEMBERED_PEERS])


async def find_someone(
    p2p: P2P,
    addresses: Sequence[Address],
    *,
    may_start: bool,
    wait_seconds: float,
    on_waiting: Callable[[str], None],
) -> list[Address]:
    """Dial until at least one address answers; empty only if ``may_start`` and nobody does.

    :raises WrongPeerIdError: every address that answers does so under another peer id
    :raises UnreachableError: nobody answered within ``wait_seconds``
    """
    reports = await dial_until_answered(
        p2p, addresses, may_start=may_start, wait_seconds=wait_seconds, on_waiting=on_waiting
    )
    return [report.address for report in reports if report.outcome is DialOutcome.CONNECTED]


async def dial_until_answered(
    p2p: P2P,
    addresses: Sequence[Address],
    *,
    may_start: bool,
    wait_seconds: float,
    on_waiting: Callable[[str], None],
) -> list[DialReport]:
    """The same with what became of every address, our own left out."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + wait_seconds
    others = [address for address in addresses if address.peer_id != str(p2p.peer_id)]
    told: dict[str, DialReport] = {}
    attempt = 0
    while others:
        for report in await dial_all(p2p, others):
            # Soon after a failure the daemon refuses to dial and does not say why: what it said before tells more.
            if report.outcome is not DialOutcome.FAILED or report.address.text not in told:
                told[report.address.text] = report
        reports = [told[address.text] for address in others]
        if any(report.outcome is DialOutcome.CONNECTED for report in reports):
            return reports
        attempt += 1
        if may_start and attempt >= ALONE_AFTER_ATTEMPTS:
            return []
        _refuse_wrong_ids(reports, may_start)
        pause = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS)) - 1]
        if loop.time() + pause > give_up:
            raise UnreachableError(*nobody_answers(reports))
        more = f", and {len(reports) - 1} more" if len(reports) > 1 else ""
        on_waiting(f"Nobody answers yet ({reports[0]}{more}); trying again in {pause:.0f} s.")
        await asyncio.sleep(pause)
    return []


def _refuse_wrong_ids(reports: Sequence[DialReport], may_start: bool) -> None:
    wrong = [report for report in reports if report.outcome is DialOutcome.WRONG_PEER_ID]
    if len(wrong) == len(reports) and not may_start:
        first = wrong[0]
        raise WrongPeerIdError(
            f"At {first.address.text.rpartition('/p2p/')[0]} peer {first.actual_peer_id} answers, "
            f"not {first.address.peer_id}.",
            "The bootstrap peer may have lost its identity: ask the organiser for a new invite.",
        )


async def set_clock(
    clock: SwarmClock, stub: Stub, peers: Sequence[PeerID], *, newcomer: bool, lost: bool = False
) -> int:
    """Correct the clock by the median offset to up to eight peers; returns how many answered.

    Answers may take long, and meanwhile another call of this may have corrected the clock: only what is left then is
    corrected.

    :param newcomer: a peer that has no part in swarm time yet
    :param lost: nobody is heard of any more: if all clocks are incredibly far off, it is ours, as after a virtual
        machine was halted. What this does not stop: where everybody else is silent, one that lies.
    """
    round_trips: dict[PeerID, float] = {}

    async def offset_to(peer: PeerID) -> float | None:
        async def ask() -> float | None:
            sent = clock.passed()
            try:
                answer = await stub(peer).rpc_time(Ask(AskHeader()), timeout=RPC_WAIT_SECONDS)
            except TRANSPORT_ERRORS:
                return None
            round_trips[peer] = min(round_trips.get(peer, math.inf), clock.passed() - sent)
            return float(answer.header.seconds) if answer.header is not None else None

        return await measure_offset(ask, clock.uncorrected)

    measured = await asyncio.gather(*(offset_to(peer) for peer in peers[:CLOCK_PEERS]))
    offsets = [offset - clock.offset_seconds for offset in measured if offset is not None]
    credible = [offset for offset in offsets if abs(offset) <= CREDIBLE_OFFSET_SECONDS]
    newcomer = newcomer or (lost and not credible)
    if not newcomer:
        offsets = credible
    clock.offset_seconds += correction(offsets, newcomer=newcomer)
    if round_trips:
        clock.round_trip_seconds = statistics.median(round_trips.values())
    return len(offsets)


async def hosts_reached(
    stub: Stub, peers: Sequence[PeerID], port: int, *, inside: Collection[str] = ()
) -> tuple[str, ...] | None:
    """The IP addresses at which others could open connections to this peer, as they see it; None if one could not.

    Asked of a few, and all of them that answer must have. Empty if nobody tried: then it is not known. What this does
    not stop: one that says it could not; then this peer averages for nobody. Asked when the peer enters; a port that a
    person has a router forward later is not noticed.

    :param port: ours, or a router's that may lead to us
    :param inside: for a router's port, IP addresses that are our own: who sees us at one does not come through the
        router, and has no say; nor has who sees us over IPv6, for which no router forwards a port
    """

    async def ask(peer: PeerID) -> DialedBackHeader:
        try:
            answer = await stub(peer).rpc_dial_back(DialBack(DialBackHeader(port=port)), timeout=RPC_WAIT_SECONDS)
        except TRANSPORT_ERRORS:
            return UNTRIED
        return answer.header or UNTRIED

    answers = await asyncio.gather(*(ask(peer) for peer in peers[:DIAL_PEERS]))
    if inside:
        answers = [answer for answer in answers if answer.host not in inside and ":" not in answer.host]
    if any(answer.reached is False for answer in answers):
        return None
    hosts = [checked_host(answer.host) for answer in answers if answer.reached]
    return tuple(dict.fromkeys(host for host in hosts if host))


async def enter_dht(
    p2p: P2P, validator: SwarmRecordValidator, known: Sequence[Address], *, asks_only: bool = False
) -> DHTNode:
    """A DHT node in this event loop, through the daemon we already have.

    :param asks_only: nobody is sent to us: an observer, or a peer that cannot be dialled
    No caching: a cached record hides a newer one until it expires.
    """
    return await DHTNode.create(
        p2p=p2p,
        initial_peers=[address.text for address in known] or None,
        record_validator=validator,
        wait_timeout=RPC_WAIT_SECONDS,
        cache_locally=False,
        cache_on_store=False,
        cache_nearest=0,
        ensure_bootstrap_success=False,
        strict=False,
        client_mode=asks_only,
    )


async def become_known_in_dht(node: DHTNode) -> None:
    """Have others be sent to us from now on, if they were not: we entered as one that only asks. Idempotent.

    hivemind decides that when a node is made (1.1.12, dht/protocol.py:74); this is what it does for one of the others.
    """
    protocol = node.protocol
    if protocol.client_mode:
        await protocol.add_p2p_handlers(protocol.p2p, AuthRPCWrapper(protocol, AuthRole.SERVICER, protocol.authorizer))
        protocol.node_info = NodeInfo(node_id=protocol.node_id.to_bytes())
        protocol.client_mode = False


async def wait_for_answer(
    node: DHTNode, peers: Sequence[PeerID], *, wait_seconds: float, on_waiting: Callable[[str], None]
) -> float:
    """Until one of the peers we are connected to answers in the DHT: a frozen or very slow door opens later.

    Returns how long the quickest took to answer, in seconds; 0 if there are no peers.

    :raises UnreachableError: none did within ``wait_seconds``
    """
    loop = asyncio.get_running_loop()
    give_up = loop.time() + wait_seconds

    async def ping(peer: PeerID) -> float:
        asked = loop.time()
        return loop.time() - asked if await node.protocol.call_ping(peer) else math.inf

    attempt = 0
    while True:
        attempt += 1
        quickest = min(await asyncio.gather(*(ping(peer) for peer in peers)), default=0.0)
        if quickest < math.inf:
            longer = min(FAR_WAIT_SECONDS, ROUND_TRIPS * quickest)
            node.protocol.wait_timeout = max(node.protocol.wait_timeout, longer)
            return quickest
        node.protocol.wait_timeout = FAR_WAIT_SECONDS
        pause = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS)) - 1]
        if loop.time() + pause > give_up:
            raise UnreachableError(
                f"Connected to {len(peers)} peer(s), but none of them answers.",
                "Try again later, or give another peer's address with --peer.",
            )
        on_waiting(f"Connected, but nobody answers yet; trying again in {pause:.0f} s.")
        await asyncio.sleep(pause)


def answer_seconds(matchmaking_seconds: float, measured_seconds: float) -> float:
    """How long to wait for answers in the DHT once we are in.

    Short where peers are near: one that is gone must not hold up the tick. But never shorter than answers take.

    :param measured_seconds: how long the quickest peer took to answer
    """
    shortest, longest = NEAR_WAIT_SECONDS
    near = min(longest, max(shortest, matchmaking_seconds / 2))
    return min(FAR_WAIT_SECONDS, max(near, ROUND_TRIPS * measured_seconds))


async def fetch_manifest(
    node: DHTNode,
    run_id: str,
    organiser_public_key: bytes | None,
    *,
    still_there: Callable[[], Awaitable[object]],
    ours_json: str = "",
    attempts: int = 5,
) -> SignedManifest:
    """The run's manifest from the DHT, verified.

    :param still_there: awaited before looking again: over a bad line, nothing found may mean that nobody answered
    :param ours_json: the canonical manifest we came with, to say in which fields a run of its name differs
    :raises FingerprintError: the peers we reached carry other runs only, or none
    """
    others: dict[str, SignedManifest] = {}
    for attempt in range(attempts):
        keys = [run_manifest_key(run_id), manifest_key()]
        found = await node.get_many(keys, float("inf"))
        dictionaries = [found[key].value for key in keys if found[key] and isinstance(found[key].value, dict)]
        for subkey, entry in itertools.chain.from_iterable(entries.items() for entries in dictionaries):
            try:
                signed = SignedManifest.from_payload(entry.value)
                signed.verify(organiser_public_key if subkey == run_id else None)
                if signed.run_id() == run_id:
                    return signed
                others[signed.run_id()] = signed
            except RecordError:
                continue
        await asyncio.sleep(0.5 * (attempt + 1))
        await still_there()
    for other, signed in others.items():
        same_name = other.rpartition("-")[0] == run_id.rpartition("-")[0]
        if same_name and (refusal := other_protocol(signed)) is not None:
            raise refusal
        differences = []
        if ours_json:
            differences = differing_fields(json.loads(ours_json), json.loads(signed.manifest_json))
        raise FingerprintError(
            f"The peers we reached carry the run {other}, not {run_id}"
            + (f"; they differ in {'; '.join(differences)}." if differences else "."),
            "Use the run's own manifest, or ask the organiser for an invite to the run as it is now.",
        )
    raise FingerprintError(
        f"We reached a peer, but nobody there knows the run {run_id}.",
        "Ask the organiser for a new invite, or wait until a peer of the run is back.",
    )

"""Looking at a run without taking part: connect, read the manifest and everyone's records, leave."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hivemind.p2p import PeerID

from dht_config.address import Address
from dht_config.hardening import harden_msgpack
from dht_config.keys import profiles_key, rpc_namespace, states_key
from dht_config.network import NetworkSettings
from dht_config.records import SignedManifest
from dht_config.validators import SwarmRecordValidator
from peers.clock import SwarmClock
from peers.daemon import SOCKET_DIRECTORY_PREFIX, start_daemon
from peers.door import enter_dht, fetch_manifest, find_someone, set_clock, wait_for_answer
from peers.membership import View, read_view
from peers.servicer import SwarmServicer


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A run as its records show it."""

    signed_manifest: SignedManifest
    view: View


async def observe(
    run_id: str,
    organiser_public_key: bytes | None,
    addresses: Sequence[Address],
    *,
    ours_json: str = "",
    wait_seconds: float,
    on_waiting: Callable[[str], None],
) -> Observation:
    """Read a run's records through one of its peers.

    :param organiser_public_key: of whoever signed the run's manifest; None if only the manifest is known
    :param ours_json: the canonical manifest we came with, or empty
    :raises UnreachableError: :raises WrongPeerIdError: :raises FingerprintError: as for joining
    """
    harden_msgpack()
    clock = SwarmClock()
    clock.install()
    sockets = Path(tempfile.mkdtemp(prefix=SOCKET_DIRECTORY_PREFIX))
    try:
        p2p = await start_daemon(NetworkSettings(host="127.0.0.1"), None, sockets)
        try:
            known = await find_someone(
                p2p, addresses, may_start=False, wait_seconds=wait_seconds, on_waiting=on_waiting
            )
            peers = [PeerID.from_base58(address.peer_id) for address in known]
            await set_clock(
                clock,
                lambda peer: SwarmServicer.get_stub(p2p, peer, namespace=rpc_namespace(run_id)),
                peers,
                newcomer=True,
            )
            validator = SwarmRecordValidator(run_id, None, now=clock.now, organiser_public_key=organiser_public_key)
            node = await enter_dht(p2p, validator, known, asks_only=True)
            answer = partial(wait_for_answer, node, peers, wait_seconds=wait_seconds, on_waiting=on_waiting)
            await answer()
            manifest = await fetch_manifest(node, run_id, organiser_public_key, still_there=answer, ours_json=ours_json)
            found = await node.get_many([profiles_key(run_id), states_key(run_id)], float("inf"))
            return Observation(signed_manifest=manifest, view=read_view(found, run_id, clock.now()))
        finally:
            await p2p.shutdown()
    finally:
        shutil.rmtree(sockets, ignore_errors=True)

"""What the parts of the averaging process share: who we are, how we reach others, and the run as it is configured."""

from __future__ import annotations

from dataclasses import dataclass, field

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.servicer import StubBase

from dht_config.keys import rpc_namespace
from dht_config.manifest import RunManifest
from dht_config.records import SignedManifest
from peers.allowance import Allowance
from peers.clock import Schedule, SwarmClock
from peers.fragment_state import FragmentState
from peers.life import Life
from peers.line import LinkRate
from peers.servicer import SwarmServicer
from peers.settings import SwarmSettings
from peers.tasks import Tasks
from peers.training_link import TrainingLink


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Made once, when peers are found, the clock is set and the run is configured."""

    settings: SwarmSettings
    clock: SwarmClock
    p2p: P2P
    node: DHTNode
    addresses: list[str]
    """Ours, as others may dial them; empty if nobody can, as behind NAT. A line may come back with others."""
    signed_manifest: SignedManifest
    manifest: RunManifest
    schedule: Schedule
    fragments: tuple[FragmentState, ...]
    training: TrainingLink
    tasks: Tasks
    allowance: Allowance
    life: Life
    link_rate: LinkRate = field(default_factory=LinkRate)

    @property
    def can_be_dialled(self) -> bool:
        """Else it leads no group and averages nothing for others: two such peers could not reach each other."""
        return bool(self.addresses)

    @property
    def own_id(self) -> bytes:
        """Our peer id, as receipts and records name us."""
        return bytes(self.settings.identity.peer_id.to_bytes())

    def stub(self, peer: PeerID) -> StubBase:
        """To call one of this run's peers."""
        return SwarmServicer.get_stub(self.p2p, peer, namespace=rpc_namespace(self.settings.run_id))

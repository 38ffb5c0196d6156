"""What a peer's averaging process is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dht_config.address import Address
from dht_config.identity import Identity
from dht_config.network import NetworkSettings
from peers.line import CadenceValue, CodecName

Role = Literal["training", "serving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmSettings:
    """Who we are, where things are kept, and whom to ask first."""

    run_id: str
    identity: Identity
    run_directory: Path
    socket_directory: Path
    network: NetworkSettings
    role: Role
    addresses: tuple[Address, ...]
    """Addresses from the invite, the manifest and the command line; remembered ones are added."""
    may_start: bool
    """Whether this peer may go on alone if nobody is reachable: the organiser's or the run's first peer."""
    organiser_public_key: bytes | None
    """Only a manifest signed by this key is believed; None if it is not known (joining by manifest file)."""
    needs_manifest: bool
    """Whether the manifest must come from the DHT; the organiser brings its own."""
    manifest_json: str
    """The canonical manifest given as a file, or empty: to say in which field a run differs from it."""
    restart: int
    wait_seconds: float
    """How long to try to reach anybody before giving up."""
    up_bytes_per_second: float | None = None
    """What rounds and bases may send, on average; None for no limit."""
    daily_bytes: int | None = None
    """What they may move in a day, both ways together; None for no limit."""
    wished_cadence: CadenceValue | None = None
    """How many rounds of a fragment there are for one of ours; None leaves it to measurement."""
    wished_codec: CodecName | None = None
    """How to encode contributions where the run leaves that to its peers; None leaves it to measurement."""

    @property
    def remembered_peers_path(self) -> Path:
        return self.run_directory / "peers.json"

    @property
    def traffic_path(self) -> Path:
        return self.run_directory / "traffic.json"

"""What a peer says of itself, where only some of it matters."""

from __future__ import annotations

from typing import Literal

from dht_config.records import PeerProfile

Status = Literal["syncing", "training", "serving", "leaving"]


def profile(
    status: Status = "training", *, cadence: Literal[1, 2, 4] = 1, addresses: tuple[str, ...] = ()
) -> PeerProfile:
    return PeerProfile(
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
        addresses=addresses,
    )

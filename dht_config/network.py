"""Where a peer listens, what it announces and whom it knows: the settings of its network side."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from dht_config.address import parse_address, parse_announced
from dht_config.errors import AddressError


class NetworkSettings(BaseModel):
    """Network settings of one peer; they may differ from peer to peer.

    Raises (on construction): AddressError for a host or an address that cannot be used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "0.0.0.0"
    """IP address to listen on; 0.0.0.0 for every IPv4 interface, :: for IPv6."""
    port: int = Field(default=0, ge=0, le=65535)
    """TCP port to listen on; 0 lets the system choose one, which is then lost at the next start."""
    direct_port: int | None = Field(default=0, ge=0, le=65535)
    """TCP port for direct connections between the averaging processes, if it is free, else and for 0 any free one.

    None: rounds go through the p2p daemon alone.
    """
    announce: Annotated[tuple[str, ...], Field(max_length=16)] = ()
    """Addresses that others should dial instead of these, such as /dns4/peer.example.org/tcp/31337.

    Needed where a router forwards a port, or where a container sees only its private address.
    """
    initial_peers: Annotated[tuple[str, ...], Field(max_length=256)] = ()
    """Addresses of peers to join through, normalised."""

    @field_validator("host")
    @classmethod
    def _is_an_ip_address(cls, host: str) -> str:
        try:
            return str(ipaddress.ip_address(host.strip("[] ")))
        except ValueError:
            raise AddressError(
                problem=f'The host to listen on, "{host}", is not an IP address.',
                remedy="Use 0.0.0.0 for every IPv4 interface, 127.0.0.1 for this machine alone, :: for IPv6. A name "
                "goes into --announce, such as /dns4/peer.example.org/tcp/31337.",
            ) from None

    @field_validator("announce")
    @classmethod
    def _can_be_announced(cls, announce: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(parse_announced(text).text for text in announce)

    @field_validator("initial_peers")
    @classmethod
    def _can_be_dialled(cls, initial_peers: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(parse_address(text).text for text in initial_peers)

    def listen_maddrs(self) -> list[str]:
        """What hivemind takes as ``host_maddrs``."""
        return [f"/ip{ipaddress.ip_address(self.host).version}/{self.host}/tcp/{self.port}"]

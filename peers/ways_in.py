"""What dialling has shown, in words; whom to dial first; which addresses of ours to tell others (pure).

What this does not stop: a peer that says it reached us at an address where it did not. Others dial that one in vain,
and then the next. What a router says of the ports that it forwards is only ever tried, never believed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence

from dht_config.address import Address, Transport, address_of, dialable, parse_addresses, reach
from peers.daemon import DialOutcome, DialReport

REMEMBERED_PEERS = 32
ADDRESSES_PER_PEER = 4
CLOCK_SECONDS = 2.0
"""A clock that is further off than this is worth a line; swarm time makes up for any."""
OTHER_WAYS = "or give another peer's address with --peer."
_REMEDIES = {
    DialOutcome.REFUSED: f"The machine is there, but no peer runs on it at the moment: ask the organiser, {OTHER_WAYS}",
    DialOutcome.TIMED_OUT: "A firewall or a router keeps the port shut, here or there, or the machine is off: ask the "
    f"organiser whether the bootstrap peer runs, try another network, {OTHER_WAYS}",
    DialOutcome.NOT_FOUND: f"Check how the name is spelt, and this machine's name server (DNS), {OTHER_WAYS}",
    DialOutcome.NO_ROUTE: f"Check that this machine is online, over IPv4 or IPv6 as the address is, {OTHER_WAYS}",
    DialOutcome.NOT_A_PEER: f"Check the port: another program listens there, or a proxy between, {OTHER_WAYS}",
}
_UNCLEAR = f"Check the network, ask the organiser whether the bootstrap peer runs, {OTHER_WAYS}"


def nobody_answers(reports: Sequence[DialReport]) -> tuple[str, str]:
    """What became of every address, and what a person can do about it: of many causes the ones that they share."""
    outcomes = {report.outcome for report in reports}
    remedy = _REMEDIES.get(next(iter(outcomes)), _UNCLEAR) if len(outcomes) == 1 else _UNCLEAR
    return f"Nobody answered at {len(reports)} address(es): {'; '.join(map(str, reports))}.", remedy


def clock_line(offset_seconds: float) -> str:
    """What to say of this machine's clock; nothing if it is about right.

    :param offset_seconds: to be added to this machine's time
    """
    if abs(offset_seconds) < CLOCK_SECONDS:
        return ""
    direction = "behind" if offset_seconds > 0 else "ahead of"
    return (
        f"This machine's clock is {abs(offset_seconds):.0f} s {direction} the swarm's: working in the swarm's time. "
        "Set it (NTP), so that files and logs have the right times."
    )


def split_line(recorded: int, reached: int) -> str:
    """What to say of peers whose records are there and whose machines are not; nothing while some can be reached.

    :param recorded: training peers that the records name, with addresses
    :param reached: of those
    """
    if reached or recorded < 2:
        return ""
    return (
        f"The records name {recorded} training peers that can be dialled, and this one reaches none of them: the swarm "
        "may be split, or a firewall here lets only some ports out. It takes part with those that it meets."
    )


def forwarding_line(port: int | None, *, inside: bool = False) -> str:
    """What to say of a router's port at which others reach us; None if they do not any more.

    :param inside: whether those inside this network reach us without it
    """
    if port is None and inside:
        return "The router forwards nothing to this peer any more: others reach it inside this network alone."
    if port is None:
        return "The router forwards nothing to this peer any more: it averages nothing for others."
    return f"The router forwards port {port} to this peer (UPnP or NAT-PMP): others reach it, and it averages for them."


def ways_to(peer: str, texts: Sequence[str]) -> list[Address]:
    """A few of the addresses in a peer's record, its own alone.

    What a record says of others, or too much, would have the whole swarm knock at whatever a stranger likes.

    :param peer: base58
    """
    good, _ = parse_addresses(texts[:ADDRESSES_PER_PEER])
    return [address for address in good if address.peer_id == peer][:ADDRESSES_PER_PEER]


def best_first(
    found: Mapping[str, Sequence[str]], answered: Collection[str], earlier: Iterable[str], *, given: Iterable[str] = ()
) -> list[str]:
    """Addresses to remember, those first that are most likely to let us in next time.

    :param found: by peer id, the addresses in records that stand
    :param answered: peers that answered when we dialled them
    :param earlier: remembered before
    :param given: by a person
    """
    order = sorted(found, key=lambda peer: peer not in answered)
    ways = [[address.text for address in dialable(ways_to(peer, found[peer]))] for peer in order]
    first = [texts[0] for texts in ways if texts]  # one of each before the second of any
    rest = [text for texts in ways for text in texts[1:]]
    return list(dict.fromkeys([*first, *given, *rest, *earlier]))[:REMEMBERED_PEERS]


def listening(visible: Iterable[str], host: str) -> tuple[list[Address], list[int]]:
    """Where a daemon listens, and ports of a router that it says lead there.

    It names both alike. The router gives it any port that is free, and names a public address, its own or not.

    :param visible: addresses that the daemon names
    :param host: IP address that it was told to listen on; of every interface the loopback is among those named
    """
    known, _ = parse_addresses(visible)
    ours = [address for address in known if address.transport.host == host or _is_loopback(address.transport.host)]
    port = (ours or known)[0].transport.port if known else 0
    others = dict.fromkeys(address.transport.port for address in known if address.transport.port != port)
    return [address for address in known if address.transport.port == port], list(others)


def only_inside(addresses: Iterable[str]) -> bool:
    """Whether none of these addresses can be dialled from everywhere; also if there are none."""
    return all(reach(address) for address in parse_addresses(addresses)[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def announced(own: Iterable[str], observed_hosts: Iterable[str], *, port: int | None = None) -> tuple[str, ...]:
    """The addresses to tell others: where somebody reached us, as well as where we listen; the widest known first.

    Behind a router that forwards our port we listen at a private address only.

    :param own: addresses that we listen at
    :param observed_hosts: IP addresses at which others have reached us
    :param port: the port that they reached, if it is a router's and not the one that we listen on
    """
    known, _ = parse_addresses(own)
    if not known:
        return ()
    here = known[0]
    observed = [
        address_of(
            Transport(protocol="ip6" if ":" in host else "ip4", host=host, port=port or here.transport.port),
            here.peer_id,
        )
        for host in observed_hosts
    ]
    every: dict[str, Address] = {address.text: address for address in [*known, *observed]}
    return tuple(address.text for address in dialable(list(every.values())))

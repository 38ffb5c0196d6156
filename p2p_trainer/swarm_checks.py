"""What was seen of a run means for a peer of this machine: pure, one finding each."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from dht_config.errors import P2PTrainerError
from dht_config.manifest import RunManifest
from dht_config.records import SignedManifest
from p2p_trainer.findings import Finding, not_known
from p2p_trainer.machine_checks import gigabytes, megabytes
from p2p_trainer.run_model import check_model, checked_manifest
from p2p_trainer.target import Target
from p2p_trainer.traffic import DAY_SECONDS, cycle_bytes
from peers.daemon import DialOutcome
from peers.examination import ClockCompared, Dialled, DialledBack
from peers.fragments import FragmentLayout
from peers.line import CODECS
from peers.membership import View

CLOCK_SECONDS = 5.0
"""A clock that is set by the network is right to a fraction of a second; one route's asymmetry does not make up 5 s."""
SUGGESTED_PORT = 31337


def judge_dials(dialled: Dialled) -> Finding:
    """Who of the invite answers."""
    silent = [str(report) for report in dialled.reports if report.outcome is not DialOutcome.CONNECTED]
    answered = len(dialled.reports) - len(silent)
    others = f"; not {'; '.join(silent[:3])}" if silent else ""
    return Finding(check="swarm", ok=True, cause=f"{answered} of {len(dialled.reports)} address(es) answer(s){others}.")


def judge_clock(compared: ClockCompared) -> Finding:
    """This machine's clock against the swarm's time."""
    if compared.peers == 0:
        return not_known("clock", "No peer told the swarm's time.")
    offset = compared.offset_seconds
    how = f"{abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} the swarm's time (median of {compared.peers})"
    if abs(offset) <= CLOCK_SECONDS:
        return Finding(check="clock", ok=True, cause=f"This machine's clock is {how}.")
    return Finding(
        check="clock",
        ok=False,
        cause=f"This machine's clock is {how}; the peer works in corrected time.",
        remedy="Let the network set the clock: `timedatectl set-ntp true`.",
    )


def judge_manifest(
    signed: SignedManifest, target: Target, *, allow_files: bool
) -> tuple[Finding, tuple[RunManifest, FragmentLayout] | None]:
    """Whether this program would do exactly what the run does; what was learned of the run, if it would."""
    try:
        manifest, task = checked_manifest(signed, target, allow_files=allow_files)
        layout = check_model(manifest, task)
    except P2PTrainerError as error:
        return Finding(check="manifest", ok=False, cause=error.problem, remedy=error.remedy), None
    by = "by the organiser of the invite" if target.invite is not None else "by whoever started it"
    cause = (
        f"{signed.run_id()}, signed {by} with p2p-trainer {signed.software_version}; the fingerprint is ours; "
        f"{layout.num_elements:,} parameters in {layout.num_fragments} fragments."
    )
    return Finding(check="manifest", ok=True, cause=cause), (manifest, layout)


def judge_own_manifest(target: Target) -> tuple[Finding, tuple[RunManifest, FragmentLayout] | None]:
    """A run that is only known from its file: nobody was asked."""
    if target.manifest is None or target.task is None:
        return not_known("manifest", "Nobody was asked for it."), None
    try:
        layout = check_model(target.manifest, target.task)
    except P2PTrainerError as error:
        return Finding(check="manifest", ok=False, cause=error.problem, remedy=error.remedy), None
    cause = (
        f"{target.run_id}, from its file; nobody was asked; {layout.num_elements:,} parameters in "
        f"{layout.num_fragments} fragments."
    )
    return Finding(check="manifest", ok=True, cause=cause), (target.manifest, layout)


def judge_peers(view: View) -> Finding:
    """Who is there, as the DHT shows it."""
    training = [view.members[peer].profile for peer in view.training()]
    if not view.members:
        return not_known("peers", "The DHT shows nobody's record: whoever answers may just have started.")
    rate = sum(profile.samples_per_second for profile in training)
    devices = sorted({profile.device for profile in training if profile.device})
    on = f" on {', '.join(devices[:4])}{' and others' if len(devices) > 4 else ''}" if devices else ""
    busy = f"{len(training)} train, {rate:.1f} samples/s in all{on}" if training else "nobody trains yet"
    return Finding(check="peers", ok=True, cause=f"{len(view.members)} peer(s) in the DHT; {busy}.")


def judge_port(back: DialledBack, own: Collection[str]) -> Finding:
    """Whether others can dial this machine.

    :param own: this machine's IP addresses
    """
    if back.hindrance is not None:
        return not_known("port", back.hindrance.problem, "Stop the peer that uses it to have it tried.")
    tried = [answer for answer in back.answers if answer.reached is not None]
    if not tried:
        why = f"none of the {back.asked} peer(s) that were asked tried it"
        return not_known("port", f"Port {back.port}: {why} (older versions do not).", "Ask again in a minute.")
    reached = [answer for answer in tried if answer.reached]
    outside = [answer for answer in tried if _is_public(answer.host)]
    if not reached:
        seen = ", ".join(sorted({answer.host for answer in tried}))
        return Finding(
            check="port",
            ok=False,
            cause=f"None of {len(tried)} peer(s) reached port {back.port} at {seen}.",
            remedy=_open_the_port(back.port, outside[0].host if outside else "", own),
        )
    said = f"{len(reached)} of {len(tried)} peer(s) reached port {back.port} at {reached[0].host}"
    if outside and not any(answer.reached for answer in outside):
        return Finding(
            check="port",
            ok=False,
            cause=f"{said}, inside this network; none of {len(outside)} outside reached it at {outside[0].host}.",
            remedy=_open_the_port(back.port, outside[0].host, own),
        )
    if not outside:
        return not_known("port", f"{said}, inside this network; nobody outside of it was there to ask.")
    return Finding(check="port", ok=True, cause=f"{said}.")


def judge_nat(back: DialledBack, own: Collection[str]) -> Finding:
    """Whether a router stands between this machine and the others. There is no relaying in this version.

    :param own: this machine's IP addresses
    """
    seen = sorted({answer.host for answer in back.answers if answer.host})
    if not seen:
        return not_known("nat", "No peer told at which address it sees this machine.")
    foreign = [host for host in seen if host not in own]
    if not foreign:
        if not any(_is_public(host) for host in seen):
            return not_known("nat", f"Peers of this network see it at {seen[0]}; nobody outside was there to ask.")
        return Finding(check="nat", ok=True, cause=f"No NAT: peers see this machine at its own {seen[0]}.")
    if any(answer.reached for answer in back.answers if answer.host in foreign):
        return Finding(check="nat", ok=True, cause=f"Behind NAT at {foreign[0]}, which forwards the port.")
    return Finding(
        check="nat",
        ok=False,
        cause=f"Behind NAT: peers see {foreign[0]}, which forwards nothing here. Relays are not used.",
        remedy=_open_the_port(back.port, foreign[0], own),
    )


def judge_traffic(manifest: RunManifest, layout: FragmentLayout, others_training: int) -> Finding:
    """What rounds move in a day, each way, at cadence 1; matchmaking, the DHT and fetching bases come on top."""
    members = max(2, others_training + 1)
    averaging = manifest.averaging
    codec = CODECS[0] if averaging.codec == "auto" else averaging.codec
    sizes = [layout.size(fragment) for fragment in range(layout.num_fragments)]
    in_a_cycle = cycle_bytes(codec, averaging.answer_codec, sizes, members)
    cycle_seconds = manifest.run.tick_seconds * manifest.run.fragments
    daily = in_a_cycle * DAY_SECONDS / cycle_seconds
    line = daily * 8 / DAY_SECONDS / 1e6
    when = f"with {members} peers training" if others_training else "as soon as a second peer trains"
    return Finding(
        check="traffic",
        ok=True,
        cause=f"About {gigabytes(daily)} up and as much down a day ({line:.1f} Mbit/s each way) {when}, less "
        f"where the line does not carry every round; "
        f"{megabytes(in_a_cycle)} every {cycle_seconds:g} s.",
    )


def _open_the_port(port: int, seen_at: str, own: Collection[str]) -> str:
    """What makes a machine reachable, as a command where we know enough."""
    port = port if port < 32768 else SUGGESTED_PORT  # above: the system's choice of the moment
    if seen_at and seen_at not in own:
        protocol = "ip6" if ":" in seen_at else "ip4"
        return (
            f"Forward TCP ports {port} and {port + 1} on the router to this machine, and join with --port {port} "
            f"--announce /{protocol}/{seen_at}/tcp/{port}; or switch on UPnP or NAT-PMP there, which is all it needs."
        )
    return f"Open TCP ports {port} and {port + 1} in this machine's firewall, and join with --port {port}."


def _is_public(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False

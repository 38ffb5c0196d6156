"""Emulated links: processes on one computer that meet over lines with a rate, a latency and losses.

Every peer gets a network namespace of its own, and ``link_router`` carries the packets between them. A peer behind NAT
has a private address, the same as every other such peer; it can dial, and nobody can dial it. Nothing has a
name on the machine, so two networks never meet, and nothing is left when the processes in them have ended, also when
they or we were killed. IPv4 only; Linux only; needs the right to make namespaces (root, CAP_NET_ADMIN and
CAP_SYS_ADMIN, or unprivileged user namespaces) and ``nsenter`` (util-linux).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dht_config.errors import RehearsalError
from p2p_trainer.rehearsal import link_router
from p2p_trainer.rehearsal.home_router import PRIVATE_ADDRESS

ANSWER_SECONDS = 30.0
END_SECONDS = 2.0
MAX_PEERS = 1000
UNLIMITED = "unlimited"

_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([kMG])")
_TIME = re.compile(r"(\d{1,6}(?:\.\d{1,9})?)(ms|s)")
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)%")
_BITS_PER_SECOND = {"k": 1e3, "M": 1e6, "G": 1e9}
_MILLISECONDS = {"ms": 1.0, "s": 1e3}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One peer's line to everybody else. A packet between two peers crosses the sender's up and the receiver's down."""

    down_bits_per_second: float = math.inf
    up_bits_per_second: float = math.inf
    round_trip_ms: float = 0.0
    """What the line adds to a round trip: half of it to every crossing. Of two peers, both lines' values add up."""
    jitter_ms: float = 0.0
    """Every crossing takes up to this much longer, evenly spread; packets do not overtake each other."""
    loss: float = 0.0
    """The part, 0 to 1, of the packets that is lost on every crossing."""

    @classmethod
    def parse(cls, text: str) -> LinkSpec:
        """Read a link such as ``50M/40ms`` or ``10M/2M/60ms/5ms/1%``.

        Pieces between slashes, all optional: the rate down, the rate up if it is another (k, M or G bit/s), the round
        trip, the jitter (ms or s), the loss of a crossing in percent.

        Raises: RehearsalError naming the piece that is wrong.
        """
        if text.strip() == UNLIMITED:
            return cls()
        rates: list[float] = []
        times: list[float] = []
        losses: list[float] = []
        for piece in (part.strip() for part in text.split("/")):
            if match := _RATE.fullmatch(piece):
                rates.append(float(match[1]) * _BITS_PER_SECOND[match[2]])
                complaint = "a rate is above 0, and there are two at most" if not rates[-1] or len(rates) > 2 else ""
            elif match := _TIME.fullmatch(piece):
                times.append(float(match[1]) * _MILLISECONDS[match[2]])
                complaint = "there are two times at most, round trip and jitter" if len(times) > 2 else ""
            elif match := _SHARE.fullmatch(piece):
                losses.append(float(match[1]) / 100)
                complaint = "one loss, of at most 100%" if losses[-1] > 1 or len(losses) > 1 else ""
            else:
                complaint = "neither a rate (50M), nor a time (40ms), nor a loss (1%)"
            if complaint:
                raise RehearsalError(
                    problem=f"The link {text!r}: {piece!r} is wrong: {complaint}.",
                    remedy="Write down/up/round trip/jitter/loss, such as 50M/40ms or 10M/2M/60ms/5ms/1%.",
                )
        return cls(
            down_bits_per_second=rates[0] if rates else math.inf,
            up_bits_per_second=rates[-1] if rates else math.inf,
            round_trip_ms=times[0] if times else 0.0,
            jitter_ms=times[1] if len(times) > 1 else 0.0,
            loss=losses[0] if losses else 0.0,
        )

    def __str__(self) -> str:
        """As ``parse`` reads it, without what is not limited; ``unlimited`` if nothing is."""
        pieces = []
        if math.isfinite(self.down_bits_per_second):
            pieces.append(_rate_text(self.down_bits_per_second))
        if self.up_bits_per_second != self.down_bits_per_second:
            pieces.append(_rate_text(self.up_bits_per_second))
        if self.round_trip_ms or self.jitter_ms:
            pieces.append(f"{self.round_trip_ms:g}ms")
        if self.jitter_ms:
            pieces.append(f"{self.jitter_ms:g}ms")
        if self.loss:
            pieces.append(f"{100 * self.loss:g}%")
        return "/".join(pieces) or UNLIMITED


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether links can be emulated here; false values say why not, for a person."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


def available() -> Availability:
    """Find out by making a network of no peers but one."""
    if sys.platform != "linux":
        return Availability("network namespaces need Linux")
    if shutil.which("nsenter") is None:
        return Availability("the program nsenter (package util-linux) is missing")
    try:
        with Network({"probe": LinkSpec()}):
            return Availability()
    except LinksUnavailable as error:
        return Availability(str(error))


class LinksUnavailable(Exception):
    """Links cannot be emulated here; the text says why."""


class Network:
    """Peers with a line each, from entering this context to leaving it. Not for several threads at once.

    :param links: a link for each peer's name; lines are full of what all its conversations send
    :param behind_nat: those of the peers that nobody can dial
    :param seed: decides which packets are lost, and the jitter; not when packets are sent, so no run is like another
    """

    def __init__(self, links: Mapping[str, LinkSpec], *, behind_nat: Collection[str] = (), seed: int = 0) -> None:
        if len(links) > MAX_PEERS:
            raise RehearsalError(problem=f"{len(links)} emulated links are too many.", remedy=f"At most {MAX_PEERS}.")
        self._links = dict(links)
        self._positions = {peer: position for position, peer in enumerate(links)}
        self._numbers = {peer: position + 1 for peer, position in self._positions.items()}
        self._behind_nat = frozenset(behind_nat)
        self._seed = seed
        self._router: subprocess.Popen[str] | None = None
        self._namespaces: list[int] = []
        self._user_namespace = False

    def __enter__(self) -> Network:
        """:raises LinksUnavailable: this user or this machine cannot make what is needed"""
        numbers = [os.getpid(), len(self._links), self._seed, *(self._numbers[peer] for peer in self._behind_nat)]
        self._router = subprocess.Popen(
            # Isolated, without site-packages: it needs the standard library alone.
            [sys.executable, "-IS", link_router.__file__, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            answer = self._answer()
            if "error" in answer:
                raise LinksUnavailable(answer["error"])
            self._namespaces, self._user_namespace = answer["namespaces"], answer["user_namespace"]
            for peer, spec in self._links.items():
                self.set_link(peer, spec)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __contains__(self, peer: object) -> bool:
        return peer in self._numbers

    def address(self, peer: str) -> str:
        """The peer's own IPv4 address, for its ``--host``."""
        return PRIVATE_ADDRESS if peer in self._behind_nat else self.public_address(peer)

    def public_address(self, peer: str) -> str:
        """The IPv4 address that others see; of a peer behind NAT its router's."""
        return link_router.address(self._numbers[peer])

    def command(self, peer: str, command: Sequence[str]) -> list[str]:
        """The command that runs this command at a peer: the same process, in the peer's namespace.

        It sees the peer's device and a loopback of its own, and no other network. Start it while the network stands.
        """
        if self._router is None:
            raise ValueError("the network does not stand")
        namespace = Path("/proc", str(self._router.pid), "fd", str(self._namespaces[self._positions[peer]]))
        user = [f"--user=/proc/{self._router.pid}/ns/user", "--preserve-credentials"] if self._user_namespace else []
        return ["nsenter", *user, f"--net={namespace}", "--", *command]

    def traffic(self, peer: str) -> tuple[int, int]:
        """Bytes that the peer has sent and received over its line so far, by the counters of its interfaces.

        Whole IP packets; of what was sent also what was lost on the way. Raises: LinksUnavailable.
        """
        command = self.command(peer, ["cat", "/proc/net/dev"])
        try:
            shown = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise LinksUnavailable(f"the counters of {peer}'s line cannot be read: {error}") from error
        return counted_bytes(shown)

    def set_link(self, peer: str, spec: LinkSpec) -> None:
        """Give a peer another line. Packets on the way arrive as they would have; those after them do not overtake."""
        self._links[peer] = spec
        self._tell(
            peer=self._positions[peer],
            up=_direction(spec, spec.up_bits_per_second),
            down=_direction(spec, spec.down_bits_per_second),
        )

    def link(self, peer: str) -> LinkSpec:
        """The line that a peer has now."""
        return self._links[peer]

    def down(self, peer: str) -> None:
        """Cut a peer off: whatever is sent to it or by it, or under way, is lost; nobody is told."""
        self._tell(peer=self._positions[peer], connected=False)

    def up(self, peer: str) -> None:
        """Connect a peer again."""
        self._tell(peer=self._positions[peer], connected=True)

    def renumber(self, peer: str) -> str:
        """Give a peer that is not behind NAT another address, as a line does that comes back; returns it."""
        if peer in self._behind_nat:
            raise ValueError(f"{peer} is behind NAT: its address is its router's")
        number = max(len(self._links), *self._numbers.values()) + 1
        self._tell(peer=self._positions[peer], number=number)
        self._numbers[peer] = number
        return self.address(peer)

    def split(self, *parts: Collection[str]) -> None:
        """Cut these parts off from each other, and from whoever is in none of them. Without any, all is whole again."""
        part_of = {peer: number for number, part in enumerate(parts, start=1) for peer in part}
        self._tell(parts=[part_of.get(peer, 0) for peer in self._numbers])

    def _tell(self, **command: Any) -> None:
        router = self._router
        if router is None or router.stdin is None:
            raise ValueError("the network does not stand")
        with suppress(BrokenPipeError):  # the answer that does not come says more
            print(json.dumps(command), file=router.stdin, flush=True)
        self._answer()

    def _answer(self) -> dict[str, Any]:
        router = self._router
        line = router.stdout.readline() if router is not None and router.stdout is not None else ""
        if router is None or not line:
            code = router.wait(ANSWER_SECONDS) if router is not None else None
            raise LinksUnavailable(f"the router of the emulated links ended (exit code {code})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        router, self._router = self._router, None
        if router is None:
            return
        for stream in (router.stdin, router.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        try:
            router.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            router.kill()
            router.wait()


def counted_bytes(proc_net_dev: str) -> tuple[int, int]:
    """Sent and received by all interfaces but the loopback, from the text of ``/proc/net/dev``."""
    sent = received = 0
    for line in proc_net_dev.splitlines()[2:]:  # two lines of headings
        interface, _, counters = line.partition(":")
        if interface.strip() != "lo":
            numbers = counters.split()
            received, sent = received + int(numbers[0]), sent + int(numbers[8])
    return sent, received


def _direction(spec: LinkSpec, bits_per_second: float) -> dict[str, float | None]:
    return {
        "bits_per_second": bits_per_second if math.isfinite(bits_per_second) else None,
        "latency_seconds": spec.round_trip_ms / 2e3,
        "jitter_seconds": spec.jitter_ms / 1e3,
        "loss": spec.loss,
    }


def _rate_text(bits_per_second: float) -> str:
    for unit, factor in reversed(_BITS_PER_SECOND.items()):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:g}{unit}"
    return f"{bits_per_second / 1e3:g}k"

"""What a rehearsal plays: unlike machines, each with a speed, a line, and a life of its own.

A scene is written in one line (``--peers``) or in a TOML file (``--scene``); ``README.md`` shows both. The line is a
list of peers between commas, and each of them is

    SPEED[:LINK][:nat][:mem=SIZE][LIFE...][*N]

SPEED is samples a second, a machine's name or a share of one (``0.5x4090``). LINK is what ``LinkSpec.parse`` reads.
``nat`` puts the peer behind a home router: it can dial others, and nobody can dial it. ``mem=2G`` (M or G bytes, in
powers of 1024) is all the memory that its processes may take; a machine with a name has its own memory without it.
LIFE, in seconds after training began and in order of time: ``@30-90`` is there from 30 to 90 s and leaves (``@30-``
stays, ``@-90`` is there from the beginning), ``!60`` is killed at 60 s, ``~20-25`` is frozen from 20 to 25 s; a peer
that left or was killed may come back with another ``@``. ``*N`` makes N such peers.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dht_config.errors import RehearsalError, UsageError
from dht_config.manifest import EXAMPLES
from p2p_trainer.machines import MACHINES, memory_of, read_memory, read_speed
from p2p_trainer.rehearsal.link_router import MTU_BYTES
from p2p_trainer.rehearsal.links import LinkSpec

MAX_PEERS = 64
DEFAULT_PEERS = "80,40,20,8"
DEFAULT_SECONDS = 90.0
MAX_SECONDS = 1e6
CHURN_AWAY_AT = (0.15, 0.6)
"""Between these parts of the rehearsal a peer of the churn goes away: after its first rounds, early enough for it to
come back and to be in rounds again."""
CHURN_AWAY_FOR = (0.05, 0.2)
"""This part of the rehearsal it is away."""
LEAST_BITS_PER_SECOND = 8.0 * MTU_BYTES
"""One full packet a second: below it no connection comes about."""
EXCERPT_COLUMNS = 72

Action = Literal["start", "leave", "kill", "freeze", "thaw"]

_PIECE = re.compile(r"(?P<speed>[^:@!~*]*)(?P<options>:[^@!~*]*)?(?P<life>[^*]*)(?P<count>\*.*)?", re.DOTALL)
_OPTION = re.compile(r":([^:]*)")
_LIFE = re.compile(r"[@!~][^@!~]*")
_SECONDS = re.compile(r"\d{1,7}(?:\.\d{1,3})?", re.ASCII)
_COUNT = re.compile(r"0*[1-9]\d{0,2}", re.ASCII)
_PERCENT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*%", re.ASCII)


class SceneError(UsageError):
    """A scene that cannot be played. ``excerpt`` is two lines: what was written, and the offending piece underlined."""

    def __init__(self, problem: str, remedy: str = "", excerpt: str = "") -> None:
        super().__init__(problem, remedy)
        self.excerpt = excerpt


def underlined(text: str, start: int, end: int) -> str:
    """Two lines: the text, or what surrounds the piece if that is long, and ``^`` under text[start:end]."""
    text = text.replace("\t", " ").replace("\n", " ")
    end = max(end, start + 1)
    first = max(0, min(start - EXCERPT_COLUMNS // 2, len(text) - EXCERPT_COLUMNS))
    shown = text[first : first + EXCERPT_COLUMNS]
    before = "... " if first else ""
    after = " ..." if first + EXCERPT_COLUMNS < len(text) else ""
    carets = "^" * min(end - start, max(1, len(shown) - (start - first)))
    return f"{before}{shown}{after}\n{' ' * (len(before) + start - first)}{carets}"


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happens to a peer, in seconds after training began."""

    at_seconds: float
    action: Action


@dataclass(frozen=True, slots=True)
class Stay:
    """A time that a peer is there for."""

    from_seconds: float = 0.0
    until_seconds: float = math.inf
    killed: bool = False
    """It does not leave but is killed with -9, all of it at once, as when its machine loses power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """When a peer is there and when it is frozen, in seconds after training began; in order of time."""

    stays: tuple[Stay, ...] = (Stay(),)
    frozen: tuple[tuple[float, float], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it is there all the time, at work."""
        return self == Life()

    @property
    def begins_with_training(self) -> bool:
        return self.stays[0].from_seconds == 0

    def moments(self) -> list[Moment]:
        """Everything that happens to it, in order; the start of a peer that is there from the beginning is none."""
        found = [Moment(stay.from_seconds, "start") for stay in self.stays if stay.from_seconds > 0]
        found += [
            Moment(stay.until_seconds, "kill" if stay.killed else "leave")
            for stay in self.stays
            if math.isfinite(stay.until_seconds)
        ]
        found += [Moment(begin, "freeze") for begin, _ in self.frozen]
        found += [Moment(end, "thaw") for _, end in self.frozen]
        # At one moment a thaw comes before a leave, and an end before the next start.
        order: list[Action] = ["thaw", "leave", "kill", "start", "freeze"]
        return sorted(found, key=lambda moment: (moment.at_seconds, order.index(moment.action)))

    def complaint(self, seconds: float) -> tuple[int, str] | None:
        """What is impossible about it in a rehearsal of this length.

        Returns: the index of the stay (or, counted on from there, of the freeze), and words; None if all is well.
        """
        now = 0.0
        for index, stay in enumerate(self.stays):
            if stay.from_seconds < now or (index and stay.from_seconds == now):
                return index, "it comes back before it was gone"
            if stay.until_seconds <= stay.from_seconds:
                return index, f"it {'dies' if stay.killed else 'leaves'} before it joins"
            if (stay.until_seconds if math.isfinite(stay.until_seconds) else stay.from_seconds) >= seconds:
                return index, f"the rehearsal is over after {seconds:g} s of training"
            now = stay.until_seconds
        thawed = 0.0
        for index, (begin, end) in enumerate(self.frozen, start=len(self.stays)):
            if end <= begin:
                return index, "it thaws before it freezes"
            if begin < thawed:
                return index, "it is frozen then already: freezes overlap"
            if not any(stay.from_seconds <= begin and end <= stay.until_seconds for stay in self.stays):
                return index, "it is not there then"
            if begin >= seconds:
                return index, f"the rehearsal is over after {seconds:g} s of training"
            thawed = end
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedPeer:
    """One peer of a rehearsal; its name is unique among them and safe in a file name."""

    name: str
    samples_per_second: float
    link: LinkSpec | None = None
    """None: no line of its own."""
    behind_nat: bool = False
    """It can dial others; nobody can dial it."""
    memory_bytes: int | None = None
    """All that its processes may take; None: as much as there is."""
    life: Life = Life()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What to rehearse, and for how long."""

    peers: tuple[EmulatedPeer, ...]
    seconds: float = DEFAULT_SECONDS
    """To train once every peer that is there from the beginning has begun."""
    churn: float = 0.0
    """The part, 0 to 1, of the peers without a life of their own that go away and come back."""
    seed: int = 0
    """Decides who that is, how and when, and which packets are lost."""
    run: str = EXAMPLES[0]
    """A manifest's path, or the name of a shipped example."""

    @property
    def has_links(self) -> bool:
        return any(peer.link is not None or peer.behind_nat for peer in self.peers)

    def with_churn(self) -> Scene:
        """The same scene with the lives that its churn and its seed give the peers; it has no churn then."""
        chance = random.Random(self.seed)
        whole = [peer.name for peer in self.peers if peer.life.is_whole]
        chosen = set(chance.sample(whole, math.ceil(self.churn * len(whole) - 1e-9)))
        peers = [
            replace(peer, life=_churned(chance, self.seconds)) if peer.name in chosen else peer for peer in self.peers
        ]
        return replace(self, peers=tuple(peers), churn=0.0)


def _churned(chance: random.Random, seconds: float) -> Life:
    away_at = seconds * chance.uniform(*CHURN_AWAY_AT)
    back_at = away_at + seconds * chance.uniform(*CHURN_AWAY_FOR)
    return Life(stays=(Stay(0.0, away_at, killed=chance.random() < 0.5), Stay(back_at)))


def parse_churn(text: str) -> float:
    """Read ``20%``; returns 0 to 1. Raises: SceneError."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None or float(match[1]) > 100:
        raise SceneError(
            f"--churn: {text!r} is wrong: {'over 100%' if match else 'not a share in percent'}.",
            "Write the share of the peers that go away and come back, such as 20%.",
            underlined(text, 0, len(text)),
        )
    return float(match[1]) / 100


def parse_peers(text: str, seconds: float = math.inf) -> tuple[EmulatedPeer, ...]:
    """Read a list of peers such as ``80,40,20,8`` or ``4090:500M/20ms,3060:10M/60ms!60@90-*2``.

    :param seconds: how long the rehearsal is; what would happen after it is refused
    Raises: SceneError naming and underlining what is wrong.
    """
    peers: list[EmulatedPeer] = []
    names = Names()
    position = 0
    for piece in text.split(","):
        peer, count = _Piece(text, position, piece).read(seconds)
        if len(peers) + count > MAX_PEERS:
            raise SceneError(
                f"--peers: {piece.strip()!r} makes more than {MAX_PEERS} peers.",
                "Rehearse with fewer: they all share this machine.",
                underlined(text, position, position + len(piece)),
            )
        peers += [replace(peer, name=names.next(peer.name)) for _ in range(count)]
        position += len(piece) + 1
    return tuple(peers)


class Names:
    """Gives every peer a name of its own: the second 3060 is 3060-2."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def next(self, label: str) -> str:
        number, name = 1, label
        while name in self._given:
            number += 1
            name = f"{label}-{number}"
        self._given.add(name)
        return name


@dataclass(frozen=True, slots=True)
class _Piece:
    """One peer of ``--peers``, and where in the whole text it stands."""

    text: str
    start: int
    piece: str

    def read(self, seconds: float) -> tuple[EmulatedPeer, int]:
        match = _PIECE.fullmatch(self.piece)
        if match is None:  # the pattern takes every text
            raise self._wrong("it cannot be read", 0, len(self.piece))
        count = 1
        if match["count"] is not None:
            # Not `int` alone: it takes "1_0", "+2" and other scripts' digits.
            if not _COUNT.fullmatch(match["count"][1:].strip()):
                complaint = "what follows the * must be a whole number of peers, 1 or more"
                raise self._wrong(complaint, *match.span("count"))
            count = int(match["count"][1:])
        try:
            label, samples_per_second = read_speed(match["speed"])
        except ValueError as error:
            raise self._wrong(str(error), *match.span("speed")) from None
        peer = EmulatedPeer(name=label, samples_per_second=samples_per_second, memory_bytes=memory_of(match["speed"]))
        peer = self._with_options(peer, match.start("options"), match["options"] or "")
        return replace(peer, life=self._life(match.start("life"), match["life"], seconds)), count

    def _with_options(self, peer: EmulatedPeer, start: int, text: str) -> EmulatedPeer:
        """The peer with what stands between its speed and its life: its line, NAT, memory, each once."""
        given: set[str] = set()
        for match in _OPTION.finditer(text):
            first, end = start + match.start(1), start + match.end(1)
            written = match[1].strip()
            what = "nat" if written.lower() == "nat" else "mem=SIZE" if written.startswith("mem") else "line"
            if what in given:
                raise self._wrong(
                    f"there is a {what} already; each of LINK, nat and mem=SIZE stands there once", first, end
                )
            given.add(what)
            try:
                if what == "nat":
                    peer = replace(peer, behind_nat=True)
                elif what == "mem=SIZE":
                    name, _, size = written.partition("=")
                    if name.strip() != "mem":
                        raise ValueError("write mem=SIZE, such as mem=2G")
                    peer = replace(peer, memory_bytes=read_memory(size))
                else:
                    peer = replace(peer, link=read_link(match[1]))
            except LinkPieceError as error:
                raise self._wrong(str(error), first + error.start, first + error.end) from None
            except ValueError as error:
                raise self._wrong(str(error), first, end) from None
        return peer

    def _life(self, start: int, text: str, seconds: float) -> Life:
        stays: list[Stay] = []
        frozen: list[tuple[float, float]] = []
        spans_of_stays: list[tuple[int, int]] = []
        spans_of_frozen: list[tuple[int, int]] = []
        for match in _LIFE.finditer(text):
            span = start + match.start(), start + match.end()
            sign, written = match[0][0], match[0][1:].strip()
            if sign == "!" and (killed_at := _moment(written)) is not None:
                if stays and math.isfinite(stays[-1].until_seconds):
                    raise self._wrong("it is not there then", *span)
                stay = stays.pop() if stays else Stay()
                stays.append(replace(stay, until_seconds=killed_at, killed=True))
                spans_of_stays[len(stays) - 1 :] = [span]
                continue
            since, dash, until = (part.strip() for part in written.partition("-"))
            begin, end = _moment(since or "0"), _moment(until) if until else math.inf
            if begin is None or end is None or not dash or sign == "!" or (sign == "~" and not (since and until)):
                raise self._wrong("write @FROM-TO, !KILLED_AT or ~FROM-TO in seconds", *span)
            if sign == "@":
                stays.append(Stay(begin, end))
                spans_of_stays.append(span)
            else:
                frozen.append((begin, end))
                spans_of_frozen.append(span)
        life = Life(stays=tuple(stays) or (Stay(),), frozen=tuple(frozen))
        if (complaint := life.complaint(seconds)) is not None:
            index, words = complaint
            # Of a stay that nobody wrote there is nothing to complain.
            raise self._wrong(words, *[*(spans_of_stays or [(start, start)]), *spans_of_frozen][index])
        return life

    def _wrong(self, complaint: str, start: int, end: int) -> SceneError:
        return SceneError(
            f"--peers: {self.piece.strip()!r} is wrong: {complaint}.",
            f"Write SPEED[:LINK][:nat][:mem=SIZE][@FROM-TO][!KILLED_AT][*N]; speeds are samples a second or machines "
            f"({', '.join(MACHINES)}), such as 80,40,20,8 or 4090:500M/20ms,3060:10M/60ms@30-*2.",
            underlined(self.text, self.start + start, self.start + end),
        )


class LinkPieceError(ValueError):
    """A link's piece at text[start:end] is wrong; the text says how, for a person."""

    def __init__(self, complaint: str, start: int, end: int) -> None:
        super().__init__(complaint)
        self.start, self.end = start, end


def read_link(text: str) -> LinkSpec:
    """What ``LinkSpec.parse`` reads, if something comes through. Raises: LinkPieceError."""
    link = LinkSpec()
    for start, end in _pieces_of_a_link(text):
        try:
            link = LinkSpec.parse(text[:end])
        except RehearsalError as error:
            raise LinkPieceError(error.problem.rstrip("."), start, end) from None
        if min(link.down_bits_per_second, link.up_bits_per_second) < LEAST_BITS_PER_SECOND:
            least = f"{LEAST_BITS_PER_SECOND / 1e3:g}k"
            raise LinkPieceError(f"slower than one packet a second ({least})", start, end)
        if link.loss >= 1:
            raise LinkPieceError("nothing would ever arrive", start, end)
    return link


def _pieces_of_a_link(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for piece in text.split("/"):
        yield start, start + len(piece)
        start += len(piece) + 1


def _moment(text: str) -> float | None:
    return float(text) if _SECONDS.fullmatch(text) else None

"""What ``side_by_side.py`` plays: unlike machines and lines, who takes part, and how each contender divides the work.

Pure. Speeds are samples a second of the shipped example ``stdlib-text``; the reference cluster's 20/10/5/4/2/2/1/1 are
three times as much here, which leaves two cores most of their time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dht_config.manifest import example_manifest
from p2p_trainer.rehearsal.links import LinkSpec
from p2p_trainer.rehearsal.scene import EmulatedPeer, parse_peers

RUN = "stdlib-text"
DDP = ("ddp_equal", "ddp_proportional")
HIVEMIND = ("hivemind_sync", "hivemind_delayed", "hivemind_local")
ALONE = ("fastest_alone", "one_machine")
OURS = "ours"
CONTENDERS = (*DDP, *HIVEMIND, *ALONE, OURS)
OURS_WITHOUT_CURSED = "ours_without_cursed"
"""Run in the scene ``cursed`` for the ratio, not a contender."""

CYCLE_SECONDS = 4.0
"""Of the example: a parameter's time between two rounds. hivemind's epochs are made as long."""
MICRO_STEP_SECONDS = 0.25
MANY_PEERS = 5
"""From this many on ours holds half as many rounds, of fragments twice as big: a cycle is as long, and two cores carry
the peers."""

_REFERENCE = "60:300M/20ms,30:1G/10ms,15:100M/30ms,12:100M/30ms,6:50M/40ms,6:30M/50ms,3:20M/60ms,3:10M/80ms"
_PEERS = {
    "equal": "30:1G/10ms*4",
    "8421": "80:1G/10ms,40:1G/10ms,20:1G/10ms,10:1G/10ms",
    "reference": _REFERENCE,
    "cursed": f"{_REFERENCE},0.6:1M/80ms",
    "killed": _REFERENCE,
    "lines": "80:1G/20ms,40:100M/40ms,20:20M/60ms,10:5M/80ms",
    "throttled": "80:1G/10ms,40:1G/10ms,20:1G/10ms,10:1G/10ms",
}
SCENES = tuple(_PEERS)
_KILLED = {"killed": ("30", "6-2", "3-2")}
"""Three of eight peers: 29 % of the speed."""
_KILLED_AT = 0.4
"""Of the training time; a moment of no round's choosing, so in the middle of one."""
_FLAPPING = {"cursed": ("0.6",)}
_THROTTLED = {"throttled": ("20",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flapping:
    """A line that goes down again and again."""

    up_seconds: float = 15.0
    down_seconds: float = 5.0

    def moments(self, seconds: float) -> Iterator[tuple[float, bool]]:
        """(when, whether the line is up from then on), in order, for this long; the line is up at 0 and at the end."""
        at = self.up_seconds
        while at + self.down_seconds < seconds:
            yield at, False
            yield at + self.down_seconds, True
            at += self.down_seconds + self.up_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttling:
    """A line that for a while carries next to nothing."""

    link: str = "256k/80ms"
    since: float = 1 / 3
    """This part of the training time is over then."""
    until: float = 2 / 3


@dataclass(frozen=True, slots=True)
class LineChange:
    """What becomes of a peer's line, in seconds after all train."""

    at_seconds: float
    peer: str
    link: LinkSpec | None
    """None: it is down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkScene:
    """One scene, of one length."""

    name: str
    seconds: float
    peers: tuple[EmulatedPeer, ...]
    """The fastest first."""
    kill_at_seconds: float | None = None
    killed: tuple[str, ...] = ()
    flapping: tuple[str, ...] = ()
    """Names of peers whose line goes down again and again."""
    throttled: tuple[str, ...] = ()
    """Names of peers whose line carries next to nothing for a while."""

    @property
    def throttled_seconds(self) -> tuple[float, float] | None:
        """From when to when, if a line is throttled."""
        if not self.throttled:
            return None
        return Throttling().since * self.seconds, Throttling().until * self.seconds

    def line_changes(self, contender: str) -> list[LineChange]:
        """All that happens to the lines of those who take part, in order; nobody who is alone has one that matters."""
        peers = self.taking_part(contender)
        if len(peers) < 2:
            return []
        found = []
        for peer in peers:
            if peer.name in self.flapping:
                found += [
                    LineChange(at, peer.name, peer.link if up else None) for at, up in Flapping().moments(self.seconds)
                ]
            if peer.name in self.throttled and (window := self.throttled_seconds) is not None:
                slow = LinkSpec.parse(Throttling().link)
                found += [LineChange(window[0], peer.name, slow), LineChange(window[1], peer.name, peer.link)]
        return sorted(found, key=lambda change: change.at_seconds)

    @property
    def samples_per_second(self) -> float:
        """Of all peers alone, as they are emulated."""
        return sum(peer.samples_per_second for peer in self.peers)

    def taking_part(self, contender: str) -> tuple[EmulatedPeer, ...]:
        """The machines that a contender uses."""
        if contender == "fastest_alone":
            return self.peers[:1]
        if contender == "one_machine":
            only = EmulatedPeer(name="all", samples_per_second=self.samples_per_second, link=self.peers[0].link)
            return (only,)
        if contender == OURS_WITHOUT_CURSED:
            return tuple(peer for peer in self.peers if peer.name not in self.flapping)
        return self.peers

    def lived_seconds(self, peer: str) -> float:
        """The part of the training time that a peer is there for."""
        if self.kill_at_seconds is not None and peer in self.killed:
            return self.kill_at_seconds
        return self.seconds


def manifest_text(peers: int) -> str:
    """The shipped example; for many peers with two fragments and ticks of 2 s instead of four and 1 s."""
    text = example_manifest(RUN)
    if peers < MANY_PEERS:
        return text
    for before, after in (("tick_seconds = 1.0 ", "tick_seconds = 2.0 "), ("fragments = 4 ", "fragments = 2 ")):
        if text.count(before) != 1:
            raise ValueError(f"the example {RUN} has no line {before!r} any more")
        text = text.replace(before, after)
    return text


def load_scene(name: str, seconds: float) -> BenchmarkScene:
    """:param name: one of SCENES"""
    killed = _KILLED.get(name, ())
    return BenchmarkScene(
        name=name,
        seconds=seconds,
        peers=parse_peers(_PEERS[name]),
        killed=killed,
        kill_at_seconds=_KILLED_AT * seconds if killed else None,
        flapping=_FLAPPING.get(name, ()),
        throttled=_THROTTLED.get(name, ()),
    )


def contenders_of(scene: str, chosen: Sequence[str]) -> tuple[str, ...]:
    """What to run, in order: nobody is killed who is alone, and our own ratio needs another run."""
    kept = [name for name in chosen if not (scene == "killed" and name in ALONE)]
    if scene == "cursed" and OURS in kept:
        kept.insert(kept.index(OURS), OURS_WITHOUT_CURSED)
    return tuple(kept)


def batches(contender: str, speeds: Sequence[float], batch_size: int) -> list[int]:
    """Samples of each peer in one of its own steps.

    ddp_equal          the run's batch everywhere
    ddp_proportional   shares of about as many samples in all, as the speeds are; a peer may have none
    hivemind_local     the run's batch: each step is an inner step
    hivemind, others   what accumulates toward the epoch: less for the slow, so that none is in the middle of a long
                       step when an epoch ends
    """
    if contender == "ddp_proportional":
        return proportional_batches(speeds, batch_size * len(speeds))
    if contender in ("hivemind_sync", "hivemind_delayed"):
        return [min(batch_size, max(1, int(speed * MICRO_STEP_SECONDS))) for speed in speeds]
    return [batch_size] * len(speeds)


def proportional_batches(speeds: Sequence[float], about: int) -> list[int]:
    """Whole samples in the proportion of the speeds, by largest remainder.

    Of all totals from 0.7 to 1.3 times ``about`` it takes the one whose slowest peer loses least by rounding.
    """

    def divided(total: int) -> list[int]:
        exact = [total * speed / sum(speeds) for speed in speeds]
        shares = [int(share + 1e-9) for share in exact]
        by_remainder = sorted(range(len(speeds)), key=lambda index: shares[index] - exact[index])
        for index in by_remainder[: total - sum(shares)]:
            shares[index] += 1
        return shares

    def lost(total: int) -> float:
        return max(share / speed for share, speed in zip(divided(total), speeds, strict=True)) * sum(speeds) / total

    least = max(1, round(0.7 * about))
    totals = range(least, max(least, round(1.3 * about)) + 1)
    return divided(min(totals, key=lambda total: (round(lost(total), 6), abs(total - about))))

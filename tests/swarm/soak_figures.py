"""What a soak came to, from what its peers wrote: pure functions, so that what counts as broken is itself tested.

Times are unix seconds. Events are lines of ``metrics.jsonl`` of all of a peer's starts, oldest first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Event = Mapping[str, Any]

FULL = 0.9
"""Of what the swarm was credited in calm, for the peers that are there: this is its full rate again."""
WINDOW_CYCLES = 4
"""Rates are over so many cycles: a round that ends a moment later is no dip."""
LOSS_PARTS = 5
LOSS_TOLERANCE = 0.1
"""Of what it fell to its lowest: it may rise again by so much."""
RSS_TOLERANCE, RSS_TOLERANCE_BYTES = 0.05, 8 << 20
DESCRIPTORS_TOLERANCE, THREADS_TOLERANCE = 8, 4
SETTLED_SECONDS = 60.0
"""Of a process's life: caches and pools fill."""
JUDGED_SECONDS, RSS_JUDGED_SECONDS = 60.0, 240.0
"""Shorter lives after that say nothing of descriptors and threads, or of memory."""


# --------------------------------------------------------------------------- bases and accounts


def digest_conflicts(events: Mapping[str, Sequence[Event]]) -> tuple[int, list[str]]:
    """Invariant 1: (versions that several peers had, those among them with more than one digest).

    :param events: by peer
    """
    seen: dict[tuple[int, int], dict[str, set[str]]] = {}
    for peer, own in events.items():
        for event in own:
            if event["event"] == "round" and event["outcome"] == "committed":
                version = event["version"]
            elif event["event"] == "rebase":
                version = event["to_version"]
            else:
                continue
            seen.setdefault((event["fragment"], version), {}).setdefault(event["digest"], set()).add(peer)
    shared = {key: digests for key, digests in seen.items() if len(set().union(*digests.values())) > 1}
    conflicts = [
        f"fragment {fragment} version {version}: "
        + ", ".join(f"{digest[:8]} on {'+'.join(sorted(peers))}" for digest, peers in sorted(digests.items()))
        for (fragment, version), digests in sorted(seen.items())
        if len(digests) > 1
    ]
    return len(shared), conflicts


def broken_accounts(leaves: Mapping[str, Event | None]) -> list[str]:
    """Invariant 2, peer by peer: credited + pending + dropped is what was trained.

    :param leaves: each peer's last goodbye, None if it ended without one
    """
    broken = []
    for peer, leave in leaves.items():
        if leave is None or "trained_samples" not in leave:
            broken.append(f"{peer} ended without closing its accounts")
            continue
        credited, pending, dropped = (leave[f"{kind}_samples"] for kind in ("credited", "pending", "dropped"))
        total, trained = credited + pending + dropped, leave["trained_samples"]
        if leave["exact"] is not True or abs(total - trained) > 1e-6 or trained > leave["processed_samples"]:
            broken.append(
                f"the samples of {peer} do not add up: credited {credited:g} + pending {pending:g} + dropped "
                f"{dropped:g}, trained {trained:g} of {leave['processed_samples']} processed"
            )
    return broken


def broken_loss(losses: Sequence[tuple[float, float]]) -> list[str]:
    """The held-out loss ends lower than it began, and about as low as it ever was. :param losses: (time, loss)"""
    parts = loss_by_parts(losses)
    if len(parts) < 2:
        return ["the held-out loss was not evaluated often enough to say whether it fell"]
    broken = []
    if parts[-1] >= parts[0]:
        broken.append(f"the loss did not fall: {parts[0]:.3f} at the start, {parts[-1]:.3f} at the end")
    if parts[-1] > min(parts) + LOSS_TOLERANCE * (parts[0] - min(parts)) and parts[-1] < parts[0]:
        broken.append(f"the loss rose again: {min(parts):.3f} at its lowest, {parts[-1]:.3f} at the end")
    return broken


def loss_by_parts(losses: Sequence[tuple[float, float]]) -> list[float]:
    """Its mean in each part of the time from the first to the last evaluation, without parts that have none."""
    if not losses:
        return []
    first, last = min(at for at, _ in losses), max(at for at, _ in losses)
    span = max(last - first, 1e-9)
    parts: list[list[float]] = [[] for _ in range(LOSS_PARTS)]
    for at, loss in losses:
        parts[min(LOSS_PARTS - 1, int(LOSS_PARTS * (at - first) / span))].append(loss)
    return [statistics.fmean(part) for part in parts if part]


# --------------------------------------------------------------------------- recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Samples of one peer that came into a base, as a mean over the whole model."""

    at: float
    peer: str
    samples: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A peer was there and trained, as far as anybody can expect it."""

    peer: str
    begin: float
    end: float


def credits(events: Mapping[str, Sequence[Event]], fragments: int) -> list[Credit]:
    """From the rounds that each peer committed; its weight there must be in samples, as the manifest decides."""
    found = [
        Credit(at=event["time"], peer=peer, samples=event["weight"] * (1 - event["late_share"]) / fragments)
        for peer, own in events.items()
        for event in own
        if event["event"] == "round" and event["outcome"] == "committed"
    ]
    return sorted((one for one in found if one.samples > 0), key=lambda one: one.at)


def stays(peer: str, starts: Sequence[float], faults: Sequence[tuple[float, float]], end: float) -> list[Stay]:
    """When a peer is expected to earn credit: from its first start on, but while a fault keeps it away.

    :param starts: when it began to train, each time
    :param faults: what took it away, each from, to; one that it does not live through lasts until its next start
    """
    if not starts:
        return []
    found, begin = [], min(starts)
    for (at, until), (following, _) in pairwise([*faults, (end, end)]):
        if begin < at:
            found.append(Stay(peer=peer, begin=begin, end=at))
        begin = max(begin, next((start for start in starts if at < start < following), until))
    return [*found, Stay(peer=peer, begin=begin, end=end)] if begin < end else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarmwide:
    """How much the swarm is credited, against what it should be."""

    credits: Sequence[Credit]
    stays: Sequence[Stay]
    rates: Mapping[str, float]
    """What each peer does alone, samples a second."""
    window_seconds: float
    step_seconds: float

    def share(self, at: float) -> float | None:
        """Credited of what the peers that were there do alone, in the window that begins then; None if nobody was."""
        end = at + self.window_seconds
        due = sum(self.rates[stay.peer] * max(0.0, min(stay.end, end) - max(stay.begin, at)) for stay in self.stays)
        got = sum(credit.samples for credit in self.credits if at < credit.at <= end)
        return got / due if due else None

    def usual_share(self, begin: float, end: float) -> float:
        """The median over a calm time; 0 if it is shorter than a window."""
        shares, at = [], begin
        while at + self.window_seconds <= end:
            shares.append(self.share(at) or 0.0)
            at += self.step_seconds
        return statistics.median(shares) if shares else 0.0

    def seconds_to_full(self, at: float, usual: float, end: float) -> float | None:
        """From a moment to the first window with the full rate; None if there is none before the end."""
        begin = at
        while begin + self.window_seconds <= end:
            share = self.share(begin)
            if share is not None and share >= FULL * usual:
                return round(begin - at, 1)
            begin += self.step_seconds
        return None

    def seconds_to_credit(self, peer: str, after: float) -> float | None:
        """From a moment to a peer's next credited sample."""
        return next((round(one.at - after, 1) for one in self.credits if one.peer == peer and one.at > after), None)


def broken_recoveries(recoveries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Faults after which the swarm did not come to its full rate again, or the peer did not come back."""
    broken = []
    for one in recoveries:
        if one["note"]:
            continue
        what = f"{one['kind']} of {one['peer']} at {one['at']:g} s"
        if one["seconds_to_full_rate"] is None:
            broken.append(f"after {what} the swarm did not come to its full rate again")
        if one["seconds_to_first_credit"] is None:
            broken.append(f"after {what} the peer was not credited with anything again")
    return broken


def unasked_faults(events: Mapping[str, Sequence[Event]], struck: Iterable[tuple[str, float]]) -> list[str]:
    """Parts that a peer says have died or frozen, although nobody did anything to them.

    :param struck: peers, and when one of their parts was killed or frozen
    """
    left: dict[str, list[float]] = {}
    for peer, at in struck:
        left.setdefault(peer, []).append(at)
    broken = []
    for peer, own in events.items():
        for event in own:
            if event["event"] != "fault":
                continue
            cause = next((at for at in left.get(peer, []) if at < event["time"]), None)
            if cause is None:
                broken.append(f"{peer} failed by itself: {event['reason']}")
            else:
                left[peer].remove(cause)
    return broken


def by_kind(recoveries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """How often each kind of fault came about, and the medians of what it took; None where it never was over."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for one in recoveries:
        if not one["note"]:
            rows.setdefault(one["kind"], []).append(one)

    def median(kind: str, what: str) -> float | None:
        values = [one[what] for one in rows[kind] if one[what] is not None]
        return round(statistics.median(values), 1) if values else None

    return {
        kind: {"times": len(rows[kind])}
        | {what: median(kind, what) for what in ("seconds_to_full_rate", "seconds_to_first_credit")}
        for kind in sorted(rows)
    }


# --------------------------------------------------------------------------- what processes hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one process held at one moment."""

    at: float
    rss_bytes: int
    descriptors: int
    threads: int


def growth(held: Sequence[Held]) -> dict[str, Any]:
    """One process at its start, in its middle and at its end, and whether it is level.

    Compared are the second and the last quarter of its life after it has settled: the medians of memory, the least of
    descriptors and threads, since a round under way holds some for every member, and what is lost is held all the time.
    ``level`` is None for a life too short to be judged; memory is judged in longer ones only.
    """
    settled = [one for one in held if one.at - held[0].at >= SETTLED_SECONDS]
    seconds = settled[-1].at - settled[0].at if settled else 0.0
    broken: list[str] = []
    if seconds >= JUDGED_SECONDS:
        quarter = max(1, len(settled) // 4)
        early, late = settled[quarter : 2 * quarter] or settled[:1], settled[-quarter:]

        def grown(what: str, typical: Callable[[Iterable[float]], float]) -> tuple[float, float]:
            before, after = (typical(getattr(one, what) for one in part) for part in (early, late))
            return before, after - before

        before, more = grown("rss_bytes", statistics.median)
        if seconds >= RSS_JUDGED_SECONDS and more > RSS_TOLERANCE * before + RSS_TOLERANCE_BYTES:
            broken.append(f"memory grew from {before / 1e6:.0f} to {(before + more) / 1e6:.0f} MB")
        for what, tolerance in (("descriptors", DESCRIPTORS_TOLERANCE), ("threads", THREADS_TOLERANCE)):
            before, more = grown(what, min)
            if more > tolerance:
                broken.append(f"{what} grew from {before:.0f} to {before + more:.0f}")
    moments = {"start": held[0], "middle": held[len(held) // 2], "end": held[-1]}
    return {
        "seconds": round(held[-1].at - held[0].at, 1),
        **{
            name: {"rss_mb": round(one.rss_bytes / 1e6, 1), "descriptors": one.descriptors, "threads": one.threads}
            for name, one in moments.items()
        },
        "level": not broken if seconds >= JUDGED_SECONDS else None,
        "grown": broken,
    }

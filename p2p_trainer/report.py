"""What a rehearsal found, computed from the peers' metrics and nothing else.

Pure functions of events, so that every number can be checked by hand. Other tools read the JSON: names here are a
promise.
"""

from __future__ import annotations

import math
import signal
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dht_config.errors import RehearsalError

ORDERLY_EXIT_CODES = (0, 130, 143, None)
"""Done, interrupted, terminated, not known."""
GOOD_EFFICIENCY = 0.93
"""Below this a verdict asks where the work went. 80, 40, 20 and 8 samples/s on two cores reach it."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedRun:
    """What was rehearsed, for how long."""

    seconds: float
    """How long the peers were left to train after the last of them had begun."""
    fragments: int
    tick_seconds: float

    @property
    def cycle_seconds(self) -> float:
        """From one round of a fragment to its next."""
        return self.fragments * self.tick_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """One peer's metrics, oldest event first, and how its process ended."""

    name: str
    events: Sequence[Event]
    exit_code: int | None = None
    """Negative for a signal; None if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """What one peer did. Its window runs from its first training moment to its last."""

    name: str
    solo_samples_per_second: float
    """Measured before joining."""
    swarm_samples_per_second: float
    """Processed samples over the window."""
    processed_samples: int
    credited_samples: float
    """In bases: mean over fragments, weighted by their parameters."""
    pending_samples: float
    dropped_samples: float
    inner_steps: int
    rounds_committed: int
    rounds_carried: int
    rounds_skipped: int
    share: float
    """Of everything that was credited, 0 to 1."""
    final_loss: float | None
    digests: dict[str, str]
    """``fragment:version`` to hex, of the bases it committed or fetched."""
    seconds_to_first_credit: float | None
    """From joining to the first committed round that held samples of its own."""
    samples_add_up: bool
    """Credited + pending + dropped = processed, exactly, by its own integer accounts and by the numbers here."""
    window_seconds: float
    exit_code: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the swarm did."""

    run_id: str
    seconds: float
    fragments: int
    tick_seconds: float
    efficiency: float
    """Samples credited, or pending for less than one cycle, per second, over the sum of solo samples/s."""
    credited_efficiency: float
    """The same with credited samples alone."""
    digests_agree: bool
    """Every (fragment, version) has one digest on all peers that had it; False if there was nothing to compare."""
    digests_compared: int
    """(fragment, version) pairs that at least two peers had."""
    digest_conflicts: list[str]
    held_out_loss: list[tuple[float, float]]
    """(seconds since training began, loss of the base)."""
    leftover_processes: int
    """Processes and socket directories of the rehearsal that were still there after it."""
    leftovers: list[str]
    peers: list[PeerReport]

    def as_json(self) -> dict[str, Any]:
        """The report as plain tables and lists."""
        return asdict(self)


def build_report(
    run: RehearsedRun,
    peers: Sequence[PeerRecord],
    *,
    leftovers: Sequence[str] = (),
    others: Sequence[PeerRecord] = (),
) -> Report:
    """Compute the report.

    :param others: peers that serve and do not train, such as the bootstrap: only their digests are looked at.
    Raises: RehearsalError for a peer that never measured its speed or never trained.
    """
    accounts = [_Account.of(peer) for peer in peers]
    credited = sum(account.credited for account in accounts)
    reports = [_peer_report(account, credited) for account in accounts]
    solo = sum(account.solo for account in accounts)
    counted = sum(_counted_samples(account, run.cycle_seconds) / account.window_seconds for account in accounts)
    seen, conflicts = _compare_digests([*peers, *others])
    began = min(account.training_started for account in accounts)
    return Report(
        run_id=next((str(event["run_id"]) for peer in peers for event in peer.events if event.get("run_id")), ""),
        seconds=run.seconds,
        fragments=run.fragments,
        tick_seconds=run.tick_seconds,
        efficiency=counted / solo,
        credited_efficiency=sum(account.credited / account.window_seconds for account in accounts) / solo,
        digests_agree=bool(seen) and not conflicts,
        digests_compared=sum(1 for holders in seen.values() if holders >= 2),
        digest_conflicts=conflicts,
        held_out_loss=_held_out_loss(peers, began),
        leftover_processes=len(leftovers),
        leftovers=list(leftovers),
        peers=reports,
    )


def problems(report: Report) -> list[str]:
    """What a person should know before trusting this run, in plain words; nothing if all is well."""
    found = []
    if report.digest_conflicts:
        where = ", ".join(report.digest_conflicts[:4])
        found.append(f"peers hold different bases of the same version (fragment:version {where})")
    elif not report.digests_agree:
        found.append("no round was committed, so nothing was averaged")
    found.extend(
        f"the samples of peer {peer.name} do not add up (credited {peer.credited_samples:g} + pending "
        f"{peer.pending_samples:g} + dropped {peer.dropped_samples:g}, processed {peer.processed_samples})"
        for peer in report.peers
        if not peer.samples_add_up
    )
    found.extend(
        f"peer {peer.name} took part in no round" for peer in report.peers if peer.seconds_to_first_credit is None
    )
    found.extend(
        f"peer {peer.name} {_ending(peer.exit_code)}"
        for peer in report.peers
        if peer.exit_code not in ORDERLY_EXIT_CODES
    )
    if report.efficiency < GOOD_EFFICIENCY:
        found.append(
            f"only {100 * report.efficiency:.1f} % of what the peers do alone was put to use "
            f"({100 * GOOD_EFFICIENCY:.0f} % is good): look at carried and skipped rounds"
        )
    losses = report.held_out_loss
    cycle_seconds = report.fragments * report.tick_seconds
    if losses and losses[-1][0] > losses[0][0] + cycle_seconds and losses[-1][1] >= losses[0][1]:
        found.append("the held-out loss did not fall")
    if report.leftovers:
        found.append(f"left behind: {', '.join(report.leftovers)}")
    return found


def verdict(report: Report) -> str:
    """One plain sentence about the rehearsal."""
    found = problems(report)
    if found:
        return f"Not good: {'; '.join(found)}."
    count = len(report.peers)
    who = "This peer" if count == 1 else f"These {count} peers"
    return (
        f"Good. {who} put {100 * report.efficiency:.1f} % of what they do alone to use, every base is the same "
        "everywhere, every sample is accounted for, and nothing was left behind."
    )


def _ending(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return "did not leave in time and was killed"
    return f"left with exit code {exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Account:
    """A peer's totals, from its goodbye, or from its last account if it ended without one."""

    peer: PeerRecord
    solo: float
    training_started: float
    training_ended: float
    processed: int
    credited: float
    pending: float
    dropped: float
    inner_steps: int
    exact: bool
    pending_by_fragment: tuple[tuple[float, float], ...]
    """(parameters, pending samples); one entry of weight 1 if fragments are not known."""

    @property
    def window_seconds(self) -> float:
        return self.training_ended - self.training_started

    @classmethod
    def of(cls, peer: PeerRecord) -> _Account:
        solo = [
            speed
            for event in _of_kind(peer.events, "throughput")
            if event.get("phase") == "solo" and (speed := _number(event, "samples_per_second"))
        ]
        started = [at for event in _of_kind(peer.events, "training_started") if (at := _number(event, "time"))]
        if not solo or not started:
            raise RehearsalError(
                problem=f"Peer {peer.name} {'never trained' if solo else 'measured no throughput'}.",
                remedy="Look at its log.",
            )
        leave = next(iter(_of_kind(reversed(peer.events), "leave")), None)
        last = leave or next(iter(_of_kind(reversed(peer.events), "account")), {})
        ended = _number(last, "training_ended")
        if ended is None:
            ended = max(_number(event, "time") or 0.0 for event in peer.events)
        credited = _number(last, "credited_samples") or 0.0
        pending = _number(last, "pending_samples") or 0.0
        dropped = _number(last, "dropped_samples") or 0.0
        processed = int(_number(last, "processed_samples") or 0)
        by_fragment = tuple(
            (_number(fragment, "parameters") or 0.0, _number(fragment, "pending_samples") or 0.0)
            for fragment in last.get("fragments") or ()
        )
        return cls(
            peer=peer,
            solo=solo[0],
            training_started=started[0],
            # Above zero, so that a peer that trained for no time at all is a rate of 0, not an error.
            training_ended=max(ended, started[0] + 1e-6),
            processed=processed,
            credited=credited,
            pending=pending,
            dropped=dropped,
            inner_steps=int(_number(last, "inner_steps") or 0),
            # The peer's own verdict is over integers; sums of means over fragments are rounded.
            exact=leave is not None
            and leave.get("exact") is True
            and math.isclose(credited + pending + dropped, processed, rel_tol=1e-9, abs_tol=1e-9),
            pending_by_fragment=by_fragment or ((1.0, pending),),
        )


def _peer_report(account: _Account, credited_by_all: float) -> PeerReport:
    events = account.peer.events
    outcomes = [event.get("outcome") for event in _of_kind(events, "round")]
    losses = [loss for event in _of_kind(events, "train") if (loss := _number(event, "loss")) is not None]
    return PeerReport(
        name=account.peer.name,
        solo_samples_per_second=account.solo,
        swarm_samples_per_second=account.processed / account.window_seconds,
        processed_samples=account.processed,
        credited_samples=account.credited,
        pending_samples=account.pending,
        dropped_samples=account.dropped,
        inner_steps=account.inner_steps,
        rounds_committed=outcomes.count("committed"),
        rounds_carried=outcomes.count("carried"),
        rounds_skipped=outcomes.count("skipped"),
        share=account.credited / credited_by_all if credited_by_all else 0.0,
        final_loss=losses[-1] if losses else None,
        digests=dict(_digests(events)),
        seconds_to_first_credit=_seconds_to_first_credit(events),
        samples_add_up=account.exact,
        window_seconds=account.window_seconds,
        exit_code=account.peer.exit_code,
    )


def _counted_samples(account: _Account, cycle_seconds: float) -> float:
    """Credited samples, and those pending for less than a cycle when training ended.

    A fragment's samples wait for its next round, one cycle at most: that is no loss, but it would be one to count
    more than a cycle's worth.
    """
    points = _progress(account)
    recent = _processed_at(points, account.training_ended) - _processed_at(
        points, account.training_ended - cycle_seconds
    )
    parameters = sum(weight for weight, _ in account.pending_by_fragment)
    if not parameters:
        return account.credited
    waiting = sum(weight * min(pending, recent) for weight, pending in account.pending_by_fragment)
    return account.credited + waiting / parameters


def _progress(account: _Account) -> list[tuple[float, float]]:
    """(unix s, samples processed so far), rising in both."""
    joined = next(iter(_of_kind(account.peer.events, "join")), {})
    points = [(account.training_started, _number(joined, "processed_samples") or 0.0)]
    for kind, field in (("train", "samples"), ("account", "processed_samples")):
        for event in _of_kind(account.peer.events, kind):
            at, samples = _number(event, "time"), _number(event, field)
            if at is not None and samples is not None and at < account.training_ended:
                points.append((at, samples))
    return [*sorted(points), (account.training_ended, float(account.processed))]


def _processed_at(points: Sequence[tuple[float, float]], at: float) -> float:
    """Samples processed by a moment: a line between the two points around it, level outside of them."""
    after = bisect_right(points, at, key=lambda point: point[0])
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (early, low), (late, high) = points[after - 1], points[after]
    return low + (high - low) * (at - early) / (late - early)


def _compare_digests(peers: Sequence[PeerRecord]) -> tuple[dict[str, int], list[str]]:
    """How many peers had each ``fragment:version``, and those that were not the same for all (or for one twice)."""
    digests: dict[str, set[str]] = {}
    holders: dict[str, int] = {}
    for peer in peers:
        own = _digests(peer.events)
        for key, digest in own:
            digests.setdefault(key, set()).add(digest)
        for key in {key for key, _ in own}:
            holders[key] = holders.get(key, 0) + 1
    conflicts = sorted(
        (key for key, different in digests.items() if len(different) > 1),
        key=lambda key: tuple(int(part) for part in key.split(":")),
    )
    return holders, conflicts


def _digests(events: Sequence[Event]) -> list[tuple[str, str]]:
    found = []
    for event in events:
        if event.get("event") == "round" and event.get("outcome") == "committed":
            version = event.get("version")
        elif event.get("event") == "rebase":
            version = event.get("to_version")
        else:
            continue
        fragment, digest = event.get("fragment"), event.get("digest")
        if isinstance(fragment, int) and isinstance(version, int) and isinstance(digest, str):
            found.append((f"{fragment}:{version}", digest))
    return found


def _seconds_to_first_credit(events: Sequence[Event]) -> float | None:
    joined = next(iter(_of_kind(events, "join")), {}).get("time")
    for event in _of_kind(events, "round"):
        if event.get("outcome") == "committed" and (_number(event, "weight") or 0.0) > 0:
            at = _number(event, "time")
            return None if at is None or joined is None else at - float(joined)
    return None


def _held_out_loss(peers: Sequence[PeerRecord], began: float) -> list[tuple[float, float]]:
    """Of all peers, in order of time. An evaluation before training began counts as at its beginning."""
    return sorted(
        (max(0.0, at - began), loss)
        for peer in peers
        for event in _of_kind(peer.events, "eval")
        if (at := _number(event, "time")) is not None and (loss := _number(event, "loss")) is not None
    )


def _of_kind(events: Iterable[Event], kind: str) -> Iterable[Event]:
    return (event for event in events if event.get("event") == kind)


def _number(event: Event, key: str) -> float | None:
    """A field that is a finite number; NaN is written as null."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)

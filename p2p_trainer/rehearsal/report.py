"""What a rehearsal found, computed from the peers' metrics and nothing else.

Pure functions of events, so that every number can be checked by hand. Other tools read the JSON: names here are a
promise.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from p2p_trainer.machines import memory_text
from p2p_trainer.rehearsal.rehearsed_peer import (
    Account,
    Event,
    PeerRecord,
    TimeUse,
    counted_samples,
    number,
    of_kind,
    time_use,
)
from p2p_trainer.rehearsal.timeline import Timeline, TimelineClock, build_timeline, cadence

ORDERLY_EXIT_CODES = (0, 130, 143, -signal.SIGTERM, None)
"""Done, interrupted, terminated (also before it could answer), not known."""
GOOD_EFFICIENCY = 0.93
"""Below this a verdict asks where the work went. 80, 40, 20 and 8 samples/s on two cores reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedRun:
    """What was rehearsed, for how long."""

    seconds: float
    """How long the peers were left to train once all that were there from the beginning had begun."""
    fragments: int
    tick_seconds: float
    start_seconds: float = 0.0
    """Unix seconds: when tick 0 of the run began."""
    began: float | None = None
    """Unix seconds: when all that were there from the beginning had begun. None: as the first peer did."""

    @property
    def cycle_seconds(self) -> float:
        """From one round of a fragment to its next."""
        return self.fragments * self.tick_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """What one peer did, all its starts together. Its window is the time it trained, without what it was frozen for."""

    name: str
    solo_samples_per_second: float
    """Measured before it joined for the first time."""
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
    cadence: int | None
    """It committed every n-th round of a fragment, 1 being every one; None if its rounds kept no such rule."""
    time: TimeUse
    samples_add_up: bool
    """Credited + pending + dropped = processed, exactly, by its own integer accounts and by the numbers here."""
    window_seconds: float
    exit_code: int | None
    killed: bool
    """It ended because the rehearsal meant to kill it, or for want of memory: by its last account, since it said no
    goodbye."""
    lost_samples: float
    """Processed before a kill and, after it, in no base and in nobody's account."""
    link: str
    """Its line, such as ``10M/60ms``; empty: loopback."""
    joins: list[float]
    """Its starts, in seconds after training began, as the three below; 0: it was there from the beginning."""
    leaves: list[float]
    kills: list[float]
    freezes: list[float]
    bytes_sent_per_hour: float
    bytes_received_per_hour: float
    bytes_counted: Literal["line", "rounds"]
    """What the two above are: everything that crossed its line, by its network interface, per hour that it was there;
    without lines what its rounds took, per hour of its window: what newcomers fetch and the DHT are not in it."""
    behind_nat: bool
    """It could dial others, and nobody could dial it."""
    memory_limit_bytes: int | None
    """Of all its processes together; None: it had no limit of its own."""
    memory_peak_bytes: int | None
    """The most that they took at once; None: it was not counted."""
    memory_kills: int
    """How many of them the kernel killed because the limit was reached."""
    out_of_memory: list[float]
    """When it ended for that reason, in seconds after training began; 0: before."""
    plan: str = ""
    """How it saved memory, and why, in its own words; empty if it did not say."""

    @property
    def participation(self) -> float:
        """The part, 0 to 1, of the rounds there were for it that it committed."""
        rounds = self.rounds_committed + self.rounds_carried + self.rounds_skipped
        return self.rounds_committed / rounds if rounds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the swarm did."""

    run_id: str
    seconds: float
    fragments: int
    tick_seconds: float
    efficiency: float
    """Samples credited, or pending for a peer's next round, over what the peers do alone in their windows."""
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
    timeline: Timeline

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
    Raises: RehearsalError for a peer that never measured its speed or never trained although it was there all the time.
    """
    accounts = [Account.of(peer) for peer in peers]
    credited = sum(account.credited for account in accounts)
    began = min((stay.started for account in accounts for stay in account.stays), default=0.0)
    clock = TimelineClock(
        zero=began,
        scene_zero=run.began if run.began is not None else began,
        run_start=run.start_seconds,
        tick_seconds=run.tick_seconds,
    )
    timeline = build_timeline(accounts, clock)
    reports = [
        _peer_report(account, credited, cadence(one.rounds, run.fragments))
        for account, one in zip(accounts, timeline.peers, strict=True)
    ]
    # Per account, not of the rates: who was there for half of the time, or trains half of the model, counts half.
    alone = sum(stay.solo * stay.window_seconds * stay.trained_share for account in accounts for stay in account.stays)
    counted = sum(counted_samples(account, run.cycle_seconds) for account in accounts)
    seen, conflicts = _compare_digests([*peers, *others])
    return Report(
        run_id=next((str(event["run_id"]) for peer in peers for event in peer.events if event.get("run_id")), ""),
        seconds=run.seconds,
        fragments=run.fragments,
        tick_seconds=run.tick_seconds,
        efficiency=counted / alone if alone else 0.0,
        credited_efficiency=credited / alone if alone else 0.0,
        digests_agree=bool(seen) and not conflicts,
        digests_compared=sum(1 for holders in seen.values() if holders >= 2),
        digest_conflicts=conflicts,
        held_out_loss=_held_out_loss(peers, began),
        leftover_processes=len(leftovers),
        leftovers=list(leftovers),
        peers=reports,
        timeline=timeline,
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
        f"peer {peer.name} ran out of memory ({memory_text(peer.memory_limit_bytes or 0)} do not suffice: give it more "
        "with mem=SIZE, or make the model or the batch smaller)"
        for peer in report.peers
        if peer.out_of_memory
    )
    found.extend(
        f"peer {peer.name} took part in no round"
        for peer in report.peers
        if peer.seconds_to_first_credit is None and not peer.out_of_memory
    )
    found.extend(
        f"peer {peer.name} {_ending(peer.exit_code)}"
        for peer in report.peers
        if peer.exit_code not in ORDERLY_EXIT_CODES and not peer.killed
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


def _peer_report(account: Account, credited_by_all: float, every_nth: int | None) -> PeerReport:
    events = account.peer.events
    outcomes = [event.get("outcome") for event in of_kind(events, "round")]
    losses = [loss for event in of_kind(events, "train") if (loss := number(event, "loss")) is not None]
    life, memory = account.peer.life, account.peer.memory
    sent, received, counted = _bytes_per_hour(account)
    trained = sum(stay.processed - stay.processed_before for stay in account.stays)
    return PeerReport(
        name=account.peer.name,
        solo_samples_per_second=account.solo,
        swarm_samples_per_second=trained / account.window_seconds if account.stays else 0.0,
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
        cadence=every_nth,
        time=time_use(account),
        samples_add_up=account.exact,
        window_seconds=account.window_seconds,
        exit_code=account.peer.exit_code,
        killed=account.peer.killed,
        lost_samples=account.lost,
        link=account.peer.link,
        joins=life.joins,
        leaves=life.leaves,
        kills=life.kills,
        freezes=life.freezes,
        bytes_sent_per_hour=sent,
        bytes_received_per_hour=received,
        bytes_counted=counted,
        behind_nat=account.peer.behind_nat,
        memory_limit_bytes=memory.limit_bytes if memory is not None else None,
        memory_peak_bytes=memory.peak_bytes if memory is not None else None,
        memory_kills=memory.kills if memory is not None else 0,
        out_of_memory=life.out_of_memory,
        plan=next((str(event["reasons"][0]) for event in of_kind(account.peer.events, "plan") if event["reasons"]), ""),
    )


def _bytes_per_hour(account: Account) -> tuple[float, float, Literal["line", "rounds"]]:
    """Sent, received, and what was counted."""
    line = account.peer.line_count
    if line is not None:
        hours = max(line.seconds, 1e-6) / 3600
        return line.sent_bytes / hours, line.received_bytes / hours, "line"
    if not account.stays:
        return 0.0, 0.0, "rounds"
    hours = account.window_seconds / 3600
    rounds = list(of_kind(account.peer.events, "round"))
    sent, received = (sum(number(one, key) or 0.0 for one in rounds) for key in ("bytes_sent", "bytes_received"))
    return sent / hours, received / hours, "rounds"


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
    joined = next(iter(of_kind(events, "join")), {}).get("time")
    for event in of_kind(events, "round"):
        if event.get("outcome") == "committed" and (number(event, "weight") or 0.0) > 0:
            at = number(event, "time")
            return None if at is None or joined is None else at - float(joined)
    return None


def _held_out_loss(peers: Sequence[PeerRecord], began: float) -> list[tuple[float, float]]:
    """Of all peers, in order of time. An evaluation before training began counts as at its beginning."""
    return sorted(
        (max(0.0, at - began), loss)
        for peer in peers
        for event in of_kind(peer.events, "eval")
        if (at := number(event, "time")) is not None and (loss := number(event, "loss")) is not None
    )

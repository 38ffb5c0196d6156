"""What the runs of ``side_by_side.py`` mean: every number of its table and its JSON, computed from what was counted.

Pure, so that each can be checked by hand.

efficiency           samples credited (for ours also those pending for their next round) over what the peers do alone in
                     the time that they were there; ``credited_efficiency`` is without the pending ones. Alone they do
                     their emulated speed, which pacing lets nobody exceed; what each measured alone before it began
                     (``solo``, by the same pacing) says how much of that this machine left them at that moment.
compute + waiting    = 1: what the peers processed over what they do alone, and the rest.
rejected             processed and not credited, over what the peers do alone: efficiency = compute - rejected.
seconds_to_loss      wall seconds until a held-out loss was first seen, on a line between two evaluations. From
                     the moment when all peers were let go; for ours, where nobody waits for anybody, from when the
                     first one trained. null: not reached.
final_loss           at equal samples: those of the contender that made the fewest. ``loss_at_end`` is after equal time.
least_own_rate       where a line is throttled for a third of the run: of the peers whose line is as it was, in their
                     worst third, samples processed over what that peer does alone.
slow_credited        of the peer on the slowest line: credited over processed.
bytes_per_parameter  mean over the peers, through the device of each one's namespace, everything included, divided by
                     parameters and rounds (of all parameters); a step of DDP and an epoch of hivemind are a round.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from side_by_side_scenes import OURS, OURS_WITHOUT_CURSED, BenchmarkScene

Series = list[tuple[float, float]]
"""(when, a count so far), in order of time."""
Curve = list[tuple[float, float, float]]
"""(seconds, samples of all peers, held-out loss), in order of time."""

RECOVERED = 0.95
RECOVERY_WINDOW_SECONDS = 10.0
"""Two of our peers' accounts; a rate over less would be that of a moment."""
LOSS_STEPS = (0.4, 0.15, 0.0)
"""The three losses: these parts of the way from the hardest to the loss at the beginning."""
AVERAGED = (
    "efficiency",
    "credited_efficiency",
    "samples_per_second",
    "compute",
    "waiting",
    "rejected",
    "loss_at_end",
    "bytes_per_parameter_up",
    "bytes_per_parameter_down",
    "kilobytes_per_second_up",
    "kilobytes_per_second_down",
    "rounds",
    "seconds_to_recover",
    "seconds_to_first_credit",
    "least_own_rate",
    "slow_credited",
    "cpu_share",
    "machine_share",
)


def value_at(series: Series, at: float) -> float:
    """On a line between two points, level outside of them; 0 if there is none."""
    if not series:
        return 0.0
    times, values = zip(*series, strict=True)
    return float(np.interp(at, times, values))


def increase(series: Series, window: tuple[float, float]) -> float:
    return value_at(series, window[1]) - value_at(series, window[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """What one peer of a run did."""

    name: str
    speed: float
    """Samples per second alone, as it is emulated."""
    solo: float
    """The same, measured by the same pacing before it began."""
    lived_seconds: float
    processed: float
    credited: float
    bytes_received: float
    bytes_sent: float
    progress: Series
    """(seconds since all were there, samples credited)."""
    work: Series
    """(seconds since all were there, samples processed)."""
    seconds_to_first_credit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One contender with one seed; JSON has its fields."""

    contender: str
    seed: int
    seconds: float
    peers: list[dict[str, float | str]]
    efficiency: float
    credited_efficiency: float
    samples_per_second: float
    """Credited, of all peers, from when all were there to the end."""
    compute: float
    waiting: float
    rejected: float
    rounds: float
    curve: Curve
    bytes_per_parameter_up: float | None
    bytes_per_parameter_down: float | None
    kilobytes_per_second_up: float
    """Mean over the peers."""
    kilobytes_per_second_down: float
    seconds_to_recover: float | None
    seconds_to_first_credit: float | None
    """Median over the peers."""
    cpu_share: float
    """Of all cores, taken by this contender's processes and its lines."""
    machine_share: float
    """Of all cores, taken by whatever ran on this machine."""
    load: float
    ended: str
    """Why peers could not go on; empty if they did."""
    least_own_rate: float | None = None
    slow_credited: float | None = None

    @classmethod
    def of(
        cls,
        *,
        contender: str,
        seed: int,
        scene: BenchmarkScene,
        peers: Sequence[PeerRun],
        rounds: float,
        parameters: int,
        curve: Curve,
        cpu: Series,
        machine: Series,
        window: tuple[float, float],
        counted: float | None = None,
        killed_at: float | None = None,
        ended: str = "",
    ) -> Run:
        """:param counted: samples that efficiency counts, if not the credited ones
        :param killed_at: when peers were killed, in seconds since all were there
        """
        absent = 0.0
        if contender != OURS_WITHOUT_CURSED:
            taking_part = sum(peer.samples_per_second for peer in scene.taking_part(contender))
            absent = max(0.0, scene.samples_per_second - taking_part) * scene.seconds
        alone = absent + sum(peer.speed * peer.lived_seconds for peer in peers)
        processed, credited = sum(peer.processed for peer in peers), sum(peer.credited for peer in peers)
        counted = credited if counted is None else counted
        seconds, cores = window[1] - window[0], os.cpu_count() or 1
        # Of what killed peers sent nothing can be read any more, and they were not there for all of the rounds.
        whole = [peer for peer in peers if peer.name not in scene.killed]
        sent = statistics.fmean(peer.bytes_sent for peer in whole)
        received = statistics.fmean(peer.bytes_received for peer in whole)
        per_round = parameters * rounds if rounds and len(peers) > 1 else None
        firsts = [peer.seconds_to_first_credit for peer in peers if peer.seconds_to_first_credit is not None]
        return cls(
            contender=contender,
            seed=seed,
            seconds=scene.seconds,
            peers=[
                {
                    key: value
                    for key, value in asdict(peer).items()
                    if key not in ("progress", "work", "seconds_to_first_credit")
                }
                for peer in peers
            ],
            efficiency=counted / alone,
            credited_efficiency=credited / alone,
            samples_per_second=sum(increase(peer.progress, (0.0, seconds)) for peer in peers) / seconds,
            compute=processed / alone,
            waiting=1 - processed / alone,
            rejected=(processed - counted) / alone,
            rounds=rounds,
            curve=curve,
            bytes_per_parameter_up=sent / per_round if per_round else None,
            bytes_per_parameter_down=received / per_round if per_round else None,
            kilobytes_per_second_up=sent / seconds / 1e3,
            kilobytes_per_second_down=received / seconds / 1e3,
            seconds_to_recover=_recovered(scene, whole, killed_at, seconds),
            seconds_to_first_credit=statistics.median(firsts) if firsts else None,
            cpu_share=increase(cpu, window) / seconds / cores,
            machine_share=increase(machine, window) / seconds / cores,
            load=os.getloadavg()[1],
            ended=ended,
            least_own_rate=least_own_rate(scene, peers),
            slow_credited=slow_credited(scene, peers),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Run:
        return cls(**{**table, "curve": [(at, samples, loss) for at, samples, loss in table["curve"]]})


def _recovered(
    scene: BenchmarkScene, whole: Sequence[PeerRun], killed_at: float | None, seconds: float
) -> float | None:
    """Of the survivors from a kill; of who was throttled from when its line is as before."""
    if (window := scene.throttled_seconds) is not None:
        return seconds_to_recover([peer for peer in whole if peer.name in scene.throttled], window[1], seconds)
    return None if killed_at is None else seconds_to_recover(whole, killed_at, seconds)


def least_own_rate(scene: BenchmarkScene, peers: Sequence[PeerRun]) -> float | None:
    """See above; None where no line is throttled, or nobody else is there."""
    if (throttled := scene.throttled_seconds) is None:
        return None
    windows = ((0.0, throttled[0]), throttled, (throttled[1], scene.seconds))
    rates = []
    for peer in peers:
        if peer.name not in scene.throttled and peer.work:
            # Its first and last account may be seconds within the run.
            known = [(max(since, peer.work[0][0]), min(until, peer.work[-1][0])) for since, until in windows]
            rates += [increase(peer.work, one) / (one[1] - one[0]) / peer.speed for one in known if one[0] < one[1]]
    return min(rates, default=None)


def slow_credited(scene: BenchmarkScene, peers: Sequence[PeerRun]) -> float | None:
    """See above; None where it did nothing."""
    up = {peer.name: peer.link.up_bits_per_second for peer in scene.peers if peer.link is not None}
    slowest = min((peer for peer in peers if peer.name in up), key=lambda peer: up[peer.name], default=None)
    return slowest.credited / slowest.processed if slowest is not None and slowest.processed else None


def seconds_to_recover(survivors: Sequence[PeerRun], killed_at: float, seconds: float) -> float | None:
    """From the kill to when the survivors are credited 95 % of what they do alone, over the next ten seconds."""
    wanted = RECOVERED * sum(peer.speed for peer in survivors)
    at = killed_at
    while at + RECOVERY_WINDOW_SECONDS <= seconds:
        window = (at, at + RECOVERY_WINDOW_SECONDS)
        if sum(increase(peer.progress, window) for peer in survivors) >= wanted * RECOVERY_WINDOW_SECONDS:
            return at - killed_at
        at += 1.0
    return None


def curve_of_snapshots(losses: Series, processed: Sequence[Series], began_at: float, ended_at: float) -> Curve:
    """:param losses: (unix s, loss); :param processed: of each peer, (unix s, samples so far)"""
    return [
        (max(0.0, at - began_at), sum(value_at(series, at) for series in processed), loss)
        for at, loss in losses
        if at <= ended_at
    ]


def curve_of_evaluations(events: Iterable[Mapping[str, Any]], began_at: float) -> Curve:
    """Of all peers' ``eval`` events, those of the newest base at their time: a peer may be behind the others."""
    curve: Curve = []
    for event in sorted(events, key=lambda event: float(event["time"])):
        if event["loss"] is not None and (not curve or event["samples"] >= curve[-1][1]):
            curve.append((max(0.0, event["time"] - began_at), float(event["samples"]), float(event["loss"])))
    return curve


def seconds_to_loss(curve: Curve, loss: float) -> float | None:
    before: tuple[float, float] | None = None
    for at, _, seen in curve:
        if seen <= loss:
            if before is None or before[1] == seen:
                return at
            return before[0] + (at - before[0]) * (before[1] - loss) / (before[1] - seen)
        before = (at, seen)
    return None


def loss_at_samples(curve: Curve, samples: float) -> float:
    """On a line between two evaluations."""
    return value_at([(done, loss) for _, done, loss in curve], samples)


def choose_losses(runs: Sequence[Run]) -> list[float]:
    """Three held-out losses, the last of which just over half of the contenders reach with their median seed."""
    lowest: dict[str, list[float]] = {}
    for run in runs:
        lowest.setdefault(run.contender, []).append(min(loss for _, _, loss in run.curve))
    reached = sorted(statistics.median(values) for values in lowest.values())
    hardest = reached[len(reached) // 2]
    start = statistics.median(run.curve[0][2] for run in runs)
    return [math.ceil(100 * (hardest + part * (start - hardest))) / 100 for part in LOSS_STEPS]


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """The part of the JSON that follows from the runs: ``losses``, ``equal_samples``, ``contenders``."""
    known = [run for run in runs if run.curve]
    contenders = [run for run in known if run.contender != OURS_WITHOUT_CURSED]
    if not contenders:
        return {"losses": [], "equal_samples": None, "contenders": {}}
    losses = choose_losses(contenders)
    equal = min(max(samples for _, samples, _ in run.curve) for run in contenders)
    names = dict.fromkeys(run.contender for run in contenders)
    of = {name: [run for run in known if run.contender == name] for name in (*names, OURS_WITHOUT_CURSED)}
    tables = {name: _contender(of[name], losses, equal) for name in names}
    ours = tables.get(OURS)
    for table in tables.values():
        table["seconds_to_loss_over_ours"] = {
            loss: _ratio(seconds, ours["seconds_to_loss"][loss] if ours else None)
            for loss, seconds in table["seconds_to_loss"].items()
        }
    if ours is not None:
        without = {run.seed: run.samples_per_second for run in of[OURS_WITHOUT_CURSED]}
        ratios = [run.samples_per_second / without[run.seed] for run in of[OURS] if run.seed in without]
        ours["cursed_ratio"] = statistics.fmean(ratios) if ratios else None
    return {"losses": losses, "equal_samples": equal, "contenders": tables}


def _contender(runs: Sequence[Run], losses: Sequence[float], equal_samples: float) -> dict[str, Any]:
    """Means over the seeds; ``spread`` has the least and the greatest of each."""
    found: dict[str, list[float | None]] = {}
    for run in runs:
        for name in AVERAGED:
            value = run.curve[-1][2] if name == "loss_at_end" else getattr(run, name)
            found.setdefault(name, []).append(value)
        found.setdefault("final_loss", []).append(loss_at_samples(run.curve, equal_samples))
    times = {f"{loss:g}": [seconds_to_loss(run.curve, loss) for run in runs] for loss in losses}
    return {
        **{name: _mean(values) for name, values in found.items()},
        "seconds_to_loss": {loss: _mean(values) for loss, values in times.items()},
        "cursed_ratio": None,
        "samples_at_end": _mean([run.curve[-1][1] for run in runs]),
        "ended": next((run.ended for run in runs if run.ended), ""),
        "spread": {
            **{name: _spread(values) for name, values in found.items()},
            "seconds_to_loss": {loss: _spread(values) for loss, values in times.items()},
        },
        "seeds": [run.seed for run in runs],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """None if one of them is not known: a loss that one seed did not reach has no mean time."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _spread(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None


def _ratio(value: float | None, ours: float | None) -> float | None:
    return value / ours if value is not None and ours else None

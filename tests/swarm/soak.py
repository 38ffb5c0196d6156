"""Endurance: a real swarm whose peers come, go, crash, freeze and lose their lines, as a seed decides.

    python tests/swarm/soak.py --minutes 10 --seed 1 --peers 12 --json FILE

A bootstrap peer and the peers are processes of the program, slowed down so that two cores carry them (ticks are longer
for more peers), on lines of their own where this machine allows that. The JSON begins with the schedule; the same seed,
minutes and peers give the same one. It ends with 0 if all bases agree, all samples add up, the loss fell, every peer
came back after everything and the swarm with it, no process grew, and nothing was left behind; else with 1 and one line
for each of these that does not hold. What it cannot replay is the order in which processes get the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import soak_figures as figures
from harness import (
    LEAVE_SECONDS,
    START_SECONDS,
    Peer,
    Swarm,
    accounts_of_the_bases,
    small_manifest,
)
from preloaded import Preloaded
from soak_schedule import LINE_KINDS, Fault, Kind, Schedule, make_schedule

from p2p_trainer.rehearsal.links import LinkSpec, available

RATES = (16.0, 12.0, 8.0, 4.0)
"""Samples per second, over and over."""
PEERS_PER_TICK_SECOND = 4
FRAGMENTS = 2
SAMPLE_SECONDS = 5.0
"""Between two looks at what the processes hold."""
PATIENCE_SECONDS = 120.0
"""For peers that are not back at the end: on a busy machine a start takes a minute."""
POLL_SECONDS = 0.1
SLOW_LINE = LinkSpec.parse("1M/100ms")
AWAY_KINDS: frozenset[Kind] = frozenset(
    {"leave", "kill", "kill_daemon", "kill_averaging", "freeze", "freeze_daemon", "freeze_averaging", "line_down"}
)
"""Faults that keep a peer from earning credit."""
LIVE = ("--checkpoint-seconds", "10", "--eval-seconds", "10", "--eval-samples", "300")


@dataclass(slots=True, kw_only=True)
class Played:
    """A fault as it came about, in unix seconds."""

    fault: Fault
    at: float
    until: float
    note: str = ""
    """Why it did not come about."""


class Soak:
    """One soak, from the first process to the verdict."""

    def __init__(self, schedule: Schedule, swarm: Swarm, *, lines: bool) -> None:
        self.schedule, self.swarm, self.lines = schedule, swarm, lines
        names = [*schedule.first, *schedule.late]
        self.rates = {name: RATES[number % len(RATES)] for number, name in enumerate(names)}
        self.tick_seconds = max(1.0, len(names) / PEERS_PER_TICK_SECOND)
        self.lives: dict[str, list[Peer]] = {name: [] for name in names}
        self.held: dict[tuple[str, str, int, int], list[figures.Held]] = defaultdict(list)
        """By peer, part, pid and start: a peer that comes back by itself is another program in the same process."""
        self.played: list[Played] = []
        self.broken: list[str] = []
        self._frozen: dict[Fault, list[psutil.Process]] = {}
        self._struck: dict[Fault, Played] = {}

    # ------------------------------------------------------------------ playing

    def play(self) -> None:
        """Live through the schedule, then let everybody leave."""
        names = [*self.schedule.first, *self.schedule.late]
        if self.lines:
            self.swarm.links(**dict.fromkeys(["bootstrap", *names], "unlimited"))
        tick = f"{self.tick_seconds:g}"
        manifest = small_manifest(
            self.swarm.path / "soak.toml",
            tick_seconds=f"tick_seconds = {tick}",
            matchmaking_seconds=f"matchmaking_seconds = {tick}",
            weighting='weighting = "samples"',
        )
        self.bootstrap = self.swarm.bootstrap("bootstrap", manifest)
        for name in self.schedule.first:
            self.start(name)
        first = [self.lives[name][-1] for name in self.schedule.first]
        self.swarm.wait_until(
            lambda: all(peer.rounds(group=2) for peer in first), "the first peers average", 3 * START_SECONDS
        )
        self.began = time.time()
        zero = time.monotonic()
        todo = self.schedule.actions()
        look_at, over_at = 0.0, self.schedule.seconds
        while (now := time.monotonic() - zero) < over_at:
            while todo and todo[0][0] <= now:
                _, undo, fault = todo.pop(0)
                if undo:
                    self.undo(fault)
                else:
                    self.strike(fault)
            if now >= look_at:
                look_at = now + SAMPLE_SECONDS
                self.look()
                if now + SAMPLE_SECONDS > self.schedule.seconds and not self.all_are_back():
                    over_at = min(look_at + SAMPLE_SECONDS, self.schedule.seconds + PATIENCE_SECONDS)
            self.revive()
            time.sleep(POLL_SECONDS)
        self.ended = time.time()
        try:
            codes = self.swarm.leave_all(2 * LEAVE_SECONDS)
            self.broken += [f"{name} left with exit code {code}" for name, code in codes.items() if code]
        except AssertionError as error:
            self.broken.append(str(error))

    def start(self, name: str) -> None:
        attempt = self.swarm.join(
            name, self.bootstrap.invite, self.rates[name], *LIVE, directory=self.swarm.path / name
        )
        self.lives[name].append(attempt)

    def strike(self, fault: Fault) -> None:
        played = Played(fault=fault, at=time.time(), until=time.time())
        self.played.append(played)
        self._struck[fault] = played
        if fault.kind == "join":
            self.start(fault.peer)
            return
        peer = self.lives[fault.peer][-1]
        parts = parts_of(peer)
        part = {"daemon": "daemon", "averaging": "averaging"}.get(fault.kind.partition("_")[2], "")
        if fault.kind in LINE_KINDS and not self.lines:
            played.note = "there are no lines here"
        elif fault.kind == "slow_line":
            self.swarm.network.set_link(fault.peer, SLOW_LINE)
        elif fault.kind == "line_down":
            self.swarm.network.down(fault.peer)
        elif len(peer.events("training_started")) < len(peer.events("start")) or peer.process.poll() is not None:
            played.note = "it did not train at that moment"
        elif part and part not in parts:
            played.note = f"it had no {part} process at that moment"
        elif fault.kind == "leave":
            peer.expected_to_live = False
            peer.process.terminate()
        elif fault.kind == "kill":
            peer.crash()
        elif fault.kind.startswith("kill"):
            parts[part].kill()
        else:
            self._frozen[fault] = [parts[part]] if part else peer.processes()
            for process in self._frozen[fault]:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()

    def undo(self, fault: Fault) -> None:
        played = self._struck[fault]
        if played.note:
            return
        peer = self.lives[fault.peer][-1]
        if fault.kind == "slow_line":
            self.swarm.network.set_link(fault.peer, LinkSpec())
        elif fault.kind == "line_down":
            self.swarm.network.up(fault.peer)
        elif fault.kind == "leave":
            try:
                if code := peer.gone():
                    self.broken.append(f"{peer.name} left with exit code {code}")
            except AssertionError as error:
                self.broken.append(str(error))
            self.start(fault.peer)
        elif fault.kind == "kill":
            self.start(fault.peer)
        else:
            for process in self._frozen.pop(fault):
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        played.until = time.time()

    def revive(self) -> None:
        """A peer that ended by itself is a broken promise, and started again."""
        for name, lives in self.lives.items():
            if lives and lives[-1].expected_to_live and (code := lives[-1].process.poll()) is not None:
                lives[-1].expected_to_live = False
                self.broken.append(f"{lives[-1].name} ended by itself with exit code {code}")
                self.start(name)

    def all_are_back(self) -> bool:
        """Whether every peer trains, and was credited with something after the last thing that was done to it.

        A round that was under way when its daemon was killed credits it as well, before it comes back.
        """
        living = [lives[-1] for lives in self.lives.values() if lives]
        if any(len(peer.events("training_started")) < len(peer.events("start")) for peer in living):
            return False
        credited = {
            name: lives[-1].rounds(after=max((one.until for one in self.played if one.fault.peer == name), default=0.0))
            for name, lives in self.lives.items()
            if lives
        }
        return all(credited.values())

    def look(self) -> None:
        """Note what every process holds now."""
        for peer in [self.bootstrap, *(lives[-1] for lives in self.lives.values() if lives)]:
            starts = len(peer.events("start"))
            for part, process in parts_of(peer).items():
                with suppress(psutil.Error):
                    with process.oneshot():
                        held = figures.Held(
                            at=time.time(),
                            rss_bytes=process.memory_info().rss,
                            descriptors=process.num_fds(),
                            threads=process.num_threads(),
                        )
                    self.held[peer.name, part, process.pid, starts].append(held)

    # ------------------------------------------------------------------ verdict

    def report(self, left: Sequence[str]) -> dict[str, Any]:
        """What it came to; ``broken`` has a line for every claim that does not hold."""
        events = {name: lives[-1].all_events() for name, lives in self.lives.items() if lives}
        everybody = {**events, "bootstrap": self.bootstrap.all_events()}
        compared, conflicts = figures.digest_conflicts(everybody)
        leaves = {name: next(iter(lives[-1].events("leave")), None) for name, lives in self.lives.items() if lives}
        accounts = figures.broken_accounts(leaves)
        with suppress(OSError, KeyError):  # a checkpoint that is not there: its peer did not leave, as is said already
            accounts += accounts_of_the_bases(lives[-1] for lives in self.lives.values() if lives)
        losses = [
            (event["time"], event["loss"])
            for own in events.values()
            for event in own
            if event["event"] == "eval" and event["loss"] is not None
        ]
        parts = figures.loss_by_parts(losses)
        recoveries, usual = self.recoveries(events)
        grown = {
            f"{peer} {part} {pid}, start {start}": figures.growth(held)
            for (peer, part, pid, start), held in sorted(self.held.items())
        }
        tracebacks = [f"{peer.name} printed a traceback" for peer in self.swarm.peers if "Traceback" in peer.text]
        broken = [
            *self.broken,
            *([] if compared else ["no version was on two peers"]),
            *conflicts,
            *accounts,
            *figures.broken_loss(losses),
            *figures.broken_recoveries(recoveries),
            *(f"{name}: {what}" for name, one in grown.items() for what in one["grown"]),
            *figures.unasked_faults(
                everybody,
                [
                    (one.fault.peer, one.at)
                    for one in self.played
                    if not one.note and one.fault.kind.partition("_")[2] in ("daemon", "averaging")
                ],
            ),
            *tracebacks,
            *(f"left behind: {what}" for what in left),
        ]
        return {
            "schedule": self.schedule.as_json(),
            "lines": self.lines,
            "tick_seconds": self.tick_seconds,
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "digests_agree": bool(compared) and not conflicts,
            "digests_compared": compared,
            "samples_add_up": not accounts,
            "loss_start": round(parts[0], 4) if parts else None,
            "loss_end": round(parts[-1], 4) if parts else None,
            "loss_by_parts": [round(part, 4) for part in parts],
            "leftover_processes": len(left),
            "calm_credited_share": round(usual, 3),
            "recoveries": recoveries,
            "recoveries_by_kind": figures.by_kind(recoveries),
            "processes": grown,
            "level": not any(one["grown"] for one in grown.values()),
            "broken": broken,
        }

    def recoveries(self, events: Mapping[str, Sequence[figures.Event]]) -> tuple[list[dict[str, Any]], float]:
        """Every fault and what came after it, and the credited share in calm."""
        starts = {
            name: [event["time"] for event in own if event["event"] == "training_started"]
            for name, own in events.items()
        }
        stays = [
            stay
            for name in self.lives
            for stay in figures.stays(
                name,
                starts.get(name, []),
                [
                    (one.at, one.until)
                    for one in self.played
                    if one.fault.peer == name and one.fault.kind in AWAY_KINDS and not one.note
                ],
                self.ended,
            )
        ]
        swarm = figures.Swarmwide(
            credits=figures.credits(events, FRAGMENTS),
            stays=stays,
            rates=self.rates,
            window_seconds=figures.WINDOW_CYCLES * FRAGMENTS * self.tick_seconds,
            step_seconds=self.tick_seconds / 2,
        )
        usual = swarm.usual_share(self.began, self.began + self.schedule.calm_seconds)
        rows = []
        for one in self.played:
            fault, happened = one.fault, not one.note
            rows.append(
                {
                    "kind": fault.kind,
                    "peer": fault.peer,
                    "at": fault.at,
                    "until": fault.until,
                    "seconds_to_full_rate": swarm.seconds_to_full(one.at, usual, self.ended) if happened else None,
                    "seconds_to_first_credit": swarm.seconds_to_credit(fault.peer, one.until) if happened else None,
                    "note": one.note,
                }
            )
        return rows, usual


def parts_of(peer: Peer) -> dict[str, psutil.Process]:
    """The processes of one peer that live, by what they do."""
    parts: dict[str, psutil.Process] = {}
    with suppress(psutil.Error):
        training = psutil.Process(peer.process.pid)
        if training.status() == psutil.STATUS_ZOMBIE:
            return {}
        parts["training"] = training
        for process in training.children(recursive=True):
            if process.name() == "p2pd" and process.status() != psutil.STATUS_ZOMBIE:
                averaging = process.parent()
                # A copied identity is looked for through a second daemon, for a moment: the first one is ours.
                if averaging is not None and "daemon" not in parts:
                    parts["daemon"], parts["averaging"] = process, averaging
    return parts


def summary(report: Mapping[str, Any]) -> list[str]:
    """For a person."""
    lines = [
        f"{report['digests_compared']} versions of fragments compared; loss {report['loss_start']} to "
        f"{report['loss_end']}; in calm {report['calm_credited_share']:.0%} of what the peers do was credited."
    ]
    for one in report["recoveries"]:
        told = one["note"] or (
            f"full rate after {one['seconds_to_full_rate']} s, own first credit {one['seconds_to_first_credit']} s "
            "after its return"
        )
        lines.append(f"{one['at']:7.1f} s {one['kind']:16} {one['peer']}: {told}")
    lines += [
        f"{kind:16} {row['times']:3} times; medians: full rate after {row['seconds_to_full_rate']} s, own first credit "
        f"{row['seconds_to_first_credit']} s after the return"
        for kind, row in figures.by_kind(report["recoveries"]).items()
    ]
    judged = [one for one in report["processes"].values() if one["level"] is not None]
    lines.append(
        f"{len(judged)} processes lived long enough to be judged, {sum(one['level'] for one in judged)} level."
    )
    return [*lines, *(f"BROKEN: {what}" for what in report["broken"])]


def soak(
    schedule: Schedule,
    path: Path,
    *,
    lines: bool | None = None,
    preloaded: Preloaded | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Play a schedule in a directory and report.

    :param lines: of their own for the peers; None where they can be
    :param preloaded: forks the peers; None starts them afresh
    """
    if lines is None:
        lines = bool(available())
    swarm = Swarm(path, preloaded)
    player = Soak(schedule, swarm, lines=lines)
    left: list[str] = []
    try:
        player.play()
    finally:
        left = swarm.close()
    report = player.report(left)
    for line in summary(report):
        say(line)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="from when the first peers average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", type=int, default=12)
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    parser.add_argument("--no-lines", action="store_true", help="over loopback, also where lines can be emulated")
    parser.add_argument("--dir", type=Path, help="keep logs and state here; by default a directory that is removed")
    options = parser.parse_args(arguments)
    try:
        schedule = make_schedule(options.seed, options.minutes, options.peers)
    except ValueError as error:
        parser.error(str(error))
    # At the head, before anything can go wrong: what is missing then is the rest.
    options.json.write_text(json.dumps({"schedule": schedule.as_json()}, indent=1) + "\n")
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        path = options.dir if options.dir is not None else Path(temporary) / "run"
        path.mkdir(parents=True, exist_ok=True)
        report = soak(schedule, path, lines=False if options.no_lines else None)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())

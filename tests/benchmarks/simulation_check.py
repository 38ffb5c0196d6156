"""The simulations against real rehearsals of a few peers on this machine.

    python tests/benchmarks/simulation_check.py --peers 4,8,12 --json tests/benchmarks/results/simulation-check.json

For each number of peers it rehearses for real on loopback, for ``--seconds`` of training, and plays the same scene with
``--simulate``'s engine. The run is the digits with ``--tick-seconds`` from round to round. Compared are the part of its
rounds that a peer committed, bases made a second, and bytes a peer sent for each round it committed; ratios are
simulated over real. With ``--lines`` every peer has a wide line, and instead of rounds' bytes all that it sends in an
hour is compared, by the interface's counters: the DHT's load is most of it. What it does not compare: narrow lines,
lives, swarms bigger than this machine carries. Where other programs take the cores the real rounds suffer, and the
ratios say so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dht_config.manifest import RunManifest, example_manifest
from p2p_trainer.rehearsal.rehearse import RehearseOptions, find_manifest, rehearse
from p2p_trainer.rehearsal.report import Report
from p2p_trainer.rehearsal.scene import Scene
from p2p_trainer.simulation.simulate import fragment_sizes, play, played
from p2p_trainer.simulation.simulated_dht import RecordSizes

SPEEDS = (40, 20, 10, 4)
"""Samples per second, over and over: what two cores carry of the digits twelve times."""


LINE = "200M/2ms"
"""Of every peer with ``--lines``: wide, so that it only counts."""


def scene_text(peers: int, lines: bool) -> str:
    line = f":{LINE}" if lines else ""
    return ",".join(f"{SPEEDS[number % len(SPEEDS)]}{line}" for number in range(peers))


def manifest_text(tick_seconds: float) -> str:
    """The digits' manifest with longer ticks, so that a machine that is busy is in time for them."""
    text = example_manifest("digits")
    for before, after in (
        ("tick_seconds = 1.0", f"tick_seconds = {tick_seconds:g}"),
        ("matchmaking_seconds = 1.0", f"matchmaking_seconds = {min(2.0, tick_seconds):g}"),
    ):
        if text.count(before) != 1:
            raise ValueError(f"the example has no line {before!r} any more")
        text = text.replace(before, after)
    return text


def of_report(report: Report) -> dict[str, float]:
    """What a real rehearsal came to."""
    bases = {key for peer in report.peers for key in peer.digests if not key.endswith(":0")}
    sent = sum(peer.bytes_sent_per_hour * peer.window_seconds / 3600 for peer in report.peers)
    seconds = statistics.fmean(peer.window_seconds for peer in report.peers)
    traffic = {"bytes_per_round": sent / max(1, sum(peer.rounds_committed for peer in report.peers))}
    if all(peer.bytes_counted == "line" for peer in report.peers):
        traffic = {"line_bytes_per_hour": statistics.fmean(peer.bytes_sent_per_hour for peer in report.peers)}
    return {
        "participation": statistics.fmean(peer.participation for peer in report.peers),
        "rounds_per_second": len(bases) / seconds,
        **traffic,
        "credited": report.credited_efficiency,
    }


def of_simulation(scene: Scene, manifest: RunManifest) -> dict[str, float]:
    """The same of the simulation."""
    fragments = fragment_sizes(manifest)
    records = RecordSizes.measured(len(fragments), max(fragments))
    swarm, size = played(scene, manifest, fragments, records), play(scene, manifest, fragments, records)
    tallies = [peer.tally for peer in swarm.peers]
    alone = sum(peer.emulated.samples_per_second for peer in swarm.peers) * scene.seconds
    return {
        "participation": statistics.fmean(tally.participation for tally in tallies),
        "rounds_per_second": len(swarm.ticks.group_sizes) / scene.seconds,
        "bytes_per_round": sum(tally.bytes_sent for tally in tallies) / sum(tally.committed for tally in tallies),
        "line_bytes_per_hour": size.round_bytes_per_hour + 3600 * size.dht_bytes_per_second,
        "credited": sum(peer.credited_samples for peer in swarm.peers) / alone,
    }


def check(peers: int, run: str, seconds: float, lines: bool, console: Console) -> dict[str, Any]:
    options = RehearseOptions(peers=scene_text(peers, lines), seconds=seconds, run=run, seed=0)
    _, manifest = find_manifest(run)
    simulated = of_simulation(options.scene(), manifest)
    real = of_report(rehearse(options, console=console))
    return {
        "peers": peers,
        "real": real,
        "simulated": {key: simulated[key] for key in real},
        "simulated_over_real": {key: round(simulated[key] / real[key], 4) if real[key] else None for key in real},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default="4,8", help="numbers of peers")
    parser.add_argument("--tick-seconds", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--lines", action="store_true", help="count everything that crosses the peers' interfaces")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="written after every number of peers")
    options = parser.parse_args(arguments)
    console, rows = Console(width=120), []
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run.toml"
        run.write_text(manifest_text(options.tick_seconds))
        for peers in (int(text) for text in options.peers.split(",")):
            rows.append(check(peers, str(run), options.seconds, options.lines, console))
            console.print_json(json.dumps(rows[-1]))
            table = {"tick_seconds": options.tick_seconds, "seconds": options.seconds, "checks": rows}
            options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Is a swarm worth it? Time to a loss against its fastest peer alone and against one machine with all the speed.

``python tests/benchmarks/long_run.py --scene reference --seeds 3 --minutes 27 --json FILE``

A swarm's averages cost it something in its first rounds, so a minute and a half (``side_by_side.py``) says little about
a run of days. Here the same scenes are played for hundreds of rounds on an event clock: real text, real gradients, the
product's own rounds, weights and accounts (``rehearse --virtual-time``), and nobody waits. Contenders:

ours            all peers of the scene
fastest_alone   the fastest of them, on its own, with inner optimizer and data order as in the swarm
one_machine     one machine with everybody's speed: what no swarm can beat

For a quarter, a half and all of the run: the loss that ``fastest_alone`` had by then, how long the others took to it,
and the ratio. Losses are of the base on 512 held-out samples; between two evaluations on a line. ``of_one_machine`` is
how much less time one machine with all the speed took to the loss that the swarm ended at.

What it does not show: what the real network, clocks and processes cost (``side_by_side.py``); lines here only decide
who is in which round. Learning rates are the run's for everybody: ``one_machine`` and ``fastest_alone`` might do better
with others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from side_by_side_figures import seconds_to_loss
from side_by_side_scenes import ALONE, OURS, RUN, SCENES, load_scene, manifest_text

from dht_config.manifest import parse_manifest
from p2p_trainer.rehearsal.scene import Scene
from p2p_trainer.simulation.virtual_time import VirtualRehearsal

CONTENDERS = (OURS, *ALONE)
PARTS = (0.25, 0.5, 1.0)
"""Of the run: the losses that the fastest peer alone has by then."""
Curve = list[tuple[float, float, float]]
"""(virtual seconds, samples of all peers, held-out loss), in order of time."""


def play(scene_name: str, contender: str, seed: int, seconds: float) -> dict[str, Any]:
    """One contender with one seed, which decides the model's first values and the order of the data."""
    began = time.monotonic()
    scene = load_scene(scene_name, seconds)
    manifest = parse_manifest(manifest_text(len(scene.peers)), scene_name)
    peers = tuple(replace(peer, link=None) if contender in ALONE else peer for peer in scene.taking_part(contender))
    rehearsal = VirtualRehearsal(Scene(peers=peers, seconds=seconds, seed=seed, run=RUN), manifest)
    report = rehearsal.run()
    return {
        "contender": contender,
        "seed": seed,
        "curve": rehearsal.held_out,
        "efficiency": report.efficiency,
        "digests_agree": report.digests_agree,
        "rounds": max(peer.rounds_committed for peer in report.peers) / manifest.run.fragments,
        "took_seconds": time.monotonic() - began,
    }


def loss_after(curve: Curve, seconds: float) -> float:
    """The loss of the last evaluation by then."""
    return [loss for at, _, loss in curve if at <= seconds * 1.01][-1]


def compare(runs: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """What the seeds have in common: mean and (least, greatest) of each ratio, seed by seed."""
    curves = {(run["contender"], run["seed"]): [tuple(point) for point in run["curve"]] for run in runs}
    seeds = sorted({seed for contender, seed in curves if all((name, seed) in curves for name in CONTENDERS)})
    found: dict[str, list[float | None]] = {}

    def note(name: str, value: float | None) -> None:
        found.setdefault(name, []).append(value)

    for seed in seeds:
        ours, alone, one = (curves[name, seed] for name in (OURS, "fastest_alone", "one_machine"))
        for part in PARTS:
            at = part * seconds
            loss = loss_after(alone, at)
            # Noise may let the curve pass this loss earlier: then that is when it was reached.
            reached, taken = seconds_to_loss(alone, loss), seconds_to_loss(ours, loss)
            note(f"loss_{part:g}", loss)
            note(f"faster_than_alone_{part:g}", reached / taken if reached and taken else None)
        note("final_loss_ours", ours[-1][2])
        note("final_loss_alone", alone[-1][2])
        note("final_loss_one_machine", one[-1][2])
        reached, taken = seconds_to_loss(one, ours[-1][2]), seconds_to_loss(ours, ours[-1][2])
        note("of_one_machine", reached / taken if reached and taken else None)
    return {"seeds": seeds, **{name: _spread(values) for name, values in found.items()}}


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """None where a seed did not get there: that has no mean."""
    known = [value for value in values if value is not None]
    whole = len(known) == len(values)
    return {
        "mean": statistics.fmean(known) if known and whole else None,
        "least": min(known, default=None) if whole else None,
        "greatest": max(known, default=None),
    }


def table_of(summary: Mapping[str, Any], seconds: float) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("fastest peer alone, after", "its loss", "ours is there x sooner", "least", "greatest"):
        table.add_column(heading)
    for part in PARTS:
        loss, faster = summary[f"loss_{part:g}"], summary[f"faster_than_alone_{part:g}"]
        table.add_row(
            f"{part * seconds:.0f} s", *(_text(value) for value in (loss["mean"], *(faster[k] for k in faster)))
        )
    return table


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scene", choices=SCENES, default="reference")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=27.0, help="virtual; 27 are 400 rounds of each parameter")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True, help="results; written after every run, and resumed from")
    options = parser.parse_args(arguments)
    console, seconds = Console(stderr=True), options.minutes * 60
    document: dict[str, Any] = {"scene": options.scene, "seconds": seconds, "cores": os.cpu_count(), "runs": []}
    if options.json.exists():
        before = json.loads(options.json.read_text())
        if (before["scene"], before["seconds"]) != (options.scene, seconds):
            parser.error(f"{options.json} has results of another scene or length")
        document["runs"] = before["runs"]
    done = {(run["contender"], run["seed"]) for run in document["runs"]}
    wanted = [(name, seed) for seed in range(options.seeds) for name in CONTENDERS if (name, seed) not in done]
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(play, options.scene, name, seed, seconds) for name, seed in wanted]):
            run = future.result()
            document["runs"].append(run)
            document["summary"] = compare(document["runs"], seconds)
            options.json.write_text(json.dumps(document, indent=1) + "\n")
            console.print(
                f"{run['contender']}, seed {run['seed']}: loss {run['curve'][-1][2]:.3f}, {run['took_seconds']:.0f} s"
            )
    summary = compare(document["runs"], seconds)
    if not summary["seeds"]:
        parser.error("no seed has all contenders yet")
    Console().print(table_of(summary, seconds))
    one, ours, alone = (summary[f"final_loss_{name}"]["mean"] for name in ("one_machine", "ours", "alone"))
    share = summary["of_one_machine"]["mean"]
    Console().print(
        f"Loss at the end: ours {ours:.3f}, fastest alone {alone:.3f}, one machine {one:.3f}, "
        f"which took {_text(share)} of our time to our last loss. Seeds: {summary['seeds']}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

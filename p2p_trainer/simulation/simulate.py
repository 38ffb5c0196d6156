"""``rehearse --simulate``: what rounds, traffic and the DHT would be as a swarm grows, without network or model.

With a number of peers (``--peers 1000``) it plays swarms of growing size up to it, of random machines on random lines;
with a scene, that scene. The decisions are the product's (``simulated_swarm.py``), the DHT's load is records times size
times how often they are read (``simulated_dht.py``). Random peers have a machine of ``machines.py`` and a line of
LINES, an assumption about homes and not a census; each is as likely as the other.

All figures are simulated, and marked so. ``tests/benchmarks/simulation_check.py`` holds them against real runs of a
few peers; beyond those nobody has seen a real swarm of this program.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dht_config.errors import UsageError
from dht_config.manifest import RunManifest
from p2p_trainer.machines import MACHINES
from p2p_trainer.rehearsal.links import LinkSpec
from p2p_trainer.rehearsal.rehearsal_files import check_report_path, write_json
from p2p_trainer.rehearsal.rehearsal_view import say, show_status
from p2p_trainer.rehearsal.rehearse import RehearseOptions, find_manifest
from p2p_trainer.rehearsal.scene import EmulatedPeer, Names, Scene
from p2p_trainer.run_model import layout_of
from p2p_trainer.simulation.simulated_dht import RecordSizes, dht_load
from p2p_trainer.simulation.simulated_peer import CountedWork
from p2p_trainer.simulation.simulated_swarm import SimulatedSwarm
from p2p_trainer.simulation.simulated_world import SwarmModel
from p2p_trainer.target import manifest_target

MAX_SIMULATED_PEERS = 10_000
SIZES = (10, 30, 100, 300, 1000, 3000)
"""Of growing swarms, and what was asked for."""
LINES = ("1G/500M/10ms", "250M/40M/20ms", "100M/40M/25ms", "50M/10M/30ms", "16M/2400k/40ms")
"""Of random peers, each as likely as the other: fibre, two cables, two telephone lines."""
NOTICE = "Simulated, not measured: the product's decisions on an event clock, without network or model."

_COUNT = re.compile(r"\s*(\d{1,9})\s*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSize:
    """What a swarm of one size came to. Traffic is a mean over peers, each way."""

    peers: int
    rounds_per_minute: float
    """That made a base, of all fragments."""
    group_size: float
    """Mean, of the rounds that made one."""
    participation: float
    """The part, 0 to 1, of its rounds that a peer committed; mean."""
    credited: float
    """The part of all processed samples that is in a base."""
    round_bytes_per_hour: float
    fetched_bytes_per_hour: float
    leader_bytes_per_round: float
    """That a group's leader sends to bring it together."""
    dht_bytes_per_second: float
    dht_holder_bytes_per_second: float
    """Sent by a peer near the run's keys."""
    signatures_per_second: float
    """That a peer checks."""
    dictionary_bytes: int
    """Of everybody's records of one kind, as one message."""
    records_are_readable: bool
    reasons: dict[str, float]
    """Why rounds were not committed, as parts of all."""


def simulate(options: RehearseOptions, console: Console) -> list[SimulatedSize]:
    """Play it, print a table, and return what it says.

    Raises: UsageError for options or a run that cannot be simulated; ManifestError.
    """
    count = _COUNT.fullmatch(options.peers) if options.peers is not None and options.scene_path is None else None
    if count is not None:
        number = int(count[1])
        if not 1 <= number <= MAX_SIMULATED_PEERS:
            raise UsageError(
                f"--simulate --peers {number}: from 1 to {MAX_SIMULATED_PEERS} can be simulated.", "Give such a number."
            )
        scene = replace(options, peers="1").scene()
        everybody = random_peers(number, scene.seed)
        sizes = [*(size for size in SIZES if size < number), number]
        scenes = [replace(scene, peers=everybody[:size]) for size in sizes]
    else:
        scenes = [options.scene()]
    _, manifest = find_manifest(scenes[0].run)
    if manifest.averaging.mode != "local":
        raise UsageError('--simulate plays runs of mode = "local" only.', "Leave it out for this run.")
    check_report_path(options.json_path, "--json")
    fragments = fragment_sizes(manifest)
    records = RecordSizes.measured(len(fragments), max(fragments))
    began, found = time.monotonic(), []
    with show_status(console) as status:
        for one in scenes:
            status.show("Simulating", f"{len(one.peers)} peers")
            found.append(play(one.with_churn(), manifest, fragments, records))
    if options.json_path is not None:
        table = _as_json(scenes[0], count is not None, manifest, records, found)
        write_json(options.json_path, table, "--json")
    _print(console, scenes[0], found)
    if count is not None:
        say(console, f"Peers: random machines, lines of {', '.join(LINES)}; seed {scenes[0].seed}.")
    say(console, f"{NOTICE} It took {time.monotonic() - began:.0f} s.")
    return found


def fragment_sizes(manifest: RunManifest) -> list[int]:
    """Elements of each fragment of a run's model, which is not built for it."""
    task = manifest_target(manifest).task
    if task is None:
        raise UsageError("There is nothing to train.", "Give a manifest.")
    with torch.device("meta"):
        layout = layout_of(task.build_model(), manifest)
    return [layout.size(fragment) for fragment in range(layout.num_fragments)]


def random_peers(count: int, seed: int) -> tuple[EmulatedPeer, ...]:
    """So many peers of random machines and lines; the first n are the same however many there are."""
    chance, names = random.Random(seed), Names()
    peers = []
    for _ in range(count):
        machine, line = chance.choice(list(MACHINES)), chance.choice(LINES)
        peers.append(
            EmulatedPeer(
                name=names.next(machine),
                samples_per_second=MACHINES[machine].samples_per_second,
                link=LinkSpec.parse(line),
            )
        )
    return tuple(peers)


def played(scene: Scene, manifest: RunManifest, fragments: Sequence[int], records: RecordSizes) -> SimulatedSwarm:
    """A swarm that has come to its end.

    :param scene: with its lives, without churn
    :param fragments: their sizes in elements
    """
    batch_size = manifest.inner_optimizer.batch_size
    model = SwarmModel.of(
        manifest,
        fragments,
        announcement_bytes=records.announcement,
        records_are_readable=records.readable(len(scene.peers)),
    )
    swarm = SimulatedSwarm(
        model, scene.peers, lambda index, own_id: CountedWork(own_id, fragments, batch_size), seed=scene.seed
    )
    swarm.run(scene.seconds)
    return swarm


def play(scene: Scene, manifest: RunManifest, fragments: Sequence[int], records: RecordSizes) -> SimulatedSize:
    """What a swarm comes to; see ``played``."""
    swarm, number = played(scene, manifest, fragments, records), len(scene.peers)
    model, peers, ticks = swarm.world.model, swarm.peers, swarm.ticks
    minutes, hours = scene.seconds / 60, scene.seconds / 3600
    commits = statistics.fmean(peer.tally.committed for peer in peers) / scene.seconds
    load = dht_load(records, number, model.schedule.tick_seconds, model.lead_seconds, commits)
    processed = sum(peer.samples for peer in peers)
    outcomes = sum(peer.tally.rounds for peer in peers)
    return SimulatedSize(
        peers=number,
        rounds_per_minute=len(ticks.group_sizes) / minutes,
        group_size=statistics.fmean(ticks.group_sizes) if ticks.group_sizes else 0.0,
        participation=statistics.fmean(peer.tally.participation for peer in peers),
        credited=sum(peer.credited_samples for peer in peers) / processed if processed else 0.0,
        round_bytes_per_hour=statistics.fmean(peer.tally.bytes_sent for peer in peers) / hours,
        fetched_bytes_per_hour=statistics.fmean(peer.tally.bytes_fetched for peer in peers) / hours,
        leader_bytes_per_round=ticks.matchmaking_bytes / ticks.groups if ticks.groups else 0.0,
        dht_bytes_per_second=load.bytes_per_second,
        dht_holder_bytes_per_second=load.holder_bytes_per_second,
        signatures_per_second=load.signatures_per_second,
        dictionary_bytes=load.dictionary_bytes,
        records_are_readable=load.readable,
        reasons={reason: count / outcomes for reason, count in ticks.reasons.most_common()},
    )


def _as_json(
    scene: Scene, random_machines: bool, manifest: RunManifest, records: RecordSizes, found: Sequence[SimulatedSize]
) -> dict[str, Any]:
    return {
        "simulated": True,
        "what": NOTICE,
        "run": manifest.run.name,
        "seconds": scene.seconds,
        "seed": scene.seed,
        "lines": list(LINES) if random_machines else None,
        "record_bytes": asdict(records),
        "sizes": [asdict(size) for size in found],
    }


def _print(console: Console, scene: Scene, found: Sequence[SimulatedSize]) -> None:
    table = Table(title=f"Simulated: {scene.run}, {scene.seconds:g} s", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("peers", "rounds/min", "group", "part", "credited", "rounds MB/h", "DHT MB/h", "checks/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for size in found:
        table.add_row(
            f"{size.peers}",
            f"{size.rounds_per_minute:.1f}",
            f"{size.group_size:.0f}",
            f"{100 * size.participation:.0f} %",
            f"{100 * size.credited:.0f} %",
            f"{size.round_bytes_per_hour / 1e6:.0f}",
            f"{size.dht_bytes_per_second * 3600 / 1e6:.0f}",
            f"{size.signatures_per_second:.0f}",
        )
    console.print(table)
    say(console, "group: members of a round; part: rounds that a peer committed; MB/h: of a peer, each way;")
    say(console, "checks/s: signatures of records that a peer checks.")
    for size in found:
        for text in remarks(size):
            say(console, f"{size.peers} peers: {text}")


def remarks(size: SimulatedSize) -> list[str]:
    """What stands in the way of a swarm of this size, in plain words."""
    found = []
    if not size.records_are_readable:
        found.append(
            f"their records of one kind are {size.dictionary_bytes / 1e6:.1f} MB, more than a peer accepts: "
            "nobody knows of anybody."
        )
    elif size.participation < 0.9 and size.reasons:
        reason, part = next(iter(size.reasons.items()))
        found.append(f"{100 * part:.0f} % of rounds were not committed because {reason}.")
    return found

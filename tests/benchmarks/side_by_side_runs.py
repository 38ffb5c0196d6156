"""One run of one contender of ``side_by_side.py``: its processes over emulated lines, watched, and what they did.

Rivals are processes of ``side_by_side_rivals.py``; ours is what ``p2p-trainer rehearse`` starts, the product's own
commands. Lines, kills and counters are the same for all: bytes are those of each peer's device in its own network
namespace, CPU seconds those of every process below this one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import side_by_side_rivals as rivals
import torch
from rich.console import Console
from side_by_side_figures import PeerRun, Run, Series, curve_of_evaluations, curve_of_snapshots, increase
from side_by_side_scenes import CYCLE_SECONDS, RUN, BenchmarkScene, batches, manifest_text
from side_by_side_watch import Lines, Observer, nothing_left_behind
from torch import nn

from dht_config.errors import RehearsalError
from dht_config.manifest import load_manifest
from p2p_trainer.metrics import read_metrics
from p2p_trainer.rehearsal.links import LinkSpec, Network
from p2p_trainer.rehearsal.rehearsal_view import Status
from p2p_trainer.rehearsal.rehearse import BOOTSTRAP, Rehearsal
from p2p_trainer.rehearsal.rehearsed_processes import ProgramCommands, RehearsedProcess
from p2p_trainer.rehearsal.report import Report
from p2p_trainer.rehearsal.scene import EmulatedPeer, Life, Scene, Stay
from p2p_trainer.settings import PeerSettings
from p2p_trainer.tasks import mean_loss

READY_SECONDS = 300.0
POLL_SECONDS = 0.2
GO_SECONDS = 1.0
HELD_OUT_SAMPLES: int = PeerSettings.model_fields["eval_samples"].default
"""What ours evaluates on; the rivals' snapshots are evaluated on the same."""


def run_rival(scene: BenchmarkScene, contender: str, seed: int, directory: Path, say: Callable[[str], None]) -> Run:
    """Run a contender of ``side_by_side_rivals`` for the scene's time. Raises: RehearsalError if it does not begin."""
    peers = scene.taking_part(contender)
    places = {
        peer.name: RehearsedProcess(name=peer.name, directory=directory / str(index), log=directory / f"{index}.log")
        for index, peer in enumerate(peers)
    }
    network = Network({peer.name: peer.link or LinkSpec() for peer in peers}, seed=seed)

    def pids() -> dict[str, int]:
        return {name: place.process.pid for name, place in places.items() if place.process and place.is_alive}

    with network, nothing_left_behind(), Observer(pids) as observer:
        try:
            start_rivals(scene, contender, seed, directory, peers, places, network)
            wait_until_ready(places)
            began_at = time.time() + GO_SECONDS
            rivals.publish(directory / "go", repr(began_at))
            say(f"{contender}: {len(peers)} peers train for {scene.seconds:g} s")
            with Lines(network, scene.line_changes(contender)) as lines:
                lines.start()
                _play(scene, places, began_at)
        finally:
            for place in places.values():
                place.crash()
            for socket in observer.sockets:
                Path(socket).unlink(missing_ok=True)
    return _rival_run(scene, contender, seed, directory, peers, observer, began_at)


def start_rivals(
    scene: BenchmarkScene,
    contender: str,
    seed: int,
    directory: Path,
    peers: tuple[EmulatedPeer, ...],
    places: Mapping[str, RehearsedProcess],
    network: Network,
) -> None:
    """Start a process of ``side_by_side_rivals`` for each peer; they wait for the file ``go``."""
    speeds = tuple(peer.samples_per_second for peer in peers)
    config = rivals.RivalConfig(
        contender=contender,
        run=RUN,
        seed=seed,
        speeds=speeds,
        hosts=tuple(network.address(peer.name) for peer in peers),
        batches=tuple(batches(contender, speeds, rivals.load_manifest(RUN).inner_optimizer.batch_size)),
        target_batch=round(scene.samples_per_second * CYCLE_SECONDS),
        directory=str(directory),
    )
    path = directory / "config.json"
    path.write_text(json.dumps(asdict(config)))
    for index, (name, place) in enumerate(places.items()):
        place.directory.mkdir()
        command = rivals.command(path, index)
        place.start(network.command(name, command), {**os.environ, "PYTHONUNBUFFERED": "1"})


def wait_until_ready(places: Mapping[str, RehearsedProcess]) -> None:
    """:raises RehearsalError: a peer ended, or needs too long"""
    deadline = time.monotonic() + READY_SECONDS
    waiting = list(places.values())
    while waiting := [place for place in waiting if not events_of(place.metrics, "ready")]:
        dead = next((place for place in waiting if not place.is_alive), None)
        if dead is not None or time.monotonic() > deadline:
            place = dead or waiting[0]
            raise RehearsalError(
                problem=f"Peer {place.name} {'ended' if dead else 'was not ready in time'}.",
                remedy="\n".join(place.log_tail()),
            )
        time.sleep(POLL_SECONDS)


def _play(scene: BenchmarkScene, places: Mapping[str, RehearsedProcess], began_at: float) -> None:
    """Until the time is over, or nobody lives who could go on."""
    to_kill = list(scene.killed)
    while (now := time.time() - began_at) < scene.seconds:
        if scene.kill_at_seconds is not None and now >= scene.kill_at_seconds:
            for name in to_kill:
                places[name].crash()
            to_kill = []
        if not any(place.is_alive for place in places.values()):
            return
        time.sleep(POLL_SECONDS)


def _rival_run(
    scene: BenchmarkScene,
    contender: str,
    seed: int,
    directory: Path,
    peers: tuple[EmulatedPeer, ...],
    observer: Observer,
    began_at: float,
) -> Run:
    ended_at = began_at + scene.seconds
    runs, processed, rounds, ended = [], [], 0, ""
    for index, peer in enumerate(peers):
        path = directory / str(index) / "metrics.jsonl"
        steps = [event for event in events_of(path, "step") if event["time"] <= ended_at]
        ready = events_of(path, "ready")[0]
        ended = ended or next((event["reason"] for event in events_of(path, "ended") if event["time"] <= ended_at), "")
        last = steps[-1] if steps else {}
        rounds = max(rounds, last.get("rounds", 0))
        done = last.get("processed_samples", 0)
        processed.append([(began_at, 0.0), *((event["time"], event["processed_samples"]) for event in steps)])
        runs.append(
            PeerRun(
                name=peer.name,
                speed=peer.samples_per_second,
                solo=ready["samples_per_second"],
                lived_seconds=scene.lived_seconds(peer.name),
                processed=done,
                credited=done - last.get("rejected_samples", 0),
                bytes_received=increase(observer.received.get(peer.name, []), (began_at, ended_at)),
                bytes_sent=increase(observer.sent.get(peer.name, []), (began_at, ended_at)),
                progress=[
                    (event["time"] - began_at, event["processed_samples"] - event["rejected_samples"])
                    for event in steps
                ],
                work=[(event["time"] - began_at, event["processed_samples"]) for event in steps],
            )
        )
    losses, parameters = _evaluate(directory / "0")
    return Run.of(
        contender=contender,
        seed=seed,
        scene=scene,
        peers=runs,
        rounds=rounds,
        parameters=parameters,
        curve=curve_of_snapshots(losses, processed, began_at, ended_at),
        cpu=observer.cpu,
        machine=observer.machine,
        window=(began_at, ended_at),
        killed_at=scene.kill_at_seconds,
        ended=ended,
    )


def _evaluate(directory: Path) -> tuple[Series, int]:
    """(unix s, held-out loss) of every snapshot of a peer, and the number of parameters."""
    task = rivals.task_of(rivals.load_manifest(RUN))
    model, held_out = task.build_model(), task.held_out(HELD_OUT_SAMPLES, HELD_OUT_SAMPLES)
    losses = []
    for event in events_of(directory / "metrics.jsonl", "snapshot"):
        nn.utils.vector_to_parameters(torch.from_numpy(np.load(directory / event["file"])), model.parameters())
        losses.append((float(event["time"]), mean_loss(task, model, held_out)))
    return losses, sum(parameter.numel() for parameter in model.parameters())


def run_ours(scene: BenchmarkScene, contender: str, seed: int, directory: Path, say: Callable[[str], None]) -> Run:
    """The product, by the commands that a rehearsal types. Raises: RehearsalError if it does not come to an end."""
    peers = scene.taking_part(contender)
    killed_at = Life(stays=(Stay(0.0, scene.kill_at_seconds or 0.0, killed=True),))
    played = Scene(
        peers=tuple(
            EmulatedPeer(
                name=peer.name,
                samples_per_second=peer.samples_per_second,
                link=peer.link,
                life=killed_at if peer.name in scene.killed else Life(),
            )
            for peer in peers
        ),
        seconds=scene.seconds,
        seed=seed,
        run=RUN,
    )
    network = Network({BOOTSTRAP: LinkSpec(), **{peer.name: peer.link or LinkSpec() for peer in peers}}, seed=seed)
    manifest_path = directory / "run.toml"
    manifest_path.write_text(manifest_text(len(peers)))
    console = Console(quiet=True)
    with network, nothing_left_behind(), Lines(network, scene.line_changes(contender)) as lines:
        rehearsal = Rehearsal(
            directory=directory,
            scene=played,
            network=network,
            memory=None,
            commands=ProgramCommands(),
            console=console,
            status=_Watched(console, lines, lambda: say(f"{contender}: {len(peers)} peers train")),
        )
        with Observer(rehearsal.pids) as observer:
            report = rehearsal.run(str(manifest_path), load_manifest(manifest_path))
    return _our_run(scene, contender, seed, directory, report, observer)


class _Watched(Status):
    """Learns from a rehearsal that all peers train."""

    def __init__(self, console: Console, lines: Lines, started: Callable[[], None]) -> None:
        super().__init__(console)
        self._lines, self._started, self._training = lines, started, False

    def show(self, phase: str, detail: str = "") -> None:
        if phase.endswith("training") and not self._training:
            self._training = True
            self._started()
            self._lines.start()


def _our_run(
    scene: BenchmarkScene, contender: str, seed: int, directory: Path, report: Report, observer: Observer
) -> Run:
    events = {peer.name: read_metrics(directory / f"peer-{peer.name}" / "metrics.jsonl") for peer in report.peers}
    started = {name: min(_times(found, "training_started")) for name, found in events.items()}
    began_at, all_there_at = min(started.values()), max(started.values())
    window = (all_there_at, all_there_at + scene.seconds)
    committed = {
        (event["fragment"], event["version"])
        for found in events.values()
        for event in found
        if event["event"] == "round" and event["outcome"] == "committed" and window[0] <= event["time"] <= window[1]
    }
    speeds = {peer.name: peer.samples_per_second for peer in scene.peers}
    runs = [
        PeerRun(
            name=peer.name,
            speed=speeds[peer.name],
            solo=peer.solo_samples_per_second,
            lived_seconds=peer.window_seconds,
            processed=peer.processed_samples,
            credited=peer.credited_samples,
            bytes_received=increase(observer.received.get(peer.name, []), window),
            bytes_sent=increase(observer.sent.get(peer.name, []), window),
            progress=[
                (event["time"] - all_there_at, event["credited_samples"])
                for event in events[peer.name]
                if event["event"] == "account"
            ],
            work=[
                (started[peer.name] - all_there_at, 0.0),
                *(
                    (event["time"] - all_there_at, event["processed_samples"])
                    for event in events[peer.name]
                    if event["event"] == "account"
                ),
            ],
            seconds_to_first_credit=peer.seconds_to_first_credit,
        )
        for peer in report.peers
    ]
    killed_at = [max(float(event["time"]) for event in events[name]) - window[0] for name in scene.killed]
    evaluations = [event for found in events.values() for event in found if event["event"] == "eval"]
    return Run.of(
        contender=contender,
        seed=seed,
        scene=scene,
        peers=runs,
        rounds=len(committed) / report.fragments,
        parameters=_parameters(events),
        curve=curve_of_evaluations(evaluations, began_at),
        cpu=observer.cpu,
        machine=observer.machine,
        window=window,
        counted=report.efficiency * sum(run.solo * run.lived_seconds for run in runs),
        killed_at=max(killed_at, default=None),
    )


def _parameters(events: Mapping[str, list[dict[str, Any]]]) -> int:
    """Of the model, as peers that said goodbye wrote them down."""
    goodbye = next(event for found in events.values() for event in found if event["event"] == "leave")
    return sum(int(fragment["parameters"]) for fragment in goodbye["fragments"])


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    """What a peer wrote in its metrics of one kind."""
    return [event for event in read_metrics(path) if event["event"] == kind]


def _times(events: list[dict[str, Any]], kind: str) -> list[float]:
    return [float(event["time"]) for event in events if event["event"] == kind]

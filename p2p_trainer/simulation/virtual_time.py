"""``rehearse --virtual-time``: a scene played on an event clock, with real gradients and without waiting.

The peers of the scene train the manifest's real task on this machine, one after the other between two events, as many
steps as each would have made by then; rounds, weights, codecs, closing, outer optimizer and accounts are the product's
(``simulated_swarm.py``, ``virtual_peer.py``). So the slowest machines cost no waiting, and the same seed gives the same
report on the same machine: what is learned can be compared. One thread computes, since the order of additions must not
depend on the machine's load.

What it does not show is said in ``simulated_swarm.py``. The report is simulated: times are a model's, losses are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console

from dht_config.errors import UsageError
from dht_config.manifest import RunManifest, run_id
from p2p_trainer.rehearsal.rehearsal_files import check_report_path, write_json
from p2p_trainer.rehearsal.rehearsal_view import print_report, say, show_status
from p2p_trainer.rehearsal.rehearse import RehearseOptions, find_manifest
from p2p_trainer.rehearsal.rehearsed_peer import PeerRecord, PlayedLife
from p2p_trainer.rehearsal.report import RehearsedRun, Report, build_report
from p2p_trainer.rehearsal.scene import Life, Scene
from p2p_trainer.run_model import layout_of
from p2p_trainer.running_statistics import load_model
from p2p_trainer.simulation.simulated_peer import SimulatedPeer
from p2p_trainer.simulation.simulated_swarm import SimulatedSwarm
from p2p_trainer.simulation.simulated_world import SwarmModel
from p2p_trainer.simulation.virtual_peer import TrainedRun, TrainedWork, average_of
from p2p_trainer.target import manifest_target
from p2p_trainer.tasks import Batch, mean_loss

EVALUATIONS = 20
HELD_OUT_SAMPLES = 512
HELD_OUT_BATCH = 64
PROGRESS_SECONDS = 1.0
NOTICE = "Simulated: one process computed all peers on a virtual clock; times are a model's, losses are real."


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualReport:
    """A rehearsal's report, and what only virtual time knows."""

    report: Report
    held_out: list[tuple[float, int, float]]
    """(virtual seconds, samples of all peers in the base, loss of the base)."""
    wall_seconds: float

    def as_json(self) -> dict[str, Any]:
        """Without how long it took, so that the same seed gives the same text."""
        return {
            "simulated": True,
            "what": NOTICE,
            **self.report.as_json(),
            "held_out_loss_by_samples": [[samples, loss] for _, samples, loss in self.held_out],
        }


def rehearse_in_virtual_time(options: RehearseOptions, console: Console) -> VirtualReport:
    """Play it, print what came of it, and return the report.

    Raises: UsageError for options or a run that cannot be played so; ManifestError.
    """
    scene = options.scene().with_churn()
    _, manifest = find_manifest(scene.run)
    if manifest.averaging.mode != "local":
        raise UsageError('--virtual-time plays runs of mode = "local" only.', "Leave it out for this run.")
    check_report_path(options.json_path, "--json")
    with show_status(console) as status:
        rehearsal = VirtualRehearsal(scene, manifest)
        began = time.monotonic()
        report = rehearsal.run(
            lambda seconds: status.show("Playing", f"{seconds:.0f} of {scene.seconds:g} virtual seconds")
        )
        result = VirtualReport(report=report, held_out=rehearsal.held_out, wall_seconds=time.monotonic() - began)
    if options.json_path is not None:
        write_json(options.json_path, result.as_json(), "--json")
    say(console, NOTICE)
    print_report(console, report)
    _, samples, loss = result.held_out[-1]
    text = f"Held-out loss {loss:.3f} after {samples} samples of all peers"
    say(console, f"{text}, simulated in {result.wall_seconds:.0f} s.")
    return result


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(slots=True)
class _Record:
    """What a peer's ``metrics.jsonl`` would hold."""

    events: list[dict[str, Any]] = field(default_factory=list)


class VirtualRehearsal:
    """One scene with one manifest, to be played once."""

    def __init__(self, scene: Scene, manifest: RunManifest) -> None:
        task = manifest_target(manifest).task
        if task is None:
            raise UsageError("There is nothing to train.", "Give a manifest.")
        self._scene, self._manifest, self._task = scene, manifest, task
        self._run_id = run_id(manifest, task.version)
        with torch.device("meta"):
            layout = layout_of(task.build_model(), manifest)
        fragments = range(layout.num_fragments)
        sizes = [layout.size(fragment) for fragment in fragments]
        model = SwarmModel.of(manifest, sizes, [layout.parameters_of(fragment) for fragment in fragments])
        self._run = TrainedRun.of(manifest, task, layout, model.rules, scene.seed)
        self._records = {peer.name: _Record() for peer in scene.peers}
        self.held_out: list[tuple[float, int, float]] = []
        self._batches: Sequence[Batch] = task.held_out(HELD_OUT_BATCH, HELD_OUT_SAMPLES)
        self._works: dict[str, TrainedWork] = {}

        def work(index: int, own_id: bytes) -> TrainedWork:
            made = TrainedWork(self._run, own_id, scene.seed * 1000 + index)
            self._works[scene.peers[index].name] = made
            return made

        self.swarm = SimulatedSwarm(
            model,
            scene.peers,
            work,
            seed=scene.seed,
            average=partial(average_of, self._run),
            listener=self._note,
        )

    def run(self, on_progress: Callable[[float], None] = lambda seconds: None) -> Report:
        """Play it to its end. :param on_progress: is told the virtual seconds"""
        with _one_thread():
            return self._run_alone(on_progress)

    def _run_alone(self, on_progress: Callable[[float], None]) -> Report:
        world, seconds = self.swarm.world, self._scene.seconds
        for number in range(EVALUATIONS + 1):
            world.at(seconds * number / EVALUATIONS, self._evaluate)

        def progress() -> None:
            on_progress(world.now)
            for peer in self.swarm.peers:
                peer.advance(world.now)
                self._note_progress(peer)
            world.at(world.now + PROGRESS_SECONDS, progress)

        world.at(PROGRESS_SECONDS, progress)
        self.swarm.run(seconds)
        for peer in self.swarm.peers:
            if peer.present:
                self._note(seconds, peer, "leave", {})
        return build_report(
            RehearsedRun(
                seconds=seconds,
                fragments=self._manifest.run.fragments,
                tick_seconds=self._manifest.run.tick_seconds,
            ),
            [
                PeerRecord(
                    name=peer.name,
                    events=self._records[peer.name].events,
                    killed=any(stay.killed for stay in peer.life.stays),
                    link=str(peer.link) if peer.link is not None else "",
                    life=played(peer.life, seconds),
                )
                for peer in self._scene.peers
            ],
        )

    def _note(self, now: float, peer: SimulatedPeer, event: str, fields: Mapping[str, Any]) -> None:
        events = self._records[peer.name].events
        if event == "join":
            speed = peer.emulated.samples_per_second
            events.append({"time": now, "event": "throughput", "phase": "solo", "samples_per_second": speed})
            fields = {**fields, "run_id": self._run_id}
        elif event in ("account", "leave"):
            fields = {**fields, **account(peer)}
            if event == "leave":
                fields["training_ended"] = now
        events.append({"time": now, "event": event, **fields})

    def _note_progress(self, peer: SimulatedPeer) -> None:
        losses = self._works[peer.name].losses
        if losses:
            loss = sum(losses) / len(losses)
            losses.clear()
            self._note(
                self.swarm.world.now, peer, "train", {"samples": peer.samples, "steps": peer.steps, "loss": loss}
            )

    def _evaluate(self) -> None:
        """The loss of the newest base that one peer has whole."""
        there = [peer for peer in self.swarm.peers if peer.present]
        if not there or not self._batches:
            return
        best = max(there, key=lambda peer: peer.lineage_samples)
        base = torch.cat([holding.state.base for holding in self._works[best.name].holdings])
        load_model(self._run.model, self._run.layout, base)
        loss = mean_loss(self._task, self._run.model, self._batches)
        self.held_out.append((self.swarm.world.now, best.lineage_samples, loss))
        self._note(self.swarm.world.now, best, "eval", {"samples": HELD_OUT_SAMPLES, "loss": loss})


def account(peer: SimulatedPeer) -> dict[str, Any]:
    """A peer's book, as its ``leave`` event has it."""
    holdings = peer.work.holdings
    books = [
        (
            one.ledger.credited_element_samples(),
            one.ledger.dropped_element_samples(),
            one.ledger.pending_element_samples(peer.samples),
        )
        for one in holdings
    ]
    elements = sum(one.size for one in holdings)
    return {
        "processed_samples": peer.samples,
        "inner_steps": peer.steps,
        "credited_samples": sum(credited for credited, _, _ in books) / elements,
        "dropped_samples": sum(dropped for _, dropped, _ in books) / elements,
        "pending_samples": sum(pending for _, _, pending in books) / elements,
        "exact": sum(map(sum, books)) == peer.samples * elements,
        "fragments": [
            {"fragment": index, "parameters": one.size, "pending_samples": pending / one.size}
            for index, (one, (_, _, pending)) in enumerate(zip(holdings, books, strict=True))
        ],
    }


def played(life: Life, seconds: float) -> PlayedLife:
    """What of a life happened before the end."""
    found = PlayedLife(joins=[0.0] if life.begins_with_training else [])
    lists = {"start": found.joins, "leave": found.leaves, "kill": found.kills, "freeze": found.freezes}
    for moment in life.moments():
        if moment.at_seconds < seconds and moment.action in lists:
            lists[moment.action].append(moment.at_seconds)
    found.frozen_at.extend((begin, min(end, seconds)) for begin, end in life.frozen if begin < seconds)
    return found

"""How long a swarm of ours and one of hivemind.Optimizer take to recover from the same three faults.

    python tests/benchmarks/recovery.py ours hivemind_sync hivemind_local --json FILE

Four equal peers on lines of their own train the same model. After a calm time the last of them is frozen for a while
(all its processes), then its line is cut, then it is killed. The first peer is left alone: in hivemind's swarm it is
the only way in. The rivals are those of ``side_by_side_rivals.py``; three to four minutes a contender. ``--json`` adds
to what the file holds; without contenders its table is printed.

Two figures a fault: seconds until the others are credited with 90 % of what they were in calm, over a window of four
cycles, the fault's beginning being 0; and seconds from the peer's return to its first credited sample. A rival's sample
is credited when it is processed, unless it is thrown away later, and the returned peer's first when it comes to another
epoch: more than hivemind promises, since who averages with nobody counts as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import side_by_side_rivals as rivals
from side_by_side_runs import GO_SECONDS, POLL_SECONDS, READY_SECONDS, events_of, start_rivals, wait_until_ready
from side_by_side_scenes import CYCLE_SECONDS, HIVEMIND, OURS, BenchmarkScene, manifest_text
from side_by_side_watch import Observer, nothing_left_behind

from dht_config.errors import RehearsalError
from p2p_trainer.rehearsal.links import LinkSpec, Network
from p2p_trainer.rehearsal.rehearse import BOOTSTRAP
from p2p_trainer.rehearsal.rehearsed_processes import ProgramCommands, RehearsedProcess
from p2p_trainer.rehearsal.scene import parse_peers

sys.path.append(str(Path(__file__).parents[1] / "swarm"))
import soak_figures as figures

PEERS = "15:100M/20ms*4"
SETTLE_SECONDS, CALM_SECONDS = 10.0, 28.0
AWAY_SECONDS, REST_SECONDS = 20.0, 28.0
CONTENDERS = (OURS, *HIVEMIND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is done to the last peer. Seconds from when all trained; it returns at ``until``, if at all."""

    kind: str
    at: float
    until: float | None


def faults() -> tuple[Fault, ...]:
    frozen = SETTLE_SECONDS + CALM_SECONDS
    cut = frozen + AWAY_SECONDS + REST_SECONDS
    killed = cut + AWAY_SECONDS + REST_SECONDS
    return (
        Fault(kind="frozen", at=frozen, until=frozen + AWAY_SECONDS),
        Fault(kind="line cut", at=cut, until=cut + AWAY_SECONDS),
        Fault(kind="killed", at=killed, until=None),
    )


def play(contender: str, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """One contender through all faults. Raises: RehearsalError if it does not begin."""
    seconds = faults()[-1].at + REST_SECONDS
    scene = BenchmarkScene(name="recovery", seconds=seconds, peers=parse_peers(PEERS))
    places = {
        peer.name: RehearsedProcess(name=peer.name, directory=directory / str(index), log=directory / f"{index}.log")
        for index, peer in enumerate(scene.peers)
    }
    door = RehearsedProcess(name=BOOTSTRAP, directory=directory / BOOTSTRAP, log=directory / "bootstrap.log")
    network = Network({BOOTSTRAP: LinkSpec(), **{peer.name: peer.link or LinkSpec() for peer in scene.peers}})

    def pids() -> dict[str, int]:
        return {name: place.process.pid for name, place in places.items() if place.process and place.is_alive}

    with network, nothing_left_behind(), Observer(pids) as observer:
        try:
            if contender == OURS:
                _start_ours(scene, directory, {**places, BOOTSTRAP: door}, network)
                began = time.time()
            else:
                start_rivals(scene, contender, 1, directory, scene.peers, places, network)
                wait_until_ready(places)
                began = time.time() + GO_SECONDS
                rivals.publish(directory / "go", repr(began))
            say(f"{contender}: {len(places)} peers train for {seconds:g} s")
            _strike(places[scene.peers[-1].name], network, began, seconds)
        finally:
            for place in (*places.values(), door):
                place.crash()
            for socket in observer.sockets:
                Path(socket).unlink(missing_ok=True)
    paths = {name: place.metrics for name, place in places.items()}
    return report(contender, paths, began, began + seconds)


def _start_ours(
    scene: BenchmarkScene, directory: Path, places: Mapping[str, RehearsedProcess], network: Network
) -> None:
    """All peers have averaged together when this returns."""
    manifest, invite = directory / "run.toml", directory / "invite"
    before = 'weighting = "samples_times_batch"'
    text = manifest_text(len(scene.peers))
    manifest.write_text(text.replace(before, 'weighting = "samples"'))  # so that weights are samples
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    commands, door = ProgramCommands(), places[BOOTSTRAP]
    command = commands.bootstrap(str(manifest), door.directory, invite, network.address(BOOTSTRAP))
    door.start(network.command(BOOTSTRAP, command), environment)
    _wait(lambda: invite.exists(), places)
    for peer in scene.peers:
        place = places[peer.name]
        command = commands.join(
            invite.read_text().strip(), place.directory, peer.samples_per_second, network.address(peer.name)
        )
        place.start(network.command(peer.name, [*command, "--eval-samples", "0"]), environment)
    _wait(lambda: all(_averaged(places[peer.name].metrics, len(scene.peers)) for peer in scene.peers), places)


def _averaged(path: Path, group: int) -> bool:
    return any(event["outcome"] == "committed" and event["group_size"] >= group for event in events_of(path, "round"))


def _wait(condition: Callable[[], bool], places: Mapping[str, RehearsedProcess]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        if time.monotonic() > deadline or any(place.process and not place.is_alive for place in places.values()):
            raise RehearsalError(
                problem="Our peers did not come to average together.",
                remedy="\n".join(line for place in places.values() if place.process for line in place.log_tail()),
            )
        time.sleep(POLL_SECONDS)


def _strike(place: RehearsedProcess, network: Network, began: float, seconds: float) -> None:
    def until(moment: float) -> None:
        time.sleep(max(0.0, began + moment - time.time()))

    for fault in faults():
        until(fault.at)
        if fault.kind == "frozen":
            place.freeze()
        elif fault.kind == "line cut":
            network.down(place.name)
        else:
            place.crash()
        if fault.until is not None:
            until(fault.until)
            place.thaw()
            network.up(place.name)
    until(seconds)


# --------------------------------------------------------------------------- figures


def report(contender: str, paths: Mapping[str, Path], began: float, end: float) -> dict[str, Any]:
    """What the peers' metrics say. :param paths: by peer, the one that was struck last"""
    struck = list(paths)[-1]
    away = [(began + fault.at, end if fault.until is None else began + fault.until) for fault in faults()]
    stays = [stay for name in paths for stay in figures.stays(name, [began], away if name == struck else [], end)]
    fragments = 1 + max((event["fragment"] for event in events_of(paths[struck], "round")), default=0)
    if contender == OURS:
        found = figures.credits({name: events_of(path, "round") for name, path in paths.items()}, fragments)
        first = [one.at for one in found if one.peer == struck]
    else:
        found = [one for name, path in paths.items() for one in credits_of_steps(name, events_of(path, "step"))]
        first = epochs(events_of(paths[struck], "step"))
    here = [one for one in found if any(stay.peer == one.peer and stay.begin <= one.at <= stay.end for stay in stays)]
    swarm = figures.Swarmwide(
        credits=here,
        stays=stays,
        rates={peer.name: peer.samples_per_second for peer in parse_peers(PEERS)},
        window_seconds=figures.WINDOW_CYCLES * CYCLE_SECONDS,
        step_seconds=0.5,
    )
    usual = swarm.usual_share(began + SETTLE_SECONDS, began + SETTLE_SECONDS + CALM_SECONDS)
    rows = []
    for fault, following in pairwise([*faults(), Fault(kind="end", at=end - began, until=None)]):
        back = began + fault.until if fault.until is not None else None
        credit = next((at for at in first if back is not None and back < at < began + following.at), None)
        rows.append(
            {
                **asdict(fault),
                "seconds_to_full_rate": swarm.seconds_to_full(began + fault.at, usual, began + following.at),
                "seconds_to_first_credit": round(credit - back, 1) if credit is not None and back is not None else None,
            }
        )
    ended = {name: events_of(path, "ended") for name, path in paths.items()}
    return {
        "contender": contender,
        "calm_credited_share": round(usual, 3),
        "faults": rows,
        "ended": {name: events[0]["reason"] for name, events in ended.items() if events},
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def credits_of_steps(peer: str, steps: Sequence[Mapping[str, Any]]) -> list[figures.Credit]:
    """Of a rival: what it processed and did not throw away, as it came."""
    kept = [(event["time"], event["processed_samples"] - event["rejected_samples"]) for event in steps]
    pairs = pairwise([(0.0, 0.0), *kept])
    return [figures.Credit(at=at, peer=peer, samples=after - before) for (_, before), (at, after) in pairs]


def epochs(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """When a rival came to another epoch."""
    return [after["time"] for before, after in pairwise(steps) if after["rounds"] > before["rounds"]]


def print_table(runs: Sequence[Mapping[str, Any]]) -> None:
    """In Markdown. Full rates are shares of what the contender is credited with in calm, which stands beside them."""
    kinds = [fault.kind for fault in faults()]
    print("| | credited in calm | " + " | ".join(f"{kind}: full rate | {kind}: first credit" for kind in kinds) + " |")
    print("|---" * (2 + 2 * len(kinds)) + "|")
    for run in runs:
        cells = [
            "-" if fault[what] is None else f"{fault[what]:g}"
            for fault in run["faults"]
            for what in ("seconds_to_full_rate", "seconds_to_first_credit")
        ]
        print(f"| {run['contender']} | {run['calm_credited_share']:.0%} | " + " | ".join(cells) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contenders", nargs="*", choices=[*CONTENDERS, []], metavar="CONTENDER", help=str(CONTENDERS))
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    parser.add_argument("--dir", type=Path, help="keep logs and metrics here; by default a directory that is removed")
    options = parser.parse_args()
    runs = json.loads(options.json.read_text()) if options.json.exists() else []
    for contender in options.contenders:
        with tempfile.TemporaryDirectory(prefix="recovery-") as temporary:
            directory = (options.dir or Path(temporary)) / contender
            directory.mkdir(parents=True)
            run = play(contender, directory, print)
        runs = [*(other for other in runs if other["contender"] != contender), run]
        options.json.write_text(json.dumps(runs, indent=1) + "\n")
    print_table(runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())

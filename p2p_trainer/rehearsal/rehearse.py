"""A whole run on this machine: a bootstrap and unequal peers, as real processes that meet over lines of their own.

It types the same commands as people do and reads the same metrics files as other tools. Where this machine may make
network namespaces, every peer has the line that the scene gives it (``links``), else all meet over loopback. What it
does not show: clocks that disagree, and more cores than this machine has.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from rich.console import Console

from dht_config.errors import RehearsalError, UsageError
from dht_config.manifest import EXAMPLES, RunManifest, example_manifest, load_manifest, parse_manifest
from p2p_trainer.machines import memory_text
from p2p_trainer.metrics import read_metrics
from p2p_trainer.rehearsal.emulation import lines, memories
from p2p_trainer.rehearsal.leftovers import Traces
from p2p_trainer.rehearsal.links import LinksUnavailable, Network
from p2p_trainer.rehearsal.memory_limits import MemoryLimits
from p2p_trainer.rehearsal.rehearsal_files import check_report_path, make_directory, write_json, write_report
from p2p_trainer.rehearsal.rehearsal_page import rehearsal_page
from p2p_trainer.rehearsal.rehearsal_view import Status, print_report, say, show_status
from p2p_trainer.rehearsal.rehearsed_peer import LineCount, PeerRecord, PlayedLife
from p2p_trainer.rehearsal.rehearsed_processes import (
    LOOPBACK,
    Commands,
    ProgramCommands,
    RehearsedProcess,
    environment_of_a_rehearsal,
    leave_together,
)
from p2p_trainer.rehearsal.report import RehearsedRun, Report, build_report, problems
from p2p_trainer.rehearsal.scene import (
    DEFAULT_PEERS,
    DEFAULT_SECONDS,
    MAX_SECONDS,
    Action,
    EmulatedPeer,
    Moment,
    Scene,
    parse_churn,
    parse_peers,
)
from p2p_trainer.rehearsal.scene_file import load_scene

POLL_SECONDS = 0.25
INVITE_SECONDS = 120.0
"""For a bootstrap to import torch on a busy machine, build the model and listen."""
START_SECONDS = 180.0
START_SECONDS_PER_PEER = 15.0
START_STEPS = 4
"""Inner steps of the slowest peer: one that is measured, one that is trained, and as much again."""
START_ROUND_TRIPS = 70
"""Measured: 3 s and a loss of 20 % took 216 s to get in."""
DONOR_BITS_PER_SECOND = 300e6
"""What one peer serves on a busy machine: the emulated lines of all carry 600 Mbit/s in half a core."""
END_SECONDS = 10.0
"""What a peer has to leave in; after that it is killed and the report says so."""
BOOTSTRAP = "bootstrap"
PAGE = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseOptions:
    """What to rehearse, and where. What is None is as the scene file says, or the default."""

    peers: str | None = None
    """As ``parse_peers`` reads them."""
    scene_path: Path | None = None
    """A scene file instead of ``peers``."""
    seconds: float | None = None
    """How long to train once every peer that is there from the beginning has begun."""
    churn: str | None = None
    """The share of peers that go away and come back, such as ``20%``."""
    seed: int | None = None
    run: str | None = None
    """A manifest's path, or the name of a shipped example."""
    json_path: Path | None = None
    """Where to write the report for programs."""
    html_path: Path | None = None
    """Where to write the report as a page for people."""
    directory: Path | None = None
    """Empty or new, and kept. By default a temporary one that is removed if all went well."""
    keep: bool = False
    """Keep the temporary directory in any case."""

    def scene(self) -> Scene:
        """:raises UsageError: options that cannot be used; a SceneError underlines what is wrong"""
        if self.seconds is not None and not 0 < self.seconds <= MAX_SECONDS:
            raise UsageError(
                problem=f"--seconds {self.seconds:g} cannot be used.", remedy="Give a number of seconds above 0."
            )
        if self.scene_path is not None:
            if self.peers is not None:
                raise UsageError("--peers and --scene both say who takes part.", "Give one of them.")
            scene = load_scene(self.scene_path, self.seconds)
        else:
            seconds = self.seconds if self.seconds is not None else DEFAULT_SECONDS
            peers = parse_peers(self.peers if self.peers is not None else DEFAULT_PEERS, seconds)
            scene = Scene(peers=peers, seconds=seconds)
        return replace(
            scene,
            churn=parse_churn(self.churn) if self.churn is not None else scene.churn,
            seed=self.seed if self.seed is not None else scene.seed,
            run=self.run if self.run is not None else scene.run,
        )


def rehearse(options: RehearseOptions, *, console: Console | None = None, commands: Commands | None = None) -> Report:
    """Run it, print what came of it, and return the report.

    Every process is ended before this returns or raises, also on Ctrl-C and TERM, which raise KeyboardInterrupt.
    What it does not promise: a kill -9 of the rehearsal sends TERM to its peers (on Linux), and waits for nobody; a
    peer that is frozen at that moment stays so.

    Raises: UsageError for options that cannot be used, DirectoryError for places that cannot be written to,
        ManifestError for a manifest that cannot be used; RehearsalError for a peer that ended early or did not begin
        in time.
    """
    console = console or Console()
    scene = options.scene().with_churn()
    run, manifest = find_manifest(scene.run)
    if options.json_path is not None and options.json_path == options.html_path:
        raise UsageError("--json and --html name the same file.", "Give each a file of its own.")
    check_report_path(options.json_path, "--json")
    check_report_path(options.html_path, "--html")
    directory = make_directory(options.directory)
    keep = True
    try:
        with (
            show_status(console) as status,
            _terminated_like_interrupted(),
            lines(scene, console, BOOTSTRAP) as network,
            memories(scene, console) as memory,
        ):
            rehearsal = Rehearsal(
                directory=directory,
                scene=scene,
                network=network,
                memory=memory,
                commands=commands or ProgramCommands(),
                console=console,
                status=status,
            )
            report = rehearsal.run(run, manifest)
        print_report(console, report)
        page = rehearsal_page(report)
        if options.json_path is not None:
            write_json(options.json_path, report.as_json(), "--json")
        if options.html_path is not None:
            write_report(options.html_path, page, "--html")
        write_report(directory / PAGE, page, "--dir")
        keep = options.keep or options.directory is not None or bool(problems(report))
        return report
    finally:
        if keep:
            say(console, f"Logs and metrics are kept in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(slots=True, kw_only=True)
class _Part:
    """One peer of the scene: what is still to happen to it, and what has happened."""

    peer: EmulatedPeer
    place: RehearsedProcess
    moments: deque[Moment]
    played: PlayedLife = field(default_factory=PlayedLife)
    frozen_since: float | None = None
    """In unix seconds."""


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """The processes of one rehearsal, from the first start to the last goodbye.

    ``rehearse`` wraps it for people; benchmarks use it with a network of their own, whose lines they change meanwhile.
    """

    directory: Path
    scene: Scene
    network: Network | None
    memory: MemoryLimits | None
    commands: Commands
    console: Console
    status: Status
    invite: str = ""
    bootstrap: RehearsedProcess = field(init=False)
    parts: list[_Part] = field(init=False)
    environment: Mapping[str, str] = field(init=False)
    traces: Traces = field(default_factory=Traces)
    leftovers: list[str] = field(default_factory=list)
    began: float = 0.0
    """In unix seconds: what the scene's seconds count from."""
    line_counts: dict[str, LineCount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = environment_of_a_rehearsal(self.directory, self.scene.seconds)
        self.bootstrap = self._place(BOOTSTRAP, BOOTSTRAP)
        self.parts = [
            _Part(peer=peer, place=self._place(peer.name, f"peer-{peer.name}"), moments=deque(peer.life.moments()))
            for peer in self.scene.peers
        ]

    def run(self, run: str, manifest: RunManifest) -> Report:
        """Start everything, let it train, end everything, compute the report."""
        try:
            self._start_bootstrap(run)
            self._start_peers(manifest)
            self._train()
            self.status.show("Asking the peers to leave")
        finally:
            self._end()
        return build_report(
            RehearsedRun(
                seconds=self.scene.seconds,
                fragments=manifest.run.fragments,
                tick_seconds=manifest.run.tick_seconds,
                start_seconds=manifest.run.start.timestamp(),
                began=self.began,
            ),
            [self._record(part) for part in self.parts],
            leftovers=self.leftovers,
            others=[PeerRecord(name=BOOTSTRAP, events=read_metrics(self.bootstrap.metrics))],
        )

    # -------------------------------------------------------------- beginning

    def _start_bootstrap(self, run: str) -> None:
        self.status.show("Starting the bootstrap peer")
        invite_file = self.directory / "invite.txt"
        self._start(
            self.bootstrap,
            self.commands.bootstrap(run, self.bootstrap.directory, invite_file, self._host(BOOTSTRAP)),
        )
        deadline = time.monotonic() + INVITE_SECONDS
        while not invite_file.exists():
            self._watch(deadline, self.bootstrap, f"The bootstrap peer wrote no invite within {INVITE_SECONDS:.0f} s.")
        self.invite = invite_file.read_text().strip()

    def _start_peers(self, manifest: RunManifest) -> None:
        """Those that are there from the beginning, until all of them train."""
        first = [part for part in self.parts if part.peer.life.begins_with_training]
        for part in first:
            self._join(part, 0.0)
        limit_seconds = start_limit_seconds([part.peer for part in first], manifest, self._model_bytes())
        deadline = time.monotonic() + limit_seconds
        waiting = [part.place for part in first]
        while waiting:
            self.status.show("Waiting for peers to train", ", ".join(place.name for place in waiting))
            self._watch(deadline, waiting[0], f"Peer {waiting[0].name} has not begun within {limit_seconds:.0f} s.")
            waiting = [place for place in waiting if place.expected_to_live and not _trains(place)]
        if first and not any(part.place.expected_to_live for part in first):
            raise RehearsalError(
                problem="Every peer ran out of memory before it could train.",
                remedy="Give them more with mem=SIZE, or make the model or the batch smaller.",
            )

    def _model_bytes(self) -> int:
        """What a newcomer fetches: the bootstrap has written it down before it wrote the invite."""
        checkpoint = self.bootstrap.directory / "checkpoint.safetensors"
        return checkpoint.stat().st_size if checkpoint.exists() else 0

    def _join(self, part: _Part, at_seconds: float) -> None:
        part.played.joins.append(at_seconds)
        host = self._host(part.peer.name)
        command = self.commands.join(self.invite, part.place.directory, part.peer.samples_per_second, host)
        self._start(part.place, command)

    def _place(self, name: str, directory: str) -> RehearsedProcess:
        return RehearsedProcess(
            name=name, directory=self.directory / directory, log=self.directory / f"{directory}.log"
        )

    def _host(self, name: str) -> str:
        return LOOPBACK if self.network is None else self.network.address(name)

    def _start(self, place: RehearsedProcess, command: list[str]) -> None:
        memory, name = self.memory, place.name
        place.start(
            command if self.network is None else self.network.command(name, command),
            self.environment,
            prepare=(lambda: memory.enter(name)) if memory is not None and name in memory else None,
        )

    # --------------------------------------------------------------- training

    def _train(self) -> None:
        before = self._traffic()
        self.began = time.time()
        began = time.monotonic()
        while (left := began + self.scene.seconds - time.monotonic()) > 0:
            self._watch_once()
            for part in self.parts:
                self._play(part, time.monotonic() - began)
            there = sum(part.place.expected_to_live for part in self.parts)
            who = f"{there} peer{' is' if there == 1 else 's are'} training"
            self.status.show(who, f"{left:.0f} s left")
            time.sleep(min(POLL_SECONDS, left))
        self._watch_once()
        after = self._traffic()
        for part in self.parts:
            name = part.peer.name
            if name in before and name in after:
                self.line_counts[name] = LineCount(
                    sent_bytes=after[name][0] - before[name][0],
                    received_bytes=after[name][1] - before[name][1],
                    seconds=part.played.seconds_there(time.monotonic() - began),
                )

    def _traffic(self) -> dict[str, tuple[int, int]]:
        """What has crossed each peer's line so far, if it has one."""
        if self.network is None:
            return {}
        try:
            return {part.peer.name: self.network.traffic(part.peer.name) for part in self.parts}
        except LinksUnavailable as error:
            say(self.console, f"The traffic is counted by the peers' rounds alone: {error}.")
            return {}

    def _play(self, part: _Part, now_seconds: float) -> None:
        """Let everything happen to a peer that is due."""
        place, moments = part.place, part.moments
        if place.is_alive and time.monotonic() > place.leave_by:
            place.end()
        while moments and moments[0].at_seconds <= now_seconds:
            if moments[0].action == "start" and place.is_alive:
                return  # it is still leaving
            self._act(part, moments.popleft().action, now_seconds)

    def _act(self, part: _Part, action: Action, now_seconds: float) -> None:
        place, played = part.place, part.played
        # What it leaves in its directory is noted before it changes.
        self.traces.record(self.directory, now=True)
        if action == "start":
            self._join(part, now_seconds)
        elif action == "freeze":
            played.freezes.append(now_seconds)
            part.frozen_since = time.time()
            place.freeze()
        else:
            self._thaw(part)
            if action == "leave":
                played.leaves.append(now_seconds)
                place.ask_to_leave(END_SECONDS)
            elif action == "kill":
                played.kills.append(now_seconds)
                place.crash()
                self.traces.expect(place.directory)

    def _thaw(self, part: _Part) -> None:
        part.place.thaw()
        if part.frozen_since is not None:
            part.played.frozen_at.append((part.frozen_since, time.time()))
            part.frozen_since = None

    def _watch(self, deadline: float, awaited: RehearsedProcess, complaint: str) -> None:
        """Wait a moment for something. :raises RehearsalError: if a peer ended, or the deadline has passed"""
        self._watch_once()
        if time.monotonic() > deadline:
            self._show_log(awaited)
            raise RehearsalError(problem=complaint, remedy=f"Its log is {awaited.log}.")
        time.sleep(POLL_SECONDS)

    def _watch_once(self) -> None:
        self.traces.record(self.directory)
        if self.memory is not None:
            self.memory.sample()
        for place in self._places():
            if not place.expected_to_live or place.is_alive or place.process is None or self._out_of_memory(place):
                continue
            code = place.process.returncode
            self._show_log(place)
            who = "The bootstrap peer" if place is self.bootstrap else f"Peer {place.name}"
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise RehearsalError(
                problem=f"{who} ended before the rehearsal did ({how}).", remedy=f"Its log is {place.log}."
            )

    def _out_of_memory(self, place: RehearsedProcess) -> bool:
        """Whether a peer ended because its memory did not suffice: that is a result, and the others go on."""
        part = next((part for part in self.parts if part.place is place), None)
        if part is None or self.memory is None or place.name not in self.memory:
            return False
        use = self.memory.use(place.name)
        if use.limit_bytes is None or not use.kills:
            return False
        part.played.out_of_memory.append(time.time() - self.began if self.began else 0.0)
        part.moments.clear()
        place.expected_to_live = False
        # What the kernel left of it at that moment does not say goodbye in its stead.
        self.traces.expect(place.directory)
        self.status.clear()
        say(
            self.console,
            f"Peer {place.name} ran out of memory ({memory_text(use.limit_bytes)}), and the others go on. Give it more "
            "with mem=SIZE, or make the model or the batch smaller.",
        )
        return True

    # -------------------------------------------------------------------- end

    def _end(self) -> None:
        """TERM to the peers, 10 s, then to the bootstrap; whoever remains is killed. Another Ctrl-C skips the wait."""
        try:
            self.traces.record(self.directory, now=True)
            for part in self.parts:
                self._thaw(part)
            leave_together([part.place for part in self.parts], END_SECONDS)
            leave_together([self.bootstrap], END_SECONDS)
            self._kill()
            if self.memory is not None:
                self.memory.close()
            self.leftovers = self.traces.leftovers()
            if self.memory is not None and self.memory.directory is not None:
                self.leftovers.append(f"control groups in {self.memory.directory}")
        finally:
            self._kill()
            self.traces.clean()

    def _kill(self) -> None:
        for place in self._places():
            place.end()

    def pids(self) -> dict[str, int]:
        """The peers that live, by name. May be called from another thread."""
        return {
            part.peer.name: part.place.process.pid
            for part in self.parts
            if part.place.process is not None and part.place.is_alive
        }

    def _places(self) -> list[RehearsedProcess]:
        return [self.bootstrap, *(part.place for part in self.parts)]

    def _record(self, part: _Part) -> PeerRecord:
        code, killed = part.place.ending
        name, memory = part.peer.name, self.memory
        link = part.peer.link if self.network is not None else None
        return PeerRecord(
            name=name,
            events=read_metrics(part.place.metrics),
            exit_code=code,
            killed=killed or bool(part.played.out_of_memory),
            link=str(link) if link is not None else "",
            behind_nat=part.peer.behind_nat and self.network is not None,
            memory=memory.use(name) if memory is not None and name in memory else None,
            life=part.played,
            line_count=self.line_counts.get(name),
        )

    def _show_log(self, place: RehearsedProcess) -> None:
        self.status.clear()
        say(self.console, f"The last lines of {place.log}:")
        for line in place.log_tail():
            say(self.console, f"  {line}")


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """TERM means what Ctrl-C means: end the peers first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def find_manifest(run: str) -> tuple[str, RunManifest]:
    """What to hand to the bootstrap, and the manifest itself: a mistake in it is told before anything starts."""
    if run in EXAMPLES:
        return run, parse_manifest(example_manifest(run), source=run)
    return str(Path(run).absolute()), load_manifest(run)


def start_limit_seconds(peers: Sequence[EmulatedPeer], manifest: RunManifest, model_bytes: int) -> float:
    """How long these peers may take from their start to training, all at once.

    :param model_bytes: what each of them fetches, all from one donor
    """
    links = [peer.link for peer in peers if peer.link is not None]
    slowest = min((peer.samples_per_second for peer in peers), default=1.0)
    shared = DONOR_BITS_PER_SECOND / max(1, len(peers))
    rate = min([shared, *(link.down_bits_per_second * (1 - link.loss) for link in links)])
    return (
        START_SECONDS
        + START_SECONDS_PER_PEER * len(peers)
        + START_STEPS * manifest.inner_optimizer.batch_size / slowest
        + START_ROUND_TRIPS * max((link.round_trip_ms / 1e3 for link in links), default=0.0)
        + 2 * 8 * model_bytes / rate
    )


def _trains(place: RehearsedProcess) -> bool:
    kinds = {event.get("event") for event in read_metrics(place.metrics)}
    return {"join", "train"} <= kinds

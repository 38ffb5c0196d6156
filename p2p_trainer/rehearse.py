"""A whole run on this machine: a bootstrap and unequal peers, as real processes that meet over loopback.

It types the same commands as people do and reads the same metrics files as other tools. What it does not show: slow
or lossy links, clocks that disagree, and more cores than this machine has.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dht_config.errors import DirectoryError, RehearsalError, UsageError
from dht_config.manifest import EXAMPLES, RunManifest, example_manifest, load_manifest, parse_manifest
from p2p_trainer.leftovers import Traces
from p2p_trainer.machines import EmulatedPeer, parse_peers
from p2p_trainer.metrics import read_metrics
from p2p_trainer.report import PeerRecord, RehearsedRun, Report, build_report, problems, verdict

POLL_SECONDS = 0.25
INVITE_SECONDS = 120.0
"""For a bootstrap to import torch on a busy machine, build the model and listen."""
START_SECONDS = 180.0
START_SECONDS_PER_PEER = 15.0
END_SECONDS = 10.0
"""What a peer has to leave in; after that it is killed and the report says so."""
STATUS_SECONDS = 10.0
EVALUATIONS = 8
"""Per peer, about, and not more often than every 10 s: each holds up training for a moment."""
LOG_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseOptions:
    """What to rehearse, and where."""

    peers: str = "80,40,20,8"
    """Samples a second or names of machines, as ``parse_peers`` reads them."""
    seconds: float = 90.0
    """How long to train once every peer has begun."""
    run: str = EXAMPLES[0]
    """A manifest's path, or the name of a shipped example."""
    json_path: Path | None = None
    """Where to write the report for programs."""
    directory: Path | None = None
    """Empty or new, and kept. By default a temporary one that is removed if all went well."""
    keep: bool = False
    """Keep the temporary directory in any case."""


class Commands(Protocol):
    """How the processes of a rehearsal are started."""

    def bootstrap(self, run: str, directory: Path, invite_file: Path) -> list[str]:
        """The organiser's peer. It writes its invite to a file, whole."""
        ...

    def join(self, invite: str, directory: Path, samples_per_second: float) -> list[str]:
        """A volunteer's peer that is no faster than it is told to be."""
        ...


class ProgramCommands:
    """The program's own command line, run by this interpreter."""

    def bootstrap(self, run: str, directory: Path, invite_file: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "p2p_trainer", "bootstrap", run, "--dir", str(directory)),
            *("--host", "127.0.0.1", "--port", "0", "--invite-file", str(invite_file)),
        ]

    def join(self, invite: str, directory: Path, samples_per_second: float) -> list[str]:
        return [
            *(sys.executable, "-m", "p2p_trainer", "join", invite, "--dir", str(directory), "--host", "127.0.0.1"),
            *("--emulate", f"{samples_per_second:g}", "--plain", "--threads", "1"),
        ]


def rehearse(options: RehearseOptions, *, console: Console | None = None, commands: Commands | None = None) -> Report:
    """Run it, print what came of it, and return the report.

    Every process is ended before this returns or raises, also on Ctrl-C and TERM, which raise KeyboardInterrupt.
    What it does not promise: a kill -9 of the rehearsal sends TERM to its peers (on Linux), and waits for nobody.

    Raises: UsageError for options that cannot be used, DirectoryError for places that cannot be written to,
        ManifestError for a manifest that cannot be used; RehearsalError for a peer that ended early or did not begin
        in time.
    """
    console = console or Console()
    peers = parse_peers(options.peers)
    if not 0 < options.seconds <= 1e6:
        raise UsageError(
            problem=f"--seconds {options.seconds:g} cannot be used.", remedy="Give a number of seconds above 0."
        )
    run, manifest = _find_manifest(options.run)
    _check_report_path(options.json_path)
    directory = _make_directory(options.directory)
    keep = True
    try:
        with _status(console) as status, _terminated_like_interrupted():
            rehearsal = _Rehearsal(
                directory=directory,
                peers=peers,
                seconds=options.seconds,
                commands=commands or ProgramCommands(),
                console=console,
                status=status,
            )
            report = rehearsal.run(run, manifest)
        if options.json_path is not None:
            _write_report(options.json_path, report)
        _print_report(console, report)
        keep = options.keep or options.directory is not None or bool(problems(report))
        return report
    finally:
        if keep:
            _say(console, f"Logs and metrics are kept in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(slots=True)
class _Started:
    """A process of the rehearsal and where it keeps its things."""

    name: str
    directory: Path
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics.jsonl"


@dataclass(slots=True, kw_only=True)
class _Rehearsal:
    """The processes of one rehearsal, from the first start to the last goodbye."""

    directory: Path
    peers: Sequence[EmulatedPeer]
    seconds: float
    commands: Commands
    console: Console
    status: _Status
    bootstrap: _Started | None = None
    joined: list[_Started] = field(default_factory=list)
    traces: Traces = field(default_factory=Traces)
    leftovers: list[str] = field(default_factory=list)

    def run(self, run: str, manifest: RunManifest) -> Report:
        """Start everything, let it train, end everything, compute the report."""
        try:
            invite = self._start_bootstrap(run)
            self._start_peers(invite, manifest)
            self._train()
            self.status.show("Asking the peers to leave")
        finally:
            self._end()
        others = [self.bootstrap] if self.bootstrap else []
        return build_report(
            RehearsedRun(
                seconds=self.seconds, fragments=manifest.run.fragments, tick_seconds=manifest.run.tick_seconds
            ),
            [_record_of(started) for started in self.joined],
            leftovers=self.leftovers,
            others=[_record_of(started) for started in others],
        )

    def _start_bootstrap(self, run: str) -> str:
        self.status.show("Starting the bootstrap peer")
        directory, invite_file = self.directory / "bootstrap", self.directory / "invite.txt"
        self.bootstrap = self._start("bootstrap", directory, self.commands.bootstrap(run, directory, invite_file))
        deadline = time.monotonic() + INVITE_SECONDS
        while not invite_file.exists():
            self._watch(deadline, self.bootstrap, f"The bootstrap peer wrote no invite within {INVITE_SECONDS:.0f} s.")
        return invite_file.read_text().strip()

    def _start_peers(self, invite: str, manifest: RunManifest) -> None:
        for peer in self.peers:
            directory = self.directory / f"peer-{peer.name}"
            command = self.commands.join(invite, directory, peer.samples_per_second)
            self.joined.append(self._start(peer.name, directory, command))
        slowest = min(peer.samples_per_second for peer in self.peers)
        # The slowest peer measures itself by a few inner steps, and then trains one.
        step_seconds = manifest.inner_optimizer.batch_size / slowest
        limit_seconds = START_SECONDS + START_SECONDS_PER_PEER * len(self.peers) + 8 * step_seconds
        deadline = time.monotonic() + limit_seconds
        waiting = list(self.joined)
        while waiting:
            self.status.show("Waiting for peers to train", f"{', '.join(started.name for started in waiting)}")
            self._watch(deadline, waiting[0], f"Peer {waiting[0].name} has not begun within {limit_seconds:.0f} s.")
            waiting = [started for started in waiting if not _trains(started)]

    def _train(self) -> None:
        began = time.monotonic()
        while (left := began + self.seconds - time.monotonic()) > 0:
            self.status.show(f"{len(self.joined)} peers are training", f"{left:.0f} s left")
            self._watch_once()
            time.sleep(min(POLL_SECONDS, left))
        self._watch_once()

    def _start(self, name: str, directory: Path, command: Sequence[str]) -> _Started:
        log = self.directory / f"{directory.name}.log"
        with log.open("wb") as output:
            try:
                # A session of its own: Ctrl-C is for the rehearsal, which then ends its peers in order.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(self.directory, self.seconds),
                    start_new_session=True,
                    preexec_fn=_die_with_the_rehearsal if sys.platform == "linux" else None,
                )
            except OSError as error:
                raise RehearsalError(
                    problem=f"{command[0]} cannot be started: {error.strerror or error}.",
                    remedy="Check the Python installation.",
                ) from error
        return _Started(name, directory, process, log)

    def _watch(self, deadline: float, awaited: _Started, complaint: str) -> None:
        """Wait a moment for something. :raises RehearsalError: if a peer ended, or the deadline has passed"""
        self._watch_once()
        if time.monotonic() > deadline:
            self._show_log(awaited)
            raise RehearsalError(problem=complaint, remedy=f"Its log is {awaited.log}.")
        time.sleep(POLL_SECONDS)

    def _watch_once(self) -> None:
        self.traces.record(self.directory)
        for started in self._started():
            code = started.process.poll()
            if code is not None:
                self._show_log(started)
                who = "The bootstrap peer" if started is self.bootstrap else f"Peer {started.name}"
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                raise RehearsalError(
                    problem=f"{who} ended before the rehearsal did ({how}).", remedy=f"Its log is {started.log}."
                )

    def _started(self) -> list[_Started]:
        return [*([self.bootstrap] if self.bootstrap else []), *self.joined]

    def _end(self) -> None:
        """TERM to the peers, 10 s, then to the bootstrap; whoever remains is killed. Another Ctrl-C skips the wait."""
        try:
            self.traces.record(self.directory, now=True)
            _terminate(self.joined)
            _terminate([self.bootstrap] if self.bootstrap else [])
            self._kill()
            self.leftovers = self.traces.leftovers()
        finally:
            self._kill()
            self.traces.clean()

    def _kill(self) -> None:
        """End the processes that did not leave, by their handles."""
        for started in self._started():
            if started.process.poll() is None:
                started.process.kill()
                started.process.wait()

    def _show_log(self, started: _Started) -> None:
        self.status.clear()
        lines = started.log.read_bytes().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        _say(self.console, f"The last lines of {started.log}:")
        for line in lines:
            _say(self.console, f"  {line}")


class _Status:
    """One line that says what is going on; on a terminal in place, elsewhere now and then. No thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._phase = ""
        self._shown_at = float("-inf")

    def show(self, phase: str, detail: str = "") -> None:
        text = f"{phase}: {detail}" if detail else f"{phase} ..."
        now = time.monotonic()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=False)
                self._live.start()
            self._live.update(Text(text), refresh=True)
        elif phase != self._phase or now - self._shown_at >= STATUS_SECONDS:
            self._shown_at = now
            _say(self._console, text)
        self._phase = phase

    def clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


@contextmanager
def _status(console: Console) -> Iterator[_Status]:
    status = _Status(console)
    try:
        yield status
    finally:
        status.clear()


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


def _find_manifest(run: str) -> tuple[str, RunManifest]:
    """What to hand to the bootstrap, and the manifest itself: a mistake in it is told before anything starts."""
    if run in EXAMPLES:
        return run, parse_manifest(example_manifest(run), source=run)
    return str(Path(run).absolute()), load_manifest(run)


def _check_report_path(path: Path | None) -> None:
    """Now, not after the run."""
    if path is None:
        return
    parent = path.absolute().parent
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise DirectoryError(
            problem=f"The report cannot be written to {path}.", remedy="Give --json a file in a writable directory."
        )


def _make_directory(path: Path | None) -> Path:
    """A directory of its own: metrics of an earlier rehearsal would be counted as this one's."""
    try:
        if path is None:
            # Not the prefix of the peers' socket directories.
            return Path(tempfile.mkdtemp(prefix="rehearsal-p2p-trainer-"))
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise DirectoryError(problem=f"{path} is not empty.", remedy="Give --dir a new or empty directory.")
    except OSError as error:
        raise DirectoryError(
            problem=f"The directory {path or tempfile.gettempdir()} cannot be used: {error.strerror or error}.",
            remedy="Give --dir a new directory in a place that is writable.",
        ) from error
    return path.absolute()


def _environment(directory: Path, seconds: float) -> Mapping[str, str]:
    """This process's, without the person's settings: a rehearsal meets nobody but itself.

    Files that the manifest names may be read: it is this person's own manifest, not a stranger's.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("P2P_TRAINER_")}
    return {
        **kept,
        "P2P_TRAINER_ALLOW_FILES": "true",
        # Also a short rehearsal shows how the loss falls.
        "P2P_TRAINER_EVAL_SECONDS": f"{min(60.0, max(10.0, seconds / EVALUATIONS)):g}",
        "XDG_CONFIG_HOME": str(directory / "no-settings"),
        "PYTHONUNBUFFERED": "1",
    }


def _die_with_the_rehearsal() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _terminate(started: Sequence[_Started]) -> None:
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
    deadline = time.monotonic() + END_SECONDS
    for one in started:
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, deadline - time.monotonic()))


def _trains(started: _Started) -> bool:
    kinds = {event.get("event") for event in read_metrics(started.metrics)}
    return {"join", "train"} <= kinds


def _record_of(started: _Started) -> PeerRecord:
    return PeerRecord(name=started.name, events=read_metrics(started.metrics), exit_code=started.process.returncode)


def _write_report(path: Path, report: Report) -> None:
    """Whole or not at all. Raises: DirectoryError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(report.as_json(), indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise DirectoryError(
            problem=f"The report cannot be written to {path}: {error.strerror or error}.",
            remedy="Give --json a file in a writable directory.",
        ) from error


def _print_report(console: Console, report: Report) -> None:
    # Fits into 80 columns. Numbers are never cut; a long name is folded before it vanishes.
    table = Table(title=f"{report.run_id}, {report.seconds:g} s", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("peer", overflow="fold", min_width=4)
    for heading in ("alone", "swarm", "processed", "credited", "pending", "rounds", "carried", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for peer in report.peers:
        table.add_row(
            Text(peer.name),
            _figure(peer.solo_samples_per_second),
            _figure(peer.swarm_samples_per_second),
            f"{peer.processed_samples}",
            _figure(peer.credited_samples),
            _figure(peer.pending_samples),
            f"{peer.rounds_committed}",
            f"{peer.rounds_carried}",
            f"{100 * peer.share:.0f} %",
        )
    console.print(table)
    for line in _summary(report):
        _say(console, line)


def _figure(value: float) -> str:
    """To a tenth, as far as a tenth matters."""
    return f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def _summary(report: Report) -> list[str]:
    """The swarm's lines, and the verdict."""
    lines = [
        "alone, swarm: samples/s; rounds: committed; share: of all credited samples.",
        f"Efficiency {report.efficiency:.3f} of the sum of what the peers do alone; credited alone "
        f"{report.credited_efficiency:.3f}.",
        f"Digests {'agree' if report.digests_agree else 'do not agree'}: {report.digests_compared} versions of "
        "fragments were on several peers.",
    ]
    if report.held_out_loss:
        (first_at, first), (last_at, last) = report.held_out_loss[0], report.held_out_loss[-1]
        lines.append(f"Held-out loss {first:.3f} after {first_at:.0f} s, {last:.3f} after {last_at:.0f} s.")
    lines.append(f"Left behind: {', '.join(report.leftovers) or 'nothing'}.")
    return [*lines, verdict(report)]


def _say(console: Console, text: str) -> None:
    # A Text, since words in [brackets] would be taken for markup.
    console.print(Text(text), soft_wrap=True)

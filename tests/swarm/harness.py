"""Real swarms for tests: peers as operating-system processes that meet over loopback, read through what they write.

Every process that a test starts carries a mark in its environment, which its descendants inherit, or has a session of
its own: whatever is left of a test is found by these, also if its parent is long gone. The peers' temporary directory
is the test's own, so a socket that is left behind is found there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from hivemind.p2p import PeerID
from preloaded import Preloaded, Process
from safetensors import safe_open
from upnp_router import Home

from dht_config.invite import Invite
from dht_config.manifest import example_manifest
from p2p_trainer.metrics import read_metrics
from p2p_trainer.rehearsal.links import LinkSpec, Network, available
from peers.ledger import Ledger
from peers.messages import unpack_receipts

POLL_SECONDS = 0.2
START_SECONDS = 120.0
"""For a process to import torch, measure and join on a machine that does other things as well."""
ROUND_SECONDS = 60.0
"""For a few rounds, on the same machine."""
LEAVE_SECONDS = 10.0
"""What a peer promises: the one bound on time that the tests hold it to."""
LOG_TAIL_LINES = 40
TICK_SECONDS = 1.0
FRAGMENTS = 2
PROGRAM = ("-m", "p2p_trainer")
"""What Python runs."""

needs_links = pytest.mark.skipif(
    not (links := available()), reason=f"links between peers cannot be emulated here: {links.reason}"
)

Result = TypeVar("Result")
Event = dict[str, Any]


def small_manifest(path: Path, **replacements: str) -> Path:
    """The digits example in ticks of a second, written to ``path``.

    :param replacements: a key and the whole line that takes the place of its line
    """
    lines = example_manifest("digits").splitlines()
    for key, line in {"tick_seconds": f"tick_seconds = {TICK_SECONDS}", **replacements}.items():
        where = [index for index, old in enumerate(lines) if old.split("=")[0].strip() == key]
        assert len(where) == 1, f"the example has {len(where)} lines for {key}"
        lines[where[0]] = line
    path.write_text("\n".join(lines) + "\n")
    return path


class Peer:
    """One process of the program, from its start to its end. A restart in the same directory is another one."""

    def __init__(
        self,
        swarm: Swarm,
        name: str,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.swarm, self.name, self.arguments, self.directory = swarm, name, list(arguments), directory
        self.mark = uuid.uuid4().hex
        self.log = swarm.path / f"{name}.log"
        self.invite_file = swarm.path / f"{directory.name}.invite"
        self.expected_to_live = True
        self.events_before = len(self.all_events())
        self.log.write_bytes(b"")
        self.process: Process
        # What a test changes of a program or its environment may have to be there before anything is imported.
        if swarm.preloaded is not None and program == PROGRAM and not environment:
            prefix = swarm.at(directory.name, [])
            self.process = swarm.preloaded.start(self.arguments, swarm.environment(self.mark), self.log, prefix)
            return
        command = swarm.at(directory.name, [sys.executable, *program, *self.arguments])
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**swarm.environment(self.mark), **(environment or {})},
                start_new_session=True,
            )

    # ------------------------------------------------------- what it has done

    def events(self, kind: str) -> list[Event]:
        """Its events of one kind since this start, oldest first."""
        return [event for event in self.all_events()[self.events_before :] if event["event"] == kind]

    def all_events(self) -> list[Event]:
        """Of earlier starts in this directory as well; none if there is no such directory."""
        with suppress(NotADirectoryError):
            return read_metrics(self.directory / "metrics.jsonl")
        return []

    def rounds(self, outcome: str = "committed", group: int = 0, after: float = 0.0) -> list[Event]:
        """Its rounds of one outcome, in a group of at least ``group``, that ended after a moment (unix seconds)."""
        return [
            event
            for event in self.events("round")
            if event["outcome"] == outcome and event["group_size"] >= group and event["time"] > after
        ]

    @property
    def joined(self) -> bool:
        return bool(self.events("join"))

    @property
    def peer_id(self) -> str:
        return str(self.events("join")[-1]["peer_id"])

    @property
    def text(self) -> str:
        """Everything it printed."""
        return self.log.read_bytes().decode(errors="replace")

    @property
    def invite(self) -> str:
        return self.invite_file.read_text().strip()

    @property
    def address(self) -> str:
        """Where others can dial it."""
        return Invite.decode(self.invite).addresses[0]

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint.safetensors"

    def checkpoint_meta(self) -> dict[str, Any]:
        with safe_open(self.checkpoint, framework="pt") as file:
            meta: dict[str, Any] = json.loads(file.metadata()["meta"])
        return meta

    # ------------------------------------------------------------ its processes

    def processes(self) -> list[psutil.Process]:
        """Itself and all its descendants that live, also those whose parents are gone."""
        return marked_processes(self.mark, [self.process.pid])

    def averaging_process(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def daemon_process(self) -> psutil.Process:
        (daemon,) = self.averaging_process().children()
        return daemon

    def signal_group(self, number: signal.Signals) -> None:
        """What a terminal does on Ctrl-C: every process of the foreground group gets it."""
        os.killpg(self.process.pid, number)

    def crash(self) -> None:
        """All of it at once with -9, as when the machine loses power: nobody is left to say goodbye or clean up."""
        self.expected_to_live = False
        self.swarm.may_remain.update(self.swarm.sockets_of(self))
        processes = self.processes()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self.process.wait()

    def freeze(self) -> None:
        for process in self.processes():
            process.suspend()

    def thaw(self) -> None:
        for process in self.processes():
            process.resume()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to leave and wait until nothing of it is left; returns its exit code."""
        self.expected_to_live = False
        self.process.send_signal(number)
        return self.gone()

    def gone(self, within_seconds: float = LEAVE_SECONDS) -> int:
        """Wait until it has left nothing behind, within the time that is promised; returns its exit code."""
        self.expected_to_live = False
        self.swarm.wait_until(
            lambda: self.process.poll() is not None and not self.processes() and not self.swarm.sockets_of(self),
            lambda: (
                f"{self.name} has left (exit code {self.process.poll()}, processes {self.processes()}, "
                f"sockets {self.swarm.sockets_of(self)})"
            ),
            within_seconds,
        )
        return int(self.process.returncode)

    def exit_code(self, within_seconds: float = START_SECONDS) -> int:
        """Wait for a process that ends by itself."""
        self.expected_to_live = False
        self.swarm.wait_until(lambda: self.process.poll() is not None, f"{self.name} has ended", within_seconds)
        return int(self.process.returncode)


def port_of_its_own() -> int:
    """One below those that the system gives to whoever asks for any: nobody takes it while its peer is away."""
    while True:
        port = random.randrange(20_000, 30_000, 2)
        with suppress(OSError), socket.socket() as own, socket.socket() as following:
            own.bind(("127.0.0.1", port))
            following.bind(("127.0.0.1", port + 1))
            return port


class Swarm:
    """The processes of one test.

    :param preloaded: forks its peers; None starts all afresh
    """

    def __init__(self, path: Path, preloaded: Preloaded | None = None) -> None:
        self.path = path
        self.preloaded = preloaded
        self.mark = uuid.uuid4().hex
        self.peers: list[Peer] = []
        # Short, since a socket's path is; apart from pytest's, so that whatever is in it was left by a peer.
        self.temporary = Path(tempfile.mkdtemp(prefix="swt-"))
        self.may_remain: set[Path] = set()
        """Socket directories of crashed peers: the next start in their directory removes them, nobody before."""
        self.manifest = small_manifest(path / "run.toml")
        self.network = Network({})
        self.homes: dict[str, Home] = {}
        """Routers that peers of these names are behind, in that network."""

    # ------------------------------------------------------------------ starting

    def links(self, behind_nat: Iterable[str] = (), **links: str) -> Network:
        """Peers of these names (of their directories) that are started from now on meet over emulated lines only.

        The others are on loopback, and cannot reach them.
        """
        specs = {name: LinkSpec.parse(text) for name, text in links.items()}
        self.network = Network(specs, behind_nat=list(behind_nat))
        return self.network.__enter__()

    def host(self, name: str) -> str:
        """The address that a peer of this name listens on."""
        if name in self.homes:
            return self.homes[name].address
        return self.network.address(name) if name in self.network else "127.0.0.1"

    def at(self, name: str, command: list[str]) -> list[str]:
        """The command that runs this command where the peer of this name is."""
        if name in self.homes:
            return self.homes[name].command(command)
        return self.network.command(name, command) if name in self.network else command

    def environment(self, mark: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("P2P_TRAINER_")}
        return {
            **kept,
            "SWARM_TEST_MARKS": f"{self.mark} {mark}",
            "TMPDIR": str(self.temporary),
            "XDG_CONFIG_HOME": str(self.path / "no-settings"),
            "XDG_CACHE_HOME": str(self.path.parent / "cache"),  # the session's: a machine is measured once
            "PYTHONUNBUFFERED": "1",
        }

    def run(
        self,
        name: str,
        *arguments: str,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> Peer:
        """Start the program with these arguments."""
        attempts = sum(peer.name.split("#")[0] == name for peer in self.peers)
        unique = name if not attempts else f"{name}#{attempts}"
        peer = Peer(self, unique, arguments, directory or self.path / name, environment, program)
        self.peers.append(peer)
        return peer

    def bootstrap(self, name: str = "bootstrap", manifest: Path | None = None, *more: str) -> Peer:
        """The organiser's door; its invite is there when this returns."""
        (self.path / f"{name}.invite").unlink(missing_ok=True)
        bootstrap = self.run(
            name,
            *("bootstrap", str(manifest or self.manifest), "--dir", str(self.path / name)),
            *("--host", self.host(name), "--plain", "--invite-file", str(self.path / f"{name}.invite"), *more),
        )
        self.wait_until(bootstrap.invite_file.exists, f"{name} has written an invite", START_SECONDS)
        return bootstrap

    def join(
        self,
        name: str,
        target: str | Path,
        rate: float = 40.0,
        *more: str,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> Peer:
        """A volunteer of ``rate`` samples/s, started; again in the same directory if there was one of this name."""
        directory = directory or self.path / name
        return self.run(
            name,
            *("join", str(target), "--dir", str(directory), "--host", self.host(directory.name), "--plain"),
            *("--threads", "1"),
            *("--emulate", f"{rate:g}", "--eval-samples", "0", "--invite-file", str(self.path / f"{name}.invite")),
            *more,
            directory=directory,
            environment=environment,
            program=program,
        )

    # ------------------------------------------------------------------- waiting

    def wait_until(
        self, condition: Callable[[], Result], what: str | Callable[[], str], within_seconds: float
    ) -> Result:
        """Wait for something to be true, and return it. AssertionError when it is late, or a peer ended unasked."""
        deadline = time.monotonic() + within_seconds
        while not (result := condition()):
            for peer in self.peers:
                if peer.expected_to_live and peer.process.poll() is not None:
                    raise AssertionError(f"{peer.name} ended with exit code {peer.process.returncode}")
            if time.monotonic() > deadline:
                said = what if isinstance(what, str) else what()
                raise AssertionError(f"not within {within_seconds:g} s: {said}")
            time.sleep(POLL_SECONDS)
        return result

    def wait_joined(self, *peers: Peer) -> None:
        self.wait_until(
            lambda: all(peer.joined for peer in peers),
            lambda: f"{', '.join(peer.name for peer in peers if not peer.joined)} joined",
            START_SECONDS,
        )

    def wait_for_tick(self, fraction: float, tick_seconds: float = TICK_SECONDS) -> float:
        """Until this part of a tick has passed; returns the moment (unix seconds). All peers here share one clock."""
        begun = time.time() // tick_seconds
        while (now := time.time()) < (begun + 1 + fraction) * tick_seconds:
            time.sleep(0.005)
        return now

    def status(self, invite: str) -> dict[str, Any]:
        """What ``status --json`` says."""
        asked = self.run("status", "status", invite, "--json")
        assert asked.exit_code() == 0
        report: dict[str, Any] = json.loads(asked.text)
        return report

    def wait_averaged(self, *peers: Peer, group: int = 2, rounds: int = 1, after: float = 0.0) -> None:
        """Until each has committed that many rounds in a group of at least that size, after a moment."""

        def behind() -> list[str]:
            return [peer.name for peer in peers if len(peer.rounds(group=group, after=after)) < rounds]

        self.wait_until(
            lambda: not behind(),
            lambda: f"{', '.join(behind())} committed {rounds} round(s) in a group of {group}",
            START_SECONDS + rounds * ROUND_SECONDS / 10,
        )

    def wait_said(self, peer: Peer, *words: str) -> None:
        self.wait_until(lambda: all(word in peer.text for word in words), f"{peer.name} said {words}", START_SECONDS)

    # -------------------------------------------------------------------- ending

    def sockets_of(self, peer: Peer) -> list[Path]:
        """The socket directory that a peer wrote down, if it is there."""
        try:
            noted = Path((peer.directory / "sockets.path").read_text().strip())
        except OSError:
            return []
        return [noted] if noted.parent == self.temporary and noted.exists() else []

    def leave_all(self, within_seconds: float = LEAVE_SECONDS) -> dict[str, int]:
        """TERM to all at once; their exit codes when nothing of them is left."""
        leaving = [peer for peer in self.peers if peer.process.poll() is None]
        for peer in leaving:
            peer.expected_to_live = False
            peer.process.terminate()
        return {peer.name: peer.gone(within_seconds) for peer in leaving}

    def close(self) -> list[str]:
        """End what still runs, and say what was left behind that should not be."""
        for peer in self.peers:
            if peer.process.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    peer.thaw()
                peer.process.terminate()
        deadline = time.monotonic() + LEAVE_SECONDS
        slow = []
        for peer in self.peers:
            try:
                peer.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                slow.append(f"{peer.name} did not leave within {LEAVE_SECONDS:g} s of TERM")
                peer.process.kill()
                peer.process.wait()
        deadline = time.monotonic() + LEAVE_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.network.__exit__(None, None, None)
        shutil.rmtree(self.temporary, ignore_errors=True)
        return [*slow, *left]

    def _processes(self) -> list[psutil.Process]:
        return marked_processes(self.mark, [peer.process.pid for peer in self.peers])

    def _left(self) -> list[str]:
        processes = [f"process {process}" for process in self._processes()]
        # torchinductor_USER is torch's own cache.
        files = [
            str(path)
            for path in self.temporary.iterdir()
            if path not in self.may_remain and not path.name.startswith("torchinductor_")
        ]
        return [*processes, *files]


def marked_processes(mark: str, sessions: Sequence[int] = ()) -> list[psutil.Process]:
    """Living processes with this mark in their environment, or in one of these sessions: of a process that was forked
    /proc shows the environment of whom it was forked from. A zombie has ended: it waits for a parent to ask."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            marked = os.getsid(process.pid) in sessions or mark in process.environ().get("SWARM_TEST_MARKS", "")
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


# ------------------------------------------------------------------------ accounts


def assert_digests_agree(*peers: Peer) -> None:
    """Invariant 1: every (fragment, version) has one digest, wherever it was committed or fetched."""
    seen: dict[tuple[int, int], dict[str, str]] = {}
    for peer in peers:
        for event in (*peer.rounds(), *peer.events("rebase")):
            version = event["to_version"] if event["event"] == "rebase" else event["version"]
            seen.setdefault((event["fragment"], version), {})[peer.name] = event["digest"]
    shared = {key: digests for key, digests in seen.items() if len(digests) > 1}
    assert shared, "no version was on two peers"
    conflicts = {key: digests for key, digests in shared.items() if len(set(digests.values())) > 1}
    assert not conflicts


def assert_samples_add_up(peer: Peer) -> Event:
    """Invariant 2 for one peer that said goodbye: credited + pending + dropped = trained, in integers."""
    (leave,) = peer.events("leave")
    assert leave["exact"] is True, leave
    total = leave["credited_samples"] + leave["pending_samples"] + leave["dropped_samples"]
    assert abs(total - leave["trained_samples"]) < 1e-6, leave
    assert leave["trained_samples"] <= leave["processed_samples"]
    return leave


def accounts_of_the_bases(peers: Iterable[Peer]) -> list[str]:
    """Invariant 2 for the swarm: what the peers' ledgers call credited is what the newest bases hold, in integers.

    A peer that left before it had the newest base learns from the receipts what of its work is in it.

    :param peers: every peer that ever trained, each as it was when it left with a checkpoint
    :returns: a line for every fragment in which that is not so
    """
    metas = {PeerID.from_base58(peer.peer_id).to_bytes(): peer.checkpoint_meta() for peer in peers}
    broken = []
    for fragment in range(len(next(iter(metas.values()))["fragments"])):
        rows = {peer_id: meta["fragments"][fragment] for peer_id, meta in metas.items()}
        newest = max(rows.values(), key=lambda row: row["version"])
        receipts = unpack_receipts(bytes.fromhex(newest["past"]["receipts"]))
        credited = 0
        for peer_id, row in rows.items():
            ledger = Ledger.from_json(row["ledger"])
            for receipt in receipts:
                entry, held = receipt.ranges_of(peer_id)
                if entry is not None and receipt.version > row["version"]:
                    ledger = ledger.credit(held, entry.samples, entry.steps)
            credited += ledger.credited_element_samples()
        if credited != newest["total_element_samples"]:
            versions = [row["version"] for row in rows.values()]
            broken.append(
                f"fragment {fragment} (versions {versions}): peers are credited with {credited} element samples, its "
                f"base holds {newest['total_element_samples']}"
            )
    return broken


def assert_bases_hold_every_credit_once(peers: Iterable[Peer]) -> None:
    """See ``accounts_of_the_bases``."""
    assert not accounts_of_the_bases(peers)


def assert_no_traceback(*peers: Peer) -> None:
    for peer in peers:
        assert "Traceback" not in peer.text, f"{peer.name} printed a traceback"

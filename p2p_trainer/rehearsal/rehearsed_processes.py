"""The processes of a rehearsal: how one is started, ended, killed and frozen, each by the handle that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from dht_config.errors import RehearsalError
from p2p_trainer.rehearsal.report import ORDERLY_EXIT_CODES

EVALUATIONS = 8
"""Per peer, about, and not more often than every 10 s: each holds up training for a moment."""
LOG_TAIL_LINES = 15
LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class Commands(Protocol):
    """How the processes of a rehearsal are started."""

    def bootstrap(self, run: str, directory: Path, invite_file: Path, host: str) -> list[str]:
        """The organiser's peer. It writes its invite to a file, whole."""
        ...

    def join(self, invite: str, directory: Path, samples_per_second: float, host: str) -> list[str]:
        """A volunteer's peer that is no faster than it is told to be."""
        ...


class ProgramCommands:
    """The program's own command line, run by this interpreter."""

    def bootstrap(self, run: str, directory: Path, invite_file: Path, host: str) -> list[str]:
        return [
            *(sys.executable, "-m", "p2p_trainer", "bootstrap", run, "--dir", str(directory)),
            *("--host", host, "--port", "0", "--invite-file", str(invite_file)),
        ]

    def join(self, invite: str, directory: Path, samples_per_second: float, host: str) -> list[str]:
        return [
            *(sys.executable, "-m", "p2p_trainer", "join", invite, "--dir", str(directory), "--host", host),
            *("--emulate", f"{samples_per_second:g}", "--plain", "--threads", "1"),
        ]


@dataclass(slots=True, kw_only=True)
class RehearsedProcess:
    """A peer's place in the rehearsal: its directory, and the process that lives there, one after another."""

    name: str
    directory: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    expected_to_live: bool = False
    leave_by: float = float("inf")
    """When a process that was asked to leave has had its time (``time.monotonic``)."""
    _killed: bool = False
    _ended: list[tuple[int, bool]] = field(default_factory=list)
    """Of earlier processes: exit code, and whether it was meant to be killed."""
    _frozen: list[psutil.Process] = field(default_factory=list)

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def ending(self) -> tuple[int | None, bool]:
        """Exit code, and whether it was meant to be killed, of its first process that ended badly, or the last.

        The code is None if there was no process, or while it lives.
        """
        ended = list(self._ended)
        if self.process is not None and (code := self.process.poll()) is not None:
            ended.append((code, self._killed))
        bad = [(code, killed) for code, killed in ended if not killed and code not in ORDERLY_EXIT_CODES]
        return next(iter([*bad, *ended[-1:]]), (None, False))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], prepare: Callable[[], None] | None = None
    ) -> None:
        """Start a process here; an earlier one must have ended.

        :param prepare: called in the new process before the command takes its place
        :raises RehearsalError:
        """

        def before_the_command() -> None:
            if sys.platform == "linux":
                _die_with_the_rehearsal()
            if prepare is not None:
                prepare()

        if self.process is not None:
            self._ended.append((self.process.wait(), self._killed))
        with self.log.open("ab") as output:
            try:
                # A session of its own: Ctrl-C is for the rehearsal, which then ends its peers in order.
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=before_the_command,
                )
            except (OSError, subprocess.SubprocessError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                raise RehearsalError(
                    problem=f"{command[0]} cannot be started: {why}.",
                    remedy="Check the Python installation.",
                ) from error
        self.expected_to_live, self._killed, self.leave_by = True, False, float("inf")

    def ask_to_leave(self, within_seconds: float) -> None:
        self.thaw()
        self.expected_to_live = False
        self.leave_by = time.monotonic() + within_seconds
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def crash(self) -> None:
        """Kill all of it at once, as when its machine loses power: nobody is left to say goodbye or to clean up."""
        self.expected_to_live, self._killed = False, True
        processes = self._processes()
        # Stopped first: whoever still ran would see the others end, and say goodbye.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            _signal(processes, number)
        if self.process is not None:
            self.process.wait()
        self._frozen = []

    def freeze(self) -> None:
        """Stop all of it where it is, as when its machine sleeps."""
        self._frozen = self._processes()
        _signal(self._frozen, signal.SIGSTOP)

    def thaw(self) -> None:
        _signal(self._frozen, signal.SIGCONT)
        self._frozen = []

    def end(self) -> None:
        """Kill the process that did not leave, by its handle."""
        self.thaw()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def log_tail(self) -> list[str]:
        return self.log.read_bytes().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]

    def _processes(self) -> list[psutil.Process]:
        """It and its descendants that live."""
        if self.process is None or self.process.poll() is not None:
            return []
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        return []


def leave_together(processes: Iterable[RehearsedProcess], within_seconds: float) -> None:
    """TERM to all that live, and wait until they have left or their time is over."""
    leaving = [one for one in processes if one.is_alive]
    for one in leaving:
        one.ask_to_leave(within_seconds)
    for one in leaving:
        if one.process is not None:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, one.leave_by - time.monotonic()))


def environment_of_a_rehearsal(directory: Path, seconds: float) -> Mapping[str, str]:
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
        "XDG_CACHE_HOME": str(directory / "cache"),  # measured by peers that each have their own memory
        "PYTHONUNBUFFERED": "1",
    }


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)  # psutil checks that the pid was not reused


def _die_with_the_rehearsal() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

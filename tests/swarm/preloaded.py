"""Peers for tests, forked from a process that has imported what they need: ``python preloaded.py`` is that process.

To import torch, hivemind and what torch loads with its first optimizer takes five to six seconds of a core, several
times what a small test's peer does otherwise, and a swarm test starts two to ten peers. A forked one begins where
``python -m p2p_trainer`` has imported everything: a session, environment, arguments, temporary directory, output and
random state of its own, and the entry point of every start. What it shares with a fresh one less: imports that fail,
what the interpreter reads of the environment when it starts, and resident memory, which is other tests' business; those
start peers afresh (``Swarm.run`` with ``environment`` or ``program``), and ``FRESH=1 pytest ...`` starts all so.

The two talk through a socket in messages of JSON, one a datagram: a request for a process, its pid, its end.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

MODULE = "p2p_trainer"
FRESH = "FRESH"
"""Set in the environment: no process is forked."""
MESSAGE_BYTES = 1 << 18
BEGIN_SECONDS = 120.0
"""For a process to import everything on a machine that does other things as well."""
POLL_SECONDS = 0.05


class Process(Protocol):
    """What a test needs of a ``subprocess.Popen``."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Preloaded:
    """The test's end of the process that forks; started with the first peer."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: dict[int, int] = {}

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, prefix: Sequence[str]
    ) -> Process:
        """Fork a process of the program.

        :param log: takes standard output and standard error
        :param prefix: a command that would run it elsewhere, as ``Network.command`` makes it
        """
        if self._process is None:
            self._begin()
        request = {"arguments": arguments, "environment": environment, "log": str(log), "prefix": prefix}
        message = json.dumps(request).encode()
        assert len(message) < MESSAGE_BYTES
        self._socket.send(message)
        while True:
            if not select.select([self._socket], [], [], BEGIN_SECONDS)[0]:
                raise RuntimeError("the process that forks peers does not answer")
            if (pid := self._read()) is not None:
                return ForkedProcess(self, pid)

    def close(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.wait()
            self._process = None

    def end_of(self, pid: int) -> int | None:
        """Exit code of a process that has ended, negative for a signal; else None."""
        while pid not in self._ended and select.select([self._socket], [], [], 0)[0]:
            self._read()
        return self._ended.get(pid)

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def _read(self) -> int | None:
        """One message; the pid if it tells of a beginning."""
        data = self._socket.recv(MESSAGE_BYTES)
        if not data:
            raise RuntimeError("the process that forks peers has ended")
        message = json.loads(data)
        if "began" in message:
            return int(message["began"])
        self._ended[message["ended"]] = message["code"]
        return None


class ForkedProcess:
    """A child of the process that forks."""

    def __init__(self, preloaded: Preloaded, pid: int) -> None:
        self._preloaded, self.pid = preloaded, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._preloaded.end_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# ------------------------------------------------------------------- the process that forks


def preload() -> None:
    """Import what peers do, and start no thread and draw no random number."""
    import torch

    for module in ("cli", "doctor", "session", "status", "tasks.digits"):
        import_module(f"{MODULE}.{module}")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.freeze()  # what is never looked at again is never copied


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for whoever asks, until nobody can ask any more: then None. Returns the request in each child."""
    awake, wake = socket.socketpair()
    for end in (awake, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    while True:
        readable, _, _ = select.select([connection, awake], [], [])
        if awake in readable:
            awake.recv(4096)
            while (ended := _reaped()) is not None:
                connection.send(json.dumps({"ended": ended[0], "code": ended[1]}).encode())
        if connection in readable:
            data = connection.recv(MESSAGE_BYTES)
            if not data:
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (connection, awake, wake):
                    end.close()
                request: dict[str, Any] = json.loads(data)
                return request
            connection.send(json.dumps({"began": pid}).encode())


def _reaped() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def become(request: Mapping[str, Any]) -> None:
    """Be as a fresh process with these arguments would be."""
    os.setsid()
    for option in request["prefix"]:
        _enter(option)
    output = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # kept since somebody asked for it first
    sys.argv = ["-m", *request["arguments"]]
    sys.orig_argv = [sys.executable, "-m", MODULE, *request["arguments"]]
    import numpy as np

    np.random.seed()  # Python's own is sown anew by the fork, and torch begins with the same number everywhere


def _enter(option: str) -> None:
    """Go where an option of nsenter would lead."""
    name, _, path = option.partition("=")
    if name in ("--user", "--net"):
        namespace = os.open(path, os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {path}")
        os.close(namespace)
    else:
        assert option in ("nsenter", "--preserve-credentials", "--"), option


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        os.set_inheritable(connection.fileno(), False)
        preload()
        asked = serve(connection)
    if asked is not None:
        become(asked)
        sys.path[0] = os.getcwd()
        runpy.run_module(MODULE, run_name="__main__", alter_sys=True)

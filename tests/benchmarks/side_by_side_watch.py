"""What surrounds a run of ``side_by_side.py``: counters of bytes and CPU seconds, lines that change, a clean end."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from side_by_side_figures import Series
from side_by_side_rivals import DEVICE
from side_by_side_scenes import LineChange

from p2p_trainer.rehearsal.links import Network

OBSERVE_SECONDS = 1.0
_PR_SET_CHILD_SUBREAPER = 36
_COUNTERS = re.compile(rf"^\s*{DEVICE}:\s*(.*)$", re.MULTILINE)
_HIVEMIND_SOCKET = re.compile(r"/tmp/hivemind-p2p(?:d|client)-[\w-]+\.sock")


class Observer:
    """Counts bytes and CPU seconds while a contender runs, in a thread.

    :param pids: the peers that live, by name
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self.received: dict[str, Series] = {}
        """By peer: (unix s, bytes so far); as for everything here."""
        self.sent: dict[str, Series] = {}
        self.cpu: Series = []
        """Seconds of all processes below this one."""
        self.machine: Series = []
        """CPU seconds of whatever ran on this machine."""
        self.sockets: set[str] = set()
        """Paths of hivemind's sockets, which a peer that is killed leaves behind."""
        self._cpu_seconds: dict[tuple[int, float], float] = {}

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(OBSERVE_SECONDS):
            now = time.time()
            for name, pid in self._pids().items():
                with suppress(OSError):
                    self.sockets |= set(_HIVEMIND_SOCKET.findall(Path(f"/proc/{pid}/net/unix").read_text()))
                if (counters := _counters(pid)) is not None:
                    self.received.setdefault(name, []).append((now, counters[0]))
                    self.sent.setdefault(name, []).append((now, counters[1]))
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    times = process.cpu_times()
                    self._cpu_seconds[process.pid, process.create_time()] = times.user + times.system
            self.cpu.append((now, sum(self._cpu_seconds.values())))
            all_times = psutil.cpu_times()
            self.machine.append((now, sum(all_times) - all_times.idle - all_times.iowait - all_times.guest))


def _counters(pid: int) -> tuple[float, float] | None:
    """Bytes that came in and went out over the device of the namespace that a process is in."""
    with suppress(OSError):
        if found := _COUNTERS.search(Path(f"/proc/{pid}/net/dev").read_text()):
            fields = found[1].split()
            return float(fields[0]), float(fields[8])
    return None


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Whatever is started below ends with this context: orphans come to this process, and are ended by their handle."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        ours = set(psutil.Process().children(recursive=True)) - before
        for process in ours:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(ours, timeout=10)


class Lines:
    """Changes lines when their time has come, in a thread, from ``start`` until the context ends."""

    def __init__(self, network: Network, changes: Sequence[LineChange]) -> None:
        self._network, self._changes = network, changes
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)

    def start(self) -> None:
        if self._changes and not self._thread.is_alive():
            self._thread.start()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        for change in self._changes:
            if self._end.wait(max(0.0, began + change.at_seconds - time.monotonic())):
                return
            if change.link is None:
                self._network.down(change.peer)
            else:
                self._network.set_link(change.peer, change.link)
                self._network.up(change.peer)

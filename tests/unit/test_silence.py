"""Frozen processes: noticed by their silence, but never by one in which nobody listened."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dht_config.errors import ExitCode, SwarmProcessDied
from peers.pipe import Alive, Event, Stopped
from peers.process import FROZEN_LOOKS, SwarmHandle
from peers.silence import LOOK_SECONDS, Silence, is_stopped

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


def test_silence_is_borne_for_so_many_looks_and_a_word_breaks_it() -> None:
    silence = Silence(3)
    assert [silence.look(float(now)) for now in range(5)] == [False, False, False, True, True]
    silence.heard()
    assert [silence.look(5.0 + now) for now in range(4)] == [False, False, False, True]


def test_looks_that_follow_each_other_fast_are_one() -> None:
    silence = Silence(3)
    assert not any(silence.look(now / 100 * LOOK_SECONDS) for now in range(290))


def test_time_in_which_nobody_looked_is_no_silence() -> None:
    """The machine slept, or the whole peer was stopped: the other one has all its time again."""
    silence = Silence(3)
    assert not silence.look(0.0) and not silence.look(1.0)
    assert not silence.look(3600.0), "however long it was"
    assert silence.look(3601.0)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition: Any) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@needs_proc
def test_a_stopped_process_is_told_from_a_running_one_and_from_one_that_is_gone(child: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(os.getpid()) and not is_stopped(child.pid)
    child.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(child.pid))
    child.send_signal(signal.SIGCONT)
    until(lambda: not is_stopped(child.pid))
    child.kill()
    child.wait()
    assert not is_stopped(child.pid)


class Handle:
    """The training process's end, with a process at the other one that says what the test says."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        ours, self.theirs = context.Pipe(duplex=True)
        self.process = context.Process(target=time.sleep, args=(600,), daemon=True)
        self.process.start()
        settings: Any = SimpleNamespace(socket_directory=Path("/nonexistent"))
        process: Any = self.process
        pipe: Connection = ours
        self.handle = SwarmHandle(process, pipe, settings)


@pytest.fixture
def other() -> Iterator[Handle]:
    other = Handle()
    try:
        yield other
    finally:
        other.handle.close()
        other.theirs.close()


def test_signs_of_life_are_no_messages_and_the_last_word_is_kept(other: Handle) -> None:
    told = Stopped([], True)
    for message in (Alive(), Event("peers"), Alive(), told, Alive()):
        other.theirs.send(message)
    assert list(other.handle.messages(60.0)) == [Event("peers"), told]
    assert other.handle.stopped == told


def test_an_averaging_process_that_says_nothing_is_killed(other: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("peers.process.time", SimpleNamespace(monotonic=lambda: now))
    for now in range(10 * FROZEN_LOOKS):  # noqa: B007
        other.theirs.send(Alive())
        assert list(other.handle.messages()) == []
    begun = now
    with pytest.raises(SwarmProcessDied, match="frozen") as failure:
        while now < begun + 10 * FROZEN_LOOKS:
            now += 1
            assert list(other.handle.messages()) == []
    assert now == begun + FROZEN_LOOKS + 1
    assert failure.value.exit_code == ExitCode.SWARM_PROCESS_DIED
    other.process.join()
    assert other.process.exitcode == -signal.SIGKILL


def test_a_training_process_that_was_busy_for_long_reads_what_was_said_meanwhile(
    other: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("peers.process.time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(3 * FROZEN_LOOKS):
        now += 1000
        other.theirs.send(Alive())
        other.theirs.send(Alive())
        assert list(other.handle.messages()) == []
        assert list(other.handle.messages()) == []

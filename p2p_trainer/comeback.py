"""Coming back: when a part of a peer has died, the command starts itself again, so that nobody need type anything.

The program takes its own place (exec): the same process for whoever started it, and nothing of the old life in it. So
there is one way back, whatever died, and it is the way of every start: from the checkpoint, with the same identity and
port. A daemon put in under the living DHT node, rounds and streams would be back a few seconds sooner, and need every
one of those to survive a change that happens almost never.

After a few failures in a row the command ends, and says what failed. If the training process itself is killed nobody is
left to come back: that is for a service manager, or for docker's ``--restart``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dht_config.errors import P2PTrainerError, SwarmProcessDied, UnreachableError

WAIT_SECONDS = (1.0, 5.0, 20.0, 60.0, 300.0)
"""Before the first comeback in a row, the second, ...; after the last one the command ends."""
STEADY_SECONDS = 900.0
"""A life of this length was no failure to come back: counting begins anew."""
ENVIRONMENT_NAME = "_P2P_TRAINER_COMEBACKS"
"""How many in a row led to this start; set by us alone."""
POLL_SECONDS = 0.1
LATE_SECONDS = 60.0
"""For a checkpoint that is being written; the one before it stands. A library's pool of idle threads never ends."""


@dataclass(frozen=True, slots=True)
class Comeback:
    """The next one in a row."""

    number: int
    """From 1."""

    @property
    def wait_seconds(self) -> float:
        return WAIT_SECONDS[self.number - 1]


def next_comeback(
    error: P2PTrainerError, lived_seconds: float, environment: Mapping[str, str] = os.environ
) -> Comeback | None:
    """Whether to come back after a life of this length; None if that does not help, or did not several times."""
    text = environment.get(ENVIRONMENT_NAME, "")
    before = int(text) if text.isdecimal() and lived_seconds < STEADY_SECONDS else 0
    # Who has come back and finds nobody: the line may be what the part that died had died of.
    helps = isinstance(error, SwarmProcessDied) or (before > 0 and isinstance(error, UnreachableError))
    if not helps:
        return None
    return Comeback(before + 1) if before < len(WAIT_SECONDS) else None


def wait(comeback: Comeback, check: Callable[[], None]) -> None:
    """Until it is time. :param check: called all the while; what it raises ends the wait"""
    until = time.monotonic() + comeback.wait_seconds
    while time.monotonic() < until:
        check()
        time.sleep(POLL_SECONDS)


def let_threads_end() -> None:
    """A fresh start ends whatever still runs. Before it is begun, since somebody may ask to leave meanwhile."""
    until = time.monotonic() + LATE_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, until - time.monotonic()))


def start_again(comeback: Comeback) -> None:
    """Put a fresh start of the same command in this process's place; does not return."""
    os.environ[ENVIRONMENT_NAME] = str(comeback.number)
    sys.stdout.flush()
    sys.stderr.flush()
    # Whatever a library opened: a device that is still held would have no memory for the next life.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

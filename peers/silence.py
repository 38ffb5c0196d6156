"""How long another process has said nothing, counted in our own looks rather than in seconds.

A frozen process (SIGSTOP, a machine out of memory, a deadlock) keeps its sockets open and looks alive from outside, so
the processes of a peer listen to each other. When the machine sleeps, or the whole peer is stopped, nobody looks: what
is counted afterwards goes on from where it was, and the other one has all the time it had before to speak.
"""

from __future__ import annotations

from pathlib import Path

LOOK_SECONDS = 1.0
"""Looks that follow each other faster count once."""


class Silence:
    """Of one process, as another one counts it.

    :param patience_looks: so many looks in a row without a word are borne
    """

    def __init__(self, patience_looks: int) -> None:
        self._patience_looks = patience_looks
        self._looks = 0
        self._looked_at = float("-inf")

    def heard(self) -> None:
        """The other one has said something."""
        self._looks = 0

    def look(self, now: float) -> bool:
        """Nothing was heard until now; returns whether that is more than is borne. :param now: ``time.monotonic``"""
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._looks += 1
        return self._looks > self._patience_looks


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (Ctrl-Z, SIGSTOP) and not continued since; False if nobody can tell."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except (OSError, UnicodeDecodeError):
        return False
    # Its state follows its name, which stands in brackets and may hold any.
    return stat.rpartition(")")[2].split()[:1] == ["T"]

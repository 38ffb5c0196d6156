"""What the peers of this machine do, read from their directories: no network, no torch, nothing that disturbs them.

Made for a container's or a service's health check. Whether others can reach a peer is not seen from here: ``doctor``
asks them.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_trainer.run_files import LOCK_NAME, METRICS_NAME, STATE_NAME
from peers.life import BIRTH, State
from peers.silence import is_stopped

STALE_SECONDS = 900.0
"""A peer that trains writes an event every ten seconds; a step of a slow machine, or a fetch, may take minutes."""
IN_THE_SWARM: Collection[State] = ("training", "serving")
TAIL_BYTES = 256 * 1024
"""Of the metrics: some thousand events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPeer:
    """One peer's directory, as it looks from outside."""

    directory: str
    role: str
    """"training" or "serving"."""
    running: bool
    state: str
    """In words: what it is doing, and why."""
    healthy: bool
    samples: int | None
    """Processed, as told last."""
    seconds_since_event: float | None


def peers_below(data_directory: Path) -> list[Path]:
    """Every directory of a peer below the one that holds all runs."""
    return sorted(path.parent for path in data_directory.glob(f"*/*/{LOCK_NAME}"))


def look(directory: Path, now: float) -> LocalPeer:
    """Read one peer's directory. :param now: unix seconds"""
    running = is_locked(directory / LOCK_NAME)
    stopped = running and is_stopped(_holder(directory / LOCK_NAME))
    life = _state(directory / STATE_NAME)
    events = _last_start(_tail(directory / METRICS_NAME))
    role = "serving" if (directory / "organiser.key").exists() or directory.name == "bootstrap" else "training"
    kinds = {str(event["event"]) for event in events}
    age = max(0.0, now - float(events[-1]["time"])) if events else None
    stale = "training_started" in kinds and age is not None and age > STALE_SECONDS
    ends = [event for event in events if event["event"] in ("leave", "fault")]
    end, reason = (ends[-1]["event"], ends[-1].get("reason", "")) if ends else ("", "")
    if not running:
        words = {"leave": f"not running: left ({reason})", "fault": f"ended, and may come back in a moment: {reason}"}
        state = words.get(end, "not running")
    elif stopped:
        state = "is stopped (SIGSTOP), and leaves the swarm after half a minute; kill -CONT continues it"
    elif ends:
        state = f"is ending: {reason}"
    elif stale:
        state = f"runs, but nothing was heard of it for {(age or 0.0) / 60:.0f} minutes"
    else:
        state = ": ".join(life)
    samples = [
        event["samples"] for event in events if event["event"] == "train" and isinstance(event.get("samples"), int)
    ]
    return LocalPeer(
        directory=str(directory),
        role=role,
        running=running,
        state=state,
        healthy=running
        and not (stale or stopped or ends)
        and (life[0] in IN_THE_SWARM or (life[0] == "syncing" and "train" in kinds)),
        samples=samples[-1] if samples else None,
        seconds_since_event=age,
    )


def is_healthy(peers: Sequence[LocalPeer]) -> bool:
    """At least one runs, and all that run are in the swarm and have something to say."""
    running = [peer for peer in peers if peer.running]
    return bool(running) and all(peer.healthy for peer in running)


def line(peer: LocalPeer) -> str:
    """One peer for people."""
    told = f", {peer.samples:,} samples" if peer.samples is not None else ""
    heard = f", last event {peer.seconds_since_event:.0f} s ago" if peer.seconds_since_event is not None else ""
    return f"{'✓' if peer.healthy else '✗'} {peer.directory}: {peer.state}{told}{heard}"


def is_locked(path: Path) -> bool:
    """Whether a peer holds the lock of its directory. Where nobody does it is ours for an instant: peers wait."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no file, no right to it
        return False
    return False


def now() -> float:
    """This machine's clock, which events are written with."""
    return time.time()


def _state(path: Path) -> tuple[str, str]:
    """What a peer said last of what it is doing, and why."""
    try:
        told = json.loads(path.read_text())
        return str(told["state"]), str(told["reason"])
    except (OSError, ValueError, LookupError, TypeError):
        return BIRTH


def _tail(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    events = []
    for text in lines:  # the first one may be cut, the last one torn
        with suppress(ValueError):
            event = json.loads(text)
            if isinstance(event, dict) and isinstance(event.get("time"), int | float) and "event" in event:
                events.append(event)
    return events


def _holder(lock: Path) -> int:
    """The process that holds a lock, as it wrote down; 0 if it did not."""
    try:
        return int(lock.read_text())
    except (OSError, ValueError):
        return 0


def _last_start(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A start's own events, or the last start's if nobody runs; without a start among them, since a goodbye before."""
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    if starts:
        return events[starts[-1] :]
    goodbyes = [index for index, event in enumerate(events[:-1]) if event["event"] == "leave"]
    return events[goodbyes[-1] + 1 :] if goodbyes else events

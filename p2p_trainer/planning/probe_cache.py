"""What was measured of this machine, kept for the next start: one small file per thing measured.

A measurement holds for one model and batch, one strategy and format, one device with its driver, and one version of
torch and of this program: all of that is the key. It does not hold for more memory than it was allowed, if memory is
what ended it. A probe that was killed leaves nothing here: it goes first where others want memory, whatever it took.
The training loop says when a rate is not what was measured any more (``note_drift``), and what did not fit after all
(``note_too_big``); then the next start measures again, or does not try that.

One lock for the machine: peers that start together measure one after the other, not each other, and mostly the second
finds what it wants. A cache that cannot be read, written or locked costs a measurement, never a start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs
import torch
from filelock import FileLock, Timeout

from dht_config.manifest import RunManifest
from p2p_trainer.hardware import DeviceFacts
from p2p_trainer.planning.plan_facts import Measurement
from p2p_trainer.strategies import StrategyName
from p2p_trainer.throughput import Throughput

_log = logging.getLogger(__name__)

FORMAT = 1
MORE_MEMORY = 1.2
"""A measurement that memory ended is made again where there is so much more of it."""
LOCK_SECONDS = 30.0
"""Somebody else measures for so long at most before we do it beside him."""
LOCK_POLL_SECONDS = 0.1


def default_cache_directory() -> Path:
    return Path(platformdirs.user_cache_dir("p2p-trainer", appauthor=False)) / "probes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the cache knows of one key."""

    measurement: Measurement
    budget_bytes: int | None
    """What it was allowed."""
    drifted: bool = False
    """Reality has been seen to differ."""

    def holds_for(self, budget_bytes: int | None, *, compile: bool = False) -> bool:
        """Whether nothing else would come of measuring again, with a budget of now.

        :param compile: torch.compile is to be tried
        """
        tried = self.measurement.compiled is not None or self.measurement.compiling
        if self.drifted or (compile and not tried):
            return False
        if self.measurement.stopped != "memory" or self.budget_bytes is None:
            return True
        return budget_bytes is not None and budget_bytes <= MORE_MEMORY * self.budget_bytes


def key_of(
    manifest: RunManifest,
    task_version: int,
    strategy: StrategyName,
    compute_dtype: str,
    device: DeviceFacts,
    *,
    cores: float,
    threads: int | None,
) -> str:
    """A name for everything that a measurement depends on, memory apart.

    :param cores: that this process may use
    :param threads: that a person set; None for as many as torch takes
    """
    optimizer = manifest.inner_optimizer
    parts = {
        "format": FORMAT,
        "task": [manifest.task.name, task_version, manifest.model, manifest.data],
        # How the run cuts the model and whether it steps an optimizer decide what a strategy keeps.
        "run": [manifest.run.fragments, manifest.averaging.mode],
        "step": [optimizer.name, bool(optimizer.momentum), optimizer.batch_size, optimizer.clip_norm is not None],
        "strategy": [strategy, compute_dtype],
        "device": [device.kind, device.name, device.uuid, device.driver, device.total_bytes],
        "processor": [platform.machine(), cores, threads],
        "versions": [torch.__version__, version("p2p-trainer")],
    }
    if device.kind == "cpu":
        # A group's limit may differ from start to start; what a measurement was allowed is kept beside it.
        parts["device"] = [device.kind, device.name]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


class ProbeCache:
    """A directory of measurements.

    :param say: told in one line what is wrong with it
    """

    def __init__(self, directory: Path, say: Callable[[str], None] = lambda _line: None) -> None:
        self._directory, self._say = directory, say

    def read(self, key: str) -> Entry | None:
        """What is known; None if nothing is, or if it cannot be read."""
        try:
            text = self._path(key).read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError) as error:
            self._say(f"Measuring again: what was measured before cannot be read ({error}).")
            return None
        try:
            return _from_json(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            _log.debug("The cache's %s is damaged: %r", self._path(key), error)
            self._say(f"Measuring again: {self._path(key)} is damaged.")
            return None

    def write(self, key: str, entry: Entry) -> None:
        """Keep it, whole or not at all."""
        path = self._path(key)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(_to_json(entry)))
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            _log.debug("Measurements are not kept in %s: %r", self._directory, error)

    @contextmanager
    def lock(self, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Measure while nobody else on this machine does, or without that if it takes too long.

        :param wait: called while somebody else measures; what it raises ends the wait
        """
        lock = FileLock(self._directory / "measuring.lock")
        give_up = time.monotonic() + LOCK_SECONDS
        held = False
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            while not held and time.monotonic() < give_up:
                with suppress(Timeout):
                    lock.acquire(timeout=LOCK_POLL_SECONDS, poll_interval=LOCK_POLL_SECONDS / 2)
                    held = True
                wait()
        except (OSError, NotImplementedError) as error:  # read-only, full, or a file system without locks
            _log.debug("Measurements are not locked in %s: %r", self._directory, error)
        try:
            yield
        finally:
            lock.release(force=True)

    def note_drift(self, key: str) -> None:
        """What was measured is not so any more: the next start measures again."""
        if (entry := self.read(key)) is not None:
            self.write(key, replace(entry, drifted=True))

    def note_too_big(self, key: str, micro_batch: int) -> None:
        """Memory ran out at this micro-batch while training: no later start tries it again with as little memory."""
        if (entry := self.read(key)) is not None:
            fitted = tuple(one for one in entry.measurement.results if one.micro_batch < micro_batch)
            self.write(key, replace(entry, measurement=replace(entry.measurement, results=fitted, stopped="memory")))

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.json"


def _to_json(entry: Entry) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "results": [asdict(one) for one in entry.measurement.results],
        "stopped": entry.measurement.stopped,
        "compiled": asdict(entry.measurement.compiled) if entry.measurement.compiled is not None else None,
        "compiling": entry.measurement.compiling,
        "program_bytes": entry.measurement.program_bytes,
        "budget_bytes": entry.budget_bytes,
        "drifted": entry.drifted,
    }


def _from_json(row: Mapping[str, Any]) -> Entry:
    """:raises ValueError: and what else comes of a file that somebody else wrote"""
    results = tuple(Throughput(**one) for one in row["results"])
    if row["format"] != FORMAT or row["stopped"] not in ("done", "time", "memory"):
        raise ValueError("of another format")
    if not (results or row["stopped"] == "memory") or not all(one.makes_sense() for one in results):
        raise ValueError("figures that nobody can have measured")
    compiled = Throughput(**row["compiled"]) if row.get("compiled") is not None else None
    if compiled is not None and not compiled.makes_sense():
        raise ValueError("figures that nobody can have measured")
    return Entry(
        measurement=Measurement(
            results=results,
            stopped=row["stopped"],
            program_bytes=_size(row["program_bytes"]),
            compiled=compiled,
            compiling=str(row.get("compiling", "")),
        ),
        budget_bytes=_size(row["budget_bytes"]),
        drifted=bool(row["drifted"]),
    )


def _size(value: Any) -> int | None:
    return None if value is None else int(value)

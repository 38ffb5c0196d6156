"""Metrics are events: one JSON object a line in ``metrics.jsonl``, never parsed out of logs.

Written for programs (``rehearse``, ``status``, people's plots): append only, one system call a line, so that
a reader sees whole lines and a kill costs at most the line being written.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dht_config.errors import DirectoryError

_log = logging.getLogger(__name__)


class MetricsWriter:
    """Append events to a file. A disk that fills up costs events and one warning, never the training."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        listener: Callable[[Mapping[str, Any]], None] = lambda event: None,
    ) -> None:
        """Open the file, making it if need be. Raises DirectoryError if that is not possible.

        :param listener: is given every event as well, as it is written
        """
        self._path = path
        self._clock = clock
        self._listener = listener
        self._lock = threading.Lock()
        self._warned = False
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._torn = _ends_in_a_torn_line(self._descriptor)
        except OSError as error:
            raise DirectoryError(
                problem=f"{path} cannot be written ({error.strerror}).",
                remedy="Choose another directory with --dir, or make this one writable.",
            ) from error

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the unix time in seconds. Numbers that JSON lacks (NaN, inf) become null."""
        whole = finite({"time": self._clock(), "event": event, **fields})
        line = json.dumps(whole, allow_nan=False) + "\n"
        with self._lock:
            self._append(line.encode())
        self._listener(whole)

    def close(self) -> None:
        """Close the file; later events are dropped in silence."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        if self._descriptor < 0:
            return
        # After a torn line a new one is begun, or this event would be lost as well.
        content = b"\n" + line if self._torn else line
        try:
            written = os.write(self._descriptor, content)
        except OSError as error:
            self._warn(error.strerror or str(error))
            return
        self._torn = written < len(content)
        if self._torn:
            self._warn("the disk is full")

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s cannot be written (%s): events are lost, training goes on.", self._path, reason)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the events of a file, oldest first; of no file, none.

    Lines that are torn, because a peer was killed or its disk was full, are left out.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    events = []
    for line in content.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def _ends_in_a_torn_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def finite(value: Any) -> Any:
    """The same document with null for numbers that JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value

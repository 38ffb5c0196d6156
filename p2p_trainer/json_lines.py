"""What ``--json`` prints while a peer runs: the main events of its metrics, one JSON object a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

MAIN_EVENTS = frozenset({"join", "train", "eval", "round", "rebase", "state", "fault", "leave"})
TRAIN_SECONDS = 10.0
"""Between two ``train`` events, of which the metrics have one a second."""


class JsonLines:
    """Writes to standard output; when its reader is gone, the peer goes on and its lines are dropped."""

    def __init__(self) -> None:
        self._trained_at = float("-inf")

    def event(self, event: Mapping[str, Any]) -> None:
        """Print an event of the metrics if it is one of the main ones."""
        if event["event"] not in MAIN_EVENTS:
            return
        if event["event"] == "train":
            if event["time"] - self._trained_at < TRAIN_SECONDS:
                return
            self._trained_at = event["time"]
        self.write(event)

    def write(self, line: Mapping[str, Any]) -> None:
        """Print one object."""
        try:
            print(json.dumps(line), flush=True)
        except BrokenPipeError:
            # Python would complain once more when it flushes at the end.
            sys.stdout = open("/dev/null", "w")  # noqa: SIM115

"""The archive of a run: a snapshot of the bases every so many versions, thinned out as they age.

A snapshot is one safetensors file as ``checkpoint`` writes it, with the base and without the outer optimizer's state:
enough to export the model as it was, half of what it takes to go on from there. Files appear whole or not at all, so
the peer may be killed at any moment. How fresh the last one is says nothing of the run's: peers keep the newest bases
themselves.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from p2p_trainer.checkpoint import save_snapshot

_NAME = re.compile(r"version-(\d{10})\.safetensors", re.ASCII)


def thinned(slots: Collection[int], newest: int) -> set[int]:
    """Which of the snapshots to keep: the newest ones, and ever sparser ones before.

    Of those that are ``newest`` to 2 ``newest`` slots old, one in 2 slots is kept, then one in 4, and so on: some
    ``newest`` for each doubling of the run's length. The first one always stays. Of each stretch the oldest is kept, so
    what is thinned out now is what would be thinned out later.

    :param slots: numbers of snapshots, one for each so many versions, not necessarily all of them
    :param newest: how many of the newest slots to keep whole, at least 1
    """
    last = max(slots, default=0)
    kept: dict[tuple[int, int], int] = {}
    for slot in sorted(slots):
        level = ((last - slot) // newest).bit_length()
        kept.setdefault((level, slot >> level), slot)
    return set(kept.values())


class Archive:
    """The snapshots of one run in one directory.

    :param every: versions from one snapshot to the next; 0 for none at all
    :param newest: as for ``thinned``
    """

    def __init__(self, directory: Path, every: int, newest: int) -> None:
        self.directory, self.every, self.newest = directory, every, newest
        self._last = max((version // every for version in self.versions()), default=-1) if every else -1

    def versions(self) -> list[int]:
        """Of the snapshots that are there, oldest first."""
        try:
            found = [_NAME.fullmatch(path.name) for path in self.directory.iterdir()]
        except OSError:
            return []
        return sorted(int(match[1]) for match in found if match)

    def path(self, version: int) -> Path:
        return self.directory / f"version-{version:010d}.safetensors"

    def due(self, version: int) -> bool:
        """Whether bases of a version, the lowest of all fragments', are to be kept."""
        return self.every > 0 and version // self.every > self._last

    def save(self, version: int, base: Tensor, meta: Mapping[str, Any]) -> None:
        """Keep the bases and thin out what is there. One that fails is tried again with the next slot.

        :raises CheckpointError: it cannot be written; what was there is there
        """
        self._last = version // self.every
        save_snapshot(self.path(version), {"base": base}, meta)
        self._thin()

    def _thin(self) -> None:
        by_slot: dict[int, list[int]] = {}
        for version in self.versions():
            by_slot.setdefault(version // self.every, []).append(version)
        keep = thinned(by_slot, self.newest)
        for slot, versions in by_slot.items():
            for version in versions[1:] if slot in keep else versions:
                with contextlib.suppress(OSError):  # a file too many; the next snapshot tries again
                    self.path(version).unlink()

"""What a bootstrap peer does all day: follow the bases, save them now and then, keep the archive.

Its averaging process takes part in rounds that training peers cannot hold by themselves; here it is only said so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dht_config.errors import CheckpointError
from p2p_trainer.archive import Archive
from p2p_trainer.checkpoint import save_checkpoint
from p2p_trainer.metrics import MetricsWriter
from p2p_trainer.training import QUIET_SECONDS, LeaveFlag
from p2p_trainer.view import LiveView
from peers.arena import SharedArena
from peers.ledger import Counts
from peers.pipe import Event, FragmentMeta, Quiesce, Quiet, Resume, Waiting
from peers.process import SwarmHandle


@dataclass(slots=True, kw_only=True)
class Door:
    """A bootstrap peer between ``Synced`` and its goodbye."""

    swarm: SwarmHandle
    arena: SharedArena
    directory: Path
    checkpoint_meta: Mapping[str, Any]
    checkpoint_seconds: float
    archive: Archive
    metrics: MetricsWriter
    view: LiveView
    leave: LeaveFlag
    versions: dict[int, int] = field(default_factory=dict)
    """Of each fragment's base, as far as we have heard."""

    training: int = -1
    """Peers, as told last."""
    averages: bool = False
    """Whether it was said that rounds go through here."""

    def serve(self, fragments: Sequence[FragmentMeta]) -> None:
        """Until asked to leave. :param fragments: as they are at the beginning"""
        self._note_versions(fragments)
        save_at = time.monotonic() + self.checkpoint_seconds
        while not self.leave.is_set:
            if self.archive.due(min(self.versions.values())):
                self._snapshot()
            for message in self.swarm.messages(0.5):
                self._note(message)
            if time.monotonic() >= save_at:
                save_at = time.monotonic() + self.checkpoint_seconds
                if problem := self.save(*self._copied()):
                    self.view.status(f"Serving goes on, but the bases could not be saved: {problem}")

    def save(self, tensors: Mapping[str, Tensor], fragments: Sequence[FragmentMeta]) -> str:
        """Write the checkpoint. Returns what went wrong, or nothing."""
        nothing = [Counts() for _ in fragments]
        meta = {**self.checkpoint_meta, "clean": True, "samples": 0, "steps": 0, "counts": nothing}
        try:
            save_checkpoint(self.directory, tensors, {**meta, "fragments": [meta.to_json() for meta in fragments]})
        except CheckpointError as error:
            return error.problem
        return ""

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what a checkpoint holds."""
        return {"base": self.arena.base.clone(), "outer_state": self.arena.outer_state.clone()}

    def _note(self, message: Any) -> None:
        if isinstance(message, Waiting):
            self.view.status(message.text)
        if not isinstance(message, Event):
            return
        if message.name == "peers":
            if message.fields["training"] != self.training:
                self.training, self.averages = message.fields["training"], False
                self.view.status(f"{self.training} peer(s) are training.")
            return
        self.metrics.write(message.name, **message.fields)
        if message.name == "rebase":
            self.versions[message.fields["fragment"]] = message.fields["to_version"]
        elif message.name == "round" and message.fields["outcome"] == "committed":
            self.versions[message.fields["fragment"]] = message.fields["version"]
            if not self.averages:
                self.averages = True
                self.view.status("None of them can be dialled by the others: their rounds go through this peer.")

    def _note_versions(self, fragments: Sequence[FragmentMeta]) -> None:
        self.versions.update((index, meta.version) for index, meta in enumerate(fragments))

    def _copied(self) -> tuple[dict[str, Tensor], list[FragmentMeta]]:
        """The bases of one moment; the averaging process waits for no longer than copying takes."""
        self.swarm.send(Quiesce())
        fragments: list[FragmentMeta] | None = None
        give_up = time.monotonic() + QUIET_SECONDS
        while fragments is None:
            if time.monotonic() > give_up:
                self.leave.check()
            for message in self.swarm.messages(0.5):
                if isinstance(message, Quiet):
                    fragments = message.fragments
                else:
                    self._note(message)
        tensors = self.tensors()
        self.swarm.send(Resume())
        self._note_versions(fragments)
        return tensors, fragments

    def _snapshot(self) -> None:
        tensors, fragments = self._copied()
        rows = [{**meta.to_json(), "past": None} for meta in fragments]
        version = min(meta.version for meta in fragments)
        try:
            self.archive.save(version, tensors["base"], {**self.checkpoint_meta, "fragments": rows})
        except CheckpointError as error:
            self.view.status(f"Serving goes on, but version {version} is not in the archive: {error}")
            return
        self.metrics.write("snapshot", version=version, path=str(self.archive.path(version)))

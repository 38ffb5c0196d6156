"""What a person asks to join: an invite, a manifest file, or the name of a shipped example."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dht_config.errors import InviteError
from dht_config.invite import Invite
from dht_config.manifest import (
    EXAMPLES,
    RunManifest,
    example_manifest,
    load_manifest,
    parse_manifest,
    run_id,
)
from p2p_trainer.invites import door_of
from p2p_trainer.run_files import INVITE_NAME

if TYPE_CHECKING:
    from p2p_trainer.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The run to join or start; a manifest is only known when it was given as a file."""

    run_id: str
    invite: Invite | None = None
    manifest: RunManifest | None = None
    task: Task | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        if self.invite is not None:
            return self.invite.addresses
        return self.manifest.network.initial_peers if self.manifest is not None else ()


def read_target(text: str) -> Target:
    """Understand what was given; a peer's directory stands for the invite in it.

    :raises ManifestError: :raises InviteError:
    """
    path = Path(text)
    # os.path's questions raise nothing where the answer may not be known.
    if len(text) < 256 and os.path.isfile(path / INVITE_NAME):
        invite = door_of(text)
        return Target(run_id=invite.run_id, invite=invite)
    if text in EXAMPLES and not os.path.exists(path):
        return manifest_target(parse_manifest(example_manifest(text), f"the example {text}"))
    if text.lower().endswith(".toml") or (len(text) < 256 and os.path.isfile(path)):
        return manifest_target(load_manifest(path))
    try:
        invite = Invite.decode(text)
    except InviteError as error:
        if "/" in text and len(text) < 256:
            raise InviteError(
                f"There is no file {text} that can be read, and it is not an invite.", error.remedy
            ) from error
        raise
    return Target(run_id=invite.run_id, invite=invite)


def manifest_target(manifest: RunManifest) -> Target:
    """:raises ManifestError: its task is not installed here, or refuses a key"""
    from p2p_trainer.tasks import load_task  # imports torch, two seconds of a core: whoever mistypes an invite need not

    task = load_task(manifest.task.name, manifest.model, manifest.data)
    return Target(run_id=run_id(manifest, task.version), manifest=manifest, task=task)

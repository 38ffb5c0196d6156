"""What a person asks to join: an invite, a manifest file, or the name of a shipped example."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dht_config.errors import DataError, FingerprintError, InviteError, ManifestError
from dht_config.invite import Invite
from dht_config.manifest import (
    EXAMPLES,
    RunManifest,
    differing_fields,
    example_manifest,
    load_manifest,
    parse_manifest,
    run_id,
)
from dht_config.records import SignedManifest, software_version
from dht_config.versions import install_command, other_protocol
from p2p_trainer.invites import door_of
from p2p_trainer.run_files import INVITE_NAME
from p2p_trainer.running_statistics import running_statistics, trainable
from p2p_trainer.tasks import Task, load_task
from peers.fragments import FragmentLayout, cut


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
    task = load_task(manifest.task.name, manifest.model, manifest.data)
    return Target(run_id=run_id(manifest, task.version), manifest=manifest, task=task)


def checked_manifest(signed: SignedManifest, target: Target, *, allow_files: bool) -> tuple[RunManifest, Task]:
    """The run's manifest and task, if this program would do exactly what the run does.

    :param target: what a person asked for
    :param allow_files: whether a run that was joined by invite may read files on this machine
    :raises FingerprintError: says in what they differ
    :raises DataError: it wants to read files and may not
    :raises ManifestError: its task is not installed
    """
    if (refusal := other_protocol(signed)) is not None:
        raise refusal
    problems = []
    manifest = signed.manifest()
    task = manifest_target(manifest).task
    if task is None or task.version != signed.task_version:
        ours = task.version if task is not None else None
        problems.append(f"version of the task {manifest.task.name}: ours {ours}, theirs {signed.task_version}")
    if target.manifest is not None:
        ours_json = json.loads(target.manifest.canonical_json())
        problems += differing_fields(ours_json, json.loads(signed.manifest_json))
    if problems or task is None:
        raise FingerprintError(
            f"This peer (p2p-trainer {software_version()}) and the run {signed.run_id()} differ in "
            f"{'; '.join(problems)}.",
            f"The run was started with p2p-trainer {signed.software_version}: install that version "
            f"({install_command(signed.software_version)}), or use the run's own manifest.",
        )
    wanted = [f"{key} = {manifest.data[key]}" for key in ("files", "tokenizer") if key in manifest.data]
    if target.invite is not None and wanted and not allow_files:
        raise DataError(
            f"This run wants to read files on this machine ({', '.join(wanted)}).",
            "If you agree, start again with --allow-files.",
        )
    return manifest, task


def check_model(manifest: RunManifest, task: Task) -> FragmentLayout:
    """Find a mistake in a manifest's ``[model]`` before anybody is asked for anything and anything is written.

    Returns how the run cuts it.

    :raises ManifestError: names the key
    """
    return layout_of(blank_model(task), manifest)


def blank_model(task: Task) -> nn.Module:
    """The model without its values, which takes no memory; or with them, where an architecture does not allow that.

    :raises ManifestError: names the key
    """
    try:
        with torch.device("meta"):
            return task.build_model()
    except Exception:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # processes are forked after this, and a fork must not meet a thread
        try:
            return task.build_model()
        finally:
            torch.set_num_threads(threads)


def refuse_another_layout(signed: SignedManifest, layout: FragmentLayout) -> None:
    """Tasks of one name and version may train other things. :raises FingerprintError:"""
    if signed.layout_digest not in (None, layout.digest):
        raise FingerprintError(
            f"This peer's model is not the run's: its task trains {layout.num_elements:,} values in "
            f"{len(layout.names)} tensors, and the run other ones, or cuts them otherwise.",
            "Install the task's package as the organiser has it; it may freeze other layers there.",
        )


def refuse_random_frozen(task: Task, model: nn.Module) -> None:
    """What is frozen is in no base, so every peer must build the same.

    What this does not find: values that are the same at every build here and others on another machine.

    :raises ManifestError: frozen parameters are others at each build
    """
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if not frozen:
        return
    again = dict(task.build_model().named_parameters())
    for name, parameter in frozen.items():
        if not torch.equal(parameter, again[name]):
            raise ManifestError(
                f"The task {task.name} freezes {name}, which begins with other values at each build: every peer would "
                "have its own.",
                "Load frozen parameters from a file, or make them buffers, which travel with the base.",
            )


def layout_of(model: nn.Module, manifest: RunManifest) -> FragmentLayout:
    """How the run cuts this model.

    :raises ManifestError: it has fewer parameters than fragments, or running statistics in a run on averaged gradients
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in trainable(model).items()}
    statistics = {name: tuple(buffer.shape) for name, buffer in running_statistics(model).items()}
    if statistics and manifest.averaging.mode == "gradient":
        raise ManifestError(
            f"[averaging] mode = 'gradient' averages gradients alone, and this model keeps running statistics "
            f"({next(iter(statistics))}{', ...' if len(statistics) > 1 else ''}).",
            "Use mode = 'local', or a model with GroupNorm or LayerNorm in place of batch normalisation.",
        )
    if not shapes:
        raise ManifestError(
            f"The model of the task {manifest.task.name} has nothing to train: all of its parameters are frozen.",
            "Let some of them take gradients (requires_grad).",
        )
    try:
        return cut(shapes, manifest.run.fragments, statistics)
    except ValueError as error:
        raise ManifestError(f"[run] fragments = {manifest.run.fragments}: {error}.", "Lower it.") from error

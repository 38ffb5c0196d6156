"""Exporting a run's model: the newest base of a run directory as files that other programs load.

A model that transformers knows becomes a folder for ``AutoModelForCausalLM.from_pretrained``, with its tokenizer; any
other one becomes ``model.safetensors`` and a ``config.json`` that says how to build it. Both come with a card of the
run's facts, and the same facts for programs in ``run.json``.

The folder is written beside its place and renamed into it, so it is there whole or not at all. Nothing in the run
directory is touched: a peer may be training in it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from dht_config.errors import CheckpointError, DirectoryError, RecordError
from dht_config.manifest import RunManifest
from dht_config.records import SignedManifest, software_version
from p2p_trainer.checkpoint import Checkpoint, load_checkpoint, read_checkpoint
from p2p_trainer.metrics import read_metrics
from p2p_trainer.model_card import Library, model_card
from p2p_trainer.run_files import METRICS_NAME, SIGNED_MANIFEST_NAME
from p2p_trainer.run_model import checked_manifest, layout_of
from p2p_trainer.running_statistics import load_model
from p2p_trainer.target import Target
from p2p_trainer.tasks import Task
from peers.fragments import FragmentLayout
from peers.outer import base_digest
from peers.pipe import FragmentMeta


@runtime_checkable
class SavesTokenizer(Protocol):
    """A task whose data go through a tokenizer that users of the model need."""

    def save_tokenizer(self, directory: Path) -> None:
        """Write it into a directory. Raises OSError."""


@runtime_checkable
class SavesItself(Protocol):
    """A model of transformers."""

    def save_pretrained(self, directory: Path) -> None:
        """Write configuration and parameters into a directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedBase:
    """The bases of a run as one peer last saved them, in the model that they are the parameters of."""

    signed: SignedManifest
    manifest: RunManifest
    task: Task
    model: nn.Module
    fragments: tuple[FragmentMeta, ...]
    layout: FragmentLayout
    last_evaluation: Mapping[str, Any] | None
    """The newest ``eval`` event of the peer's metrics that is not of later versions than these."""

    @property
    def total_samples(self) -> int:
        """Samples in the base: the mean over the parameters."""
        return sum(meta.total_element_samples for meta in self.fragments) // self.layout.num_elements


def read_base(source: Path, on_warning: Callable[[str], None]) -> ExportedBase:
    """Read the newest base of a run directory, or the one of a snapshot in its archive.

    :param source: a run directory, or one file of its ``archive``
    :param on_warning: called with one sentence for each checkpoint that could not be used

    Raises DirectoryError if it is no run directory, CheckpointError if it holds no base that is whole, FingerprintError
    if another version of the program wrote it, ManifestError if the run's task is not installed.
    """
    directory, checkpoint = _checkpoint(source, on_warning)
    try:
        signed = SignedManifest.from_payload((directory / SIGNED_MANIFEST_NAME).read_bytes())
        signed.verify()
        target = Target(run_id=signed.run_id())
    except (OSError, RecordError) as error:
        raise CheckpointError(
            f"The run's manifest in {directory / SIGNED_MANIFEST_NAME} cannot be read ({_reason(error)}).",
            "Start the peer there once: it fetches the manifest again.",
        ) from error
    manifest, task = checked_manifest(signed, target, allow_files=True)
    model = task.build_model()
    layout = layout_of(model, manifest)
    fragments = tuple(FragmentMeta.from_json(row) for row in checkpoint.meta["fragments"])
    if checkpoint.meta["run_id"] != target.run_id or checkpoint.meta["bounds"] != list(layout.bounds):
        raise CheckpointError(
            f"The checkpoint in {source} is of another run than the manifest beside it.",
            "Give the directory of one run.",
        )
    base = checkpoint.tensors["base"]
    if (outer_state := checkpoint.tensors.get("outer_state")) is not None:
        _check_digests(source, layout, fragments, base, outer_state)
    load_model(model, layout, base)
    return ExportedBase(
        signed=signed,
        manifest=manifest,
        task=task,
        model=model,
        fragments=fragments,
        layout=layout,
        last_evaluation=_last_evaluation(directory, min(meta.version for meta in fragments)),
    )


def export(exported: ExportedBase, destination: Path) -> None:
    """Write a folder of a model with its card, whole or not at all.

    :param destination: made by this; an empty directory may be there

    Raises DirectoryError if something is there already, or if it cannot be written: nothing is left then.
    """
    check_free(destination)
    partial: Path | None = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
        _write(exported, partial)
        umask = _umask()
        partial.chmod(0o777 & ~umask)
        for file in partial.iterdir():  # some are written for their owner only
            file.chmod(0o666 & ~umask)
        os.replace(partial, destination)
    except (OSError, SafetensorError) as error:
        raise DirectoryError(
            f"The model cannot be written to {destination} ({_reason(error)}).",
            "Free some space, or give a place that this user may write to.",
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def check_free(destination: Path) -> None:
    """:raises DirectoryError: something is there that an export would have to overwrite"""
    try:
        occupied = any(destination.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError:
        occupied = True
    except OSError as error:
        raise DirectoryError(
            f"{destination} cannot be looked into ({_reason(error)}).", "Give another place."
        ) from error
    if occupied:
        raise DirectoryError(f"{destination} is there already.", "Give a name that does not exist yet.")


def facts(exported: ExportedBase) -> dict[str, Any]:
    """What is known of the run and of these bases, as JSON-able values."""
    last = exported.last_evaluation
    return {
        "name": exported.manifest.run.name,
        "run_id": exported.signed.run_id(),
        "organiser_public_key": exported.signed.organiser_public_key.hex(),
        "task": exported.manifest.task.name,
        "parameters": exported.layout.num_elements,
        "total_samples": exported.total_samples,
        "unit": exported.task.unit,
        "fragments": [
            {
                "version": meta.version,
                "digest": meta.digest.hex(),
                "total_samples": meta.total_element_samples // exported.layout.size(index),
            }
            for index, meta in enumerate(exported.fragments)
        ],
        "held_out_loss": last["loss"] if last is not None else None,
        "held_out_loss_version": last["version"] if last is not None else None,
        "started_with": exported.signed.software_version,
        "exported_with": software_version(),
        "exported_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "manifest": json.loads(exported.signed.manifest_json),
    }


def _write(exported: ExportedBase, directory: Path) -> None:
    """:raises OSError: :raises SafetensorError:"""
    run = facts(exported)
    model = exported.model.eval()
    library: Library = "transformers" if isinstance(model, SavesItself) else "pytorch"
    if isinstance(model, SavesItself):
        model.save_pretrained(directory)
    else:
        save_model(model, str(directory / "model.safetensors"))
        config = {section: run["manifest"].get(section, {}) for section in ("task", "model", "data")}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if isinstance(exported.task, SavesTokenizer):
        exported.task.save_tokenizer(directory)
    not_averaged = sum(value.numel() for value in _stored(model)) - exported.layout.num_elements
    (directory / "run.json").write_text(json.dumps(run, indent=2) + "\n")
    (directory / "README.md").write_text(model_card(run, library=library, not_averaged=not_averaged))


def _stored(model: nn.Module) -> list[torch.Tensor]:
    """Everything that is saved with a model, tied weights once."""
    return list({value.data_ptr(): value for value in model.state_dict().values()}.values())


def _checkpoint(source: Path, on_warning: Callable[[str], None]) -> tuple[Path, Checkpoint]:
    """The checkpoint that a source means, and the run directory that it belongs to."""
    if source.is_file():
        directory = next(
            (parent for parent in source.absolute().parents[:2] if (parent / SIGNED_MANIFEST_NAME).exists()), None
        )
        if directory is None:
            raise DirectoryError(f"{source} does not lie in a run directory.", "Give the directory of a peer.")
        return directory, read_checkpoint(source)
    if not source.is_dir():
        raise DirectoryError(f"There is no directory {source}.", "Give the directory of a peer of the run.")
    checkpoint = load_checkpoint(source, on_warning, only_look=True)
    if checkpoint is None:
        raise CheckpointError(
            f"There is no checkpoint in {source}.",
            "Give the directory of a peer of the run (its --dir); the first checkpoint is written after some minutes.",
        )
    return source, checkpoint


def _check_digests(
    source: Path,
    layout: FragmentLayout,
    fragments: tuple[FragmentMeta, ...],
    base: torch.Tensor,
    outer_state: torch.Tensor,
) -> None:
    """:raises CheckpointError: a base is not the one that it is said to be"""
    for index, meta in enumerate(fragments):
        where = layout.slice(index)
        digest = base_digest(
            fragment=index,
            version=meta.version,
            total_element_samples=meta.total_element_samples,
            history=meta.history,
            base=base[where],
            outer_state=outer_state[:, where],
        )
        if digest != meta.digest:
            raise CheckpointError(
                f"Fragment {index} of the checkpoint in {source} does not fit its digest.",
                "Start the peer there once, so that it fetches the fragment again, or export another peer's directory.",
            )


def _last_evaluation(directory: Path, version: int) -> Mapping[str, Any] | None:
    evaluations = [
        event
        for event in read_metrics(directory / METRICS_NAME)
        if event.get("event") == "eval" and event.get("loss") is not None and event.get("version", 0) <= version
    ]
    return evaluations[-1] if evaluations else None


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")

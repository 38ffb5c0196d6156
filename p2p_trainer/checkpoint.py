"""Checkpoints that survive kills, full disks and flipped bits: the newest good one is always there.

One safetensors file holds the tensors and, in its header, a JSON document and a digest over both. It is
written beside its predecessor, flushed to the disk, and only then renamed into place; the predecessor is
kept. Nothing is pickled, so a checkpoint from elsewhere is data, never code.

The digest finds accidents. It does not protect against a person who changes a file on purpose, nor does
anything here protect against two processes that save into one directory: the run directory's lock does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dht_config.errors import CheckpointError

NEWEST_NAME = "checkpoint.safetensors"
PREVIOUS_NAME = "checkpoint.previous.safetensors"
DAMAGED_NAME = "checkpoint.damaged.safetensors"
"""Where a newest checkpoint that cannot be read is put, lest the next save push a good one out."""

_TEMPORARY_NAME = "checkpoint.tmp"
"""A directory: safetensors writes to a hidden file of a random name first, which a kill leaves behind."""

_FORMAT = "1"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What ``save_checkpoint`` was given."""

    tensors: dict[str, Tensor]
    """On the CPU, each with memory of its own."""
    meta: dict[str, Any]


class _Damaged(Exception):
    """This file is no whole checkpoint; the message says why."""


def save_checkpoint(directory: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Replace the checkpoint of a directory, keeping the one before it.

    :param tensors: any device; read until this returns, so nothing may write to them meanwhile.
    :param meta: whatever JSON holds; tuples come back as lists.

    Raises CheckpointError naming the path if it cannot be written; what was there before is then still there.
    """
    newest = directory / NEWEST_NAME
    _write(newest, tensors, meta, "the checkpoint before it is kept", before=lambda: _keep_previous(directory))


def save_snapshot(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write one file of its own as a checkpoint is written, whole or not at all; its directory is made if need be.

    Raises CheckpointError naming the path if it cannot be written.
    """
    _write(path, tensors, meta, "those before it are kept")


def _write(
    path: Path,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    comfort: str,
    before: Callable[[], None] = lambda: None,
) -> None:
    """:param before: called when the new file is whole, before it takes its place"""
    contents = _on_cpu(tensors)
    document = json.dumps(meta, sort_keys=True)
    header = {"format": _FORMAT, "meta": document, "sha256": _digest(contents, document)}
    temporary = path.parent / _TEMPORARY_NAME
    try:
        _remove(temporary)
        temporary.mkdir(parents=True)
        save_file(contents, temporary / "new", metadata=header)
        _flush(temporary / "new")
        before()
        os.replace(temporary / "new", path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            problem=f"The checkpoint {path} cannot be written ({_reason(error)}).",
            remedy=f"Free some space or make the directory writable; {comfort}.",
        ) from error
    finally:
        _remove(temporary)


def load_checkpoint(
    directory: Path, on_warning: Callable[[str], None], *, only_look: bool = False
) -> Checkpoint | None:
    """Read the newest good checkpoint of a directory; None if there is none.

    A file that is truncated, empty or damaged costs a warning, never an error: the one before it is read, and
    without that the caller starts from the swarm's state. What a killed save has left is removed.

    :param on_warning: called with one sentence for each file that could not be used.
    :param only_look: the directory is another process's, which may be saving: nothing in it is touched

    Raises CheckpointError if a file is there but may not be read: nothing is wrong with what it holds.
    """
    if not only_look:
        _remove(directory / _TEMPORARY_NAME)
    newest, previous = directory / NEWEST_NAME, directory / PREVIOUS_NAME
    for path, otherwise in ((newest, "using the one before it"), (previous, "no checkpoint is left")):
        try:
            return _read(path)
        except FileNotFoundError:
            continue
        except _Damaged as error:
            if path == newest and not previous.exists():
                otherwise = "there is none before it"
            on_warning(f"The checkpoint {path} is damaged ({error}): {otherwise}.")
            if path == newest and not only_look:
                with contextlib.suppress(OSError):  # a read-only directory: nothing can push the good one out
                    os.replace(newest, directory / DAMAGED_NAME)
        except OSError as error:
            raise CheckpointError(
                problem=f"The checkpoint {path} cannot be read ({_reason(error)}).",
                remedy="Make it readable for this user, or move it away to start without it.",
            ) from error
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read one file as ``save_checkpoint`` writes it.

    Raises CheckpointError if it is missing, may not be read, or is damaged.
    """
    try:
        return _read(path)
    except (OSError, _Damaged) as error:
        raise CheckpointError(
            problem=f"The checkpoint {path} cannot be read ({_reason(error)}).", remedy="Give another one."
        ) from error


def optimizer_to_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Flatten the state of a torch optimizer: (tensors named "PARAMETER.STATE", JSON-able meta).

    PARAMETER counts through the groups. Tensors are the optimizer's own, not copies. Hyperparameters are left
    out: they are the manifest's.
    """
    state_dict = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for parameter, state in state_dict["state"].items():
        for key, value in state.items():
            (tensors if isinstance(value, Tensor) else scalars)[f"{parameter}.{key}"] = value
    meta = {"kind": _kind(optimizer), "shapes": _shapes(optimizer), "scalars": scalars}
    return tensors, meta


def optimizer_from_tensors(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """Give an optimizer the state that ``optimizer_to_tensors`` took from another over like parameters.

    The tensors are copied to the device of each parameter.

    Raises CheckpointError, and changes nothing, if they belong to another optimizer or model.
    """
    groups = _shapes(optimizer)
    expected = {"kind": _kind(optimizer), "shapes": groups}
    for field, ours in expected.items():
        if meta.get(field) != ours:
            raise CheckpointError(
                problem=f"The checkpoint's optimizer has {field} {meta.get(field)!r:.200}, this one {ours!r:.200}.",
                remedy="It belongs to another run: move it away.",
            )
    shapes = [shape for group in groups for shape in group]
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **meta.get("scalars", {})}.items():
        index, _, key = name.partition(".")
        parameter = int(index) if index.isdecimal() else -1
        if not 0 <= parameter < len(shapes) or not key or not _fits(value, shapes[parameter]):
            raise CheckpointError(
                problem=f"The checkpoint's optimizer state {name!r} does not fit this model.",
                remedy="It belongs to another run: move it away.",
            )
        # torch keeps a state that is already on its device as it is; ours must not change under the caller.
        state.setdefault(parameter, {})[key] = value.clone() if isinstance(value, Tensor) else value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _read(path: Path) -> Checkpoint:
    with path.open("rb"):  # safetensors tells a file that is missing from one that may not be read by text only
        pass
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            # Cloned, because what safetensors gives is the file itself, mapped: a disk that fails later would
            # kill the process. The digest is then over what is used.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise _Damaged(_reason(error)) from error
    document = header.get("meta", "")
    if header.get("format") != _FORMAT:
        raise _Damaged(f"its format is {header.get('format')!r}, not {_FORMAT!r}")
    if header.get("sha256") != _digest(tensors, document):
        raise _Damaged("its contents do not match their digest")
    meta: dict[str, Any] = json.loads(document)
    return Checkpoint(tensors=tensors, meta=meta)


def _keep_previous(directory: Path) -> None:
    """Make the newest checkpoint the previous one, without a moment in which there is no newest one."""
    newest, previous = directory / NEWEST_NAME, directory / PREVIOUS_NAME
    link = directory / _TEMPORARY_NAME / "previous"
    if not newest.exists():
        return
    try:
        os.link(newest, link)
    except OSError:
        # No hard links here (FAT, some container volumes). A kill before the next rename then leaves only the
        # previous one, which loads just as well.
        os.replace(newest, previous)
        return
    os.replace(link, previous)


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    contents: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        content = tensor.detach().to("cpu").contiguous()
        if content.data_ptr() in seen:  # tied weights: safetensors refuses to write memory twice
            content = content.clone()
        seen.add(content.data_ptr())
        contents[name] = content
    return contents


def _digest(tensors: Mapping[str, Tensor], document: str) -> str:
    """Hash all that is used from a checkpoint: names, element types, shapes, elements, the document."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    digest.update(document.encode())
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(temporary: Path) -> None:
    # Errors are ignored: in a read-only directory it is in nobody's way.
    shutil.rmtree(temporary, ignore_errors=True)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """What its state is of; an optimizer that keeps another one's state says so in ``kind``."""
    return str(getattr(optimizer, "kind", type(optimizer).__name__))


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    return [[list(param.shape) for param in group["params"]] for group in optimizer.param_groups]


def _fits(value: object, shape: list[int]) -> bool:
    return not isinstance(value, Tensor) or value.ndim == 0 or list(value.shape) == shape


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]

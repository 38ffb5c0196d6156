"""Tasks by name: the built-in ones, and those that other distributions install.

A manifest comes from a stranger and can only *name* a task: what runs is code that the volunteer installed.
A task whose own code runs whatever the manifest says would undo that; nothing here can prevent it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dht_config.errors import ManifestError
from p2p_trainer.tasks.base import Batch, Task, mean_loss, to_device

__all__ = ["ENTRY_POINT_GROUP", "Batch", "Task", "installed_tasks", "load_task", "mean_loss", "to_device"]

ENTRY_POINT_GROUP = "p2p_trainer.tasks"

_BUILT_IN = {"text": "p2p_trainer.tasks.text", "digits": "p2p_trainer.tasks.digits"}

_Factory = Callable[[Mapping[str, Any], Mapping[str, Any]], Task]


def installed_tasks() -> tuple[str, ...]:
    """List the names a manifest may give as ``[task] name`` on this machine, sorted."""
    return tuple(sorted({*_BUILT_IN, *_entry_points()}))


def load_task(name: str, model: Mapping[str, Any], data: Mapping[str, Any]) -> Task:
    """Make the task that a manifest names from its ``[model]`` and ``[data]``.

    Data are not read yet and transformers is not imported yet: that happens when the task is first used.

    Raises ManifestError if no such task is installed, if its code cannot be loaded, or if it refuses a key.
    """
    return _factory(name)(model, data)


def _factory(name: str) -> _Factory:
    # A built-in name cannot be taken over by another distribution: its version stands in the fingerprint.
    if name in _BUILT_IN:
        create: _Factory = importlib.import_module(_BUILT_IN[name]).create
        return create
    entry_point = _entry_points().get(name)
    if entry_point is None:
        raise ManifestError(
            problem=f"[task] name = {name!r}: no such task is installed.",
            remedy=f"Installed: {', '.join(installed_tasks())}. "
            "Install the package that provides it, or change the name.",
        )
    try:
        loaded: _Factory = entry_point.load()
    except (ImportError, AttributeError) as error:
        raise ManifestError(
            problem=f"[task] name = {name!r}: its code {entry_point.value} cannot be loaded ({error}).",
            remedy="Reinstall the package that provides it.",
        ) from error
    return loaded


def _entry_points() -> dict[str, EntryPoint]:
    return {entry_point.name: entry_point for entry_point in entry_points(group=ENTRY_POINT_GROUP)}

"""Where a rehearsal writes: its directory, and the report for programs and people. Checked before anything starts."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from dht_config.errors import DirectoryError
from p2p_trainer.metrics import finite


def check_report_path(path: Path | None, option: str) -> None:
    """Now, not after the run. :raises DirectoryError:"""
    if path is None:
        return
    temporary = _temporary(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_special(path):
            return
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise _not_writable(path, option, error) from error


def make_directory(path: Path | None) -> Path:
    """A directory of its own: metrics of an earlier rehearsal would be counted as this one's."""
    try:
        if path is None:
            # Not the prefix of the peers' socket directories.
            return Path(tempfile.mkdtemp(prefix="rehearsal-p2p-trainer-"))
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise DirectoryError(problem=f"{path} is not empty.", remedy="Give --dir a new or empty directory.")
    except OSError as error:
        raise DirectoryError(
            problem=f"The directory {path or tempfile.gettempdir()} cannot be used: {error.strerror or error}.",
            remedy="Give --dir a new directory in a place that is writable.",
        ) from error
    return path.absolute()


def write_json(path: Path, document: Any, option: str) -> None:
    """As ``write_report``; numbers that JSON lacks (NaN, inf) become null. Raises: DirectoryError."""
    write_report(path, json.dumps(finite(document), indent=2, allow_nan=False) + "\n", option)


def write_report(path: Path, content: str, option: str) -> None:
    """Whole or not at all; into a device or a pipe as it comes. Raises: DirectoryError."""
    temporary = _temporary(path)
    try:
        if _is_special(path):
            path.write_text(content, encoding="utf-8")
            return
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise _not_writable(path, option, error) from error


def _is_special(path: Path) -> bool:
    """Such as /dev/stdout or /dev/null: a file in its place would be the end of it."""
    return path.exists() and not path.is_file()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _not_writable(path: Path, option: str, error: OSError) -> DirectoryError:
    return DirectoryError(
        problem=f"The report cannot be written to {path}: {error.strerror or error}.",
        remedy=f"Give {option} a place that is writable.",
    )

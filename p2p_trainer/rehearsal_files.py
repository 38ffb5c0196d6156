"""Where a rehearsal writes: its directory, and the report for programs. Checked before anything starts."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from dht_config.errors import DirectoryError
from p2p_trainer.report import Report


def check_report_path(path: Path | None) -> None:
    """Now, not after the run."""
    if path is None:
        return
    parent = path.absolute().parent
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise DirectoryError(
            problem=f"The report cannot be written to {path}.", remedy="Give --json a file in a writable directory."
        )


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


def write_report(path: Path, report: Report) -> None:
    """Whole or not at all. Raises: DirectoryError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(report.as_json(), indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise DirectoryError(
            problem=f"The report cannot be written to {path}: {error.strerror or error}.",
            remedy="Give --json a file in a writable directory.",
        ) from error

"""Small JSON files for a peer's next start: each is replaced whole; a full disk costs the note alone."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_note(path: Path, value: Any) -> None:
    """Replace what is there; if that cannot be written the old note stays."""
    partial = path.with_name(f".{path.name}.partial")
    with suppress(OSError):
        partial.write_text(json.dumps(value))
        os.replace(partial, path)

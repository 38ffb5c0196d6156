"""The end of a process once everything is said and saved: at once.

Python takes down every module and object at its end. With torch loaded that is a second of CPU, for nothing that the
kernel would not free, and on a busy machine many seconds: a peer that has left in three would still be there after the
ten that it promises.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

UNWRITTEN = 120
"""Python's own exit code where what was printed last could not be written."""


def end_at_once(code: int) -> NoReturn:
    """End as Python does, with threads waited for, exit handlers called and output written, but take nothing down."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads it, the disk is full, or it is closed
        code = code or UNWRITTEN
    os._exit(code)

"""A peer on a machine with tight limits, for tests: ``python limited.py ARGUMENTS OF THE PROGRAM``.

LIMITED_FILES is its hard limit of open files, LIMITED_SHM the size of its /dev/shm as mount takes it, in a mount
namespace of its own. Where that is not allowed, it ends with REFUSED.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess

REFUSED = 77
_CLONE_NEWNS = 0x00020000


def limit() -> None:
    """Before the program is imported, as for a person."""
    size = os.environ.get("LIMITED_SHM")
    if size is not None:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
            os._exit(REFUSED)
        commands = [["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", f"size={size}", "t", "/dev/shm"]]
        if any(subprocess.run(command, check=False).returncode for command in commands):
            os._exit(REFUSED)
    files = int(os.environ.get("LIMITED_FILES", "0"))
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


if __name__ == "__main__":
    limit()
    from p2p_trainer.cli import main

    main()

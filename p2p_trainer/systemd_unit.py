"""A service unit for a bootstrap peer: started with the machine, back after a failure, never after a mistake (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dht_config.errors import ExitCode

STOP_SECONDS = 15
"""A peer leaves within ten."""
RESTART_SECONDS = 10

_WILL_NOT_HELP = (
    ExitCode.USAGE,
    ExitCode.MANIFEST,
    ExitCode.INVITE,
    ExitCode.ADDRESS,
    ExitCode.FINGERPRINT,
    ExitCode.IDENTITY,
    ExitCode.LIMITS,
)
"""What starting again does not change."""


def unit(program: Sequence[str], arguments: Sequence[str], *, run: str, user: str, directory: Path) -> str:
    """The text of a unit file.

    :param program: what starts ``p2p-trainer``, its first word an absolute path
    :param arguments: of the program; paths in them absolute
    :param run: what to call the run
    :param user: who owns the directory
    :param directory: the peer's, absolute
    """
    command = " ".join(_quoted(word) for word in (*program, *arguments))
    codes = " ".join(str(int(code)) for code in _WILL_NOT_HELP)
    return f"""\
[Unit]
Description=p2p-trainer: the door to {run.replace("%", "%%")}
Wants=network-online.target
After=network-online.target

[Service]
User={user}
ExecStart={command}
Restart=on-failure
RestartSec={RESTART_SECONDS}
RestartPreventExitStatus={codes}
# TERM goes to the program alone, which says goodbye to the others and ends what it started.
KillMode=mixed
TimeoutStopSec={STOP_SECONDS}
LimitNOFILE=4096
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ReadWritePaths={_quoted(str(directory))}

[Install]
WantedBy=multi-user.target
"""


def _quoted(word: str) -> str:
    """As systemd reads a word of a command line."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if not escaped or any(character in " \t;'" for character in escaped) else escaped

"""What a check found, and how checks run so that none can hang, crash or hide the others.

Checks run in a process of their own, forked before anything starts CUDA or a thread: a driver that hangs or aborts
takes that process with it, and what had been found by then stands.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from dht_config.errors import P2PTrainerError
from peers.daemon import die_with_parent

_log = logging.getLogger(__name__)

JOIN_SECONDS = 1.0
_TELL_MAINTAINERS = "Run it again with --verbose and report what it prints."


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of an examination."""

    check: str
    """A short, stable name: programs select by it."""
    ok: bool | None
    """None: not known, with the reason as the cause."""
    cause: str
    """What was found, a whole sentence or a figure; also where all is well."""
    remedy: str = ""
    """What a person can do; empty where nothing need be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A figure that was learned on the way, for checks that follow."""

    name: str
    value: int


Report = Callable[[Finding | Note], None]
Examination = Callable[[Report], None]
"""Reports one finding after the other; may raise."""


def run_isolated(
    checks: Sequence[str], examine: Examination, limit_seconds: float
) -> tuple[list[Finding], dict[str, int]]:
    """Run checks in a process of their own; exactly one finding each comes back, in their order.

    Where the process fails, the first check without a finding gets the failure and the rest are not known.
    Call it before CUDA or threads are started in this process.

    :param checks: what ``examine`` reports, in the order in which it does
    :returns: the findings, and the notes by name
    """
    rows, failure = _rows_of_child(examine, limit_seconds)
    notes = {str(row["name"]): int(row["value"]) for row in rows if "value" in row}
    by_name = {row["check"]: Finding(**row) for row in rows if "check" in row}
    findings = []
    for check in checks:
        finding = by_name.get(check)
        if finding is None and failure is not None:
            finding = Finding(check=check, ok=False, cause=failure[0], remedy=failure[1])
            failure = None
        findings.append(finding or not_known(check, "Not looked at, because of what failed before."))
    return findings, notes


def not_known(check: str, cause: str, remedy: str = "") -> Finding:
    return Finding(check=check, ok=None, cause=cause, remedy=remedy)


def one_line(text: str) -> str:
    """What somebody else wrote, fit for a terminal."""
    return "".join(character for character in " ".join(text.split()) if character.isprintable())


def _rows_of_child(examine: Examination, limit_seconds: float) -> tuple[list[dict[str, Any]], tuple[str, str] | None]:
    context = multiprocessing.get_context("fork")
    try:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_report_through, args=(examine, theirs, os.getpid()), daemon=True)
        process.start()
    except OSError as error:
        return [], (f"No process could be started for this check ({error.strerror}).", "Close other programs.")
    theirs.close()
    found: list[dict[str, Any]] = []
    failure: tuple[str, str] | None = None
    give_up = time.monotonic() + limit_seconds
    try:
        while True:
            if not ours.poll(max(0.0, give_up - time.monotonic())):
                failure = f"This did not come to an end within {limit_seconds:.0f} s.", "See what it waits for."
                break
            row: dict[str, Any] = json.loads(ours.recv_bytes())
            if "failure" in row:
                failure = row["failure"], row["remedy"]
            else:
                found.append(row)
    except EOFError:
        process.join(JOIN_SECONDS)
        if failure is None and process.exitcode:
            failure = f"This check broke off ({_ending(process.exitcode)}).", _TELL_MAINTAINERS
    finally:
        ours.close()
        process.kill()
        process.join(JOIN_SECONDS)  # not for ever: a driver may hold it where no signal reaches it
    return found, failure


def _report_through(examine: Examination, pipe: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return

    def send(row: dict[str, Any]) -> None:
        pipe.send_bytes(json.dumps(row).encode())

    def report(said: Finding | Note) -> None:
        if isinstance(said, Finding):
            said = replace(said, cause=one_line(said.cause), remedy=one_line(said.remedy))
        send(asdict(said))

    try:
        examine(report)
    except P2PTrainerError as error:
        send({"failure": one_line(error.problem), "remedy": one_line(error.remedy)})
    except BaseException as error:  # the boundary of a process: whatever it is becomes a finding
        _log.debug("A check failed", exc_info=error)
        what = one_line(f"{type(error).__name__}: {error}")[:200].rstrip(": ")
        send({"failure": f"This check failed itself ({what}).", "remedy": _TELL_MAINTAINERS})


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"

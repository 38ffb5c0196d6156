"""How every command ends that fails: one line with a remedy, or one JSON object, and a stable exit code."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import typer

from dht_config.errors import ExitCode, P2PTrainerError
from p2p_trainer.rehearsal.scene import SceneError

_PATHS_FAULT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT)
"""What may be wrong with a path that somebody named, wherever it is touched first."""


class Reporting:
    """Turns failures into one line on standard error (or one JSON object) and an exit code."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self.look_into: Callable[[], list[str]] = list[str]
        """Gives further lines about a failure, once it has been told."""

    def __enter__(self) -> Reporting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, typer.Exit | SystemExit):
            return
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        if isinstance(error, P2PTrainerError):
            self._fail(
                error.problem, error.remedy, error.exit_code, error.excerpt if isinstance(error, SceneError) else ""
            )
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            raise typer.Exit(int(ExitCode.UNEXPECTED)) from None
        logging.getLogger(__name__).debug("A failure that no command foresaw", exc_info=error)
        if isinstance(error, OSError) and error.filename is not None and error.errno in _PATHS_FAULT:
            self._fail(
                f"{error.filename} cannot be used: {error.strerror}.",
                "Name another path, or let this user read and write that one.",
                ExitCode.DIRECTORY,
            )
        if isinstance(error, MemoryError):
            self._fail("The machine's memory does not suffice.", "Close other programs.", ExitCode.LIMITS)
        self._fail(
            f"Unexpected failure: {type(error).__name__}: {error}.",
            "Run it again with --verbose and report what it prints.",
            ExitCode.UNEXPECTED,
        )

    def _fail(self, problem: str, remedy: str, code: ExitCode, excerpt: str = "") -> NoReturn:
        one_line = " ".join(f"{problem} {remedy}".split())
        if self._as_json:
            print(json.dumps({"error": problem, "remedy": remedy, "exit_code": int(code)}), flush=True)
        print(f"p2p-trainer: {one_line}", file=sys.stderr, flush=True)
        if excerpt:
            print(excerpt, file=sys.stderr, flush=True)
        with suppress(KeyboardInterrupt):  # the failure has been told: whoever does not wait for more gets its code
            for line in self.look_into():
                print(line, file=sys.stderr, flush=True)
        raise typer.Exit(int(code)) from None


def _nobody_reads() -> bool:
    """Whether the reader of standard output is gone, as with ``| head``; then Python need not complain of it either."""
    try:
        poller = select.poll()
        poller.register(sys.stdout.fileno(), 0)
        if not any(happened & (select.POLLERR | select.POLLHUP) for _, happened in poller.poll(0)):
            return False
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    except OSError:
        return False
    return True


def log_to_stderr(verbose: bool) -> None:
    """What the libraries and we log: warnings, or everything."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )

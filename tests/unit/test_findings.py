"""Checks that hang, crash, abort or lie cost their own line and no other."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable

import pytest

from dht_config.errors import LimitsError
from p2p_trainer.findings import Finding, Note, Report, not_known, run_isolated

CHECKS = ("one", "two", "three")
GOOD = Finding(check="one", ok=True, cause="All is well.")


def good_then(deed: Callable[[], object]) -> Callable[[Report], None]:
    def examine(report: Report) -> None:
        report(GOOD)
        deed()

    return examine


def fail_in_plain_words() -> None:
    raise LimitsError("Too little of it.", "Get more.")


def fail_unexpectedly() -> None:
    raise RuntimeError("two\nlines\x1b[31m")


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("deed", "cause", "remedy"),
    [
        (fail_in_plain_words, "Too little of it.", "Get more."),
        (fail_unexpectedly, "This check failed itself (RuntimeError: two lines[31m).", "--verbose"),
        (kill_itself, "This check broke off (killed by SIGKILL).", "--verbose"),
        (lambda: os._exit(7), "This check broke off (exit code 7).", "--verbose"),
        (lambda: (_ for _ in ()).throw(SystemExit(3)), "This check failed itself (SystemExit: 3).", "--verbose"),
        (lambda: (_ for _ in ()).throw(MemoryError()), "This check failed itself (MemoryError).", "--verbose"),
    ],
)
def test_the_check_that_failed_says_so_and_what_was_found_before_stands(
    deed: Callable[[], object], cause: str, remedy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second, third = run_isolated(CHECKS, good_then(deed), 60)[0]
    assert first == GOOD
    assert (second.check, second.ok, second.cause) == ("two", False, cause)
    assert remedy in second.remedy
    assert third.check == "three" and third.ok is None
    assert "Traceback" not in capfd.readouterr().err


def test_a_check_that_hangs_is_given_up() -> None:
    def ignore_everything() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)

    _, second, third = run_isolated(CHECKS, good_then(ignore_everything), 5.0)[0]
    assert second.ok is False and "did not come to an end" in second.cause
    assert third.ok is None


def test_a_check_without_a_finding_is_not_known() -> None:
    findings, _ = run_isolated(CHECKS, good_then(lambda: None), 60)
    assert [finding.ok for finding in findings] == [True, None, None]


def test_a_machine_that_starts_no_further_process_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    first, second, _ = run_isolated(CHECKS, good_then(lambda: None), 60)[0]
    assert first.ok is False and "Resource temporarily unavailable" in first.cause
    assert second.ok is None


def test_findings_come_in_the_order_that_was_promised_and_notes_beside_them() -> None:
    def examine(report: Report) -> None:
        report(not_known("three", "Later."))
        report(Note(name="size", value=2**40))
        report(GOOD)
        report(Finding(check="two", ok=False, cause="A\nline\x07.", remedy="B\nline."))

    findings, notes = run_isolated(CHECKS, examine, 60)
    assert [finding.check for finding in findings] == list(CHECKS)
    assert findings[1].cause == "A line." and findings[1].remedy == "B line."
    assert notes == {"size": 2**40}

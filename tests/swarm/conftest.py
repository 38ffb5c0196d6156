"""The ``swarm`` fixture: real peers, their logs in the report of a failed test, and nothing left after any test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import LOG_TAIL_LINES, Swarm


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """A place to start peers in. After the test it asserts that no process and no socket of theirs is left."""
    swarm = Swarm(tmp_path)
    left: list[str] = []
    try:
        yield swarm
    finally:
        left = swarm.close()
    assert not left, f"left behind: {left}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    """Show the end of each peer's log where a test failed."""
    report = yield
    swarm = getattr(item, "funcargs", {}).get("swarm")
    if report.failed and isinstance(swarm, Swarm):
        for peer in swarm.peers:
            lines = peer.text.splitlines()[-LOG_TAIL_LINES:]
            ending = f"exit code {peer.process.poll()}"
            report.sections.append((f"log of {peer.name} ({ending})", "\n".join(lines)))
    return report

"""The ``swarm`` fixture: real peers, their logs in the report of a failed test, and nothing left after any test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import LOG_TAIL_LINES, Swarm
from preloaded import FRESH, Preloaded

LONGEST = (
    "test_soak.py",
    "test_slow_line.py",
    "test_split.py",
    "test_isolation.py",
    "test_parts.py",
    "test_nat.py",
    "test_ten_minutes.py",
)
"""A minute or more for a test. They come first: who gets one last is waited for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Swarm tests of the longest files first; all others stay where they are."""

    def place(item: pytest.Item) -> int:
        is_long = item.path.name in LONGEST and item.get_closest_marker("swarm") is not None
        return LONGEST.index(item.path.name) if is_long else len(LONGEST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded | None]:
    """The process that peers are forked from; None if all should be started afresh."""
    preloaded = Preloaded()
    yield None if os.environ.get(FRESH) else preloaded
    preloaded.close()


@pytest.fixture
def swarm(tmp_path: Path, preloaded: Preloaded | None) -> Iterator[Swarm]:
    """A place to start peers in. After the test it asserts that no process and no socket of theirs is left."""
    swarm = Swarm(tmp_path, preloaded)
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

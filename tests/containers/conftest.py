"""Images are built once for all tests, and what was measured stands at the end of pytest's output, whatever passed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine import IMAGES, UnavailableError, build, missing, run

FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> list[str]:
    """Lines for the end of the output."""
    return request.config.stash.setdefault(FIGURES, [])


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory, figures: list[str]) -> None:
    """Both images, built from the working tree. Without an engine, mirror or the rights it takes, tests are skipped."""
    if why := missing():
        pytest.skip(f"containers cannot be built here: {why}")
    try:
        times = build(tmp_path_factory.mktemp("images"))
    except UnavailableError as error:
        pytest.skip(f"containers cannot be built here: {error}")
    sizes = {name: json.loads(run("podman", "inspect", image).stdout)[0]["Size"] for name, image in IMAGES.items()}
    figures.append(f"built in seconds: { {name: round(took) for name, took in times.items()} }")
    figures.append(f"sizes of images in MB: { {name: round(size / 1e6) for name, size in sizes.items()} }")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(FIGURES, None):
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Building takes minutes, and counts for whichever test comes first."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))

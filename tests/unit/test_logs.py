"""What the libraries log does not reach a volunteer's terminal, in either process."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from peers.process import _note_stray_exception

SCRIPT = """
import asyncio, logging, os, sys
from p2p_trainer.reporting import log_to_stderr
from p2p_trainer.logs import quiet_libraries

verbose = sys.argv[1] == "verbose"
log_to_stderr(verbose)
if sys.argv[2] == "imported before":
    import hivemind
    logging.getLogger("hivemind.averaging.own").addHandler(logging.StreamHandler())
quiet_libraries(verbose=verbose)
import hivemind
from hivemind.utils.asyncio import await_cancelled
from hivemind.utils.logging import get_logger


async def fail():
    raise AssertionError("a failure inside hivemind")


async def forgotten():
    task = asyncio.get_running_loop().create_task(fail())
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def everything(where):
    asyncio.run(await_cancelled(fail()))
    asyncio.run(forgotten())
    for name in ("hivemind", "hivemind.averaging.own", f"hivemind.made.later.in.{where}"):
        get_logger(name).critical("from %s in %s", name, where)
        logging.getLogger(name).warning("a warning in %s", where)
    logging.getLogger("peers.rounds").warning("ours in %s", where)


everything("training")
child = os.fork()
if child == 0:
    everything("averaging")
    os._exit(0)
os.waitpid(child, 0)
"""


def printed(*arguments: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    return result.stderr.splitlines()


@pytest.mark.parametrize("order", ["imported before", "imported after"])
def test_nothing_of_hivemind_or_of_asyncio_reaches_the_terminal(order: str) -> None:
    lines = printed("quiet", order)
    assert len(lines) == 2, lines
    assert "ours in training" in lines[0] and "ours in averaging" in lines[1]


def test_with_verbose_everything_does_once_and_in_our_format() -> None:
    lines = printed("verbose", "imported before")
    for where in ("training", "averaging"):
        assert sum(f"made.later.in.{where}: from" in line for line in lines) == 1
        assert sum(f"hivemind.averaging.own: from hivemind.averaging.own in {where}" in line for line in lines) == 1
        assert sum(line.endswith(f"WARN hivemind: a warning in {where}") for line in lines) == 1, json.dumps(lines)
    assert sum("Task exception was never retrieved" in line for line in lines) == 2


def test_a_task_that_nobody_awaits_is_told_if_it_is_ours(caplog: pytest.LogCaptureFixture) -> None:
    class Told:
        """A task or handle that shows itself in these words."""

        def __init__(self, text: str) -> None:
            self.text = text

        def __repr__(self) -> str:
            return self.text

    loop = asyncio.new_event_loop()

    def levels(**context: object) -> list[int]:
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "peers.process"):
            _note_stray_exception(loop, {"message": "m", "exception": ValueError("x"), **context})
        return [record.levelno for record in caplog.records]

    ours = Told("<Task finished coro=<RoundKeeper.hold() done, defined at /site-packages/peers/rounds.py:1>>")
    theirs = Told("<Task finished coro=<P2P._read() done, defined at /site-packages/hivemind/p2p/p2p_daemon.py:1>>")
    assert levels(task=ours) == [logging.ERROR]
    assert levels(handle=Told("<Handle Swarm.receive()>")) == [logging.ERROR]
    assert levels(task=theirs) == levels(future=Told("<Future finished exception=ValueError()>")) == [logging.DEBUG]
    loop.close()

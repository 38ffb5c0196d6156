"""The end of the program: everything that Python does for others at its end, and nothing that only takes time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from p2p_trainer.ending import end_at_once

class TakenDown:
    def __del__(self):
        print("taken down", flush=True)

kept = TakenDown()
atexit.register(print, "exit handler")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("said")
end_at_once({code})
"""


@pytest.mark.parametrize("code", [0, 13])
def test_threads_and_exit_handlers_end_and_output_is_written_but_nothing_is_taken_down(code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM.format(code=code)], capture_output=True, text=True)
    assert ended.returncode == code
    assert ended.stdout.split("\n") == ["said", "thread", "exit handler", ""]
    assert not ended.stderr


def test_what_cannot_be_written_is_no_success() -> None:
    program = "from p2p_trainer.ending import end_at_once; print(1); end_at_once(0)"
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, env=buffered)
    assert ended.returncode == 120


@pytest.mark.parametrize(("arguments", "code"), [(["example", "digits"], 0), (["join"], 2), (["join", "p2pt1x"], 11)])
def test_the_command_line_ends_so_with_its_own_codes(arguments: list[str], code: int) -> None:
    program = "import atexit; from p2p_trainer.cli import main; atexit.register(print, 'exit handler'); main()"
    ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert ended.returncode == code
    assert ended.stdout.endswith("exit handler\n")

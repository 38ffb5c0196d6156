"""What the libraries log: nothing of it reaches a volunteer's terminal, all of it reaches ``--verbose``.

hivemind gives its package a handler of its own when it is imported, which prints every lost connection with a
traceback (hivemind 1.1.12, utils/logging.py:81 and utils/asyncio.py:82); asyncio prints every exception of a task that
nobody awaits, and hivemind leaves such tasks behind in the normal course of things. A volunteer can do nothing about
either.
"""

from __future__ import annotations

import logging

LIBRARIES = ("hivemind", "asyncio")


def quiet_libraries(*, verbose: bool) -> None:
    """Take the loggers of the libraries off standard error, those that exist and those that are made later.

    Imports hivemind: before that there is nothing to take away. The averaging process is forked with this in force.

    :param verbose: give warnings and errors to the program's own log instead of dropping them
    """
    from hivemind.utils.logging import HandlerMode, use_hivemind_log_handler

    use_hivemind_log_handler(HandlerMode.NOWHERE)
    for library in LIBRARIES:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(f"{library}."):
                below = logging.getLogger(name)
                below.handlers.clear()
                below.propagate = True
        top = logging.getLogger(library)
        # A handler that does nothing, or the last resort of the logging module would print.
        top.handlers[:] = [logging.NullHandler()]
        top.propagate = verbose
        top.setLevel(logging.WARNING)

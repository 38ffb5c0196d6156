"""Starting the averaging process and talking to it from the training process.

The process is forked before the training process touches CUDA or starts a thread; hivemind's pieces do not survive
spawn. It dies with its parent, also when that is killed: the kernel sends it TERM, it says goodbye and cleans up.

Either notices when the other one is frozen. The averaging process says all the time that it is alive; one that does
not is killed, and its daemon with it. A training process that was stopped (SIGSTOP: somebody wants the machine for a
while) is left alone: the averaging process says goodbye in its place and ends, and training, continued, finds that out.
What is not noticed here is a training loop that hangs while its process runs: it looks like a long step.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import queue
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop

from dht_config.errors import START_AGAIN, P2PTrainerError, SwarmProcessDied
from peers.arena import SharedArena
from peers.daemon import die_with_parent
from peers.heap import keep_freed_memory
from peers.pipe import Alive, Configure, Event, Failed, Stop, Stopped
from peers.settings import SwarmSettings
from peers.silence import LOOK_SECONDS, Silence, is_stopped
from peers.swarm import Swarm

logger = logging.getLogger(__name__)

SWARM_THREADS = 1
"""Tensor arithmetic of the averaging process: bound by memory, not by cores, and training needs those."""
END_SECONDS = 0.5
UNSENT_EVENTS = 1000
"""Metrics and signs of life are dropped beyond this; nothing else is."""
FROZEN_LOOKS = 30
"""About so many seconds of silence are borne: on a machine that swaps, a process that is well may take some."""
WRITE_OUT_SECONDS = 1.0


class SwarmHandle:
    """The training process's end of the averaging process."""

    def __init__(self, process: multiprocessing.Process, pipe: Connection, settings: SwarmSettings) -> None:
        self._process = process
        self._pipe = pipe
        self._settings = settings
        # Asked after every inner step: 4 microseconds, where Connection.poll takes 25.
        self._poller = select.poll()
        self._poller.register(pipe.fileno(), select.POLLIN)
        self._silence = Silence(FROZEN_LOOKS)
        self.stopped: Stopped | None = None
        """Its last word, once it has been read."""

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def send(self, message: Any) -> None:
        """:raises SwarmProcessDied: if nobody listens any more"""
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._died() from error

    def configure(self, configure: Configure, arena: SharedArena) -> None:
        """Hand over the arena."""
        self.send(configure)
        reduction.send_handle(self._pipe, arena.descriptor, self.pid)

    def messages(self, wait_seconds: float = 0.0) -> Iterator[Any]:
        """Every message that is there, waiting for the first one at most ``wait_seconds``.

        :raises P2PTrainerError: what the averaging process failed with
        :raises SwarmProcessDied: if it ended without a word, or was frozen and is killed therefore
        """
        if not self._poller.poll(1000 * wait_seconds) and self._silence.look(time.monotonic()):
            self._process.kill()
            raise SwarmProcessDied(
                "The averaging process was frozen: nothing was heard of it for half a minute.", START_AGAIN
            )
        while self._poller.poll(0):
            self._silence.heard()
            try:
                message = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise self._died() from error
            if isinstance(message, Alive):
                continue
            if isinstance(message, Failed):
                raise message.error
            if isinstance(message, Stopped):
                self.stopped = message
            yield message
            if isinstance(message, Stopped):
                return

    def stop(self, reason: str) -> None:
        """Ask it to leave; ``Stopped`` follows."""
        self.send(Stop(reason))

    def close(self) -> None:
        """End the process if it still lives, with it the daemon, and remove its sockets."""
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()
        shutil.rmtree(self._settings.socket_directory, ignore_errors=True)

    def _died(self) -> P2PTrainerError:
        self._process.join(1.0)
        return SwarmProcessDied(
            f"The averaging process ended unexpectedly (exit code {self._process.exitcode}).", START_AGAIN
        )


def start_swarm(settings: SwarmSettings) -> SwarmHandle:
    """Fork the averaging process. Call it before CUDA is touched and before any thread is started."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=True)
    process = context.Process(
        target=_main, args=(settings, theirs, ours, os.getpid()), name="p2p-trainer swarm", daemon=True
    )
    process.start()
    theirs.close()
    return SwarmHandle(process, ours, settings)  # type: ignore[arg-type]  # ForkProcess is not a Process to typeshed


def _main(settings: SwarmSettings, pipe: Connection, parents_end: Connection, parent: int) -> None:
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return
    torch.set_num_threads(SWARM_THREADS)
    keep_freed_memory()
    uvloop.install()
    asyncio.run(_serve(settings, pipe))


async def _serve(settings: SwarmSettings, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    parent_pid = os.getppid()
    outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(message: Any) -> None:
        # Never blocks the loop: a training process that is busy for minutes must not stop the DHT and the rounds.
        if outgoing.qsize() < UNSENT_EVENTS or not isinstance(message, Event | Alive):
            outgoing.put(message)

    def write() -> None:
        with suppress(OSError):  # the reader notices as well and stops the swarm
            while (message := outgoing.get()) is not None:
                pipe.send(message)

    def read() -> None:
        # A thread of its own: uvloop makes a watched descriptor non-blocking, and half a message would be an error.
        try:
            while True:
                message = pipe.recv()
                if isinstance(message, Configure):
                    arena = SharedArena(reduction.recv_handle(pipe), message.layout.num_elements, message.states)
                    loop.call_soon_threadsafe(swarm.configured, message, arena)
                else:
                    loop.call_soon_threadsafe(swarm.receive, message)
        except (EOFError, OSError) as error:
            logger.debug("The pipe from the training process ended: %r", error)
            with suppress(RuntimeError):  # the loop may have ended first
                loop.call_soon_threadsafe(swarm.receive, Stop("the training process is gone"))

    swarm = Swarm(settings, send)
    loop.set_exception_handler(_note_stray_exception)
    threading.Thread(target=read, name="pipe reader", daemon=True).start()
    writer = threading.Thread(target=write, name="pipe writer", daemon=True)
    writer.start()
    # A service manager signals every process of the unit; only the parent's word or its death counts.
    loop.add_signal_handler(
        signal.SIGTERM,
        lambda: swarm.receive(Stop("the training process is gone")) if os.getppid() != parent_pid else None,
    )
    watching = asyncio.create_task(_watch_training(swarm, send))
    try:
        await swarm.run()
    except Exception as error:
        logger.exception("The averaging process failed")
        send(Failed(SwarmProcessDied(f"The averaging process failed: {error!r}.", "Please report this.")))
    finally:
        watching.cancel()
        outgoing.put(None)
        writer.join(WRITE_OUT_SECONDS)
        if os.getppid() != parent_pid:
            shutil.rmtree(settings.socket_directory, ignore_errors=True)


async def _watch_training(swarm: Swarm, send: Callable[[Any], None]) -> None:
    """Say that we live, and leave the swarm if the training process has been stopped for long."""
    loop, silence = asyncio.get_running_loop(), Silence(FROZEN_LOOKS)
    while True:
        send(Alive())
        if not is_stopped(os.getppid()):
            silence.heard()
        elif silence.look(loop.time()):
            swarm.receive(Stop("the training process was stopped"))
        await asyncio.sleep(LOOK_SECONDS)


def _note_stray_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Errors of tasks that nobody awaits: one line for those of our own code, DEBUG for the libraries'.

    hivemind leaves such tasks behind in the normal course of things: waits in matchmaking.py:343, and writes to a
    peer that hung up in p2p_daemon.py:491.
    """
    task = context.get("task") or context.get("future")
    about = repr(task or context.get("handle") or context)
    # A task's text names the file of its coroutine; a bare future's names nobody, and our code makes none.
    ours = "hivemind" not in about and "Event.wait" not in about and (task is None or "/peers/" in about)
    level = logging.ERROR if ours else logging.DEBUG
    logger.log(level, "%s: %r", context.get("message"), context.get("exception") or task)

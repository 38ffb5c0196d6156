"""Background work of the averaging process: nothing is lost silently, nothing is cut off in the middle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Tasks:
    """Tasks that nobody awaits, and changes that must not be interrupted."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._changes: set[asyncio.Future[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run in the background; a failure is logged."""
        task = asyncio.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("A task of the averaging process failed: %r", error, exc_info=error)

    async def whole(self, change: Coroutine[Any, Any, Result]) -> Result:
        """Await a change of a base together with its message to training: leaving must not come in between."""
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def settle(self, timeout_seconds: float) -> None:
        """Let what is under way come to its end by itself."""
        if self._running:
            await asyncio.wait({*self._running}, timeout=timeout_seconds)

    async def cancel(self, timeout_seconds: float) -> None:
        """End what still runs; a change that has begun is finished, which takes milliseconds."""
        ending = {*self._running}
        for task in ending:
            task.cancel()
        if ending or self._changes:
            await asyncio.wait({*ending, *self._changes}, timeout=timeout_seconds)

"""The averaging process's end of the pipe to training: requests, their answers, and when the arena holds still."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from peers.fragment_state import FragmentState
from peers.pipe import BeginTraining, Progress, Quiet, Rebase, Rebased, SnapshotTaken, TakeSnapshot

Reply = TypeVar("Reply")

RECENT_SNAPSHOTS = 8


class TrainingLink:
    """Training as the other parts see it.

    :param send: puts a message into the pipe
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self.send = send
        self.begun: BeginTraining | None = None
        self.progress = Progress(samples=0, steps=0, credited_samples=0.0, samples_per_second=0.0)
        self._replies: dict[tuple[type, int], asyncio.Future[Any]] = {}
        self._snapshot_seconds: deque[float] = deque(maxlen=RECENT_SNAPSHOTS)
        self._quiet: list[FragmentState] = []

    @property
    def snapshot_seconds(self) -> float:
        """How long the slowest of recent snapshots was waited for: training answers between its (micro-)batches."""
        return max(self._snapshot_seconds, default=0.0)

    def answered(self, message: SnapshotTaken | Rebased) -> None:
        """Training answered a request."""
        reply = self._replies.pop((type(message), message.fragment), None)
        if reply is not None and not reply.done():
            reply.set_result(message)

    def _ask(self, request: Any, reply: type[Reply], fragment: int) -> asyncio.Future[Reply]:
        """Send a request for one fragment, or wait on for the answer to the same one."""
        key = (reply, fragment)
        if key not in self._replies:
            self._replies[key] = asyncio.get_running_loop().create_future()
            self.send(request)
        return self._replies[key]

    async def snapshot(self, state: FragmentState, timeout_seconds: float) -> SnapshotTaken | None:
        """The fragment as training has it now, or as of the last request if that was answered too late for its round.

        None if the answer does not come in time: it is kept for the next round.
        """
        if state.late is not None:
            taken, state.late = state.late, None
            return taken
        state.taken = None  # the snapshot it describes is about to be overwritten
        now = asyncio.get_running_loop().time
        began = now()
        asked = self._ask(TakeSnapshot(state.index), SnapshotTaken, state.index)
        asked.add_done_callback(lambda _: self._snapshot_seconds.append(now() - began))
        try:
            return await asyncio.wait_for(asyncio.shield(asked), timeout_seconds)
        except asyncio.TimeoutError:

            def keep(answer: asyncio.Future[SnapshotTaken]) -> None:
                if not answer.cancelled():
                    state.late = answer.result()

            asked.add_done_callback(keep)
            return None

    async def no_snapshot_under_way(self, state: FragmentState) -> None:
        """Wait until training does not write to ``state.snapshot`` any more."""
        pending = self._replies.get((SnapshotTaken, state.index))
        if pending is not None:
            await asyncio.shield(pending)

    def rebase(self, state: FragmentState, keep: bool) -> asyncio.Future[Rebased] | None:
        """Tell training of a new base; inside ``state.content``, so that it comes before any ``Quiet``.

        None if there is no training yet that would have to know.
        """
        if self.begun is None:
            return None
        request = Rebase(fragment=state.index, keep=keep, meta=state.meta, unsent=state.unsent)
        return self._ask(request, Rebased, state.index)

    async def rebased(self, state: FragmentState, keep: bool, answer: asyncio.Future[Rebased] | None) -> None:
        """Wait until training stands on the new base; what it dropped leaves the ledger too."""
        if answer is None:
            return
        done = await answer
        if not keep:
            state.give_up()
            state.ledger = state.ledger.drop(done.samples, done.steps)

    async def quiesce(self, fragments: Sequence[FragmentState]) -> None:
        """Hold all bases still and say so."""
        for state in fragments:
            await state.content.acquire()
            self._quiet.append(state)
        self.send(Quiet([state.record for state in fragments]))

    def resume(self) -> None:
        """Bases may change again."""
        for state in self._quiet:
            state.content.release()
        self._quiet = []

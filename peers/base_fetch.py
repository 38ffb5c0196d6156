"""Fetching one base from several donors at once.

Each donor is asked for a few pieces ahead, so that its line never idles, and for more as it delivers them: a fast one
takes more of the work. A donor that fails, stalls or is replaced loses only what it had not delivered. How much may be
asked ahead follows from how fast answers come; what comes is checked in ``transfer.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing

from peers.donors import DonorRecords
from peers.messages import BaseAnswer, BaseRequest, BaseRequestHeader
from peers.transfer import FetchedBase, PartialBase, Piece, Refused, TransferFailed

logger = logging.getLogger(__name__)

DONORS_AT_ONCE = 4
"""For one base. Each of them makes a copy of it for serving: the swarm pays for a newcomer's haste in memory."""
BYTES_PER_DONOR = 512 * 1024
"""A base is worth one donor more for each of these that are missing: calling one costs round trips."""
ANOTHER_SECONDS = 5.0
"""It is worth one more for each of these that it has taken, too: the one donor of a small base may be slow."""
FIRST_PIECES_AHEAD = 2
MOST_PIECES_AHEAD = 16
QUICK_SECONDS = 1.0
"""While answers come sooner than this, one more piece is asked for ahead, else one less: what is on its way then fills
lines of up to 16 MiB a second, and a slow donor keeps little to itself."""
IDLE_SECONDS = 15.0
"""A donor from which no piece comes for this long is given up for another: pieces are 64 KiB to 1 MiB."""
MOST_PATIENCE = 8.0
"""The limit is stretched twofold each time that no donor kept it, up to this: then it is our own line."""

CallDonor = Callable[[str, AsyncIterator[BaseRequest]], Awaitable[AsyncGenerator[BaseAnswer, None]]]


class BaseFetcher:
    """Fetches bases.

    :param call: sends requests to a donor, gives its answers
    :param least_patience: what the limits are stretched by from the start: where round trips are long
    """

    def __init__(self, call: CallDonor, records: DonorRecords, least_patience: float = 1.0) -> None:
        self._call, self._records = call, records
        self._patience = self._least_patience = least_patience

    async def fetch(
        self, partial: PartialBase, donors: Sequence[str], on_bytes: Callable[[], None] = lambda: None
    ) -> FetchedBase | None:
        """Complete and verify a base, or None if these donors do not deliver: what has come stays in ``partial``.

        :param donors: whom to ask, in this order
        :param on_bytes: told whenever more of the base is here
        """
        willing = [donor for donor in donors if self._records.usable(donor, partial.claim.digest)]
        while willing:
            await self._collect(partial, willing, on_bytes)
            if not partial.complete:
                return None
            fetched = await asyncio.to_thread(partial.verify)
            for liar in partial.liars:
                self._records.lied(liar)
                logger.debug("Donor %s sent other bytes than announced", liar)
            if fetched is not None:
                self._patience = self._least_patience
                return fetched
            partial.start_over()
            willing = [donor for donor in willing if donor not in partial.liars]
        return None

    async def _collect(self, partial: PartialBase, willing: list[str], on_bytes: Callable[[], None]) -> None:
        """Let donors work until everything is here or none is left; those that failed are taken off the list."""
        running: dict[asyncio.Task[None], str] = {}
        here, timed_out = partial.bytes_here, False
        now = asyncio.get_running_loop().time
        began = now()
        try:
            while not partial.complete:
                for donor in [donor for donor in willing if donor not in running.values()]:
                    if len(running) < _donors_wanted(partial, now() - began) and partial.has_work_for(donor):
                        running[asyncio.create_task(self._take_from(donor, partial, on_bytes))] = donor
                if not running:
                    break
                ended, _ = await asyncio.wait(running, timeout=ANOTHER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    donor = running.pop(task)
                    error = asyncio.CancelledError() if task.cancelled() else task.exception()
                    if error is not None:
                        # Whatever goes wrong while reading what a donor sends is the donor's failure, not ours.
                        logger.debug("Donor %s of fragment %d: %r", donor, partial.fragment, error)
                        timed_out = timed_out or isinstance(error, asyncio.TimeoutError)
                        self._note(donor, partial, error)
                        willing.remove(donor)
                if partial.one_donor and not running and not partial.complete:
                    partial.start_over()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if timed_out and partial.bytes_here <= here:
            self._patience = min(MOST_PATIENCE * self._least_patience, 2 * self._patience)

    def _note(self, donor: str, partial: PartialBase, error: BaseException) -> None:
        if isinstance(error, Refused) and error.busy:
            self._records.was_busy(donor, partial.claim.digest)
        else:
            self._records.failed(donor, partial.claim.digest)

    async def _take_from(self, donor: str, partial: PartialBase, on_bytes: Callable[[], None]) -> None:
        """Ask one donor for pieces until there is none for it. :raises Exception: it does not deliver"""
        idle_seconds = self._patience * IDLE_SECONDS
        now = asyncio.get_running_loop().time
        outgoing: asyncio.Queue[BaseRequest | None] = asyncio.Queue()
        asked_at: deque[float] = deque()
        pieces_ahead = FIRST_PIECES_AHEAD
        try:
            answers = await asyncio.wait_for(self._call(donor, _until_none(outgoing)), idle_seconds)
            async with aclosing(answers):
                while not partial.complete:
                    while len(asked_at) < pieces_ahead and (piece := partial.ask(donor)) is not None:
                        outgoing.put_nowait(_request(partial, piece))
                        asked_at.append(now())
                    if not asked_at:
                        return
                    try:
                        answer = await asyncio.wait_for(answers.__anext__(), idle_seconds)
                    except StopAsyncIteration:
                        raise TransferFailed("ended early") from None
                    new_bytes = partial.put(donor, answer)
                    self._records.delivered(donor)
                    quick = now() - asked_at.popleft() < QUICK_SECONDS
                    pieces_ahead = min(MOST_PIECES_AHEAD, max(FIRST_PIECES_AHEAD, pieces_ahead + (1 if quick else -1)))
                    if new_bytes:
                        on_bytes()
        finally:
            outgoing.put_nowait(None)
            partial.give_back(donor)


def _donors_wanted(partial: PartialBase, seconds: float) -> int:
    """How many donors are worth calling for what is missing, after so many seconds."""
    if partial.one_donor:
        return 1
    return min(DONORS_AT_ONCE, max(1, partial.bytes_missing // BYTES_PER_DONOR) + int(seconds // ANOTHER_SECONDS))


def _request(partial: PartialBase, piece: Piece) -> BaseRequest:
    claim = partial.claim
    return BaseRequest(
        BaseRequestHeader(
            fragment=partial.fragment,
            version=claim.version,
            digest=claim.digest,
            start=piece.start,
            stop=piece.stop,
        )
    )


async def _until_none(queue: asyncio.Queue[BaseRequest | None]) -> AsyncIterator[BaseRequest]:
    while (request := await queue.get()) is not None:
        yield request

"""A base on its way between two peers: what a donor sends, and one that is put together from what several sent.

A donor is believed in nothing: parameters, outer optimizer state, total samples and the history of receipts must hash
to the digest that was asked for. If they do not, and several donors had a part in it, the base is fetched again whole
from one at a time; the first that is right shows which pieces had been wrong, and whose they were. What this does not
stop: peers that agree on a false base, and a liar that spoils one fetch each time it is believed again.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from dataclasses import dataclass, replace

import numpy as np
import torch

from peers.lineage import Claim
from peers.messages import BaseAnswer, BaseHeader, BasePieceHeader, BaseRefusalHeader, Receipt, extend_history
from peers.outer import base_digest
from peers.reducer import FLOAT32

PIECES = 64
"""A base is cut into about this many, so that donors of unlike speed share it finely ..."""
LEAST_PIECE_BYTES = 64 * 1024
"""... but messages cost: both ends together took 3.7 CPU seconds a GB with these, 2 with four times as much ..."""
MOST_PIECE_BYTES = 1024 * 1024
"""... and what has not arrived whole when a donor fails is lost, and must arrive within ``IDLE_SECONDS``."""


class TransferFailed(Exception):
    """A donor did not deliver what was asked of it; the text says why. Another donor may."""


class Refused(TransferFailed):
    """A donor said that it does not serve this base, or not now."""

    def __init__(self, *, busy: bool) -> None:
        super().__init__("serves too many others" if busy else "does not serve this version any more")
        self.busy = busy


class LiveBytes:
    """The bytes of a base where it lies, copied piece by piece as they are read.

    Whoever changes the base sees to it that nobody reads them any more: see ``FrozenBase.copied``.
    """

    def __init__(self, base: torch.Tensor, outer_state: torch.Tensor) -> None:
        self._rows = [row.numpy().astype(FLOAT32, copy=False).data.cast("B") for row in (base, *outer_state)]

    def __len__(self) -> int:
        return sum(len(row) for row in self._rows)

    def __getitem__(self, where: slice) -> bytes:
        start, stop, _ = where.indices(len(self))
        pieces = []
        for row in self._rows:
            pieces.append(row[max(0, start) : max(0, stop)])
            start, stop = start - len(row), stop - len(row)
        return b"".join(pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenBase:
    """The bytes of one base (parameters, then outer optimizer state, float32 little endian) and what belongs to it."""

    version: int
    digest: bytes
    total_element_samples: int
    history: bytes
    payload: bytes | memoryview | LiveBytes
    receipts: tuple[Receipt, ...]
    """Of consecutive versions, the last one this base's."""
    history_before: bytes
    """The history before the first of the receipts."""

    def copied(self) -> FrozenBase:
        """One that stays as it is when the base changes."""
        return replace(self, payload=self.payload[:])


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBase:
    """A verified base: float32 ``(size,)``, its outer state ``(states, size)``, the receipts of the versions before."""

    claim: Claim
    total_element_samples: int
    history: bytes
    history_before: bytes
    base: torch.Tensor
    outer_state: torch.Tensor
    receipts: tuple[Receipt, ...]
    donors: tuple[str, ...]
    """Whose bytes they are."""
    bytes_received: int
    """Also those that came twice or were thrown away."""
    seconds: float
    """From when it was first asked for."""
    origin: frozenset[str] = frozenset()
    """The training peers that announced it then."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[start, stop)`` of a base."""

    start: int
    stop: int


HEADER = Piece(0, 0)
"""Stands for what belongs to a base besides its bytes."""


class PartialBase:
    """What has arrived of one base, and who was asked for the rest. Pure: whoever talks to donors tells it.

    Pieces are asked for in order, each donor the next one as soon as it can take it: a fast donor takes more. What a
    donor leaves undone goes to others, and nothing that has arrived is asked for again.

    :param size: elements of the fragment; donors may not bring a byte more than belongs to it
    :param states: vectors of outer optimizer state
    :param origin: the training peers that announce it
    """

    def __init__(
        self, *, fragment: int, size: int, states: int, claim: Claim, origin: frozenset[str] = frozenset()
    ) -> None:
        self.fragment, self.claim, self._origin = fragment, claim, origin
        self._size, self._states = size, states
        self.num_bytes = (1 + states) * size * FLOAT32.itemsize
        length = min(max(-(-self.num_bytes // PIECES), LEAST_PIECE_BYTES), MOST_PIECE_BYTES)
        starts = range(0, self.num_bytes, length)
        self._pieces = (HEADER, *(Piece(start, min(start + length, self.num_bytes)) for start in starts))
        self._buffer = np.empty(self.num_bytes, dtype=np.uint8)
        self._began = time.monotonic()
        self.bytes_received = 0
        self.one_donor = False
        """Whether the next attempt must be of one donor, since one of many was found to be false."""
        self.liars: frozenset[str] = frozenset()
        """Donors that were found to have sent other bytes than the digest's."""
        self._evidence: list[tuple[Piece, str, bytes]] = []
        self.start_over()

    def start_over(self) -> None:
        """Forget what has arrived. Nobody may be asked for anything at this moment."""
        self._unasked = deque(self._pieces)
        self._asked: dict[str, deque[Piece]] = {}
        self._senders: dict[Piece, str] = {}
        self._header: BaseHeader | None = None
        self.bytes_here = 0

    @property
    def complete(self) -> bool:
        return len(self._senders) == len(self._pieces)

    @property
    def bytes_missing(self) -> int:
        return self.num_bytes - self.bytes_here

    @property
    def senders(self) -> tuple[str, ...]:
        """Whose pieces are here."""
        return tuple(dict.fromkeys(self._senders.values()))

    def has_work_for(self, donor: str) -> bool:
        """Whether a donor that was asked for nothing could be asked for something."""
        return self._next(donor, idle=True) is not None

    def ask(self, donor: str) -> Piece | None:
        """What this donor shall send next: what nobody was asked for, else what another one would send last.

        The latter only if it has nothing else to send, and only by two donors at once: at the end of a fetch nobody
        waits for a slow one, and few bytes come twice.
        """
        piece = self._next(donor, idle=not self._asked.get(donor))
        if piece is not None:
            if self._unasked and piece == self._unasked[0]:
                self._unasked.popleft()
            self._asked.setdefault(donor, deque()).append(piece)
        return piece

    def _next(self, donor: str, *, idle: bool) -> Piece | None:
        if self._unasked:
            return self._unasked[0]
        if not idle:
            return None
        askers = Counter(piece for pieces in self._asked.values() for piece in pieces)
        for _, pieces in sorted(self._asked.items(), key=lambda item: -len(item[1])):
            for piece in reversed(pieces):
                if piece not in self._senders and askers[piece] == 1 and donor not in self._asked_of(piece):
                    return piece
        return None

    def _asked_of(self, piece: Piece) -> list[str]:
        return [donor for donor, pieces in self._asked.items() if piece in pieces]

    def give_back(self, donor: str) -> None:
        """The donor sends no more: what it was asked for is for others to send."""
        left = self._asked.pop(donor, deque())
        self._unasked.extendleft(
            piece for piece in reversed(left) if piece not in self._senders and not self._asked_of(piece)
        )

    def put(self, donor: str, answer: BaseAnswer) -> int:
        """Take a donor's answer; returns how many bytes of the base are new.

        :raises TransferFailed: it is not what the donor was asked for
        """
        header = answer.header
        if isinstance(header, BaseRefusalHeader):
            raise Refused(busy=header.busy)
        if header is None:
            raise TransferFailed("sent a malformed message")
        self.bytes_received += len(answer.body)
        asked = self._asked.get(donor)
        piece = Piece(header.start, header.start + len(answer.body)) if isinstance(header, BasePieceHeader) else HEADER
        if not asked or piece != asked[0] or isinstance(header, BasePieceHeader) == (piece == HEADER):
            raise TransferFailed("sent something that it was not asked for")
        if isinstance(header, BaseHeader):
            self._check(header)
        asked.popleft()
        if piece in self._senders:
            return 0  # another one was faster
        if isinstance(header, BaseHeader):
            self._header = header
        else:
            self._buffer.data[piece.start : piece.stop] = answer.body
        self._senders[piece] = donor
        self.bytes_here += piece.stop - piece.start
        return piece.stop - piece.start

    def _check(self, header: BaseHeader) -> None:
        """What can be told from a header alone. :raises TransferFailed:"""
        version = self.claim.version
        if header.version != version:
            raise TransferFailed(f"sent version {header.version} instead of {version}")
        first = version + 1 - len(header.receipts)
        if [receipt.version for receipt in header.receipts] != list(range(first, version + 1)):
            raise TransferFailed("sent receipts of other versions")
        samples = int.from_bytes(header.total_element_samples, "little") // self._size
        if samples != self.claim.total_samples:
            raise TransferFailed(f"sent a base of {samples} samples instead of {self.claim.total_samples}")

    def verify(self) -> FetchedBase | None:
        """The base if it has the digest that was asked for, else None; ``liars`` says whose fault was found.

        Takes a while: not for the event loop.
        """
        header = self._header
        if header is None or not self.complete:
            return None
        values = torch.from_numpy(self._buffer.view(FLOAT32).astype(np.float32, copy=False))
        base, outer_state = values[: self._size], values[self._size :].view(self._states, self._size)
        total = int.from_bytes(header.total_element_samples, "little")
        history = _history(header)
        digest = base_digest(
            fragment=self.fragment,
            version=self.claim.version,
            total_element_samples=total,
            history=history,
            base=base,
            outer_state=outer_state,
        )
        if digest != self.claim.digest:
            if len(self.senders) == 1:
                self.liars |= frozenset(self.senders)
            else:
                self._evidence += [(piece, donor, self._print(piece)) for piece, donor in self._senders.items()]
                self.one_donor = True
            return None
        self.liars |= {donor for piece, donor, was in self._evidence if was != self._print(piece)}
        return FetchedBase(
            claim=self.claim,
            total_element_samples=total,
            history=history,
            history_before=header.history,
            base=base,
            outer_state=outer_state,
            receipts=tuple(header.receipts),
            donors=self.senders,
            bytes_received=self.bytes_received,
            seconds=time.monotonic() - self._began,
            origin=self._origin,
        )

    def _print(self, piece: Piece) -> bytes:
        """Hash of a piece that is here: the same if it is as good. Headers may tell of more receipts or of fewer."""
        if piece == HEADER and self._header is not None:
            return hashlib.sha256(self._header.total_element_samples + _history(self._header)).digest()
        return hashlib.sha256(self._buffer.data[piece.start : piece.stop]).digest()


def _history(header: BaseHeader) -> bytes:
    """The history of the base that a header describes."""
    history = header.history
    for receipt in header.receipts:
        history = extend_history(history, receipt)
    return history

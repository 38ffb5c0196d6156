"""Bases and donors without a network: what the tests of their transfer share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import torch

from peers.lineage import Claim
from peers.messages import (
    AveragedPart,
    BaseAnswer,
    BaseHeader,
    BasePieceHeader,
    BaseRequest,
    BaseRequestHeader,
    Contributor,
    Receipt,
    extend_history,
)
from peers.outer import NO_HISTORY, base_digest
from peers.transfer import HEADER, FrozenBase, PartialBase, Piece

SIZE = 200_000  # with outer state 1.6 MB: 25 pieces
FRAGMENT = 2


def receipt(version: int, contributors: int = 1, parts: int = 1) -> Receipt:
    return Receipt(
        version=version,
        tick=10 * version,
        contributors=[
            Contributor(peer_id=index.to_bytes(34, "big"), samples=2**40 + index, steps=2**30)
            for index in range(contributors)
        ],
        parts=[AveragedPart(start=start, stop=start + 1, included=list(range(contributors))) for start in range(parts)],
    )


def history_of(receipts: Sequence[Receipt], before: bytes = NO_HISTORY) -> bytes:
    history = before
    for one in receipts:
        history = extend_history(history, one)
    return history


def frozen_base(
    version: int = 7,
    *,
    seed: int = 0,
    fragment: int = FRAGMENT,
    receipts: Sequence[Receipt] = (),
    size: int = SIZE,
) -> FrozenBase:
    values = torch.rand(2 * size, generator=torch.Generator().manual_seed(seed))
    total = 3 * size + 11 % size
    history = history_of(receipts)
    digest = base_digest(
        fragment=fragment,
        version=version,
        total_element_samples=total,
        history=history,
        base=values[:size],
        outer_state=values[size:],
    )
    return FrozenBase(
        version=version,
        digest=digest,
        total_element_samples=total,
        history=history,
        history_before=NO_HISTORY,
        payload=values.numpy().tobytes(),
        receipts=tuple(receipts),
    )


BASE = frozen_base(receipts=[receipt(5), receipt(6), receipt(7)])
CLAIM = Claim(version=7, digest=BASE.digest, total_samples=3)


def claim_of(base: FrozenBase) -> Claim:
    return Claim(version=base.version, digest=base.digest, total_samples=3)


def partial_base(claim: Claim = CLAIM, *, size: int = SIZE, fragment: int = FRAGMENT) -> PartialBase:
    return PartialBase(fragment=fragment, size=size, states=1, claim=claim)


def request(base: FrozenBase = BASE, piece: Piece = HEADER, *, fragment: int = FRAGMENT) -> BaseRequest:
    return BaseRequest(
        BaseRequestHeader(
            fragment=fragment, version=base.version, digest=base.digest, start=piece.start, stop=piece.stop
        )
    )


def header_of(base: FrozenBase = BASE) -> BaseHeader:
    return BaseHeader(
        version=base.version,
        total_element_samples=base.total_element_samples.to_bytes(16, "little"),
        history=base.history_before,
        receipts=list(base.receipts),
    )


def honest_answer(piece: Piece, base: FrozenBase = BASE) -> BaseAnswer:
    if piece == HEADER:
        return BaseAnswer(header_of(base))
    return BaseAnswer(BasePieceHeader(start=piece.start), memoryview(base.payload)[piece.start : piece.stop])


def false_answer(piece: Piece, base: FrozenBase = BASE) -> BaseAnswer:
    """The right form, but one bit is wrong."""
    if piece == HEADER:
        return BaseAnswer(header_of(base).model_copy(update={"history": b"false" + bytes(27)}))
    body = bytearray(base.payload[piece.start : piece.stop])
    body[-1] ^= 1
    return BaseAnswer(BasePieceHeader(start=piece.start), bytes(body))


async def each(requests: Sequence[BaseRequest]) -> AsyncIterator[BaseRequest]:
    for one in requests:
        yield one

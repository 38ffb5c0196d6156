"""Every message that travels between peers, on one page.

A message is a length-prefixed msgpack header, checked by a strict schema, and a raw body. Nothing is unpickled;
msgpack extension types are not used. A message that does not parse has ``header`` None: the receiver leaves its
sender out, no exception crosses the transport. The classes have protobuf's three methods because that is what
hivemind's ServicerBase moves. What the schemas do not stop: well-formed lies.

=====================  ====================================================  ==============================
rpc                    request                                               answer
=====================  ====================================================  ==============================
rpc_time               Ask                                                   Clock
rpc_look               Ask ("my records have changed")                       Clock
rpc_news               NewsAsk ("what is newer than this?")                  News
rpc_dial_back          DialBack ("can you reach my port?")                   DialedBack
rpc_join_group         hivemind's JoinRequest (gather = RoundAnnouncement)   hivemind's MessageFromLeader
average                stream of Part, in part order                         stream of Average, in part order
base                   stream of BaseRequest, one for each piece             stream of BaseAnswer, in that order
direct                 Ask                                                   DirectOffer, or nothing
=====================  ====================================================  ==============================

``average``, ``base`` and ``direct`` go through ``transport.py``, which frames header and body itself; the rest as
``ServicerBase`` does it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

_HEADER_LENGTH = struct.Struct("<I")
MAX_HEADER_BYTES = 256 * 1024
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_GROUP_SIZE = 256
MAX_RECEIPTS = 64
LEAST_GROUP_ID_BYTES, MOST_GROUP_ID_BYTES = 8, 64

Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
PeerIdBytes = Annotated[bytes, Field(min_length=8, max_length=64)]
Version = Annotated[int, Field(ge=0, le=2**40)]
Count = Annotated[int, Field(ge=0, le=2**60)]
Position = Annotated[int, Field(ge=0, le=2**40)]


class Header(BaseModel):
    """Base of all headers: strict types, no unknown fields, no inf or NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class AskHeader(Header):
    """Asks; for what, the call's name says."""


class ClockHeader(Header):
    """The peer's swarm time, seconds since the epoch."""

    seconds: float = Field(ge=0, le=1e11)


class NewsAskHeader(Header):
    """Asks for everybody's news that is newer than what the asker has."""

    have: Annotated[bytes, Field(max_length=64 * 1024)]
    """16 bytes for each peer that it has news of: the last 8 of its id, and when its news expires (``news.py``)."""


class NewsHeader(Header):
    """Answers; what, the body says."""


class PartHeader(Header):
    """One part of a sender's contribution, encoded; or, between groups, a weighted sum (float32, little endian).

    The body is empty where the sender has no weight, as its announcement says.
    """

    group_id: Annotated[bytes, Field(min_length=LEAST_GROUP_ID_BYTES, max_length=MOST_GROUP_ID_BYTES)]
    part: Annotated[int, Field(ge=0, le=2**20)]
    included: Annotated[bytes, Field(max_length=MAX_GROUP_SIZE // 8)] = b""
    """Of a sum: bit i says whether member i is in it."""


class AverageHeader(Header):
    """One averaged part, the same bytes for everyone. Bit i of ``included`` says whether member i is in it."""

    part: Annotated[int, Field(ge=0, le=2**20)]
    included: Annotated[bytes, Field(min_length=1, max_length=MAX_GROUP_SIZE // 8)]
    received_ms: Annotated[int, Field(ge=0, le=2**32)] = 0
    """How long the asker's parts up to this one took to arrive, once its stream was open; 0 if they did not."""


class Contributor(Header):
    """A member of a round with its cumulative counts at the snapshot it contributed."""

    peer_id: PeerIdBytes
    samples: Count
    steps: Count


class AveragedPart(Header):
    """Elements ``[start, stop)`` of a round and the indices of the contributors whose work is in them."""

    start: Position
    stop: Position
    included: Annotated[list[int], Field(max_length=MAX_GROUP_SIZE)]


class Receipt(Header):
    """Who is in which part of the base of ``version``: what a peer that missed the commit learns its fate from."""

    version: Version
    tick: Version
    contributors: Annotated[list[Contributor], Field(max_length=MAX_GROUP_SIZE)]
    parts: Annotated[list[AveragedPart], Field(max_length=4096)]

    def ranges_of(self, peer_id: bytes) -> tuple[Contributor | None, list[tuple[int, int]]]:
        """The peer's entry, and the element ranges that hold its contribution."""
        for index, contributor in enumerate(self.contributors):
            if contributor.peer_id == peer_id:
                held = [(part.start, part.stop) for part in self.parts if index in part.included]
                return contributor, held
        return None, []


def extend_history(history: bytes, receipt: Receipt) -> bytes:
    """The hash chain over receipts, one link on: 32 bytes. Being in every base's digest, it vouches for receipts."""
    packed: bytes = msgpack.packb(receipt.model_dump(), use_bin_type=True)
    return hashlib.sha256(history + packed).digest()


def pack_receipts(receipts: Sequence[Receipt]) -> bytes:
    """For keeping them."""
    packed: bytes = msgpack.packb([receipt.model_dump() for receipt in receipts], use_bin_type=True)
    return packed


def unpack_receipts(packed: bytes) -> tuple[Receipt, ...]:
    """:raises ValueError: not what ``pack_receipts`` made"""
    return tuple(Receipt.model_validate(row) for row in msgpack.unpackb(packed, raw=False))


class BaseRequestHeader(Header):
    """Asks for bytes ``[start, stop)`` of a fragment's base: its parameters, then its outer state, float32.

    With ``start == stop`` it asks for what belongs to the base besides, its ``BaseHeader``.
    """

    fragment: Annotated[int, Field(ge=0, le=255)]
    version: Version
    digest: Digest
    start: Position
    stop: Position


class BaseHeader(Header):
    """What belongs to a base besides its bytes."""

    version: Version
    total_element_samples: Annotated[bytes, Field(min_length=16, max_length=16)]
    history: Digest
    """Of the base before the first of the receipts; of this base if there are none."""
    receipts: Annotated[list[Receipt], Field(max_length=MAX_RECEIPTS)]
    """Of consecutive versions, the last one this base's."""


class BasePieceHeader(Header):
    """The bytes of a base that were asked for: body is the piece that begins at ``start``."""

    start: Position


class BaseRefusalHeader(Header):
    """The last answer of a donor that does not serve this base, or not now."""

    busy: bool
    """Whether to ask again in a moment: too many are asking. Otherwise the donor has moved on."""


class DirectOfferHeader(Header):
    """How the asker, and nobody else, may call this peer directly."""

    port: Annotated[int, Field(ge=1, le=65535)]
    fingerprint: Digest
    """SHA-256 of the certificate that the peer shows there."""
    ticket: Annotated[bytes, Field(min_length=32, max_length=32)]
    """Whoever shows it is taken for the asker."""


class DialBackHeader(Header):
    """Asks to be dialled at a port of the address from which the asker is connected, and nowhere else."""

    port: Annotated[int, Field(ge=1, le=65535)]
    word: Annotated[bytes, Field(min_length=16, max_length=16)] | None = None
    """What the asker says there to whoever connects; None if its daemon listens there, which says nothing."""


class DialedBackHeader(Header):
    """What became of that."""

    host: Annotated[str, Field(max_length=45)]
    """IP address at which the asker is connected with this peer; empty if there is none, or if it was not tried."""
    reached: bool | None
    """Whether the word was heard there; None if this peer did not try, having tried often lately."""


class WireMessage:
    """A header and a body, with the methods that hivemind's transport calls."""

    header_type: ClassVar[type[Header]]

    def __init__(self, header: Any = None, body: bytes | memoryview = b"") -> None:
        self.header = header
        self.body = body

    def packed_header(self) -> bytes:
        packed: bytes = msgpack.packb(self.header.model_dump(), use_bin_type=True)
        return packed

    def SerializeToString(self) -> bytes:
        packed = self.packed_header()
        return b"".join((_HEADER_LENGTH.pack(len(packed)), packed, self.body))

    def ParseFromString(self, data: bytes) -> None:
        self.header = None
        if len(data) < _HEADER_LENGTH.size:
            return
        (length,) = _HEADER_LENGTH.unpack_from(data)
        end = _HEADER_LENGTH.size + length
        if length > MAX_HEADER_BYTES or end > len(data) or len(data) - end > MAX_BODY_BYTES:
            return
        self._parse(data[_HEADER_LENGTH.size : end], memoryview(data)[end:])

    def _parse(self, packed_header: bytes | memoryview, body: memoryview) -> None:
        try:
            fields = msgpack.unpackb(packed_header, raw=False, strict_map_key=True)
            self.header = self.header_type.model_validate(fields)
        except (ValueError, ValidationError, msgpack.exceptions.UnpackException, RecursionError):
            return
        self.body = body

    @classmethod
    def FromString(cls, data: bytes) -> WireMessage:
        message = cls()
        message.ParseFromString(data)
        return message

    @classmethod
    def from_parts(cls, packed_header: bytes | memoryview, body: memoryview) -> Self:
        """A message whose parts came apart; the body is not copied. Their lengths were checked."""
        message = cls()
        message._parse(packed_header, body)
        return message


class Ask(WireMessage):
    header_type = AskHeader
    header: AskHeader | None


class Clock(WireMessage):
    header_type = ClockHeader
    header: ClockHeader | None


class NewsAsk(WireMessage):
    """The body is the asker's own news, sealed (``dht_config/news.py``), or empty."""

    header_type = NewsAskHeader
    header: NewsAskHeader | None


class News(WireMessage):
    """The body is a msgpack list of sealed news (``news.py``)."""

    header_type = NewsHeader
    header: NewsHeader | None


class Part(WireMessage):
    header_type = PartHeader
    header: PartHeader | None


class Average(WireMessage):
    header_type = AverageHeader
    header: AverageHeader | None


class BaseRequest(WireMessage):
    header_type = BaseRequestHeader
    header: BaseRequestHeader | None


class BaseAnnouncement(WireMessage):
    header_type = BaseHeader
    header: BaseHeader | None


class BasePiece(WireMessage):
    header_type = BasePieceHeader
    header: BasePieceHeader | None


class BaseRefusal(WireMessage):
    header_type = BaseRefusalHeader
    header: BaseRefusalHeader | None


class DirectOffer(WireMessage):
    header_type = DirectOfferHeader
    header: DirectOfferHeader | None


class DialBack(WireMessage):
    header_type = DialBackHeader
    header: DialBackHeader | None


class DialedBack(WireMessage):
    header_type = DialedBackHeader
    header: DialedBackHeader | None


class BaseAnswer(WireMessage):
    """A BaseHeader, a BasePieceHeader with its body or a BaseRefusalHeader: which one is told apart by its fields."""

    header: BaseHeader | BasePieceHeader | BaseRefusalHeader | None

    def _parse(self, packed_header: bytes | memoryview, body: memoryview) -> None:
        for kind in (BasePiece, BaseAnnouncement, BaseRefusal):
            parsed = kind.from_parts(packed_header, body)
            if parsed.header is not None:
                self.header, self.body = parsed.header, parsed.body
                return


def mask_of(indices: set[int], group_size: int) -> bytes:
    """Bit i set for each index i, in ceil(group_size / 8) bytes."""
    value = sum(1 << index for index in indices)
    return value.to_bytes((group_size + 7) // 8, "little")


def indices_of(mask: bytes, group_size: int) -> set[int] | None:
    """The indices in a mask, or None if it is not a mask for a group of this size."""
    if len(mask) != (group_size + 7) // 8:
        return None
    value = int.from_bytes(mask, "little")
    if value >> group_size:
        return None
    return {index for index in range(group_size) if value >> index & 1}

"""Wire messages: whatever bytes come, nothing is raised, and what is not well-formed has no header."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from peers import messages
from peers.messages import (
    MAX_BODY_BYTES,
    MAX_GROUP_SIZE,
    MAX_HEADER_BYTES,
    Ask,
    AskHeader,
    Average,
    AveragedPart,
    AverageHeader,
    BaseAnnouncement,
    BaseAnswer,
    BaseHeader,
    BasePiece,
    BasePieceHeader,
    BaseRefusal,
    BaseRefusalHeader,
    BaseRequest,
    BaseRequestHeader,
    Clock,
    ClockHeader,
    Contributor,
    DialBack,
    DialBackHeader,
    DialedBack,
    DialedBackHeader,
    DirectOffer,
    DirectOfferHeader,
    News,
    NewsAsk,
    NewsAskHeader,
    NewsHeader,
    Part,
    PartHeader,
    Receipt,
    WireMessage,
    extend_history,
    indices_of,
    mask_of,
)

DIGEST = bytes(range(32))
RECEIPT = Receipt(
    version=3,
    tick=40,
    contributors=[
        Contributor(peer_id=b"peer-one", samples=100, steps=10),
        Contributor(peer_id=b"peer-two", samples=5, steps=1),
    ],
    parts=[AveragedPart(start=0, stop=10, included=[0, 1]), AveragedPart(start=10, stop=20, included=[1])],
)
WELL_FORMED: list[WireMessage] = [
    Ask(AskHeader()),
    Clock(ClockHeader(seconds=1.8e9)),
    DialBack(DialBackHeader(port=31337)),
    NewsAsk(NewsAskHeader(have=bytes(32)), b"sealed"),
    News(NewsHeader(), b"packed"),
    Part(PartHeader(group_id=b"g" * 20, part=7), b"\x01\x02\x03\x04"),
    Average(AverageHeader(part=0, included=b"\x03"), b"body"),
    BaseRequest(BaseRequestHeader(fragment=3, version=4, digest=DIGEST, start=0, stop=100)),
    BaseAnnouncement(BaseHeader(version=4, total_element_samples=bytes(16), history=DIGEST, receipts=[RECEIPT])),
    BasePiece(BasePieceHeader(start=1 << 30), b"piece"),
    BaseRefusal(BaseRefusalHeader(busy=True)),
    DirectOffer(DirectOfferHeader(port=31338, fingerprint=DIGEST, ticket=DIGEST)),
    DialBack(DialBackHeader(port=31337, word=DIGEST[:16])),
    DialedBack(DialedBackHeader(host="203.0.113.7", reached=True)),
    DialedBack(DialedBackHeader(host="", reached=None)),
    BaseAnswer(BaseHeader(version=4, total_element_samples=bytes(16), history=DIGEST, receipts=[RECEIPT])),
    BaseAnswer(BasePieceHeader(start=0), b"piece"),
    BaseAnswer(BaseRefusalHeader(busy=False)),
]
KINDS = list(dict.fromkeys(type(message) for message in WELL_FORMED))
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=10)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
)
field_names = st.sampled_from(
    sorted({name for kind in KINDS if kind is not BaseAnswer for name in kind.header_type.model_fields})
)
keys = field_names | st.text(max_size=5) | st.binary(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5), max_leaves=12
)


def framed(packed: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<I", len(packed)) + packed + body


def test_every_message_class_of_the_page_is_tested() -> None:
    defined = {thing for thing in vars(messages).values() if isinstance(thing, type) and issubclass(thing, WireMessage)}
    assert defined - {WireMessage} == set(KINDS)


@pytest.mark.parametrize("message", WELL_FORMED, ids=lambda message: type(message.header).__name__)
def test_a_message_arrives_as_it_was_sent(message: WireMessage) -> None:
    arrived = type(message).FromString(message.SerializeToString())
    assert arrived.header == message.header
    assert type(arrived.header) is type(message.header)
    assert bytes(arrived.body) == message.body


@each_kind
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_never_raise(kind: type[WireMessage], data: bytes) -> None:
    message = kind()
    message.ParseFromString(data)
    message.ParseFromString(framed(data))


@each_kind
@given(fields=values, body=st.binary(max_size=10))
def test_arbitrary_msgpack_never_raises_and_only_a_valid_header_is_taken(
    kind: type[WireMessage], fields: Any, body: bytes
) -> None:
    packed = msgpack.packb(fields, use_bin_type=True)
    message = kind.FromString(framed(packed, body))
    if message.header is not None:
        assert message.header.model_dump() == fields
        assert bytes(message.body) == body


@pytest.mark.parametrize("message", WELL_FORMED, ids=lambda message: type(message.header).__name__)
@given(data=st.data())
def test_a_damaged_message_never_raises_and_what_it_says_fits_the_schema(
    message: WireMessage, data: st.DataObject
) -> None:
    raw = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(raw) - 1))
        raw[position] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    header = type(message).FromString(bytes(raw)).header
    if header is not None:
        type(header).model_validate(header.model_dump())


@each_kind
@pytest.mark.parametrize(
    "bomb",
    [
        b"\x91" * 200_000 + b"\xc0",
        b"\x81\xa1a" * 60_000 + b"\xc0",
        b"\x81\xa8receipts" + b"\x91" * 100_000 + b"\xc0",
        b"".join(b"\xc7" + bytes([min(255, size)]) + b"\x05" for size in range(600)),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xd7\xff" + b"\xff" * 8,
        b"\x81\xa4part\xc7\x0c\xff" + b"\xff" * 12,
    ],
    ids=["arrays", "maps", "in a field", "extensions", "array", "map", "bytes", "extension", "time", "time in a field"],
)
def test_a_bomb_is_a_message_without_header(kind: type[WireMessage], bomb: bytes) -> None:
    assert kind.FromString(framed(bomb)).header is None


@each_kind
def test_a_length_that_does_not_fit_is_refused(kind: type[WireMessage]) -> None:
    assert kind.FromString(b"").header is None
    assert kind.FromString(b"\x01\x00\x00").header is None
    assert kind.FromString(struct.pack("<I", 2**32 - 1) + b"\x80").header is None


def test_headers_and_bodies_have_a_largest_size() -> None:
    body = bytes(MAX_BODY_BYTES)
    packed = msgpack.packb({"seconds": 1.0})
    assert Clock.FromString(framed(packed, body)).header is not None
    assert Clock.FromString(framed(packed, body + b"1")).header is None
    stretch = AveragedPart(start=0, stop=1, included=list(range(100)))
    for parts, accepted in ((10, True), (3000, False)):
        receipts = [RECEIPT.model_copy(update={"parts": [stretch] * parts})]
        raw = BaseAnnouncement(
            BaseHeader(version=4, total_element_samples=bytes(16), history=DIGEST, receipts=receipts)
        ).SerializeToString()
        assert (len(raw) <= MAX_HEADER_BYTES) is accepted
        assert (BaseAnnouncement.FromString(raw).header is not None) is accepted


def test_a_second_parse_forgets_the_first_header() -> None:
    message = Clock.FromString(WELL_FORMED[1].SerializeToString())
    assert message.header is not None
    message.ParseFromString(b"nonsense")
    assert message.header is None


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 1e300, "1.0", True, None])
def test_a_clock_reading_is_a_possible_time(seconds: Any) -> None:
    assert Clock.FromString(framed(msgpack.packb({"seconds": seconds}))).header is None


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Ask, {"extra": 1}),
        (Part, {"group_id": b"g" * 20, "part": -1}),
        (Part, {"group_id": b"g" * 20, "part": 2**20 + 1}),
        (Part, {"group_id": b"g" * 20, "part": True}),
        (Part, {"group_id": b"g" * 20, "part": 1.0}),
        (Part, {"group_id": "g" * 20, "part": 1}),
        (Part, {"group_id": b"short", "part": 1}),
        (Part, {"group_id": b"g" * 20}),
        (Average, {"part": 0, "included": b""}),
        (Average, {"part": 0, "included": b"\x01" * 33}),
        (BaseRequest, {"fragment": 256, "version": 0, "digest": DIGEST, "start": 0, "stop": 1}),
        (BaseRequest, {"fragment": 0, "version": 0, "digest": DIGEST[1:], "start": 0, "stop": 1}),
        (BaseRequest, {"fragment": 0, "version": 0, "digest": DIGEST, "start": -1, "stop": 1}),
        (BaseAnnouncement, {"version": 0, "total_element_samples": bytes(15), "history": DIGEST, "receipts": []}),
        (
            BaseAnnouncement,
            {
                "version": 0,
                "total_element_samples": bytes(16),
                "history": DIGEST,
                "receipts": [RECEIPT.model_dump()] * 65,
            },
        ),
        (BaseAnnouncement, {"version": 0, "total_element_samples": bytes(16), "history": DIGEST, "receipts": [{}]}),
        (BasePiece, {"start": -1}),
        (BaseRefusal, {"busy": 1}),
    ],
)
def test_a_field_out_of_bounds_is_a_message_without_header(kind: type[WireMessage], fields: dict[str, Any]) -> None:
    assert kind.FromString(framed(msgpack.packb(fields, use_bin_type=True))).header is None


def test_we_cannot_send_what_others_would_refuse() -> None:
    with pytest.raises(ValidationError):
        PartHeader(group_id=b"short", part=0)
    with pytest.raises(ValidationError):
        ClockHeader(seconds=math.inf)


@given(size=st.integers(1, MAX_GROUP_SIZE), data=st.data())
def test_a_mask_tells_its_indices(size: int, data: st.DataObject) -> None:
    indices = data.draw(st.sets(st.integers(0, size - 1)))
    mask = mask_of(indices, size)
    assert indices_of(mask, size) == indices
    AverageHeader(part=0, included=mask)


@given(mask=st.binary(max_size=40), size=st.integers(1, MAX_GROUP_SIZE))
def test_a_mask_names_members_only(mask: bytes, size: int) -> None:
    indices = indices_of(mask, size)
    if indices is None:
        assert len(mask) != (size + 7) // 8 or int.from_bytes(mask, "little") >= 2**size
    else:
        assert all(0 <= index < size for index in indices)
        assert mask_of(indices, size) == mask


def test_a_receipt_tells_a_peer_where_its_work_is() -> None:
    entry, ranges = RECEIPT.ranges_of(b"peer-one")
    assert entry is not None and (entry.samples, entry.steps) == (100, 10)
    assert ranges == [(0, 10)]
    assert RECEIPT.ranges_of(b"peer-two")[1] == [(0, 10), (10, 20)]
    assert RECEIPT.ranges_of(b"stranger") == (None, [])


@pytest.mark.parametrize(
    "change",
    [
        {"version": 4},
        {"tick": 41},
        {"contributors": RECEIPT.contributors[:1]},
        {"contributors": [RECEIPT.contributors[0].model_copy(update={"samples": 101}), RECEIPT.contributors[1]]},
        {"parts": RECEIPT.parts[:1]},
        {"parts": [RECEIPT.parts[0], AveragedPart(start=10, stop=20, included=[0, 1])]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_history_of_a_base_covers_every_field_of_every_receipt(change: dict[str, Any]) -> None:
    history = extend_history(DIGEST, RECEIPT)
    assert len(history) == 32
    assert history != extend_history(DIGEST, RECEIPT.model_copy(update=change))
    assert history != extend_history(bytes(32), RECEIPT)


def test_a_receipt_that_travelled_makes_the_same_history() -> None:
    raw = next(one for one in WELL_FORMED if isinstance(one, BaseAnnouncement)).SerializeToString()
    header = BaseAnnouncement.FromString(raw).header
    assert isinstance(header, BaseHeader)
    assert extend_history(DIGEST, header.receipts[0]) == extend_history(DIGEST, RECEIPT)

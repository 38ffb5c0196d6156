"""The caps on msgpack: hivemind's own messages pass, the attack and its kin never reach the decoder."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys

import msgpack
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.serializer import MSGPackSerializer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dht_config.errors import RecordError
from dht_config.hardening import (
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    check_msgpack,
    harden_msgpack,
    unpack_plain,
)

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TUPLE, DICTIONARY = 0x40, 0x50
KNOWN = frozenset({TUPLE, DICTIONARY})


@pytest.fixture(autouse=True)
def hardened() -> None:
    harden_msgpack()


def nested_tuples(depth: int) -> bytes:
    """hivemind's encoding of ((((None,),),),): an extension within an extension, the attack of 2.8 kB."""
    data = b"\xc0"
    for _ in range(depth):
        body = b"\x91" + data
        data = b"\xc9" + struct.pack(">Ib", len(body), TUPLE) + body
    return data


def test_hiveminds_nested_extension_attack_is_an_error_and_the_process_lives() -> None:
    for depth in (400, 1000, 20_000):
        with pytest.raises(RecordError, match="nested deeper"):
            MSGPackSerializer.loads(nested_tuples(depth))


def test_without_the_caps_the_attack_is_real() -> None:
    # In a process of its own. If hivemind repairs it, this fails and the caps may be reconsidered.
    program = (
        "import sys; from hivemind.utils.serializer import MSGPackSerializer\n"
        "try:\n    MSGPackSerializer.loads(sys.stdin.buffer.read())\n"
        "except ValueError:\n    print('refused')\n"
    )
    attack = nested_tuples(20_000)
    outcome = subprocess.run([sys.executable, "-c", program], input=attack, capture_output=True, timeout=120)
    assert outcome.returncode != 0
    assert b"refused" not in outcome.stdout


def test_hiveminds_own_messages_pass_unchanged() -> None:
    dictionary = DictionaryDHTValue()
    dictionary.store(b"peer", b"value", 2e9)
    for value in (None, True, b"bytes", "text", [1, (2, (3.5,))], {"key": [1, 2]}, (), tuple(range(100))):
        assert MSGPackSerializer.loads(MSGPackSerializer.dumps(value)) == value
    again = MSGPackSerializer.loads(MSGPackSerializer.dumps(dictionary))
    assert isinstance(again, DictionaryDHTValue)
    assert dict(again.items()) == dict(dictionary.items())


def test_a_dictionary_of_many_peers_passes() -> None:
    dictionary = DictionaryDHTValue()
    for number in range(200):
        dictionary.store(number.to_bytes(34, "big"), bytes(4000), 2e9 + number)
    assert len(MSGPackSerializer.loads(MSGPackSerializer.dumps(dictionary))) == 200


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"\x91" * (MAX_DEPTH + 1) + b"\xc0", "nested deeper"),
        (b"\x81\xa1k" * (MAX_DEPTH + 1) + b"\xc0", "nested deeper"),
        (msgpack.packb(bytes(MAX_MESSAGE_BYTES)), "at most 1048576"),
        (msgpack.packb([None] * MAX_ITEMS), "items"),
        (b"\xdd\xff\xff\xff\xff", "too early"),
        (b"\xdf\xff\xff\xff\xff", "too early"),
        (b"\xc6\xff\xff\xff\xff", "too early"),
        (msgpack.packb(msgpack.ExtType(0x41, b"")), "extension type 65"),
        (msgpack.packb(msgpack.Timestamp(1)), "extension type -1"),
        (b"\xc1", "not msgpack"),
        (b"", "too early"),
        (b"\xc0\xc0", "left over"),
    ],
)
def test_what_exceeds_a_cap_is_refused(message: bytes, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        MSGPackSerializer.loads(message)


def test_the_deepest_allowed_message_passes() -> None:
    value: object = None
    for _ in range(MAX_DEPTH):
        value = [value]
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps(value)) == value


def test_hardening_twice_is_hardening_once() -> None:
    installed = MSGPackSerializer.loads.__func__
    harden_msgpack()
    assert MSGPackSerializer.loads.__func__ is installed


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.floats(allow_nan=False, width=32)
    | st.text()
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text() | st.binary(), inner, max_size=20),
    max_leaves=60,
)


@unhurried
@given(values)
def test_every_value_hivemind_can_send_within_the_caps_passes_the_scan(value: object) -> None:
    packed = MSGPackSerializer.dumps(value)
    try:
        check_msgpack(packed, KNOWN)
    except RecordError as error:
        assert "nested deeper" in str(error)
    else:
        assert MSGPackSerializer.loads(packed) == value


@unhurried
@given(st.binary())
def test_what_the_scan_passes_the_decoder_reads_to_the_end(blob: bytes) -> None:
    try:
        check_msgpack(blob, frozenset())
    except RecordError:
        return
    with contextlib.suppress(TypeError):  # a list for a map key: well-formed, but no Python dictionary
        msgpack.unpackb(blob, raw=True, strict_map_key=False)


@unhurried
@given(st.binary())
def test_any_bytes_unpack_or_are_an_error_hivemind_handles(blob: bytes) -> None:
    try:
        MSGPackSerializer.loads(blob)
    except Exception as error:
        assert isinstance(error, ValueError | TypeError | msgpack.UnpackException)


@unhurried
@given(st.binary())
def test_any_bytes_unpack_plainly_or_are_a_record_error(blob: bytes) -> None:
    try:
        unpack_plain(blob, max_bytes=50)
    except RecordError:
        return
    assert len(blob) <= 50

"""Caps on msgpack from strangers, installed before any DHT starts.

hivemind unpacks nested extension types by recursion (serializer.py:58): 2.8 kB from any remote peer end the
process. Every message is therefore scanned, without recursion, before hivemind's own decoder sees it.

What this does not stop: a peer may still send many messages of the allowed size.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import msgpack
from hivemind.dht.protocol import DHTProtocol
from hivemind.utils.serializer import MSGPackSerializer

from dht_config.errors import RecordError

MAX_MESSAGE_BYTES = 1024 * 1024
MAX_DEPTH = 16
MAX_ITEMS = 64 * 1024
"""A megabyte may hold a million one-byte items; this many are scanned in about 30 ms."""

_INSTALLED_MARK = "_p2p_trainer_caps_installed"
_LATEST_EXPIRATION = 1e12

# First byte -> (bytes of the length that follows, kind). Lengths count bytes for "blob" and "ext", items for
# "array", pairs for "map". Source: the msgpack specification, section "Formats".
_VARIABLE = {
    0xC4: (1, "blob"),
    0xC5: (2, "blob"),
    0xC6: (4, "blob"),
    0xC7: (1, "ext"),
    0xC8: (2, "ext"),
    0xC9: (4, "ext"),
    0xD9: (1, "blob"),
    0xDA: (2, "blob"),
    0xDB: (4, "blob"),
    0xDC: (2, "array"),
    0xDD: (4, "array"),
    0xDE: (2, "map"),
    0xDF: (4, "map"),
}
_FIXED_BYTES = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FIXED_BYTES |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED_EXT_BYTES = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_LENGTH_FORMATS = {1: ">B", 2: ">H", 4: ">I"}


def harden_msgpack() -> None:
    """Make ``MSGPackSerializer.loads`` refuse what is too big, too deep or of unknown extension types.

    The refusal is a RecordError, which is a ValueError: hivemind answers the RPC with an error. Call it
    before any DHT starts, once in each process; a second call does nothing.
    """
    if getattr(MSGPackSerializer, _INSTALLED_MARK, False):
        return
    original = MSGPackSerializer.loads.__func__

    def loads(cls: Any, buf: bytes) -> object:
        check_msgpack(buf, frozenset(cls._ext_type_codes) | {cls._TUPLE_EXT_TYPE_CODE})
        return original(cls, buf)

    loads.__doc__ = original.__doc__
    MSGPackSerializer.loads = classmethod(loads)
    setattr(MSGPackSerializer, _INSTALLED_MARK, True)


def bound_found_expirations() -> None:
    """Make an answer to a DHT search finite in its expiration, so that no single peer can end the search.

    hivemind stops searching as soon as an answer expires late enough, and our searches ask for the latest there is
    (dht/node.py:841): a peer that claims infinity would hide everybody else's records. Idempotent.
    """
    if hasattr(DHTProtocol.call_find, _INSTALLED_MARK):
        return
    original = DHTProtocol.call_find

    async def call_find(self: Any, peer: Any, keys: Any) -> Any:
        found = await original(self, peer, keys)
        if found is None:
            return None
        return {
            key: (value and replace(value, expiration_time=min(value.expiration_time, _LATEST_EXPIRATION)), nearest)
            for key, (value, nearest) in found.items()
        }

    setattr(call_find, _INSTALLED_MARK, True)
    DHTProtocol.call_find = call_find


def unpack_plain(blob: bytes, max_bytes: int) -> Any:
    """Unpack a remote message that may hold no extension types; arrays become tuples.

    It needs no scan: without extension types the decoder does not recurse, and msgpack itself stops at 512
    levels.

    Raises: RecordError for anything but one well-formed msgpack object of at most ``max_bytes``.
    """
    if len(blob) > max_bytes:
        raise RecordError(f"{len(blob)} bytes, at most {max_bytes} are allowed")
    try:
        return msgpack.unpackb(blob, use_list=False, raw=False, strict_map_key=True, ext_hook=_refuse_extension)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise RecordError(f"not acceptable msgpack: {error}") from None


def _refuse_extension(code: int, data: bytes) -> None:
    raise RecordError(f"msgpack extension type {code} is not allowed")


def check_msgpack(buf: bytes, extension_types: frozenset[int]) -> None:
    """Walk one msgpack object, extension bodies included, and refuse what exceeds the caps.

    :param extension_types: codes whose bodies are msgpack again; any other extension is refused.
    Raises: RecordError.
    """
    size = len(buf)
    if size > MAX_MESSAGE_BYTES:
        raise RecordError(f"msgpack of {size} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    position, items = 0, 0
    open_items = [1]  # how many objects each enclosing container still expects
    while open_items:
        if open_items[-1] == 0:
            open_items.pop()
            continue
        open_items[-1] -= 1
        items += 1
        if items > MAX_ITEMS:
            raise RecordError(f"msgpack of more than {MAX_ITEMS} items")
        if position >= size:
            raise RecordError("msgpack ends too early")
        kind, length, position = _header(buf, position)
        if kind == "blob":
            position += length
            if position > size:
                raise RecordError("msgpack ends too early")
            continue
        if kind == "ext":
            if position + 1 + length > size:
                raise RecordError("msgpack ends too early")
            code = int.from_bytes(buf[position : position + 1], "big", signed=True)
            if code not in extension_types:
                raise RecordError(f"msgpack extension type {code} is not allowed")
            position += 1
            length = 1  # the body is one object; the decoder itself refuses bytes left over
        if length:
            open_items.append(length)
            if len(open_items) > MAX_DEPTH + 1:
                raise RecordError(f"msgpack nested deeper than {MAX_DEPTH}")
    if position != size:
        raise RecordError("msgpack has bytes left over")


def _header(buf: bytes, position: int) -> tuple[str, int, int]:
    """(kind, length, position after the header); a fixed-size scalar is a "blob" of its own bytes."""
    first = buf[position]
    position += 1
    if first <= 0x7F or first >= 0xE0:
        return "blob", 0, position
    if first <= 0x8F:
        return "array", 2 * (first & 0x0F), position
    if first <= 0x9F:
        return "array", first & 0x0F, position
    if first <= 0xBF:
        return "blob", first & 0x1F, position
    if first in _FIXED_BYTES:
        return "blob", _FIXED_BYTES[first], position
    if first in _FIXED_EXT_BYTES:
        return "ext", _FIXED_EXT_BYTES[first], position
    if first not in _VARIABLE:
        raise RecordError("not msgpack")
    length_bytes, kind = _VARIABLE[first]
    end = position + length_bytes
    if end > len(buf):
        raise RecordError("msgpack ends too early")
    (length,) = struct.unpack_from(_LENGTH_FORMATS[length_bytes], buf, position)
    if kind == "map":
        return "array", 2 * length, end
    return kind, length, end

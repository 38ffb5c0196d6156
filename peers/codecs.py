"""How values travel: lossless, or in a fraction of the bytes, behind one small interface.

==========  ===========================================================  ===================
codec       body, everything little endian                               bytes per parameter
==========  ===========================================================  ===================
float32     the values                                                   4
float16     the values, saturated at 65504                               2
int8        a float32 scale for each block of 256, then all levels       1.016
int4        the same with levels of four bits, two a byte                0.516
sparse      for each chunk of 4096: two float32 magnitudes, positions    0.029
            of 12 bits, codes of 2 bits
==========  ===========================================================  ===================

Encoding is done once, by one machine; its bytes may depend on that machine (division, reductions and the choice among
equal magnitudes do), so whoever needs the values that the others get decodes its own bytes. Decoding gives the same
bits everywhere: at most one float32 multiplication an element, no sum, nothing fused. Scales are never subnormal, so
that a thread which flushes subnormals to zero decodes the same too.

A body comes from a remote peer. One that ``encode`` could not have written raises MalformedBody before anything but
the result's own ``4 * size`` bytes and a few slabs was allocated. What this does not stop: a well-formed body with
values that no honest peer has; whoever receives it checks magnitudes as well.

What a lossy codec leaves out of a contribution stays in the sender's snapshot (``contribution.py``); what it leaves
out of an average its reducer keeps (``residual.py``).

Held-out loss at equal samples, ``python tests/benchmarks/learning.py --quick --rounds 400 --seeds 9 --compare codec``
(135 k parameters, 8 peers up to 20 times apart, outer optimizer 0.7 / 0.6; averages travel like contributions, with
sparse as int8): float32 1.700, standard deviation over nine seeds 0.017. Seed by seed int8 comes to 0.9995 of it
(standard error 0.0017), int4 to 0.9983 (0.0023), sparse, three seeds, to 1.019 (0.006). For sparse the literature's
feedback was worse with the one seed that was tried, where ours gave 1.736 and float32 1.692: keeping only 0.95 of what
is left out 1.753, 0.8 of it 1.804; a residual apart from the parameters, fading by 0.95 a round, 1.761, and 1.767 with
plain averaging, as SparseLoCo has it. So the sender keeps all of it, where it trains. Not measured: bigger models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

SLAB_ELEMENTS = 1 << 18
"""Lossy codecs work through slabs of this many values: temporaries stay in the cache and do not grow with the part."""
LARGEST = float(np.finfo(np.float32).max)
SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)
LARGEST_FLOAT16 = 65504.0

_FLOAT32 = np.dtype("<f4")
_FLOAT16 = np.dtype("<f2")
_FLOAT16_EXPONENT = 0x7C00


class MalformedBody(ValueError):
    """Bytes that are no encoding of so many values; the text says why."""


class Codec(Protocol):
    """Turns float32 values into bytes and back. Stateless: one object serves every part and thread."""

    @property
    def name(self) -> str:
        """What manifests and messages call it."""

    @property
    def lossless(self) -> bool:
        """Whether ``decode(encode(x))`` is x, bit for bit."""

    def encoded_bytes(self, size: int) -> int:
        """The exact length of every encoding of ``size`` values."""

    def encode(self, values: torch.Tensor) -> bytes | memoryview:
        """Encode float32 ``(size,)`` on the CPU; ``values`` is not changed. May differ among machines.

        A lossless codec may give the values' own memory: whoever encodes does not change them while the body is used.

        :raises ValueError: another shape, dtype or device, or a value that is NaN or inf
        """

    def decode(self, body: bytes | memoryview, size: int) -> torch.Tensor:
        """A float32 tensor ``(size,)`` on the CPU, the same bits on every machine, finite.

        A lossless codec may give the body's own memory: whoever decodes writes neither to it nor to the values.

        :raises MalformedBody: a body that ``encode`` does not write for ``size`` values
        """


@dataclass(frozen=True, slots=True)
class Float32:
    """Nothing is lost; also the sign of a zero is kept. Nothing is copied either, except on a big-endian machine."""

    name: ClassVar[str] = "float32"
    lossless: ClassVar[bool] = True

    def encoded_bytes(self, size: int) -> int:
        return _FLOAT32.itemsize * size

    def encode(self, values: torch.Tensor) -> memoryview:
        return _encodable(values).numpy().astype(_FLOAT32, copy=False).view(np.uint8).data

    def decode(self, body: bytes | memoryview, size: int) -> torch.Tensor:
        raw = _body(self, body, size).view(_FLOAT32)
        # torch takes aligned, writable memory only.
        values = torch.from_numpy(raw.astype(np.float32, copy=not (raw.flags.aligned and raw.flags.writeable)))
        if not _all_finite(values):
            raise MalformedBody("a value that is not finite")
        return values


@dataclass(frozen=True, slots=True)
class Float16:
    """IEEE half precision: relative error at most 2**-11, absolute 2**-25 below 2**-14; saturated beyond 65504."""

    name: ClassVar[str] = "float16"
    lossless: ClassVar[bool] = False

    def encoded_bytes(self, size: int) -> int:
        return _FLOAT16.itemsize * size

    def encode(self, values: torch.Tensor) -> bytes:
        halves = _encodable(values).clamp(-LARGEST_FLOAT16, LARGEST_FLOAT16).to(torch.float16)
        return halves.numpy().astype(_FLOAT16, copy=False).tobytes()

    def decode(self, body: bytes | memoryview, size: int) -> torch.Tensor:
        halves = _body(self, body, size).view(_FLOAT16).astype(np.float16)
        if ((halves.view(np.uint16) & _FLOAT16_EXPONENT) == _FLOAT16_EXPONENT).any():
            raise MalformedBody("a value that is not finite")
        return torch.from_numpy(halves).to(torch.float32)  # exact: every float16 is a normal float32 or zero


@dataclass(frozen=True, slots=True)
class Blockwise:
    """Whole numbers of ``bits`` bits times one scale a block, the largest magnitude over the largest level.

    The error is at most half a scale (absmax / 254 for 8 bits, absmax / 14 for 4), and at most 2**-127 in blocks so
    small that their scale would be subnormal.
    Source: Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861, section 2.1, with
    linear levels instead of its dynamic ones.
    """

    name: str
    bits: int
    """8 or 4."""
    block: ClassVar[int] = 256
    lossless: ClassVar[bool] = False

    @property
    def _top(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def _largest_scale(self) -> float:
        """Times the largest level it is still finite."""
        return float(np.nextafter(np.float32(LARGEST / self._top), np.float32(0)))

    def encoded_bytes(self, size: int) -> int:
        return _FLOAT32.itemsize * math.ceil(size / self.block) + math.ceil(size * self.bits / 8)

    def encode(self, values: torch.Tensor) -> bytes:
        values = _encodable(values)
        size = values.numel()
        scales = np.empty(math.ceil(size / self.block), dtype=_FLOAT32)
        levels = np.empty(math.ceil(size * self.bits / 8), dtype=np.uint8)
        for start, stop, width in _slabs(size, self.block):
            rows = values[start:stop].view(-1, width)
            low, high = torch.aminmax(rows, dim=1)
            absmax = torch.maximum(high, low.neg_())
            divisors = torch.div(absmax, self._top).clamp_(SMALLEST_NORMAL, self._largest_scale)
            quotients = torch.div(rows, divisors[:, None])
            slab = quotients.round_().clamp_(-self._top, self._top).to(torch.int8).view(-1).numpy()
            block = start // self.block
            scales[block : block + len(rows)] = torch.where(absmax > 0, divisors, 0.0).numpy()
            if self.bits == 8:
                levels[start:stop] = slab.view(np.uint8)
            else:
                levels[start // 2 : (stop + 1) // 2] = _pack_nibbles(slab)
        return scales.tobytes() + levels.tobytes()

    def decode(self, body: bytes | memoryview, size: int) -> torch.Tensor:
        raw = _body(self, body, size)
        blocks = math.ceil(size / self.block)
        scales = torch.from_numpy(_magnitudes(raw[: _FLOAT32.itemsize * blocks], self._largest_scale))
        levels = raw[_FLOAT32.itemsize * blocks :]
        result = torch.empty(size)
        floats = result.numpy()
        for start, stop, width in _slabs(size, self.block):
            if self.bits == 8:
                slab = levels[start:stop].view(np.int8)
                if slab.min() < -self._top:
                    raise MalformedBody("a level out of range")
                floats[start:stop] = slab
            else:
                floats[start:stop] = _unpack_nibbles(levels[start // 2 : (stop + 1) // 2], stop - start)
            rows = result[start:stop].view(-1, width)
            block = start // self.block
            rows.mul_(scales[block : block + len(rows), None])
        return result


def _pack_nibbles(levels: npt.NDArray[np.int8]) -> Bytes:
    """Levels from -7 to 7, plus 8, two a byte, the first in the low half; an odd one out is paired with level 0."""
    nibbles = levels.view(np.uint8) + np.uint8(8)  # wraps round for negative levels
    if len(nibbles) % 2:
        nibbles = np.append(nibbles, np.uint8(8))
    packed: Bytes = nibbles[0::2] | (nibbles[1::2] << np.uint8(4))
    return packed


_NIBBLES = np.arange(256, dtype=np.uint8)[:, None] >> np.array([0, 4], dtype=np.uint8) & np.uint8(15)
_NIBBLES_VALID = (_NIBBLES > 0).all(axis=1)
_LEVEL_PAIRS = (_NIBBLES.astype(np.float32) - np.float32(8)).view(np.uint64)[:, 0]
"""For each byte its two levels as float32, as one item, so that looking them up is one copy."""


def _unpack_nibbles(packed: Bytes, size: int) -> Floats:
    """The ``size`` levels that ``_pack_nibbles`` packed. :raises MalformedBody: a level or padding it does not write"""
    if not _NIBBLES_VALID[packed].all():
        raise MalformedBody("a level out of range")
    if size % 2 and packed[-1] >> 4 != 8:
        raise MalformedBody("padding that is not zero")
    levels: Floats = _LEVEL_PAIRS[packed].view(np.float32)
    return levels[:size]


@dataclass(frozen=True, slots=True)
class Sparse:
    """The largest 64 of every 4096 values, each as its sign and one of two magnitudes. For use with error feedback.

    The two magnitudes are the means of the upper and the lower half of the 64. If some of the 64 are zero they are
    the lower half, so that nothing is made of nothing. A last, shorter chunk keeps one value in 64, rounded up.
    Magnitudes whose mean is subnormal are sent as zero. Positions are sent in ascending order.

    Source: SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706), algorithm 1: top-k of chunks of 4096, 12-bit positions,
    2-bit values, error feedback with beta 0.95. There the chunks of a matrix are 64 x 64 squares and the quantiser a
    statistical one over a tensor; stretches of the flat fragment and the two means are ours.
    """

    name: ClassVar[str] = "sparse"
    lossless: ClassVar[bool] = False
    chunk: ClassVar[int] = 4096
    kept_one_in: ClassVar[int] = 64

    def _kept(self, width: int) -> int:
        return math.ceil(width / self.kept_one_in)

    def _row_bytes(self, width: int) -> int:
        kept = self._kept(width)
        return 2 * _FLOAT32.itemsize + math.ceil(kept * 12 / 8) + math.ceil(kept * 2 / 8)

    def encoded_bytes(self, size: int) -> int:
        whole, rest = divmod(size, self.chunk)
        return whole * self._row_bytes(self.chunk) + (self._row_bytes(rest) if rest else 0)

    def encode(self, values: torch.Tensor) -> bytes:
        values = _encodable(values)
        return b"".join(
            self._encode_rows(values[start:stop].view(-1, width)).tobytes()
            for start, stop, width in _slabs(values.numel(), self.chunk)
        )

    def _encode_rows(self, rows: torch.Tensor) -> Bytes:
        """``(chunks, width)`` values as ``(chunks, row bytes)``."""
        count, width = rows.shape
        kept = self._kept(width)
        strengths, chosen = rows.abs().topk(kept, dim=1)  # largest first
        nonzero = (strengths > 0).sum(dim=1, keepdim=True)
        upper_count = torch.where(nonzero == kept, (kept + 1) // 2, nonzero)
        upper = torch.arange(kept) < upper_count
        # In float64, where 64 times the largest float32 is finite.
        doubles = strengths.to(torch.float64)
        high = (doubles * upper).sum(dim=1) / upper_count[:, 0].clamp(min=1)
        low = (doubles * ~upper).sum(dim=1) / (kept - upper_count[:, 0]).clamp(min=1)
        magnitudes = torch.stack((low, high), dim=1).to(torch.float32)
        magnitudes = torch.where(magnitudes >= SMALLEST_NORMAL, magnitudes, 0.0)
        codes = upper.to(torch.uint8) | ((rows.gather(1, chosen) < 0).to(torch.uint8) << 1)
        positions, order = chosen.sort(dim=1)
        return np.concatenate(
            (
                magnitudes.numpy().astype(_FLOAT32, copy=False).view(np.uint8).reshape(count, -1),
                _pack_12_bits(positions.numpy()),
                _pack_2_bits(codes.gather(1, order).numpy()),
            ),
            axis=1,
        )

    def decode(self, body: bytes | memoryview, size: int) -> torch.Tensor:
        raw = _body(self, body, size)
        result = torch.zeros(size)
        floats = result.numpy()
        offset = 0
        for start, stop, width in _slabs(size, self.chunk):
            length = (stop - start) // width * self._row_bytes(width)
            self._decode_rows(raw[offset : offset + length], floats[start:stop].reshape(-1, width))
            offset += length
        return result

    def _decode_rows(self, raw: Bytes, out: Floats) -> None:
        """Write the values of some chunks into ``out``, zeros ``(chunks, width)``."""
        count, width = out.shape
        kept = self._kept(width)
        rows = raw.reshape(count, -1)
        head, tail = 2 * _FLOAT32.itemsize, 2 * _FLOAT32.itemsize + math.ceil(kept * 12 / 8)
        magnitudes = _magnitudes(np.ascontiguousarray(rows[:, :head]), LARGEST).reshape(count, 2)
        positions = _unpack_12_bits(rows[:, head:tail], kept)
        codes = _unpack_2_bits(rows[:, tail:], kept)
        if (positions[:, -1] >= width).any():
            raise MalformedBody("a position out of range")
        if (positions[:, 1:] <= positions[:, :-1]).any():
            raise MalformedBody("positions that do not ascend")
        values = np.take_along_axis(magnitudes, (codes & 1).astype(np.intp), axis=1)
        np.negative(values, out=values, where=codes > 1)
        np.put_along_axis(out, positions.astype(np.intp), values, axis=1)


def _pack_12_bits(numbers: npt.NDArray[np.int64]) -> Bytes:
    """``(rows, n)`` numbers below 4096 as ``(rows, ceil(1.5 n))`` bytes, two in three bytes, low bits first."""
    rows, count = numbers.shape
    pairs = np.zeros((rows, (count + 1) // 2, 2), dtype=np.int64)
    pairs.reshape(rows, -1)[:, :count] = numbers
    packed = np.empty((rows, pairs.shape[1], 3), dtype=np.uint8)
    packed[:, :, 0] = pairs[:, :, 0] & 255
    packed[:, :, 1] = pairs[:, :, 0] >> 8 | (pairs[:, :, 1] & 15) << 4
    packed[:, :, 2] = pairs[:, :, 1] >> 4
    return packed.reshape(rows, -1)[:, : math.ceil(count * 12 / 8)]


def _unpack_12_bits(packed: Bytes, count: int) -> npt.NDArray[np.uint16]:
    """What ``_pack_12_bits`` packed, ``(rows, count)``. :raises MalformedBody: padding that is not zero"""
    rows = len(packed)
    triples = np.zeros((rows, (count + 1) // 2, 3), dtype=np.uint16)
    triples.reshape(rows, -1)[:, : packed.shape[1]] = packed
    numbers = np.empty((rows, triples.shape[1], 2), dtype=np.uint16)
    numbers[:, :, 0] = triples[:, :, 0] | (triples[:, :, 1] & 15) << 8
    numbers[:, :, 1] = triples[:, :, 1] >> 4 | triples[:, :, 2] << 4
    flat = numbers.reshape(rows, -1)
    _check_padding(flat[:, count:])
    return flat[:, :count]


def _pack_2_bits(codes: Bytes) -> Bytes:
    """``(rows, n)`` numbers below 4 as ``(rows, ceil(n / 4))`` bytes, low bits first."""
    rows, count = codes.shape
    fours = np.zeros((rows, (count + 3) // 4, 4), dtype=np.uint8)
    fours.reshape(rows, -1)[:, :count] = codes
    packed: Bytes = np.bitwise_or.reduce(fours << np.array([0, 2, 4, 6], dtype=np.uint8), axis=2)
    return packed


def _unpack_2_bits(packed: Bytes, count: int) -> Bytes:
    """What ``_pack_2_bits`` packed, ``(rows, count)``. :raises MalformedBody: padding that is not zero"""
    codes: Bytes = packed[:, :, None] >> np.array([0, 2, 4, 6], dtype=np.uint8) & np.uint8(3)
    flat = codes.reshape(len(packed), -1)
    _check_padding(flat[:, count:])
    return flat[:, :count]


def _check_padding(padding: npt.NDArray[np.uint16] | Bytes) -> None:
    if padding.any():
        raise MalformedBody("padding that is not zero")


def _slabs(size: int, block: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, width of the blocks within) of stretches of whole blocks, then of the rest as one short block."""
    whole = size - size % block
    for start in range(0, whole, SLAB_ELEMENTS):
        yield start, min(start + SLAB_ELEMENTS, whole), block
    if whole < size:
        yield whole, size, size - whole


def _encodable(values: torch.Tensor) -> torch.Tensor:
    """The values without their graph, contiguous. :raises ValueError: what no codec takes"""
    if values.dim() != 1 or values.dtype != torch.float32 or values.device.type != "cpu":
        shape = tuple(values.shape)
        raise ValueError(f"values are {values.dtype} {shape} on {values.device}, not torch.float32 (size,) on cpu")
    values = values.detach().contiguous()
    if not _all_finite(values):
        raise ValueError("a value that is not finite cannot be encoded")
    return values


def _all_finite(values: torch.Tensor) -> bool:
    """In one pass and without a temporary; extremes of what holds a NaN are NaN."""
    return not values.numel() or all(math.isfinite(float(extreme)) for extreme in torch.aminmax(values))


def _body(codec: Codec, body: bytes | memoryview, size: int) -> Bytes:
    """The body as bytes, not copied. :raises MalformedBody: wrong length"""
    if size < 0:
        raise ValueError(f"size is {size}, less than 0")
    raw = np.frombuffer(body, dtype=np.uint8)
    expected = codec.encoded_bytes(size)
    if len(raw) != expected:
        raise MalformedBody(f"{len(raw)} bytes instead of {expected} for {size} values as {codec.name}")
    return raw


def _magnitudes(raw: Bytes, largest: float) -> Floats:
    """Scales and other float32 that are +0 or normal, positive and at most ``largest``; a copy.

    Looked at as integers: whether a comparison of floats takes a subnormal for zero depends on the thread's mode.
    """
    values = raw.reshape(-1).view(_FLOAT32).astype(np.float32)
    bits = values.view(np.uint32)
    lowest, highest = np.array([SMALLEST_NORMAL, largest], dtype=np.float32).view(np.uint32)
    if not ((bits == 0) | ((bits >= lowest) & (bits <= highest))).all():
        raise MalformedBody("a scale that is negative, subnormal, too large or not finite")
    return values


_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (Float32(), Float16(), Blockwise(name="int8", bits=8), Blockwise(name="int4", bits=4), Sparse())
}
CODEC_NAMES = tuple(_CODECS)
"""From the largest body to the smallest."""


def get_codec(name: str) -> Codec:
    """The codec of that name. :raises ValueError: there is none"""
    try:
        return _CODECS[name]
    except KeyError:
        raise ValueError(f"codec is {name!r}; it can be one of {', '.join(CODEC_NAMES)}") from None

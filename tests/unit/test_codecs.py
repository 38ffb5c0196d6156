"""Codecs: what is lost is bounded, what is malformed is refused, what is decoded is the same everywhere."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.codecs import (
    CODEC_NAMES,
    LARGEST,
    SLAB_ELEMENTS,
    SMALLEST_NORMAL,
    Codec,
    MalformedBody,
    get_codec,
)

each_codec = pytest.mark.parametrize("codec", [get_codec(name) for name in CODEC_NAMES], ids=CODEC_NAMES)
each_blockwise = pytest.mark.parametrize(("name", "top"), [("int8", 127), ("int4", 7)])
SIZES = (0, 1, 2, 3, 63, 64, 65, 129, 255, 256, 257, 4095, 4096, 4097, 3 * 4096 + 65, SLAB_ELEMENTS + 4096 + 257)
BLOCK, CHUNK = 256, 4096


def made(kind: str, size: int, seed: int) -> torch.Tensor:
    """Values of one character, float32 ``(size,)``."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal(size)
    values = {
        "normal": normal,
        "tiny": normal * 1e-6,
        "wide": np.sign(normal) * 10 ** (random.uniform(-44, 38, size)),
        "mostly zero": normal * (random.random(size) < 0.01),
        "zero": np.zeros(size),
        "equal": np.full(size, normal[0] if size else 0.0),
        "equal magnitudes": np.sign(normal) * 0.1,
        "subnormal": normal * 1e-41,
        "huge": normal.clip(-3, 3) * 1e38,
        "largest": np.sign(normal) * LARGEST,
        "negative zero": np.full(size, -0.0),
    }[kind]
    return torch.from_numpy(values.astype(np.float32))


KINDS = (
    "normal", "tiny", "wide", "mostly zero", "zero", "equal", "equal magnitudes", "subnormal", "huge", "largest",
    "negative zero",
)  # fmt: skip

some_values = st.one_of(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=80).map(
        lambda values: torch.tensor(values, dtype=torch.float32)
    ),
    st.builds(made, st.sampled_from(KINDS), st.integers(0, 9000), st.integers(0, 2**32 - 1)),
)


def bits(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()


def round_trip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    before = bits(values)
    body = codec.encode(values)
    assert bits(values) == before, "encoding changed the values"
    assert len(body) == codec.encoded_bytes(values.numel())
    decoded = codec.decode(body, values.numel())
    assert decoded.dtype == torch.float32 and decoded.shape == values.shape
    assert bool(torch.isfinite(decoded).all())
    return decoded


def blocks_of(values: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    yield from values.split(width) if values.numel() else ()


# The interface


def test_codecs_are_found_by_name_and_an_unknown_name_is_told_the_choice() -> None:
    assert CODEC_NAMES == ("float32", "float16", "int8", "int4", "sparse")
    assert [get_codec(name).name for name in CODEC_NAMES] == list(CODEC_NAMES)
    assert [name for name in CODEC_NAMES if get_codec(name).lossless] == ["float32"]
    with pytest.raises(ValueError, match="'zip'; it can be one of float32, float16, int8, int4, sparse"):
        get_codec("zip")


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter"), [("float32", 4), ("float16", 2), ("int8", 1.05), ("int4", 0.56), ("sparse", 0.06)]
)
def test_bytes_per_parameter(name: str, bytes_per_parameter: float) -> None:
    for size in (4096, 100_000, 1_000_003):
        assert get_codec(name).encoded_bytes(size) <= bytes_per_parameter * size


@each_codec
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["normal", "wide", "mostly zero"])
def test_any_size_goes_there_and_back(codec: Codec, size: int, kind: str) -> None:
    round_trip(codec, made(kind, size, seed=size))


@each_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 255, 4096, 4999])
def test_values_that_are_not_finite_are_not_encoded(codec: Codec, bad: float, place: int) -> None:
    values = torch.ones(5000)
    values[place] = bad
    with pytest.raises(ValueError, match="not finite"):
        codec.encode(values)


@each_codec
@pytest.mark.parametrize(
    "values", [torch.ones(2, 2), torch.tensor(1.0), torch.ones(4, dtype=torch.float64), torch.ones(4, device="meta")]
)
def test_another_shape_dtype_or_device_is_not_encoded(codec: Codec, values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"not torch\.float32"):
        codec.encode(values)


@each_codec
def test_strided_values_and_parameters_are_encoded_like_plain_ones(codec: Codec) -> None:
    values = made("normal", 1000, seed=1)
    body = codec.encode(values)
    assert codec.encode(torch.stack([values, values], dim=1)[:, 1]) == body
    assert codec.encode(values.clone().requires_grad_()) == body


@each_codec
def test_a_body_may_lie_anywhere_in_a_message_and_what_a_lossy_codec_makes_of_it_is_ones_own(codec: Codec) -> None:
    values = made("normal", 5001, seed=2)
    body = codec.encode(values)
    expected = bits(codec.decode(body, 5001))
    for shift in range(1, 5):
        message = bytearray(bytes(shift) + body)
        decoded = codec.decode(memoryview(message)[shift:], 5001)
        assert bits(decoded) == expected
        if not codec.lossless:
            message[:] = bytes(len(message))
            assert bits(decoded) == expected, "the result is a view of the message"
            decoded.add_(1.0)


@pytest.mark.skipif(sys.byteorder == "big", reason="has to be swapped there")
def test_float32_is_not_copied_on_either_side() -> None:
    codec, values = get_codec("float32"), made("normal", 5001, seed=2)
    body = codec.encode(values)
    assert np.frombuffer(body, dtype=np.uint8).ctypes.data == values.data_ptr()
    assert codec.decode(body, 5001).data_ptr() == values.data_ptr()
    assert bits(codec.decode(bytes(body), 5001)) == bits(values)


# What is lost


@given(some_values)
def test_float32_loses_nothing(values: torch.Tensor) -> None:
    assert bits(round_trip(get_codec("float32"), values)) == bits(values)


@given(some_values)
def test_float16_is_within_half_a_unit_and_saturates(values: torch.Tensor) -> None:
    decoded = round_trip(get_codec("float16"), values).double()
    wanted = values.double().clamp(-65504, 65504)
    allowed = torch.maximum(wanted.abs() * 2**-11, torch.tensor(2.0**-25, dtype=torch.float64))
    assert bool(((decoded - wanted).abs() <= allowed).all())


@each_blockwise
@given(values=some_values)
def test_blockwise_is_within_half_a_level_of_each_blocks_own_scale(name: str, top: int, values: torch.Tensor) -> None:
    decoded = round_trip(get_codec(name), values)
    for block, got in zip(blocks_of(values, BLOCK), blocks_of(decoded, BLOCK), strict=True):
        exact, absmax = block.double(), float(block.abs().max())
        rounding = absmax * 2**-22  # of the scale, the quotient and the product, a few units of 2**-24 each
        assert float((got.double() - exact).abs().max()) <= max(absmax / (2 * top) + rounding, 2**-127)


@given(some_values)
def test_sparse_keeps_the_largest_with_their_signs_and_nothing_else(values: torch.Tensor) -> None:
    decoded = round_trip(get_codec("sparse"), values)
    for chunk, got in zip(blocks_of(values, CHUNK), blocks_of(decoded, CHUNK), strict=True):
        kept = math.ceil(chunk.numel() / 64)
        support = got != 0
        assert int(support.sum()) <= kept
        assert bool((torch.sign(got) == torch.sign(chunk))[support].all())
        assert int(got.abs().unique().numel()) <= 3, "zero and two magnitudes"
        if bool(support.any()):
            left_out = chunk[~support].abs()
            if int(support.sum()) == kept and left_out.numel():
                assert float(left_out.max()) <= float(chunk[support].abs().min())
        top = chunk.abs().topk(kept).values
        if float(top[-1]) >= SMALLEST_NORMAL:
            assert int(support.sum()) == kept
        elif bool((top[top > 0] >= SMALLEST_NORMAL).all()):
            assert torch.equal(support, chunk != 0), "with fewer values than places, all of them are kept"


def test_sparse_magnitudes_are_the_means_of_the_upper_and_lower_half() -> None:
    values = made("normal", CHUNK, seed=3)
    decoded = round_trip(get_codec("sparse"), values)
    order = values.abs().argsort(descending=True)
    for half in (order[:32], order[32:64]):
        mean = values[half].abs().double().mean()
        assert torch.allclose(decoded[half].abs().double(), mean, rtol=1e-6)
        assert torch.equal(torch.sign(decoded[half]), torch.sign(values[half]))
    assert int((decoded != 0).sum()) == 64


def test_sparse_makes_nothing_of_nothing() -> None:
    values = torch.zeros(CHUNK)
    values[[5, 70, 4000]] = torch.tensor([1.0, -2.0, 3.0])
    decoded = round_trip(get_codec("sparse"), values)
    assert decoded.nonzero().flatten().tolist() == [5, 70, 4000]
    assert decoded[[5, 70, 4000]].tolist() == [2.0, -2.0, 2.0]


# The bytes


def test_the_formats_are_pinned() -> None:
    """Peers of other releases and machines wrote these: a change here is a change of protocol."""
    values = torch.tensor([127.0, -63.0, 0.0])
    assert get_codec("float32").encode(values).hex() == "0000fe4200007cc200000000"
    assert get_codec("float16").encode(values).hex() == "f057e0d30000"
    assert get_codec("int8").encode(values).hex() == "0000803f7fc100"
    # Scale 127 / 7; levels 7, -3 and 0 plus 8 in nibbles, then the padding.
    assert get_codec("int4").encode(values).hex() == "922491415f88"
    # One of three is kept: no lower half, position 0, code 1 (upper, positive).
    assert get_codec("sparse").encode(values).hex() == "000000000000fe42000001"
    # Three of 192: the upper half is two, the lower one.
    values = torch.zeros(192)
    values[[1, 100, 191]] = torch.tensor([-3.0, 2.0, -4.0])
    assert get_codec("sparse").encode(values).hex() == "0000004000006040014006bf0033"


# What is malformed


@each_codec
@pytest.mark.parametrize("size", [0, 1, 257, 5000])
def test_a_body_of_another_length_is_refused(codec: Codec, size: int) -> None:
    body = bytes(codec.encode(made("normal", size, seed=4)))
    for wrong in (body + b"\0", body * 2 + b"\0", body[:-1] if body else b"\0\0"):
        with pytest.raises(MalformedBody, match="bytes instead of"):
            codec.decode(wrong, size)
    with pytest.raises(ValueError):
        codec.decode(body, size + 5000)
    with pytest.raises(ValueError, match="size is -1"):
        codec.decode(b"", -1)


@each_codec
def test_a_wrong_length_costs_no_memory(codec: Codec) -> None:
    with pytest.raises(MalformedBody):
        codec.decode(bytes(100), 2**50)


@pytest.mark.parametrize("name", ["float32", "float16"])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    dtype = {"float32": "<f4", "float16": "<f2"}[name]
    body = np.array([1.0, bad, 2.0], dtype=dtype).tobytes()
    with pytest.raises(MalformedBody, match="not finite"):
        get_codec(name).decode(body, 3)


@pytest.mark.parametrize("name", ["int8", "int4", "sparse"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -0.0, 1e-45, 1.1e-38])
def test_scales_that_are_negative_subnormal_or_not_finite_are_refused(name: str, scale: float) -> None:
    codec = get_codec(name)
    body = np.array([scale], dtype="<f4").tobytes() + codec.encode(torch.ones(10))[4:]
    with pytest.raises(MalformedBody, match="scale"):
        codec.decode(body, 10)


@each_blockwise
def test_a_scale_that_would_overflow_is_refused(name: str, top: int) -> None:
    codec = get_codec(name)
    levels = codec.encode(torch.ones(256))[4:]
    largest = np.nextafter(np.float32(LARGEST / top), np.float32(0))
    decoded = codec.decode(np.array([largest], dtype="<f4").tobytes() + levels, 256)
    assert bool(torch.isfinite(decoded).all())
    with pytest.raises(MalformedBody, match="too large"):
        codec.decode(np.array([largest * np.float32(1.001)], dtype="<f4").tobytes() + levels, 256)


@pytest.mark.parametrize(
    ("name", "size", "place", "byte", "reason"),
    [
        ("int8", 10, 5, 0x80, "level"),
        ("int4", 10, 5, 0x80, "level"),
        ("int4", 10, 5, 0x08, "level"),
        ("int4", 9, 8, 0x98, "padding"),
        ("sparse", 10, 8, 0x0A, "out of range"),
        ("sparse", 10, 9, 0x10, "padding"),
        ("sparse", 10, 10, 0x04, "padding"),
    ],
)
def test_levels_positions_and_padding_that_no_encoder_writes_are_refused(
    name: str, size: int, place: int, byte: int, reason: str
) -> None:
    codec = get_codec(name)
    body = bytearray(codec.encode(torch.arange(size, 0, -1, dtype=torch.float32)))
    codec.decode(body, size)
    body[place] = byte
    with pytest.raises(MalformedBody, match=reason):
        codec.decode(body, size)


@pytest.mark.parametrize("positions", [(7, 7), (9, 7)])
def test_positions_that_repeat_or_descend_are_refused(positions: tuple[int, int]) -> None:
    codec = get_codec("sparse")
    first, second = positions
    packed = (first | second << 12).to_bytes(3, "little")
    body = codec.encode(torch.ones(128))
    with pytest.raises(MalformedBody, match="ascend"):
        codec.decode(body[:8] + packed + body[11:], 128)


@each_codec
@settings(max_examples=200)
@given(data=st.data())
def test_any_bytes_give_finite_values_or_a_reason(codec: Codec, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([0, 1, 2, 65, 257, 300, 4097]))
    body = bytearray(codec.encode(made("normal", size, seed=size)))
    change = data.draw(st.sampled_from(["random", "flip", "cut", "extend", "noise"]))
    if change == "random":
        body = bytearray(data.draw(st.binary(max_size=2 * len(body) if len(body) < 600 else 100)))
    elif change == "cut":
        body = body[: data.draw(st.integers(0, len(body)))]
    elif change == "extend":
        body += data.draw(st.binary(max_size=9))
    elif change == "noise":
        random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        body = bytearray(random.integers(0, 256, len(body), dtype=np.uint8).tobytes())
    elif body:
        for _ in range(data.draw(st.integers(1, 8))):
            body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoded = codec.decode(bytes(body), size)
    except ValueError as error:
        assert str(error)
        return
    assert decoded.shape == (size,) and decoded.dtype == torch.float32
    assert bool(torch.isfinite(decoded).all())


# The same bits everywhere


DECODE_ALL = """
import hashlib, os, sys
import torch
from pathlib import Path
from peers.codecs import CODEC_NAMES, get_codec

folder, threads, flush = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "flush"
torch.set_num_threads(threads)
if flush and not torch.set_flush_denormal(True):
    print("no flush mode", file=sys.stderr)
wanted = os.environ.get("ATEN_CPU_CAPABILITY")
assert wanted is None or torch.backends.cpu.get_cpu_capability().lower() == wanted, "the capability was not taken"
digest = hashlib.sha256()
for file in sorted(folder.iterdir()):
    name, size = file.name.split(".")[:2]
    digest.update(get_codec(name).decode(file.read_bytes(), int(size)).numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of bodies of all codecs and kinds of values, named codec.size.kind."""
    folder = tmp_path_factory.mktemp("bodies")
    for name in CODEC_NAMES:
        for kind in KINDS:
            for size in (300, 70_001):
                body = get_codec(name).encode(made(kind, size, seed=size))
                (folder / f"{name}.{size}.{kind}").write_bytes(body)
    # Scales with all bits of the mantissa, which no encoder needs to have met: products that have to be rounded.
    random = np.random.default_rng(5)
    for name, width in (("int8", 1), ("int4", 2)):
        size = 100 * BLOCK
        scales = (10 ** random.uniform(-37.9, 36, 100)).astype("<f4")
        nibbles = random.integers(1, 16, (size // width, width)).astype(np.uint8)
        levels = nibbles[:, 0] | nibbles[:, 1] << 4 if width == 2 else random.integers(-127, 128, size).astype(np.int8)
        (folder / f"{name}.{size}.random").write_bytes(scales.tobytes() + levels.tobytes())
    return folder


def digest_here(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        name, size = file.name.split(".")[:2]
        digest.update(bits(get_codec(name).decode(file.read_bytes(), int(size))))
    return digest.hexdigest()


def test_decoding_does_not_depend_on_the_number_of_threads(bodies: Path) -> None:
    before = torch.get_num_threads()
    digests = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            digests.add(digest_here(bodies))
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("capability", "threads", "flush"),
    [("default", 1, "keep"), ("default", 2, "flush"), ("avx2", 2, "keep"), (None, 1, "flush")],
)
def test_decoding_does_not_depend_on_the_processor(
    bodies: Path, capability: str | None, threads: int, flush: str
) -> None:
    native = torch.backends.cpu.get_cpu_capability().lower()
    if capability == "avx2" and not native.startswith("avx"):
        pytest.skip(f"this processor has {native} only")
    environment = {key: value for key, value in os.environ.items() if key != "ATEN_CPU_CAPABILITY"}
    if capability is not None:
        environment["ATEN_CPU_CAPABILITY"] = capability
    child = subprocess.run(
        [sys.executable, "-c", DECODE_ALL, str(bodies), str(threads), flush],
        env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == digest_here(bodies)


def test_what_a_decoder_computes_is_one_multiplication_rounded_once() -> None:
    scale, levels = np.float32(0.1), np.arange(-127, 128)
    body = np.array([scale], dtype="<f4").tobytes() + levels.astype(np.int8).tobytes()
    exact = levels * float(scale)  # 24 bits times 7 bits fit a float64
    assert bits(get_codec("int8").decode(body, 255)) == exact.astype(np.float32).tobytes()

"""Tensor maps: the driver's rules, and the native decoder of what Python writes, of this format and the one before."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutjax import _ffi
from cutjax.runtime.launch import FORMAT, Call, Launch, TensorMap
from cutjax.runtime.tensor_map import ELEMENTS, Im2col

pytestmark = pytest.mark.versions

MAP = TensorMap(0, jnp.dtype(jnp.bfloat16), (4096, 512, 3), (8192, 4194304), (64, 128, 1))
IMAGES = TensorMap(
    0, np.dtype("f2"), (64, 14, 14, 8), (128, 1792, 25088), Im2col((-1, -1), (-1, -1), 64, 128), 128, element="float16"
)
VECTOR = TensorMap(0, np.dtype("f2"), (64,), (), (64,))
DTYPES = {8: "u1", 16: "i2", 32: "f4", 64: "f8"}


def described(tensor_map: TensorMap, words=None, format: int = FORMAT) -> str:
    """What the native decoder makes of the tensor map, or of these words in its place."""
    encoded = Call((Launch("k", b"cubin", (1, 1, 1), (32, 1, 1), params=(tensor_map,)),)).attributes()
    head = encoded["plan"][: -len(tensor_map.words)]
    plan = np.array([*head, *(tensor_map.words if words is None else words)], np.int64)
    return _ffi.check_plan(**(encoded | {"plan": plan, "format": format})).splitlines()[1]


@st.composite
def tensor_maps(draw) -> TensorMap:
    """Any that the rules allow."""
    element = draw(st.sampled_from([*ELEMENTS]))
    bits, gaps = ELEMENTS[element], element.endswith("align16b")
    interleave = draw(st.sampled_from([0, 0, 0, 16, 32])) if "u6" not in element else 0
    kind = draw(st.sampled_from(["box", "", "w", "w128"])) if not interleave else draw(st.sampled_from(["box", ""]))
    rank = draw(st.integers(3 if interleave or kind != "box" else 1, 5))
    swizzle = draw(st.sampled_from([0, 32, 64, 128, "128_atom_32", "128_atom_32_flip_8", "128_atom_64"]))
    swizzle = 128 if gaps or kind.startswith("w") else swizzle
    swizzle = 32 if interleave == 32 else swizzle
    span = 128 if isinstance(swizzle, str) else swizzle
    unit = 1 if interleave else 128 // bits if bits > 6 else 32
    row = unit * draw(st.integers(1, max(1, min(256, (span or 256) * 8 // bits) // unit)))
    row = 128 if gaps else row
    if interleave == 0 and span and row * bits > 8 * span:
        swizzle = 0 if not kind.startswith("w") else 128
    alignment = 32 if gaps or interleave == 32 else 16
    walk = (row, *(draw(st.integers(1, 256)) for _ in range(rank - 1)))
    dims = [draw(st.integers(1, 2**32 - 2**17)) for _ in range(rank)]
    if kind != "box":
        axes = 1 if kind else rank - 2
        high = {1: 2**15, 2: 2**7, 3: 2**4}[axes]
        lower = tuple(draw(st.integers(-high, high - 1)) for _ in range(axes))
        upper = tuple(draw(st.integers(-high, high - 1)) for _ in range(axes))
        dims[1 : 1 + axes] = [d + max(0, low - up) for d, low, up in zip(dims[1:], lower, upper, strict=False)]
        walk = Im2col(lower, upper, row, draw(st.integers(1, 1024)), kind)
    dims[0] = dims[0] // 128 * 128 + 128 if bits < 8 else dims[0]
    return TensorMap(
        buffer=draw(st.integers(0, 15)),
        dtype=np.dtype(DTYPES[max(8, bits)]),
        dims=tuple(dims),
        strides=tuple(draw(st.integers(0, 2**35 - 1)) * alignment for _ in range(rank - 1)),
        box=walk,
        swizzle=swizzle,
        byte_offset=draw(st.integers(0, 2**40)) * alignment,
        l2_bytes=draw(st.sampled_from([0, 64, 128, 256])),
        element=element,
        element_strides=draw(st.sampled_from([(), tuple(draw(st.integers(1, 8)) for _ in range(rank))])),
        interleave=interleave,
        fill=draw(st.sampled_from(["zeros", "nan"])) if "float" in element else "zeros",
    )


@settings(max_examples=50)  # 1000 after a change of either side
@given(tensor_maps())
def test_every_valid_tensor_map_round_trips(tensor_map):
    extent = -(-tensor_map.dims[0] * ELEMENTS[tensor_map.element] // 8)
    extent += sum((d - 1) * s for d, s in zip(tensor_map.dims[1:], tensor_map.strides, strict=True))
    if tensor_map.interleave:
        extent = max(extent, tensor_map.dims[-1] * tensor_map.strides[-1])
    if extent >= 2**64:
        with pytest.raises(ValueError, match="more than 2\\^64 bytes"):
            described(tensor_map)
        return
    walk = tensor_map.box
    expected = {
        "buffer": tensor_map.buffer,
        "byte_offset": tensor_map.byte_offset,
        "dtype": [*ELEMENTS].index(tensor_map.element),
        "swizzle": tensor_map.swizzle,
        "l2_bytes": tensor_map.l2_bytes,
        "dims": tensor_map.dims,
        "strides": tensor_map.strides,
        "extent_bytes": extent,
    }
    if tensor_map.interleave:
        expected["interleave"] = tensor_map.interleave
    if tensor_map.fill == "nan":
        expected["fill"] = "nan"
    if set(tensor_map.element_strides) - {1}:
        expected["element_strides"] = tensor_map.element_strides
    if isinstance(walk, Im2col):
        expected["mode"] = f"im2col_{walk.wide}".removesuffix("_")
        expected |= {"lower": walk.lower, "upper": walk.upper, "channels": walk.channels, "pixels": walk.pixels}
    else:
        expected["box"] = walk
    text = {name: ",".join(map(str, x)) if isinstance(x, tuple) else str(x) for name, x in expected.items()}
    assert dict(field.split("=") for field in described(tensor_map).split()[1:]) == text


def test_interleaved_images_reach_as_far_as_their_slices():
    n, c, h, w = 3, 32, 5, 7
    strides = (16, w * 16, c // 8 * h * w * 16)
    tensor_map = TensorMap(0, np.dtype("f2"), (c, w, h, n), strides, (8, 1, 1, 1), 0, interleave=16)
    assert f"extent_bytes={2 * n * c * h * w}" in described(tensor_map)


def test_a_record_of_format_1_is_read():
    kind, *head = MAP.words[:7]
    assert MAP.words[7:10] == (0, 0, 0)
    dims, box = MAP.words[10:15], MAP.words[18:]
    assert described(MAP, (kind, *head, *dims, *box), format=1) == described(MAP)


@pytest.mark.parametrize(
    ("tensor_map", "word", "value", "message"),
    [
        (MAP, 2, 8, "offset 8 is not 16-byte aligned"),
        (MAP, 3, 16, "tensor map dtype is 16, expected 0 to 15"),
        (MAP, 3, -1, "tensor map dtype is -1"),
        (MAP, 4, 0, "tensor map rank is 0, expected 1 to 5"),
        (MAP, 4, 6, "tensor map rank is 6"),
        (MAP, 5, 7, "tensor map swizzle is 7"),
        (MAP, 6, 4, "tensor map L2 promotion is 4"),
        (MAP, 7, 4, "tensor map mode is 4, expected 0 to 3"),
        (MAP, 8, 3, "tensor map interleave is 3"),
        (MAP, 9, 2, "tensor map fill is 2"),
        (MAP, 10, 0, "tensor map dimension is 0"),
        (MAP, 10, 2**32 + 1, "tensor map dimension is 4294967297"),
        (MAP, 13, 2**40, "tensor map stride is 1099511627776"),
        (MAP, 13, 8, "stride 8 is not a multiple of 16 bytes"),
        (MAP, 15, 0, "tensor map element stride is 0"),
        (MAP, 15, 9, "tensor map element stride is 9, expected 1 to 8"),
        (MAP, 18, 257, "tensor map box is 257"),
        (MAP, 18, 3, "box row of 6 bytes is not a multiple of 16"),
        (MAP, 18, 128, "box row of 256 bytes exceeds its swizzle of 128"),
        (dataclasses.replace(MAP, byte_offset=16), 8, 2, "offset 16 is not 32-byte aligned"),
        (dataclasses.replace(MAP, strides=(8208, 2**22)), 8, 2, "stride 8208 is not a multiple of 32 bytes"),
        (dataclasses.replace(MAP, byte_offset=16), 3, 14, "offset 16 is not 32-byte aligned"),
        (VECTOR, 7, 1, "tensor map of rank 1, im2col needs 3 to 5"),
        (VECTOR, 8, 1, "tensor map of rank 1, interleaving needs 3 to 5"),
        (IMAGES, 21, -129, "tensor map lower corner is -129, expected -128 to 127"),
        (IMAGES, 23, 128, "tensor map upper corner is 128"),
        (IMAGES, 25, 257, "tensor map channels is 257, expected 1 to 256"),
        (IMAGES, 25, 72, "box row of 144 bytes exceeds its swizzle of 128"),
        (IMAGES, 26, 1025, "tensor map pixels is 1025, expected 1 to 1024"),
    ],
)
def test_a_malformed_word_is_refused(tensor_map, word, value, message):
    words = [*tensor_map.words]
    words[word] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        described(tensor_map, words)


@pytest.mark.parametrize("tensor_map", [MAP, IMAGES])
def test_a_record_cut_short_is_refused(tensor_map):
    for length in range(len(tensor_map.words)):
        with pytest.raises(ValueError, match="the plan ends where"):
            described(tensor_map, tensor_map.words[:length])


@settings(max_examples=50)  # 5000 after a change of the decoder
@given(st.lists(st.integers(-1, 5) | st.sampled_from([16, 32, 64, 2**31, 2**40, 2**63 - 1, -(2**63)]), max_size=30))
def test_any_words_decode_or_are_refused(words):
    for format in (1, 2):
        try:
            message = described(MAP, [0, 0, 0, *words], format)
        except ValueError as error:
            message = str(error)
        assert message.startswith(("tensor_map ", "cutjax_launch: "))


PACKED = TensorMap(0, np.dtype("u1"), (256, 64), (192,), (128, 8), element="16u6_align16b")
WIDE = dataclasses.replace(IMAGES, box=Im2col((-1,), (0,), 64, 128, "w"))


@pytest.mark.parametrize(
    ("tensor_map", "changes", "message"),
    [
        (MAP, {"buffer": 32}, "buffer 32 is not in 0..31"),
        (MAP, {"dtype": np.dtype("complex64")}, "TMA has no type for complex64"),
        (MAP, {"dtype": jnp.dtype("int4")}, "TMA has no type for int4"),
        (MAP, {"element": "float24"}, "element 'float24' is none of uint8, uint16"),
        (MAP, {"element": "tfloat32"}, "element tfloat32 has 32 bits, those of bfloat16 have 16"),
        (MAP, {"element": "16u4_align8b"}, "element 16u4_align8b has 4 bits, those of bfloat16 have 16"),
        (MAP, {"dims": (1,) * 6}, "rank 1 to 5, not 6"),
        (MAP, {"dims": ()}, "rank 1 to 5, not 0"),
        (MAP, {"strides": (16,)}, "rank 3 needs 2 strides"),
        (MAP, {"box": (64,)}, "rank 3 needs 3 box sizes"),
        (MAP, {"dims": (0, 1, 1)}, "not all in 1..2^32"),
        (MAP, {"strides": (8, 16)}, "not all multiples of 16 bytes below 2^40"),
        (MAP, {"strides": (16, 2**40)}, "not all multiples of 16 bytes below 2^40"),
        (MAP, {"box": (64, 257, 1)}, "not all in 1..256"),
        (MAP, {"box": (4, 1, 1)}, "a box row of 8 bytes is not a multiple of 16"),
        (MAP, {"box": (128, 1, 1)}, "a box row of 256 bytes exceeds swizzle 128"),
        (MAP, {"box": (128, 1, 1), "swizzle": "128_atom_64"}, "a box row of 256 bytes exceeds swizzle 128"),
        (MAP, {"swizzle": 16}, "swizzle 16 is none of"),
        (MAP, {"l2_bytes": 32}, "l2_bytes 32 is none of"),
        (MAP, {"byte_offset": 8}, "byte_offset 8 is not a multiple of 16"),
        (MAP, {"element_strides": (1, 2)}, "rank 3 needs 3 element strides or none, got (1, 2)"),
        (MAP, {"element_strides": (1, 9, 1)}, "element_strides (1, 9, 1) are not all in 1..8"),
        (MAP, {"fill": "ones"}, "fill ones is none of"),
        (MAP, {"fill": "nan", "dtype": np.dtype("i2")}, "fill 'nan' is for floats, not int16"),
        (PACKED, {"fill": "nan"}, "fill 'nan' is for floats, not 16u6_align16b"),
        (MAP, {"interleave": 8}, "interleave 8 is none of"),
        (VECTOR, {"interleave": 16}, "interleaving needs rank 3 to 5, not 1"),
        (MAP, {"interleave": 32}, "swizzle 128 does not go with this element, im2col or interleaving: (32,) do"),
        (MAP, {"interleave": 32, "byte_offset": 16}, "byte_offset 16 is not a multiple of 32"),
        (MAP, {"interleave": 32, "strides": (16, 32)}, "not all multiples of 32 bytes below 2^40"),
        (PACKED, {"strides": (208,)}, "not all multiples of 32 bytes below 2^40"),
        (PACKED, {"dims": (192, 64)}, "dims[0] = 192 is not a multiple of 128"),
        (PACKED, {"box": (64, 8)}, "a copy has 128 elements of a row, not 64"),
        (PACKED, {"swizzle": 64}, "swizzle 64 does not go with"),
        (PACKED, {"interleave": 16, "dims": (256, 8, 8), "strides": (192, 192), "box": (128, 1, 1)}, "be interleaved"),
        (PACKED, {"element": "16u4_align16b", "swizzle": "128_atom_64"}, "swizzle 128_atom_64 does not go with"),
        (PACKED, {"element": "16u4_align8b", "dims": (255, 64)}, "dims[0] = 255 is not even"),
        (MAP, {"box": Im2col((0, 0), (0, 0), 64, 8)}, "im2col of rank 3 needs 1 offsets for lower, got (0, 0)"),
        (VECTOR, {"box": Im2col((0,), (0,), 64, 8)}, "im2col needs rank 3 to 5, not 1"),
        (IMAGES, {"box": Im2col((0, 0), (0, 128), 64, 8)}, "rank 4: upper (0, 128) is not all in -128..127"),
        (IMAGES, {"box": Im2col((0, 0), (0, -14), 64, 8)}, "the bounding box has 0 pixels along dims[2] = 14"),
        (IMAGES, {"box": Im2col((0, 0), (0, 0), 257, 8)}, "channels 257 is not in 1..256"),
        (IMAGES, {"box": Im2col((0, 0), (0, 0), 64, 1025)}, "pixels 1025 is not in 1..1024"),
        (IMAGES, {"box": Im2col((0, 0), (0, 0), 72, 8)}, "a box row of 144 bytes exceeds swizzle 128"),
        (IMAGES, {"box": Im2col((0, 0), (0, 0), 64, 8, "h")}, "wide 'h' is none of"),
        (WIDE, {"box": Im2col((0, 0), (0, 0), 64, 8, "w")}, "needs 1 offsets for lower, got (0, 0)"),
        (WIDE, {"swizzle": 0}, "swizzle 0 does not go with"),
        (WIDE, {"interleave": 16}, "wide im2col has no interleaving, got 16"),
    ],
)  # fmt: skip
def test_a_rule_that_is_broken_is_an_error(tensor_map, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(tensor_map, **changes)


def test_images_of_any_rank_have_their_range_of_corners():
    for axes, high in ((1, 2**15), (2, 2**7), (3, 2**4)):
        dims, strides = (64, *(2**16,) * axes, 2), (128,) * (axes + 1)
        for corner, fits in ((high - 1, True), (high, False), (-high, True), (-high - 1, False)):
            walk = Im2col((0,) * axes, (corner,) * axes, 64, 8)
            if fits:
                described(TensorMap(0, np.dtype("f2"), dims, strides, walk))
            else:
                with pytest.raises(ValueError, match=f"is not all in -{high}..{high - 1}"):
                    TensorMap(0, np.dtype("f2"), dims, strides, walk)

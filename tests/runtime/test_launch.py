"""The launch plan: validation, encoding, and what the native decoder makes of it."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutjax import _ffi
from cutjax.runtime.launch import FORMAT, TARGET, Call, Float32, Float64, Int32, Int64, Launch, Pointer, TensorMap

pytestmark = pytest.mark.versions

MAP = TensorMap(0, jnp.dtype(jnp.bfloat16), (4096, 512, 3), (8192, 4194304), (64, 128, 1))
EVERY_BYTE = bytes(range(256))


def make_launch(**changes) -> Launch:
    fields = {"kernel": "k", "cubin": EVERY_BYTE, "grid": (4, 2, 1), "block": (384, 1, 1), "cluster": (2, 1, 1)}
    params = (MAP, Pointer(1, 24), Int32(-5), Int64(2**40))
    return Launch(**({**fields, "shared_bytes": 200_000, "blocks_per_sm": 1, "params": params} | changes))


def attributes(**changes) -> dict:
    return Call((make_launch(**changes),)).attributes()


def test_native_decoder_reads_what_python_wrote():
    params = (MAP, Pointer(1, 24), Int32(-5), Int64(2**40), Float32(-0.5), Float64(0.1))
    assert _ffi.check_plan(**attributes(params=params)) == (
        "k cubin=0+256 grid=4x2x1 block=384x1x1 cluster=2x1x1 shared_bytes=200000 blocks_per_sm=1\n"
        "tensor_map buffer=0 byte_offset=0 dtype=9 swizzle=128 l2_bytes=128 dims=4096,512,3 strides=8192,4194304 "
        "box=64,128,1 extent_bytes=12582912\n"
        "pointer buffer=1 byte_offset=24\n"
        "int32 -5\n"
        "int64 1099511627776\n"
        "float32 -0.5\n"
        "float64 0.1"
    )


def test_launches_of_a_call_share_a_cubin():
    first, second = make_launch(kernel="first", cubin=b"one", params=()), make_launch(kernel="second", cubin=b"other")
    call = Call((first, second, dataclasses.replace(first, kernel="third", grid=(8, 1, 1))))
    assert call.attributes()["kernel"] == "first second third"
    assert call.attributes()["cubin"] == b"oneother"
    lines = _ffi.check_plan(**call.attributes()).splitlines()
    assert [line.split(" block")[0] for line in lines if "cubin=" in line] == [
        "first cubin=0+3 grid=4x2x1",
        "second cubin=3+5 grid=4x2x1",
        "third cubin=0+3 grid=8x1x1",
    ]
    assert len(lines) == 3 + len(second.params)


@pytest.mark.parametrize(
    ("value", "found"), [(None, "no format number"), (0, "format 0"), (FORMAT + 1, f"format {FORMAT + 1}")]
)
def test_a_plan_of_another_format_is_refused(value, found):
    for rest in (attributes(), {"kernel": "", "cubin": b"", "plan": np.array([-1])}):
        with pytest.raises(ValueError, match=rf"reads launch plans of formats 1 to {FORMAT}, .* {found}.*: re-export"):
            _ffi.check_plan(**(rest | {"format": value}))


def test_both_sides_know_one_format():
    assert _ffi.PLAN_FORMAT == FORMAT


HEAD = 15  # words before the first parameter: number of launches, cubin, three shapes, three numbers


def with_params(words) -> dict:
    """The plan with these words for its parameters, as many as it says there are."""
    encoded = attributes()
    return encoded | {"plan": np.array([*encoded["plan"][:HEAD], *words], np.int64)}


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 5), max_size=40))
def test_any_words_decode_or_are_refused(words):
    for encoded in (with_params(words), attributes() | {"plan": np.array(words, np.int64)}):
        try:
            message = _ffi.check_plan(**encoded)
        except ValueError as error:
            message = str(error)
        assert message.startswith(("k cubin=", "cutjax_launch: "))


def test_a_plan_cut_short_is_refused():
    encoded = attributes()
    for length in range(len(encoded["plan"])):
        with pytest.raises(ValueError, match="the plan ends where"):
            _ffi.check_plan(**(encoded | {"plan": encoded["plan"][:length]}))


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (0, 6, "parameter kind is 6, expected 0 to 5"),
        (0, -1, "parameter kind is -1"),
        (1, 32, "buffer index is 32, expected 0 to 31"),
        (1, -1, "buffer index is -1"),
        (2, -16, "byte offset is -16"),
        (25, 2**32, "32-bit scalar is 4294967296"),
        (-15, 0, "number of launches is 0, expected 1 to 16"),
        (-15, 17, "number of launches is 17"),
        (-15, 2, "kernel 1 of 2 has no name"),
        (-14, -1, "cubin offset is -1, expected 0 to 256"),
        (-14, 1, "cubin size is 256, expected 1 to 255"),
        (-13, 0, "cubin size is 0"),
        (-13, 257, "cubin size is 257, expected 1 to 256"),
        (-12, 0, "grid is 0, expected 1 to 2147483647"),
        (-12, 3, "grid[0] = 3 is not a multiple of cluster[0] = 2"),
        (-11, 65536, "grid is 65536"),
        (-9, 1025, "block is 1025"),
        (-8, 3, "block has more than 1024 threads"),
        (-7, 65, "block is 65"),
        (-5, 8, "cluster has more than 8 blocks"),
        (-3, -1, "shared_bytes is -1"),
        (-2, 65, "blocks_per_sm is 65"),
        (-1, 49, "number of parameters is 49, expected 0 to 48"),
        (-1, -1, "number of parameters is -1"),
        (-1, 3, "the plan goes on after its last launch"),
    ],
)
def test_a_malformed_word_is_refused(word, value, message):
    encoded = attributes()
    encoded["plan"][HEAD + word] = value
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        _ffi.check_plan(**encoded)
    assert word in (-15, -1) or "kernel k" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": ""}, "kernel 0 of 1 has no name"),
        ({"kernel": " k"}, "kernel 0 of 1 has no name"),
        ({"kernel": "k other"}, "more kernels are named than the plan's 1: other"),
        ({"cubin": b""}, "cubin size is 256, expected 1 to 0"),
        ({"plan": np.array([], np.int64)}, "the plan ends where number of launches should be"),
    ],
)
def test_a_malformed_attribute_is_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        _ffi.check_plan(**(attributes() | change))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pointer(-1), "buffer -1"),
        (lambda: Pointer(0, -1), "byte_offset -1 is negative"),
        (lambda: Int32(2**32), "does not fit 32 bits"),
        (lambda: Int64(2**63), "does not fit 64 bits"),
        (lambda: make_launch(kernel=""), "no name"),
        (lambda: make_launch(kernel="two words"), "'two words' has a space in it"),
        (lambda: make_launch(cubin=b""), "cubin is empty"),
        (lambda: make_launch(grid=(4, 1)), "grid (4, 1)"),
        (lambda: make_launch(grid=(3, 1, 1)), "not a multiple of cluster"),
        (lambda: make_launch(block=(1024, 2, 1)), "more than 1024 threads"),
        (lambda: make_launch(cluster=(4, 4, 1), grid=(4, 4, 1)), "more than 8 blocks"),
        (lambda: make_launch(shared_bytes=-1), "shared_bytes -1"),
        (lambda: make_launch(blocks_per_sm=65), "blocks_per_sm 65"),
        (lambda: make_launch(params=(Int32(0),) * 49), "49 parameters are more than 48"),
        (lambda: Call(()), "1 to 16 launches, not 0"),
        (lambda: Call((make_launch(),) * 17), "1 to 16 launches, not 17"),
        (lambda: Call((make_launch(),), aliases=((32, 0),)), "no argument 32 shares memory"),
        (lambda: Call((make_launch(),), (jax.ShapeDtypeStruct((), "f4"),), aliases=((0, 1),)), "with a result 1"),
        (lambda: Call((make_launch(),), aliases=((0, 1), (2, 1))), "aliased twice"),
    ],
)
def test_launch_validation(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def call_for_cuda(x):
    return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, **attributes())


def mlir_bytes(text: str, name: str) -> bytes:
    """A string attribute out of MLIR text, which escapes a byte as a backslash and two hex digits or itself."""
    escaped = re.search(rf'{name} = "((?:[^"\\]|\\.)*)"', text)
    assert escaped
    pieces = re.findall(r"\\([0-9A-Fa-f]{2}|.)|([^\\])", escaped[1])
    return b"".join((bytes.fromhex(e) if len(e) == 2 else e.encode()) if e else c.encode() for e, c in pieces)


def test_attributes_survive_lowering_for_cuda_without_one():
    lowered = jax.jit(call_for_cuda).trace(jnp.zeros(8)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert f"@{TARGET}" in text
    assert mlir_bytes(text, "cubin") == EVERY_BYTE


def test_attributes_survive_export():
    exported = jax.export.export(
        jax.jit(call_for_cuda),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(TARGET)],
    )(jax.ShapeDtypeStruct((8,), jnp.float32))
    again = jax.export.deserialize(exported.serialize())
    assert mlir_bytes(again.mlir_module(), "cubin") == EVERY_BYTE

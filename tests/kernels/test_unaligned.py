"""Operands whose rows TMA cannot walk: how they are padded, and what that lowers to for CUDA, without a GPU."""

from __future__ import annotations

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.kernels import prepared
from cutjax.kernels.choose import choose
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.sm90 import operands

H = jnp.bfloat16
LAYOUTS = ("nn", "nt", "tn", "tt")


def shape(*sizes: int, dtype=H) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def operations(fn, *args) -> list[str]:
    """StableHLO operations of the program for CUDA, in order; a kernel is its name less the tile, a pad its result."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    for line in text.splitlines():
        if kernel := re.search(r'@cutjax_launch.*kernel = "(sm90_\w+?)_\d', line):
            found.append(kernel[1])
        elif pad := re.search(r"stablehlo\.pad .*-> tensor<(\w+)>", line):
            found.append(f"pad {pad[1]}")
        elif (operation := re.search(r"stablehlo\.(\w+)", line)) and operation[1] != "constant":
            found.append(operation[1])
    return found


def maps(problem):
    """Dims, strides and bytes of a line of the maps of a and b."""
    kernel = sm90.resolved(problem, cutjax.Config(bm=128, bn=128, stages=2))
    found = {x.name: x.value for x in kernel.arguments if x.name.startswith(("map_a", "map_b"))}
    return {name[4:]: (x.dims, x.strides, x.l2_bytes) for name, x in found.items()}


@pytest.mark.parametrize(
    ("k", "pitch", "l2_bytes"),
    [
        (1, 16, 128),
        (7, 16, 128),
        (33, 80, 128),
        (65, 144, 128),
        (1001, 2016, 128),  # to 2048 would be 2.3% more
        (1000, 2000, 128),  # rows that TMA can walk stay where they are, off the lines of memory
        (1024, 2048, 256),
        (3133, 6272, 256),
        (50257, 100608, 256),
    ],
)
def test_pitch(k, pitch, l2_bytes):
    """A map has the sizes that were asked for, so nothing that was added is read; where it is is the pitch's."""
    problem = cutjax.Problem.of(72, 64, k, "nt")
    assert maps(problem) == {
        "a": ((k, 72, 1), (pitch, 72 * pitch), l2_bytes),
        "b0": ((k, 64, 1), (pitch, 64 * pitch), l2_bytes),
    }
    assert sum(pad.columns for pad in operands.prepared(problem)) == (0 if pitch == 2 * k else pitch - 2 * k)


def test_pads_of_batches_and_groups():
    def pads(*args, **fields):
        found = operands.prepared(cutjax.Problem.of(*args, **fields))
        return [(x.name, x.buffer, x.columns, x.written // x.steps[-1].row_bytes) for x in found]

    batch = {"batch": (3, 5), "a_batch": (3, 5), "b_batch": (1, 5)}
    assert pads(66, 64, 33, "nt", **batch) == [("a", 0, 7, 15 * 66), ("b", 1, 7, 5 * 64)]
    assert pads(66, 65, 33, "tn", **batch) == [("a", 0, 6, 15 * 33), ("b", 1, 7, 5 * 33)]
    rows = {"groups": 4, "ragged": "m"}
    assert pads(50, 64, 33, "nn", **rows) == [("a", 0, 7, 50)]
    assert pads(50, 65, 32, "nn", **rows) == [("b", 1, 7, 4 * 32)]
    assert pads(33, 64, 50, "tn", groups=4, ragged="k") == [("a", 0, 7, 50)]
    assert pads(64, 64, 33, "nt", symmetric=True) == [("a", 0, 7, 64)]


def test_the_copy_is_counted_and_said():
    """A copy of 2 * 8192 rows of 8 KB, 270 MB read and written, takes longer than nothing and less than the product."""
    odd, even = (choose(cutjax.Problem.of(8192, 8192, k, "nt"), backend="cuda") for k in (4095, 4096))
    assert odd.time_us is not None
    assert even.time_us is not None
    assert even.time_us + 2 * 2 * 8192 * 8192 / 4.8e6 < odd.time_us < 1.5 * even.time_us
    assert odd.reasons[1:] == ("a padded to rows of 8192 bytes", "b padded to rows of 8192 bytes")
    assert len(even.reasons) == 1


OPERANDS = {  # what of 66 x 64 x 33, or 65 x 64 x 32, is no multiple of 8 and contiguous
    "nn": ((66, 33), (33, 64), ["pad 66x40xbf16"]),
    "nt": ((66, 33), (64, 33), ["pad 66x40xbf16", "pad 64x40xbf16"]),
    "tn": ((33, 66), (33, 64), ["pad 33x72xbf16"]),
    "tt": ((33, 66), (64, 33), ["pad 33x72xbf16", "pad 64x40xbf16"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_what_needs_it_is_padded(layout):
    a, b, pads = OPERANDS[layout]
    f = functools.partial(cutjax.gemm, layout=layout, backend="cuda")
    assert operations(f, shape(*a), shape(*b)) == [*pads, f"sm90_bf16_{layout}"]
    batched = [pad.replace("pad ", "pad 3x") for pad in pads]
    found = operations(jax.vmap(f), shape(3, *a), shape(3, *b))
    assert found == [*batched, f"sm90_bf16_{layout}"]


def test_fused_and_reduced():
    def fused(acc, bias):
        return jax.nn.gelu(acc + bias).astype(H)

    def both(acc):
        return acc.astype(H), acc.sum(0)

    a, b = shape(64, 33), shape(64, 33)
    gemm = functools.partial(cutjax.gemm, layout="nt", backend="cuda")
    found = operations(lambda a, b, x: gemm(a, b, epilogue=fused, operands=(x,)), a, b, shape(64, dtype=jnp.float32))
    assert [x for x in found if x.startswith(("pad", "sm90"))] == ["pad 64x40xbf16", "pad 64x40xbf16", "sm90_bf16_nt"]
    found = operations(lambda a, b: gemm(a, b, epilogue=both), a, b)
    assert found[:3] == ["pad 64x40xbf16", "pad 64x40xbf16", "sm90_bf16_nt"]
    assert "reduce" in found[3:]  # what the kernel left of the sum


def test_grouped():
    sizes = shape(4, dtype=jnp.int32)
    rows = functools.partial(cutjax.grouped_gemm, backend="cuda")
    assert operations(rows, shape(50, 33), shape(4, 33, 64), sizes)[0] == "pad 50x40xbf16"
    found = operations(functools.partial(rows, layout="nt"), shape(50, 33), shape(4, 64, 33), sizes)
    assert found == ["pad 50x40xbf16", "pad 4x64x40xbf16", "sm90_bf16_nt"]
    found = operations(functools.partial(cutjax.grouped_outer, backend="cuda"), shape(50, 33), shape(50, 64), sizes)
    assert found == ["pad 50x40xbf16", "sm90_bf16_tn"]


def test_padding_beside_memory_shared_in_place():
    """What is added to shares its memory with the result, whatever was copied before the launch."""

    def add(a, b, sizes, d):
        return cutjax.grouped_outer(a, b, sizes, accumulate=d, backend="cuda")

    args = shape(50, 33), shape(50, 64), shape(4, dtype=jnp.int32), shape(4, 33, 64, dtype=jnp.float32)
    text = jax.jit(add, donate_argnums=3).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.pad" in text
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 3" in text


def test_symmetric_pads_once():
    found = operations(functools.partial(cutjax.syrk, backend="cuda"), shape(64, 33))
    assert found == ["pad 64x40xbf16", "sm90_bf16_nt"]


def odd_width(layout):
    m, n, k = 64, 257, 32
    a = shape(m, k) if layout[0] == "n" else shape(k, m)
    return a, shape(k, n) if layout[1] == "n" else shape(n, k), shape(m, n)


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_gradient_of_a_before_an_odd_width(layout):
    """It contracts the odd axis, so the cotangent is padded, and b where that axis is contiguous."""

    def backward(a, b, g):
        return jax.vjp(functools.partial(cutjax.gemm, layout=layout, backend="cuda"), a, b)[1](g)[0]

    found = operations(backward, *odd_width(layout))
    pads = ["pad 32x264xbf16"] * (layout[1] == "n") + ["pad 64x264xbf16"]
    assert (sorted(found[:-1]), found[-1][:4]) == (pads, "sm90")


@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_gradients_of_an_odd_width_run_kernels(layout):
    """A vocabulary of an odd size, forwards and backwards."""
    a, b, _ = odd_width(layout)

    def loss(a, b):
        return (cutjax.gemm(a, b, layout=layout, backend="cuda").astype(jnp.float32) ** 2).sum()

    found = operations(jax.grad(loss, (0, 1)), a, b)
    assert sum(x.startswith("sm90") for x in found) == 3
    assert "dot_general" not in found


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_smallest_have_a_plan(n, layout):
    for m, k in ((1, 1), (1, 7), (2, 3), (7, 2)):
        problem = cutjax.Problem.of(m, n, k, layout)
        assert cutjax.candidates(problem), problem
        for (inner, rows, _), (pitch, plane), _ in maps(problem).values():
            assert 2 * inner <= pitch < 2 * inner + 16
            assert (pitch % 16, plane) == (0, pitch * rows)


def test_not_a_number_stays_outside():
    """What is added is zero and lies outside the sizes of the map, for any operand."""
    kernel = sm90.resolved(cutjax.Problem.of(64, 64, 3, "nt"), cutjax.Config(bm=64, bn=64, stages=2))
    a = np.full((64, 3), np.nan, H)
    (padded, same), _ = prepared.make(kernel.prepared, [jnp.asarray(a), jnp.asarray(a)])
    assert padded.shape == same.shape == (64, 8)
    assert np.isnan(np.asarray(padded, np.float32)[:, :3]).all()
    assert (np.asarray(padded)[:, 3:] == 0).all()


def test_export_keeps_the_copy():
    f = jax.jit(functools.partial(cutjax.gemm, layout="nt", backend="cuda"))
    exported = jax.export.export(
        f, platforms=("cuda",), disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("cutjax_launch")]
    )(shape(64, 33), shape(64, 33))
    text = jax.export.deserialize(exported.serialize()).mlir_module()
    assert text.count("stablehlo.pad") == 2
    assert "@cutjax_launch" in text

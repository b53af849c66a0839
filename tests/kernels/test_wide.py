"""Products of other operands than of 16 bits through wgmma: what is chosen, launched and compiled."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cubin import check_lean, disassembly
from test_sass import innermost_loop, needs_tools
from wide_cases import E4M3, KINDS, call, fused, problem

import cutjax
from cutjax.kernels import choose, prepared
from cutjax.kernels.keys import key
from cutjax.kernels.problem import LAYOUTS
from cutjax.kernels.sm90 import family, operands
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler
from cutjax.runtime.launch import TensorMap

Config = cutjax.Config


def maps(kernel):
    return {a.name: a.value for a in kernel.arguments if isinstance(a.value, TensorMap)}


# ---- what is chosen


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_serves(kind, layout):
    for sizes in ((4096, 4096, 4096), (130, 70, 33), (1, 1, 1), (8, 4096, 4096)):
        choice = choose.choose(problem(kind, *sizes, layout), backend="cuda")
        assert choice.served, choice.reasons
    batched = problem(kind, 64, 48, 40, layout, batch=(3,), a_batch=(3,), b_batch=(1,))
    assert choose.choose(batched, backend="cuda").served
    rows = problem(kind, 4096, 512, 512, "n" + layout[1], groups=8, ragged="m")
    assert choose.choose(rows, backend="cuda").served
    assert not family.reasons(problem(kind, 512, 512, 4096, "tn", groups=8, ragged="k"))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"a": "float32", "math": ""}, "wgmma multiplies float32 as one of tf32"),
        ({"a": "bfloat16", "math": "tf32"}, "bf16 x bf16 by tf32: wgmma computes these products as they are"),
        ({"a": "float8_e4m3fn", "b": "int8"}, "both operands are bf16, f16, f32, of float8 or of 8-bit integers"),
        ({"a": "int8", "acc": "float32"}, "s8 x s8 added up in f32"),
        ({"a": "int16", "acc": "int32"}, "s16 x s16: both operands are"),
        ({"a": "bfloat16", "acc": "int32"}, "bf16 x bf16 added up in s32"),
    ],
)
def test_what_wgmma_does_not_multiply(fields, match):
    a, acc = fields["a"], np.dtype(fields.get("acc", "float32"))
    of_a, of_b = np.dtype(jnp.dtype(a)), np.dtype(jnp.dtype(fields.get("b", a)))
    epilogue = problem("tf32", 64, 64, 64).epilogue
    node = dataclasses.replace(epilogue.nodes[0], dtype=acc.name)
    output = dataclasses.replace(epilogue.outputs[0], dtype=acc.name)
    epilogue = dataclasses.replace(epilogue, nodes=(node,), outputs=(output,))
    asked = cutjax.Problem.of(64, 64, 64, "nn", of_a, of_b, epilogue=epilogue, math=fields.get("math", ""))
    assert match in "; ".join(cutjax.reasons(Config(), asked))


def test_widths_that_integers_do_not_have():
    asked = problem("s8", 256, 256, 256)
    assert cutjax.reasons(Config(128, 24, swap=True), asked) == ()
    assert "wgmma of integers takes 8, 24 and multiples of 16" in cutjax.reasons(Config(128, 40, swap=True), asked)[0]


def test_sums_of_sums_take_as_many_registers():
    for kind in ("bf16x6", "e4m3"):
        assert cutjax.reasons(Config(128, 192), problem(kind, 256, 256, 256)) == ()
    assert "256 accumulator registers" in cutjax.reasons(Config(128, 256), problem("bf16x6", 256, 256, 256))[0]
    # Sums of float8 are of half a tile at a time, where those of a whole one do not fit.
    assert cutjax.reasons(Config(128, 256), problem("e4m3", 256, 256, 256)) == ()
    assert "240 accumulator registers" in cutjax.reasons(Config(256, 160, stages=3), problem("e4m3", 256, 256, 256))[0]
    assert "bk=128 of float8" in cutjax.reasons(Config(128, 128, 128, 2), problem("e4m3", 256, 256, 256))[0]


def test_names_and_keys_say_how():
    config = Config(128, 128)
    name = config.name(problem("bf16x6", 256, 256, 256))
    assert name == "sm90_f32bf16x6_nn_128x128x64_s4_c1x1_coop"
    assert config.name(problem("s8xu8", 256, 256, 256)).startswith("sm90_s8xu8s32_nn_")
    assert '"math":"bf16x6"' in key(problem("bf16x6", 256, 256, 256))
    assert "math" not in key(cutjax.Problem.of(256, 256, 256))
    assert "f32 x f32 by tf32 -> f32" in str(problem("tf32", 256, 256, 256))


def test_more_products_take_longer():
    kinds = ("s8", "bf16", "tf32", "bf16x6")
    times = [choose.choose(problem(kind, 8192, 8192, 8192), backend="cuda").time_us for kind in kinds]
    assert sorted(times) == times
    whole = choose.choose(problem("bf16x6", 8192, 8192, 8192), backend="cuda")
    assert 0.7 < whole.roofline <= 1


# ---- what is launched


def test_tiles_are_as_many_bytes_of_k():
    for kind, elements in (("tf32", 32), ("s8", 128), ("bf16x3", 64)):
        kernel = sm90.resolved(problem(kind, 4096, 4096, 4096, "nt"), Config(128, 128))
        given = maps(kernel)
        assert given["map_a"].box == given["map_b0"].box == (elements, 128, 1)
        assert (given["map_a"].element == "tfloat32") == (kind == "tf32")
        assert kernel.stage_bytes == (128 + 128) * 128
        assert kernel.k_blocks == 4096 // elements * len(kernel.way.pairs)


def test_what_lies_along_another_axis_is_transposed():
    asked = problem("s8", 256, 200, 72, "tn")
    kernel = sm90.resolved(asked, Config(128, 128))
    assert kernel.notes == (
        "a transposed and padded to rows of 80 bytes",
        "b transposed and padded to rows of 80 bytes",
    )
    assert maps(kernel)["map_a"].dims == (72, 256, 1)
    a, b = jnp.arange(72 * 256).reshape(72, 256).astype(np.int8), jnp.ones((72, 200), np.int8)
    taken, more = prepared.make(kernel.prepared, [a, b])
    assert not more
    assert np.array_equal(taken[0], np.pad(np.asarray(a).T, ((0, 0), (0, 8))))
    assert taken[1].shape == (200, 80)
    swapped = sm90.resolved(asked, Config(128, 24, swap=True))
    assert (maps(swapped)["map_a"].buffer, maps(swapped)["map_a"].dims) == (1, (72, 200, 1))


def test_parts_are_further_arguments():
    residual = jnp.zeros((256, 128))
    asked = fused("bf16x6", 256, 128, 512, lambda acc, r: acc + r, residual)
    kernel = sm90.resolved(asked, Config(128, 64, stream_k=True))
    buffers = {name: value.buffer for name, value in maps(kernel).items()}
    assert [buffers[name] for name in ("map_a", "map_a1", "map_a2")] == [0, 3, 4]
    assert [buffers[name] for name in ("map_b0", "map_b1", "map_b2")] == [1, 5, 6]
    assert (buffers["map_x0"], buffers["map_d0"]) == (2, 8)  # 7 are the tickets
    shapes = [(256, 512), (512, 128), (256, 128)]
    arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    called = kernel.call()
    taken = jax.eval_shape(called.prepare, arrays)
    half = np.dtype(jnp.bfloat16)
    assert [(x.shape, x.dtype) for x in taken[:7]] == [
        *((shape, dtype) for shape, dtype in zip(shapes, (half, half, np.float32), strict=True)),
        *((shapes[0], half),) * 2,
        *((shapes[1], half),) * 2,
    ]
    assert called.aliases[-1] == (7, 2)
    symmetric = sm90.resolved(problem("bf16x3", 256, 256, 64, "nt", symmetric=True), Config(128, 64))
    parts = {name: value.buffer for name, value in maps(symmetric).items() if name[4] in "ab"}
    assert parts == {"map_a": 0, "map_a1": 1, "map_b0": 0, "map_b1": 1}


def test_a_program_splits_and_launches():
    x = jax.ShapeDtypeStruct((100, 100), np.float32)
    text = call(problem("tf32x3", 100, 100, 100)).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("cutjax_launch") == 1
    assert text.count("stablehlo.transpose") == 2  # both parts of b
    assert text.count("stablehlo.reduce_precision") == 4


# ---- parts of float32


def split(x, math):
    way = operands._WAYS[math]
    return [np.asarray(term) for term in jax.jit(prepared.Terms(way.terms, way.rounded, way.dtype).made)(x)]


def numbers():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    exponent = bits.view(np.uint32) >> 23 & 0xFF
    return bits[(exponent < 255) & (exponent > 40)]  # below, the third part has no bits of bf16 left


@pytest.mark.parametrize(("math", "most"), [("bf16x9", 0), ("bf16x6", 0), ("bf16x3", 2.0**-17), ("tf32x3", 2.0**-23)])
def test_terms_add_up_to_the_number(math, most):
    x = numbers()
    parts = split(x, math)
    total = sum(part.astype(np.float64) for part in parts)
    assert len(parts) == operands._WAYS[math].terms
    assert np.abs((total - x) / x.astype(np.float64)).max() <= most
    assert all(np.isfinite(part.astype(np.float32)).all() for part in parts)
    if math == "tf32x3":
        assert not (parts[0].view(np.uint32) & 0x1FFF).any()  # the tensor cores' rounding changes nothing


def test_parts_of_what_is_not_finite():
    x = np.array([np.inf, -np.inf, np.nan, np.finfo(np.float32).max, 0x7F800001], np.float32)
    x[4:] = np.array([0x7F800001], np.uint32).view(np.float32)  # a NaN of low bits alone
    high, *low = [part.astype(np.float32) for part in split(x, "bf16x6")]
    assert high[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(high[[2, 4]]).all()
    assert all(np.isnan(part[[0, 1, 2, 4]]).all() for part in low)
    assert np.float64(high[3]) + np.float64(low[0][3]) + np.float64(low[1][3]) == x[3]


def test_pairs_come_with_the_smallest_products_first():
    for way in operands._WAYS.values():
        orders = [a + b for a, b in way.pairs]
        assert orders == sorted(orders, reverse=True)
        assert len(set(way.pairs)) == len(way.pairs)
        assert {a for a, _ in way.pairs} == set(range(way.terms))


# ---- what it compiles to

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
WIDEST = (Config(128, 192), Config(128, 96, schedule="pingpong"), Config(64, 64, stages=8, cluster_k=2))


@needs_nvrtc
@pytest.mark.parametrize("kind", ["tf32", "bf16x6", "s8", "e4m3"])
def test_kernels_compile_lean(kind):
    check_lean(problem(kind, 4096, 4096, 4096, "nt"), WIDEST if kind == "e4m3" else WIDEST[:1], 24 << 10)
    if kind in ("bf16x6", "e4m3"):
        check_lean(problem(kind, 4096, 4096, 4096, "nt"), [Config(128, 96, stream_k=True)], 40 << 10)
    else:
        check_lean(problem(kind, 4096, 1024, 512, groups=8, ragged="m"), [Config(128, 128)], 48 << 10)


@needs_nvrtc
def test_kernels_with_epilogues_compile_lean():
    row = jnp.zeros((1, 512))
    for kind in ("tf32", "bf16x6", "e4m3"):
        asked = fused(kind, 512, 512, 512, lambda acc, r: jax.nn.gelu(acc + r).astype(jnp.bfloat16), row)
        check_lean(asked, [Config(128, 128)], 40 << 10)
    check_lean(problem("bf16x6", 512, 512, 4096, "tn", groups=8, ragged="k"), [Config(128, 128)], 48 << 10)
    check_lean(problem("bf16x3", 512, 512, 512, "nt", symmetric=True), [Config(128, 128)], 40 << 10)


OPCODES = {"tf32": "HGMMA.64x128x8.F32.TF32", "bf16x6": "HGMMA.64x128x16.F32.BF16", "s8": "IGMMA.64x128x32.S8.S8"}
OPCODES |= {"s8xu8": "IGMMA.64x128x32.S8.U8", "e4m3xe5m2": "QGMMA.64x128x32.F32.E4M3.E5M2"}


@needs_tools
@pytest.mark.parametrize("kind", OPCODES)
def test_the_mainloop_multiplies_and_little_else(kind):
    config = Config(128, 128)
    kernel = sm90.resolved(problem(kind, 4096, 4096, 4096, "nt"), config)
    cubin = compiler.compile_kernel(kernel.source, name=kernel.name, arch="sm_90a")
    loop = innermost_loop(disassembly(cubin.image))
    multiplied = [opcode for opcode in loop if "GMMA" in opcode]
    assert {opcode.removesuffix(".gsb0") for opcode in multiplied} == {OPCODES[kind]}
    counts = collections.Counter(opcode.split(".")[0] for opcode in loop)
    assert counts["R2UR"] == 0, loop
    # Adding up sums of float8 takes 64 instructions each block, of 64 rows and 128 columns a warpgroup, in two parts.
    added = counts["FADD"] if KINDS[kind].a == E4M3 else 0
    assert len(loop) - added <= len(multiplied) // 4 * 75, loop

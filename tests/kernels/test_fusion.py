"""Kernels with an epilogue: every shipped tile compiles without a spill, and refusals say why."""

import dataclasses
import re
import shutil

import epilogue_cases as cases
import epilogue_host as host
import gxx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import changed
from cubin import check_lean, in_turns, telling
from epilogue_cases import ACTIVATIONS

import cutjax
from cutjax.epilogue import emit
from cutjax.epilogue.expression import Node, Output, normal
from cutjax.epilogue.trace import trace
from cutjax.kernels import epilogue_text
from cutjax.kernels.arguments import place_steps
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.staging import plan_staging
from cutjax.runtime import compiler, sources
from cutjax.runtime.launch import TensorMap

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))

M, N = 256, 384
BF16 = jnp.bfloat16


def problem(fn, products=1, operands=(), layout="nn", sizes=(4096, 4096, 4096)):
    accs = [jax.ShapeDtypeStruct((M, N), jnp.float32)] * products
    arrays = [x if isinstance(x, jax.Array) else jnp.zeros(*x) for x in operands]
    epilogue = trace(fn, accs, arrays).epilogue.primal
    return cutjax.Problem.of(*sizes, layout, epilogue=epilogue)


def dgelu(acc, z):
    return (acc * jax.grad(lambda t: jax.nn.gelu(t).sum())(z.astype(jnp.float32))).astype(BF16)


def dgated(acc, g, u, s):
    """The gradients of a gate, of what it multiplies and of their scale, of products in 16 bits."""
    _, pull = jax.vjp(lambda g, u, s: jax.nn.silu(g) * u * s, g.astype(F32), u.astype(F32), s)
    dg, du, ds = pull(acc)
    return dg.astype(BF16), du.astype(BF16), ds


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).astype(BF16)


KEY = jax.random.key(0)
ROW, COLUMN, FULL = ((M, 1), jnp.float32), ((N,), BF16), ((M, N), BF16)
F32 = jnp.float32


def powers(acc, labels, shift):
    """What linear_cross_entropy makes of logits."""
    found = jnp.exp2(acc * 1.4427 - shift)
    column = jax.lax.broadcasted_iota(jnp.int32, acc.shape, 1)
    return found.astype(BF16), found.sum(1), jnp.where(column == labels, acc, 0).sum(1)


def powers_and_largest(acc, labels, shift):
    """What the head that fuse finds makes of logits."""
    return *powers(acc, labels, shift), acc.max(1)


CASES = {
    "gelu": (lambda acc, b: jax.nn.gelu(acc + b.astype(F32)).astype(BF16), 1, (COLUMN,)),
    "gelu and its argument": (
        lambda acc, b: (jax.nn.gelu(acc + b.astype(F32)).astype(BF16), acc.astype(BF16)),
        1,
        (COLUMN,),
    ),
    "residual": (
        lambda acc, s, b, r: (acc * s + b.astype(F32) + r.astype(F32)).astype(BF16),
        1,
        (((), jnp.float32), COLUMN, FULL),
    ),
    "derivative": (dgelu, 1, (FULL,)),
    "row and column": (lambda acc, r, c: jnp.where(acc * r > c.astype(F32), acc, 0).astype(BF16), 1, (ROW, COLUMN)),
    "gated": (lambda g, u: (jax.nn.silu(g) * u).astype(BF16), 2, ()),
    "gated, saved": (lambda g, u: ((jax.nn.silu(g) * u).astype(BF16), g.astype(BF16), u.astype(BF16)), 2, ()),
    "float8": (lambda acc, s: (acc * s).astype(jnp.float8_e4m3fn), 1, (((), jnp.float32),)),
    "sum of columns": (lambda acc, z: ((t := dgelu(acc, z)), t.astype(F32).sum(0)), 1, (FULL,)),
    "sum of rows": (dgated, 1, (FULL, FULL, ROW)),
    "all reductions": (
        lambda acc: (acc.astype(BF16), acc.sum(0), acc.max(1), jnp.abs(acc).max(), acc.min(0)),
        1,
        (),
    ),
    "three products": (lambda a, b, c: (a * b + c).astype(BF16), 3, ()),
    "powers": (powers, 1, (((M, 1), jnp.int32), ROW)),
    "powers, reductions alone": (lambda *args: powers(*args)[1:], 1, (((M, 1), jnp.int32), ROW)),
    "powers and the largest": (powers_and_largest, 1, (((M, 1), jnp.int32), ROW)),
}
SPILLED = {
    "gelu": 16,
    "gelu and its argument": 16,
    "powers": 16,
    "powers, reductions alone": 16,
    "powers and the largest": 16,
}


@needs_nvrtc
@pytest.mark.parametrize("name", CASES)
def test_every_tile_compiles_lean(name):
    asked = problem(*CASES[name])
    # The cluster changes the producer alone, which test_kernels.py compiles in all of them.
    configs = [config for config in cutjax.candidates(asked) if config.cluster == 1]
    configs = telling(configs, 32)
    assert len(configs) > 8
    configs = in_turns(configs, 4 * list(CASES).index(name), 4 * len(CASES))
    # 83 KB at most: the derivative, inlined 96 times, and its sum. Of SPILLED a few of the widest tiles keep one number
    # of 4 bytes, or two, in memory: stored once a tile, or a chunk, never in the mainloop.
    check_lean(asked, configs, 96 << 10, most_spilled=SPILLED.get(name, 0))


# What is called for, not inlined: four copies in place of 128.
LONG = {
    "dropout": (dropout, 1, (KEY,)),
    "dropout, saved": (
        lambda acc, key, b: (dropout(jax.nn.gelu(acc + b.astype(F32)), key), acc.astype(BF16)),
        1,
        (KEY, COLUMN),
    ),
    "dropout, residual": (
        lambda acc, key, s, b, r: (dropout(acc * s + b.astype(F32), key) + r).astype(BF16),
        1,
        (KEY, ((M, 1), F32), COLUMN, FULL),
    ),
    "gated dropout": (
        lambda g, u, key: (dropout(jax.nn.silu(g) * u, key), g.astype(BF16), u.astype(BF16)),
        2,
        (KEY,),
    ),
    "normal noise": (lambda acc, key: acc + jax.random.normal(key, acc.shape), 1, (KEY,)),
    "log_ndtr": (lambda acc, r: jax.scipy.special.log_ndtr(acc + r), 1, (((M, N), F32),)),
    "six": (
        lambda acc: jnp.sin(jnp.cos(jnp.tan(jnp.arcsin(jnp.arccos(jnp.arctan(acc)))))).astype(BF16),
        1,
        (),
    ),
    "gelu (erf form)'s derivative": (
        lambda acc, z: jax.vjp(lambda t: jax.nn.gelu(t, approximate=False), z.astype(F32))[1](acc)[0].astype(BF16),
        1,
        (FULL,),
    ),
}


@needs_nvrtc
@pytest.mark.parametrize("name", LONG)
def test_long_epilogues_compile_lean(name):
    asked = problem(*LONG[name])
    assert plan_staging(asked.epilogue).called
    configs = [config for config in cutjax.candidates(asked) if config.cluster == 1]
    configs = in_turns(telling(configs, 64), list(LONG).index(name), 48)  # in one of two the widest alone
    check_lean(asked, configs[: 1 + list(LONG).index(name) % 2], 56 << 10)  # 43 KB at most


FUNCTIONS = {name: getattr(jax.lax, name) for name in cases.SMOOTH} | {
    "pow": lambda x: abs(x) ** 1.5,
    "arctan2": lambda x: jnp.arctan2(x, x + 1),
    "nextafter": lambda x: jnp.nextafter(x, x + 1),
    "rem": lambda x: jax.lax.rem(x, x + 1),
    "floor_divide": lambda x: x // 0.7,
    "sinc": jnp.sinc,
    "integer div": lambda x: (x.astype(jnp.int32) // 7).astype(F32),
}


@needs_nvrtc
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_compile_lean(name):
    """13 KB of kernel, and 20 instructions of 16 bytes for each of 32 elements; sin inlined would make 56 KB."""
    check_lean(problem(FUNCTIONS[name]), [cutjax.Config(64, 64)], 26 << 10)


# What surrounds a piece, for the host: operands hold numbers from 1 to 2, and results are kept instead of staged.
HOST = """
#define __device__
#define __noinline__ __attribute__((noinline))
using Acc = float;
constexpr int PRODUCTS = 2, D_CHUNK = 32, PIECE = 16, STAGING_ROWS = 64;
struct Partials {};
double* kept;
template <Dtype D>
struct Staging {
  template <class Carrier>
  static void stage(u32, int, int, const Carrier (&v)[8]) {
    for (Carrier x : v) *kept++ = x;
  }
};
struct Extras {
  Pair<Dtype::f32> x0, x1[2];
  Pair<Dtype::bf16> x2[2], x3[2][2];
  Pair<Dtype::boolean> x4[D_CHUNK / 8][2];
  Pair<Dtype::u32> x5, x6;
  int batch0, row1;
  void begin_piece(int, int, int, u32, int) {}
};
"""
RUN = """
extern "C" void run(double* inlined, double* called) {
  Extras extras;
  u32 state = 1, *words = reinterpret_cast<u32*>(&extras);
  auto random = [&] { return (state = state * 1664525 + 1013904223) >> 9; };
  for (u32 i = 0; i < sizeof(extras) / 4; ++i) words[i] = 0x3f803f80 | (random() & 0x7f007f);
  for (auto& pair : extras.x4)
    for (auto& x : pair) x.bits[0] = random() & 0x0101;
  extras.batch0 = 3, extras.row1 = 500;
  float acc[PRODUCTS][8];
  for (int i = 0; i < 16; ++i) acc[i / 8][i % 8] = 0.1f * i;
  Partials partials;
  for (int piece = 0; piece < 2; ++piece) {
    kept = inlined + 16 * piece;
    one::epilogue_piece(extras, partials, acc, piece, 40, 64 + 16 * piece, 0, 0);
    kept = called + 16 * piece;
    two::epilogue_piece(extras, partials, acc, piece, 40, 64 + 16 * piece, 0, 0);
  }
}
"""


def test_a_call_computes_what_inlining_does(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    def fn(g, u, s, r, c, x, mask, key):
        batch, row, col = (jax.lax.broadcasted_iota(jnp.int32, g.shape, axis).astype(F32) for axis in range(3))
        y = jnp.where(mask, jnp.sin(g * s + c.astype(F32)), u * r + x.astype(F32))
        return (y + 0.25 * batch + 2 * row - 3 * col).astype(BF16), jax.random.bits(key, g.shape)

    shapes = [((), F32), ((M, 1), F32), ((N,), BF16), ((4, M, N), BF16), ((4, M, N), bool)]
    accs = [jax.ShapeDtypeStruct((4, M, N), F32)] * 2
    epilogue = trace(fn, accs, [*(jnp.zeros(*x) for x in shapes), KEY]).epilogue.primal
    assert emit.places(epilogue) == [("batch", 0), ("row", 1)]
    staging = sources._file("common/elements.cuh")
    text = f'#include "{host.SHIM}"\n{"".join(map(sources._file, sources.MATH))}{staging}{HOST}'
    for name, called in (("one", False), ("two", True)):
        piece = epilogue_text._piece(dataclasses.replace(plan_staging(epilogue), called=called))
        assert ("epilogue_four" in piece) == called
        text += f"namespace {name} {{\n{emit.emit(epilogue)}{piece}}}\n"
    library = gxx.build(tmp_path, text + RUN)
    inlined, found = np.zeros((2, 32))
    library.run(inlined.ctypes, found.ctypes)
    np.testing.assert_array_equal(inlined, found)
    assert len(np.unique(inlined)) == 32  # so that none could stand for another


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_inlined(name):
    fn = ACTIVATIONS[name][0]
    assert not plan_staging(problem(lambda acc: fn(acc).astype(BF16)).epilogue).called


def parameters(text):
    """The kinds of a kernel's parameters, read off its text."""
    assert "KERNEL(PARAMETERS) {" in text
    (signature,) = re.findall(r"#define PARAMETERS (.*)", text)
    kinds = {"TensorMap": "TensorMap", "char": "Pointer", "float": "Pointer", "int": "Int32"}
    return [next(kind for word, kind in kinds.items() if re.search(rf"\b{word}\b", x)) for x in signature.split(",")]


@pytest.mark.parametrize("name", ["plain", *CASES])
def test_the_plan_passes_what_the_kernel_takes(name):
    asked = cutjax.Problem.of(4096, 4096, 4096) if name == "plain" else problem(*CASES[name])
    config = cutjax.candidates(asked)[0]
    plan = sm90.resolved(asked, config).call().launches[0]
    assert [type(x).__name__ for x in plan.params] == parameters(sm90.resolved(asked, config).source)
    buffers = [x.buffer for x in plan.params if hasattr(x, "buffer")]
    assert sorted(buffers) == list(
        range(1 + asked.products + len(asked.epilogue.operands) + len(asked.epilogue.outputs))
    )


def test_staging_of_several_results():
    asked = problem(lambda acc: (acc.astype(jnp.int8), acc), 1)
    kernel = sm90.resolved(asked, cutjax.Config(128, 128, stages=2))
    assert kernel.chunk == 32  # rows of 32 bytes, the least; 64 columns would make buffers of 20 KiB
    assert kernel.buffer_bytes == 64 * 32 * 5
    results = [a.value for a in kernel.arguments if a.to == "d"]
    assert [x.swizzle for x in results if isinstance(x, TensorMap)] == [32, 128]


@pytest.mark.parametrize(
    ("results", "operands", "columns", "bytes_of_a_column", "by_tma"),
    [
        ([BF16], [BF16], 64, 2, [0]),  # where the result will be
        ([BF16], [BF16, BF16], 64, 4, [0, 1]),
        ([BF16, BF16], [BF16, BF16], 64, 4, [0, 1]),
        ([BF16], [F32], 32, 6, [0]),
        ([F32, BF16], [F32, jnp.int8, BF16], 32, 6, [0, 2]),  # rows of int8 may not be of whole units of 16 bytes
        ([BF16], [bool], 64, 2, []),
        ([BF16, jnp.float8_e4m3fn], [bool], 64, 3, [0]),
    ],
)
def test_operands_share_the_staging_of_results(results, operands, columns, bytes_of_a_column, by_tma):
    def fn(acc, *xs):
        total = acc + sum(x.astype(F32) for x in xs)
        return tuple(total.astype(dtype) for dtype in results)

    asked = problem(fn, operands=[((M, N), dtype) for dtype in operands])
    staging = plan_staging(asked.epilogue)
    assert [i for i, _ in staging.operands] == by_tma
    assert (staging.chunk(256), staging.column_bytes) == (columns, bytes_of_a_column)


def test_an_epilogue_is_in_the_kernels_name():
    config = cutjax.Config()
    gelu, relu = problem(*CASES["gelu"]), problem(lambda acc: jax.nn.relu(acc).astype(BF16))
    names = {config.name(p) for p in (gelu, relu, cutjax.Problem.of(4096, 4096, 4096))}
    assert len(names) == 3
    assert all(name.startswith("sm90_bf16_nn_128x256x64_s4_c1x1_coop") for name in names)
    assert config.name(gelu) == config.name(problem(*CASES["gelu"]))


@pytest.mark.parametrize(
    ("fn", "operands", "sizes", "match"),
    [
        (lambda acc: (acc, (acc > 0).astype(jnp.int32).max(0)), (), (512, 512, 512), "a reduction in int32"),
    ],
)
def test_what_no_kernel_of_wgmma_does(fn, operands, sizes, match):
    asked = problem(fn, 1, operands, sizes=sizes)
    reason = "; ".join(cutjax.reasons(cutjax.Config(), asked))
    assert match in reason
    assert not any(isinstance(config, cutjax.Config) for config in cutjax.candidates(asked))


@pytest.mark.parametrize("batch", [(5,), (3, 5), (4, 1, 6)], ids=str)
def test_places_in_the_batch(batch):
    """What the kernel makes of a result's number is its place, and the sizes are no part of the text."""
    places = [(axis, i + (axis == "row")) for axis in ("batch", "row") for i in range(len(batch))]
    nodes, last = [Node("acc", params=(0,))], 0
    for place in places:
        at = len(nodes)
        nodes += [Node("iota", (), "int32", place), Node("convert_element_type", (at,)), Node("add", (last, at + 1))]
        last = at + 2
    epilogue = normal(1, (), nodes, [Output(last, "bfloat16")])
    assert emit.places(epilogue) == places
    asked = cutjax.Problem.of(136, 264, 72, batch=batch, a_batch=batch, b_batch=batch, epilogue=epilogue)
    config = next(config for config in cutjax.candidates(asked) if not config.swap)  # places are named as they lie
    source = sm90.resolved(asked, config).source
    more = changed(asked, m=256, **dict.fromkeys(("batch", "a_batch", "b_batch"), (7, *batch[1:])))
    assert source == sm90.resolved(more, config).source

    plan = sm90.resolved(asked, config).call().launches[0]
    assert [type(x).__name__ for x in plan.params] == parameters(source)
    assert "batch0 = result / batch0_stride % batch0_size;" in source
    assert "row1 = result / row1_stride % row1_size * m;" in source
    steps = place_steps(asked)
    for result, index in enumerate(np.ndindex(*batch)):
        for (axis, i), (stride, size) in zip(places, steps, strict=True):
            place = index[-1 - i] if axis == "batch" else np.ravel_multi_index(index[-i:], batch[-i:])
            assert result // stride % size == place


def test_too_many_accumulators():
    asked = problem(*CASES["three products"])
    reason = "; ".join(cutjax.reasons(cutjax.Config(bm=128, bn=256, stages=2), asked))
    assert "3 products of 128x256 with this epilogue: 384 accumulator registers" in reason
    assert "3 products of 256 columns: wgmma multiplies at most 256 at once" in reason


def test_a_long_epilogue_gets_small_tiles():
    asked = problem(dropout, 1, (KEY,))
    reason = "; ".join(cutjax.reasons(cutjax.Config(bm=128, bn=192, schedule="pingpong"), asked))  # it would spill
    assert "192 accumulator registers a thread, at most 128" in reason


def test_partial_results_of_reductions():
    asked = problem(*CASES["all reductions"], sizes=(1000, 1160, 256))
    plan = sm90.resolved(asked, cutjax.Config(bm=128, bn=128, stages=2)).call()
    shapes = [x.shape for x in plan.results]
    assert shapes == [(1000, 1160), (63, 1160), (10, 1000), (63, 10), (63, 1160)]
    assert plan.finish is not None
    outs = jax.eval_shape(plan.finish, plan.results, ())
    assert [x.shape for x in outs] == [(1000, 1160), (1160,), (1000,), (), (1160,)]
    plain = sm90.resolved(problem(*CASES["gated"]), cutjax.Config(bm=128, bn=64, stages=2)).call()
    assert plain.results == ()
    assert plain.finish is None

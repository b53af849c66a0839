"""Kernels that compute prologues: values on the host, what refuses them, what is chosen, and the compiler's report."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest
from emulator import device

import cutjax
from cutjax.epilogue.trace import trace
from cutjax.kernels import choose, families, keys
from cutjax.kernels.mma import family
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler
from cutjax.runtime.launch import Int32, Pointer

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
needs_gxx = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def norm(a, r, g):
    return a * r * g


def traced(fn, shape, dtype, *operands):
    return trace(lambda a, *rest: fn(a, *rest).astype(dtype), [jax.ShapeDtypeStruct(shape, dtype)], operands)


def problem(m, n, k, fn=norm, layout="nn", dtype=BF16, arch="sm_80", operands=None, **fields):
    """The problem of a prologue, of a scale of each row of a's array and of each column."""
    shape = (m, k) if layout[0] == "n" else (k, m)
    given = (jnp.ones((shape[0], 1)), jnp.ones(shape[1:], dtype)) if operands is None else operands
    found = Problem.of(m, n, k, layout, dtype, dtype, fields.pop("out_dtype", F32), arch=arch, **fields)
    prologue = traced(fn, shape, dtype, *given).epilogue.primal
    return dataclasses.replace(found, a=dataclasses.replace(found.a, prologue=prologue))


def of_all(a, r, g, f, s):
    """A function that is infinite past the end of k, where a is zero: that may not be seen."""
    odd = jax.lax.broadcasted_iota(jnp.int32, a.shape, 0) & 1
    return jnp.where(a == 0, jnp.inf, jnp.where(odd == 0, a * r * g + f, s - a))


# (layout, architecture, dtype, m, n, k, (bm, bn, bk, wm, wn, sliced_k, stages, ...))
CASES = [
    ("nn", "sm_80", BF16, 40, 33, 70, (32, 32, 32, 16, 16, 1, 3)),
    ("nt", "sm_89", F16, 17, 72, 161, (16, 64, 64, 16, 16, 1, 4)),  # rows begin anywhere: through registers
    ("tn", "sm_80", BF16, 33, 40, 64, (32, 32, 32, 16, 16, 1, 3)),
    ("tt", "sm_90a", BF16, 36, 40, 65, (64, 32, 64, 32, 32, 2, 2)),  # warps share a tile along k
    ("nn", "sm_75", F16, 40, 40, 72, (32, 32, 32, 16, 16, 1, 2)),
    ("nn", "sm_80", BF16, 3, 72, 129, (4, 64, 128, 4, 32, 4, 1, 1, 1)),  # slim
    ("nt", "sm_90a", F16, 2, 72, 128, (2, 32, 128, 2, 32, 8, 1, 1, 1)),
]


@needs_gxx
@pytest.mark.parametrize(("layout", "arch", "dtype", "m", "n", "k", "config"), CASES)
def test_products_of_small_integers_are_exact(layout, arch, dtype, m, n, k, config, tmp_path):
    rng = np.random.default_rng(0)
    shape = (m, k) if layout[0] == "n" else (k, m)
    r, g = rng.integers(1, 3, (shape[0], 1)).astype(np.float32), rng.integers(-2, 3, shape[1:]).astype(dtype)
    f, s = rng.integers(-1, 2, shape).astype(dtype), np.float32(2)
    operands = [jnp.asarray(x) for x in (r, g, f, s)]
    asked = problem(m, n, k, of_all, layout, dtype, arch, operands)
    a = rng.choice([-2, -1, 1, 2], shape).astype(dtype)
    b = rng.integers(-4, 5, (k, n) if layout[1] == "n" else (n, k)).astype(dtype)
    result = np.full((m, n), 7, np.float32)
    arrays = [a, b, *traced(of_all, shape, dtype, *operands).operands, result]
    given = [kernel_host.aligned(np.asarray(x)) for x in arrays]
    kernel_host.run(mma.resolved(asked, Config(*config)), given, tmp_path, sanitized=True)
    made = np.asarray(of_all(jnp.asarray(a), *operands).astype(dtype), np.float32)
    wide = b.astype(np.float32)
    expected = (made if layout[0] == "n" else made.T) @ (wide if layout[1] == "n" else wide.T)
    np.testing.assert_array_equal(given[-1], expected)


@needs_gxx
def test_groups_of_rows(tmp_path):
    """Operands of rows are those of all groups' rows; rows of no group are zero."""
    m, n, k, sizes = 50, 24, 64, np.array([7, 0, 30], np.int32)
    rng = np.random.default_rng(0)
    asked = problem(m, n, k, groups=3, ragged="m", epilogue=kernel_host.problem("bfloat16", "").epilogue)
    a, b = (rng.integers(-4, 5, shape).astype(BF16) for shape in ((m, k), (3, k, n)))
    r, g = rng.integers(1, 4, (m, 1)).astype(np.float32), rng.integers(-2, 3, (1, k)).astype(BF16)
    given = [kernel_host.aligned(x) for x in (a, b, sizes, r, g, np.full((m, n), 7, np.float32))]
    kernel_host.run(mma.resolved(asked, Config(32, 32, 32, 16, 16, 1, 3)), given, tmp_path, blocks=6)
    made, group = a.astype(np.float32) * r * g.astype(np.float32), np.repeat(np.arange(3), sizes)
    expected = np.zeros((m, n), np.float32)
    expected[: len(group)] = np.einsum("mk,mkn->mn", made[: len(group)], b.astype(np.float32)[group])
    np.testing.assert_array_equal(given[-1], expected)


EMULATED = {
    "rows": (24, Config(16, 32, 32, 16, 16, 1, 3)),
    "slim": (3, Config(4, 64, 128, 4, 32, 4, 1, 1, 1)),
    "in parts": (24, Config(16, 32, 32, 16, 16, 1, 3, splits=2)),
    "gradients": (24, None),
}


@needs_gxx
@pytest.mark.compiles
@pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
@pytest.mark.parametrize("name", EMULATED)
def test_programs_on_the_emulated_device(name):
    """Whole programs, to the bit; the weights' gradient has the prologue in its loads too."""
    m, config = EMULATED[name]
    rng, (n, k) = np.random.default_rng(0), (40, 96)
    x, w = rng.integers(-2, 3, (m, k)).astype(BF16), rng.integers(-2, 3, (k, n)).astype(BF16)
    r, g = rng.integers(1, 3, (m, 1)).astype(np.float32), rng.integers(-2, 3, k).astype(BF16)

    def ours(x, w, r, g):
        given = {"prologue": norm, "prologue_operands": (r, g), "out_dtype": F32}
        return cutjax.gemm(x, w, backend="cuda", config=config, **given)

    def plain(x, w, r, g):
        return jnp.matmul(norm(x, r, g).astype(BF16), w, preferred_element_type=F32)

    def program(f):
        if name != "gradients":
            return jax.jit(f)
        return jax.jit(jax.grad(lambda *args: (f(*args) * 2).sum(), (0, 1)))

    with device.emulated():
        found = jax.tree.map(np.asarray, program(ours)(x, w, r, g))
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(np.asarray, program(plain)(x, w, r, g)))


def test_a_launch_is_told_the_operands():
    """They lie behind what is multiplied and told beside it, before those of the epilogue."""
    kernel = mma.resolved(problem(64, 64, 48), Config(32, 32, 32, 16, 16, 1, 3))
    values = {argument.name: argument.value for argument in kernel.arguments}
    assert [values[f"prologue{i}"] for i in range(2)] == [Pointer(2), Pointer(3)]
    assert [values[f"prologue_{axis}"] for axis in ("rows", "columns")] == [Int32(64), Int32(48)]
    assert values["d0"] == Pointer(4)
    other = mma.resolved(problem(64, 64, 48, lambda a, r, g: a + g), kernel.config)
    assert len({kernel.name, other.name}) == 2


REFUSED = {
    "kernels change bf16 or f16 in place": {"dtype": F32, "math": "tf32"},
    "its operands are of one": {"batch": (2,), "a_batch": (2,), "b_batch": (2,)},
    "in groups of k": {"layout": "tn", "groups": 2, "ragged": "k", "out_dtype": BF16},
    "more than 40 are not inlined": {"fn": lambda a, r, g: jnp.sin(a * r) * g},
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words):
    assert any(words in reason for reason in mma.reasons(problem(64, 64, 64, **REFUSED[words])))


def test_other_loads_refuse_it():
    asked = problem(64, 64, 64, arch="sm_90a")
    assert any("where operands are swapped" in reason for reason in choose.reasons(cutjax.Config(64, 64, 64, 4), asked))
    assert not choose.reasons(cutjax.Config(64, 64, 64, 4, swap=True), asked)
    (why,) = choose.reasons(cutjax.Config(64, 256, 64, 2, swap=True), dataclasses.replace(asked, m=256))
    assert "a thread changes (16, 1) lines and units of 16 bytes, at most 8" in why
    found = mma.resolve(asked, Config(64, 64, 64, 32, 32, 1, 3, tma=True))
    assert isinstance(found, tuple)
    assert "tma with a prologue: threads change what they copied themselves" in found


def test_keys_say_the_expression():
    plain, one, other = Problem.of(64, 64, 64), problem(64, 64, 64), problem(64, 64, 64, lambda a, r, g: a + g)
    assert len({keys.key(plain), keys.key(one), keys.key(other)}) == 3
    assert keys.key(one) == keys.key(problem(64, 64, 64))
    assert "prologue a = " in str(one)


def rows(**given):
    """What runs for 16 rows and 4096 x 4096 weights, alone and with a prologue."""
    x, w = jax.ShapeDtypeStruct((16, 4096), BF16), jax.ShapeDtypeStruct((4096, 4096), BF16)
    r, g = jax.ShapeDtypeStruct((16, 1), F32), jax.ShapeDtypeStruct((4096,), BF16)
    alone = cutjax.explain(lambda x, w: cutjax.gemm(x, w, **given), arch="sm_90a")(x, w)
    fused = cutjax.explain(
        lambda x, w, r, g: cutjax.gemm(x, w, prologue=norm, prologue_operands=(r, g), **given), arch="sm_90a"
    )(x, w, r, g)
    return alone.rows[0], fused.rows[0]


def test_auto_is_what_runs_for_the_plain_product():
    alone, fused = rows()
    assert fused.runs == alone.runs
    assert ("the prologue runs before it" if alone.runs == "XLA" else "a made by its prologue") in fused.why


def test_auto_takes_one_that_is_measured_and_faster(monkeypatch):
    """The switch is one line: kernels with prologues compete with XLA's pass and product by their predicted times."""
    asked = problem(16, 6144, 4096, arch="sm_90a", out_dtype=BF16)
    monkeypatch.setattr(choose.xla, "time_us", lambda problem: 25.0)
    assert choose.choose(asked).resolved.converted  # another kernel, behind the prologue
    monkeypatch.setattr(sm90, "PROLOGUES", "")
    families.offers.cache_clear()
    families._fastest.cache_clear()
    try:
        chosen = choose.choose(asked)
        assert chosen.config.swap
        assert "with the prologue in its loads" in chosen.reasons[0]
        many = problem(8192, 4096, 4096, arch="sm_90a", out_dtype=BF16)
        assert "in its loads" not in " ".join(choose.choose(many).reasons)
    finally:
        families.offers.cache_clear()
        families._fastest.cache_clear()


def test_cuda_and_a_pinned_config_compute_it_in_the_kernel():
    _, fused = rows(config=cutjax.Config(64, 16, 64, 8, swap=True))
    assert re.match("sm90_bf16.*_nn_.*_swap.*_p[0-9a-f]{8}", fused.runs)
    assert "with the prologue in its loads: 0.262 MB less are moved" in fused.why
    _, pinned = rows(config=Config(16, 64, 64, 16, 16, 1, 4))
    assert re.match("mma_bf16_nn_16x64x64_.*_p", pinned.runs)
    alone, before = rows(config=cutjax.Config(64, 64, 64, 4))
    assert before.runs == alone.runs
    assert "a made by its prologue before the product" in before.why


def silu(a, r, g):
    return jax.nn.silu(a * r) * g


@pytest.mark.parametrize(
    ("arch", "m", "layout"), [("sm_80", 16, "nn"), ("sm_89", 4, "nt"), ("sm_90a", 64, "nn"), ("sm_100a", 16, "nt")]
)
@pytest.mark.versions
@pytest.mark.compiles
def test_compiles_without_spills(arch, m, layout):
    """One kernel of each architecture, with many tiles tried by hand: all shipped ones of six shapes had none."""
    asked = problem(m, 4096, 4096, silu, layout, arch=arch, out_dtype=BF16)
    kernel = next(found for c in family.configs(asked) if not isinstance(found := mma.resolve(asked, c), tuple))
    resources = kernel.compile().resources
    assert not resources.spill_store_bytes
    assert not resources.spill_load_bytes

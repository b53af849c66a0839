"""What fused products lower to for CUDA, without a GPU: one kernel, which keeps all it needs in registers."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies

import cutjax
from benchmarks.ops import fused
from benchmarks.ops import fused as cases

H = jnp.bfloat16
RANDOM = 4  # after a change of what an epilogue becomes: 60

pytestmark = pytest.mark.compiles


def lowered(fn, *args) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> list[str]:
    return re.findall(r'@cutjax_launch.*kernel = "(\w+)"', text)


def spills(choice) -> int:
    found = choice.resolved.compile().resources
    return (found.spill_store_bytes or 0) + (found.spill_load_bytes or 0)


@pytest.mark.parametrize("index", range(RANDOM))
def test_random_epilogues_are_one_kernel(index):
    case = strategies.examples(RANDOM, tuple(sorted(strategies.KINDS)))[index]
    batch = ((), (3,))[index % 2]
    x, w = jax.ShapeDtypeStruct((*batch, 136, 72), H), jax.ShapeDtypeStruct((*batch, 72, 264), H)
    arrays = case.arrays((*batch, 136, 264))
    operands = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in arrays)

    def fn(x, ws, operands):
        dtypes = (None,) * len(case.trees)
        return cutjax.gemm(
            x, ws if len(ws) > 1 else ws[0], epilogue=case, operands=operands, out_dtype=dtypes, backend="cuda"
        )

    text = lowered(fn, x, (w,) * case.products, operands)
    assert len(kernels(text)) == 1
    assert "dot_general" not in text
    (row,) = cutjax.explain(fn, platform="cuda")(x, (w,) * case.products, operands).rows
    assert spills(row.choice) == 0


@pytest.mark.parametrize(("name", "weights"), [("dropout", (2, 3)), ("places", (2, 1)), ("rows", ())], ids=str)
def test_places_in_the_batch_are_one_kernel(name, weights):
    def epilogue(acc, key):
        if name == "dropout":
            return jnp.where(jax.random.bernoulli(key, 0.5, acc.shape), acc * 2, 0)
        if name == "rows":
            return jnp.where(jax.random.bernoulli(key, 0.5, acc.shape[1:]), acc * 2, 0)
        return sum((jax.lax.broadcasted_iota(jnp.float32, acc.shape, axis) for axis in range(acc.ndim)), acc)

    def fn(x, w, key):
        return cutjax.gemm(x, w, epilogue=epilogue, operands=(key,), backend="cuda")

    args = jax.ShapeDtypeStruct((2, 3, 136, 72), H), jax.ShapeDtypeStruct((*weights, 72, 264), H), jax.random.key(0)
    for f in (fn,) if weights else (fn, jax.vmap(fn, (0, None, None))):
        text = lowered(f, *args)
        assert len(kernels(text)) == 1
        assert "dot_general" not in text
    (row,) = cutjax.explain(fn, platform="cuda")(*args).rows
    assert spills(row.choice) == 0


# A fifth of them: the others have the same epilogues at other sizes.
BENCHMARKS = [(case, i) for case in cases.FUSED for i in range(len(fused.pairs(case)))][::5]


@pytest.mark.parametrize(
    ("case", "i"), BENCHMARKS, ids=[f"{case.name} {fused.pairs(case)[i].name}" for case, i in BENCHMARKS]
)
def test_benchmarks_run_kernels_that_hardly_spill(case, i):
    pair = fused.pairs(case)[i]
    args = {name: jax.ShapeDtypeStruct(shape, H) for name, shape in fused.shapes(case).items()}
    with cutjax.use_backend("cuda"):  # plain products of a layer may be XLA's elsewhere
        rows = cutjax.explain(pair.ours, platform="cuda")(args).rows
    for row in rows:
        assert row.choice.config is not None, row.choice.reasons
        assert spills(row.choice) <= 16, row.choice.kernel  # a word or two, once a tile (docs/kernel-selection.md)
    if pair.plain:
        assert len(rows) == len(kernels(lowered(pair.ours, args))) == 1


def test_inputs_of_benchmarks_have_unit_variance():
    case = cases.Fused("mlp", (64, 128, 32))
    (arrays,) = fused.inputs(case, 0)
    assert set(arrays) == set(fused.shapes(case))
    z = np.asarray(arrays["x"] @ arrays["w"], np.float32)
    assert 0.7 < z.std() < 1.3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_an_identity_is_the_plain_kernel(dtype):
    x = jax.ShapeDtypeStruct((256, 256), H)
    texts = [
        lowered(lambda x, how=how: cutjax.gemm(x, x, out_dtype=dtype, **how), x)
        for how in ({}, {"epilogue": lambda acc: acc})
    ]
    (plain,), (fused,) = map(kernels, texts)
    assert plain == fused
    assert not re.search(r"_e[0-9a-f]{8}$", plain)

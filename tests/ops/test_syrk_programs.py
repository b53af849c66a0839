"""What syrk lowers to for CUDA, without a GPU: one kernel; the exported program; and what it refuses."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cutjax

LAYOUTS = ("n", "t")
M, K = 6, 5
A, H = jnp.ones((M, K)), jnp.bfloat16


def operations(fn: Callable[..., Any], *args: Any, backend: str = "cuda") -> list[str]:
    """StableHLO operations of the program for CUDA, of one function; a kernel is its name less the tile."""
    with cutjax.use_backend(backend):  # whatever is predicted of XLA's
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    for line in text.splitlines():
        if kernel := re.search(r'@cutjax_launch.*kernel = "(sm90_\w+?)_\d\w*?(_symmetric)?(_e[0-9a-f]{8})?"', line):
            found.append(kernel[1] + (kernel[2] or ""))
        elif operation := re.search(r"stablehlo\.(\w+)", line):
            found.append(operation[1])
    return sorted(found)


def shape(layout: str = "n", *batch: int, dtype: Any = H) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*batch, *((64, 128) if layout == "n" else (128, 64))), dtype)


KERNEL = {"n": "sm90_bf16_nt", "t": "sm90_bf16_tn"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_forward_is_one_kernel(layout, batch):
    a = shape(layout, *batch)
    f = functools.partial(cutjax.syrk, layout=layout)
    assert operations(f, a) == [f"{KERNEL[layout]}_symmetric"]
    if batch:
        mapped = functools.reduce(lambda f, _: jax.vmap(f), batch, f)
        assert operations(mapped, a) == [f"{KERNEL[layout]}_symmetric"]


@pytest.mark.versions
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_gradient_is_one_product(layout, batch):
    """Of g + g^T, which XLA adds: (g + g^T) a, or a (g + g^T). Nothing else is transposed."""
    a, g = shape(layout, *batch), jax.ShapeDtypeStruct((*batch, 64, 64), H)
    found = operations(lambda a, g: jax.vjp(functools.partial(cutjax.syrk, layout=layout), a)[1](g), a, g)
    assert [x for x in found if x.startswith("sm90")] == [{"n": "sm90_bf16_nn", "t": "sm90_bf16_nt"}[layout]]
    assert "dot_general" not in found
    assert found.count("add") == found.count("transpose") == 1


def test_newton_schulz_is_one_kernel():
    def f(a):
        return cutjax.syrk(a, epilogue=lambda acc, a: 2 * acc - 3 * a.astype(acc.dtype), operands=(a,))

    assert operations(f, jax.ShapeDtypeStruct((4, 64, 64), H)) == ["sm90_bf16_nt_symmetric"]


@pytest.mark.versions
def test_derivative_of_an_epilogue_keeps_accumulators_of_the_same_kernel():
    f = functools.partial(cutjax.syrk, epilogue=lambda acc, s: jnp.tanh(acc * s), operands=(jnp.float32(2),))
    found = operations(jax.grad(lambda a: f(a).astype(jnp.float32).sum()), shape())
    kernels = [x for x in found if x.startswith("sm90")]
    assert len(kernels) == 2
    assert sum("symmetric" in x for x in kernels) == 1
    assert "dot_general" not in found


@pytest.mark.versions
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids=str)
def test_export_round_trip(platforms):
    a = shape("t", 2)

    def f(a):
        return cutjax.syrk(a, layout="t", epilogue=lambda acc: acc / 2)

    exempt = [jax.export.DisabledSafetyCheck.custom_call("cutjax_launch")]
    exported = jax.export.export(jax.jit(f), platforms=platforms, disabled_checks=exempt)(a)
    restored = jax.export.deserialize(bytearray(exported.serialize()))
    assert restored.out_avals == exported.out_avals
    launch = re.compile(r"@cutjax_launch.*")
    assert launch.findall(restored.mlir_module()) == launch.findall(exported.mlir_module()) != []
    if "cpu" in platforms:
        x = jax.device_put(np.random.default_rng(0).integers(-2, 3, a.shape).astype(H))
        np.testing.assert_array_equal(jax.jit(restored.call)(x), f(x))


def test_without_a_kernel_xla_multiplies_once():
    a = jax.ShapeDtypeStruct((5, 7), jnp.int16)
    assert operations(cutjax.syrk, a, backend="auto").count("dot_general") == 1
    with pytest.raises(NotImplementedError, match="syrk"):
        operations(functools.partial(cutjax.syrk, backend="cuda"), a)


def test_pinned_config_is_of_the_forward_product_alone(kernels_run):
    f = functools.partial(cutjax.syrk, config=cutjax.Config(64, 64, stages=2, schedule="pingpong"))
    traced = jax.jit(jax.value_and_grad(lambda a: f(a).astype(jnp.float32).sum())).trace(shape())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = re.findall(r'@cutjax_launch.*?kernel = "(\w+)"', text)
    assert ["_64x64x64_s2_" in name for name in kernels] == [True, False]


@pytest.mark.versions
@pytest.mark.parametrize("precision", [None, "highest", "high", "BF16_BF16_F32_X3"])
def test_precision(precision):
    """Every product of the value and of the gradient has that of plain JAX."""

    def found(product):
        f = jax.value_and_grad(lambda a: product(a).sum())
        text = jax.jit(f).trace(A).lower(lowering_platforms=("tpu",)).as_text()
        return set(re.findall(r"precision = \[\w+, \w+\]|algorithm = <[^>]*>", text))

    def product(a):
        return lax.dot_general(a, a, (((1,), (1,)), ((), ())), precision=precision)

    assert found(functools.partial(cutjax.syrk, precision=precision)) == found(product)
    with jax.default_matmul_precision(precision or "default"):
        assert found(cutjax.syrk) == found(lambda a: jnp.matmul(a, a.T))


# What is refused.

COLUMN, ROW = jnp.ones((M, 1)), jnp.ones((1, M))
ALIKE = r"^syrk: the epilogue must treat \(i, j\) and \(j, i\) alike, but "


def scale(acc, x):
    return acc * x


def tril(acc):
    rows, columns = (lax.broadcasted_iota(jnp.int32, acc.shape, axis) for axis in (0, 1))
    return jnp.where(rows >= columns, acc, 0)


BAD = [
    (ValueError, r"^syrk: unknown layout 'nt', expected one of \('n', 't'\)", A, {"layout": "nt"}),
    (ValueError, r"^syrk: unknown layout None", A, {"layout": None}),
    (ValueError, r"^syrk: a must have rank 2 or more, got shape \(3,\)", jnp.ones(3), {}),
    (ValueError, r"^syrk: a must have rank 2 or more, got the scalar 2.0", 2.0, {}),
    (TypeError, r"^syrk: a must be an array, got list", [[1.0]], {}),
    (TypeError, r"^syrk: a must be an array, got tuple", (A, A), {"epilogue": lambda p, q: p}),
    (TypeError, r"^syrk: a is a tuple", (A, A), {}),
    (TypeError, r"^syrk: a product of float32 has no meaning as out_dtype int32", A, {"out_dtype": "int32"}),
    (TypeError, r"^syrk: out_dtype is a tuple, but without", A, {"out_dtype": ("float32", "float32")}),
    (TypeError, r"^syrk: epilogue must be a function, got int", A, {"epilogue": 3}),
    (TypeError, r"^syrk: operands must be a tuple, got ArrayImpl", A, {"epilogue": scale, "operands": COLUMN}),
    (ValueError, r"^syrk: 1 operands, but no epilogue", A, {"operands": (COLUMN,)}),
    (ValueError, r"^syrk: unknown save 'all'", A, {"save": "all"}),
    (ValueError, r"^syrk: unknown backend 'gpu'", A, {"backend": "gpu"}),
    (TypeError, r"^syrk: config must be a cutjax.Config or cutjax.MmaConfig, got dict", A, {"config": {}}),
    (ValueError, r"^syrk: Precision argument must be one of", A, {"precision": "bogus"}),
    (NotImplementedError, ALIKE + "operand 0 varies along rows alone", A, {"epilogue": scale, "operands": (COLUMN,)}),
    (NotImplementedError, ALIKE + "operand 0 varies along columns alone", A, {"epilogue": scale, "operands": (ROW,)}),
    (NotImplementedError, ALIKE + "it depends on the position along col and row", A, {"epilogue": tril}),
    (TypeError, r"incompatible shapes .*\(6, 6\), \(4, 4\)", A, {"epilogue": scale, "operands": (jnp.ones((4, 4)),)}),
]


@pytest.mark.parametrize(("error", "match", "a", "options"), BAD, ids=[case[1][:60] for case in BAD])
def test_refused(error, match, a, options):
    f = functools.partial(cutjax.syrk, **options)
    for g in (f, jax.jit(f)) if isinstance(a, jax.Array) else (f,):
        with pytest.raises(error, match=match):
            g(a)

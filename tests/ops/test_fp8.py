"""fp8_dot_general: values and gradients against numpy, transformations, Flax's layers, and programs by fuse."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import cutjax

RECIPES = ("tensor", "row", "block")
DIMS = (((1,), (0,)), ((), ()))
M, K, N = 40, 200, 72  # none a multiple of 128
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BF16 = jnp.bfloat16


def always(recipe, **how):
    return cutjax.fp8_dot_general(recipe, policy="always", **how)


def arrays(*shapes, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape) * np.exp(rng.standard_normal(shape)), dtype) for shape in shapes]


def rounded(x, recipe, dtype, weights=False):
    """Returns x ``[mn, k]`` quantized along k and dequantized, in numpy."""
    x = np.asarray(x, np.float32)
    rows, columns = {"tensor": x.shape, "row": (1, x.shape[1]), "block": (128 if weights else 1, 128)}[recipe]
    wide, most = np.zeros(x.shape), np.float32(jnp.finfo(dtype).max)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns]
            scale = (np.abs(block).max() or most) / most
            values = np.clip(block / scale, -most, most).astype(dtype)
            wide[i : i + rows, j : j + columns] = values.astype(np.float64) * np.float64(scale)
    return wide


def close(got, wanted, tolerance=2e-6):
    """By the largest number: sums in float32, and quotients that XLA rounds once more, differ by 5e-7."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("sizes", [(8192, 14336, 4096), (2048, 1024, 28672), (16384, 2048, 28672)], ids=str)
@pytest.mark.parametrize("recipe", ["tensor", "row"])
def test_xla_has_no_product_with_scales_of_results(sizes, device, recipe):
    """Its own are not predicted to be much faster: it scales in another pass, or tunes for minutes those by rows."""
    m, n, k = sizes
    x, w = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((m, k), (k, n)))

    def loss(x, w):
        return always(recipe)(x, w, DIMS).astype(jnp.float32).sum()

    rows = cutjax.explain(jax.grad(loss, (0, 1)), device=device)(x, w).rows
    products = [row for row in rows if not row.runs.startswith("quantize_")]
    assert len(products) >= 2
    assert all(row.runs.startswith("sm90_f8") for row in products), rows


@pytest.mark.parametrize("gradients", [E4M3, E5M2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_and_gradients(recipe, gradients):
    x, w, dy = arrays((M, K), (K, N), (M, N))
    dot = always(recipe, gradients=gradients)

    @jax.jit
    def run(x, w, dy):
        y, back = jax.vjp(lambda x, w: dot(x, w, DIMS), x, w)
        return y, *back(dy)

    y, dx, dw = run(x, w, dy)
    q = functools.partial(rounded, recipe=recipe)
    close(y, q(x, dtype=E4M3) @ q(w.T, dtype=E4M3, weights=True).T)
    close(dx, q(dy, dtype=gradients) @ q(w, dtype=E4M3, weights=True).T)
    close(dw, q(x.T, dtype=E4M3) @ q(dy.T, dtype=gradients).T)


@pytest.mark.versions
@pytest.mark.parametrize("recipe", RECIPES)
def test_transformations(recipe):
    dot = always(recipe)
    xs, w = arrays((3, 16, K), (K, 24), dtype=BF16)

    @jax.jit  # of which vmap, jvp and grad make one program each
    def f(x, w):
        return dot(x, w, DIMS)

    each = jnp.stack([f(x, w) for x in xs])
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(xs, w), each)
    np.testing.assert_array_equal(jax.vmap(f, (0, 0))(xs, jnp.stack([w] * 3)), each)
    # Matrices of a batch have scales of their own, as those of vmap.
    np.testing.assert_array_equal(dot(xs, jnp.stack([w] * 3), (((2,), (1,)), ((0,), (0,)))), each)

    def loss(x, w):
        return jnp.sum(jnp.sin(0.01 * f(x, w).astype(jnp.float32)))

    grad = jax.jit(jax.grad(loss, (0, 1)))
    wanted = grad(xs[0], w)

    # What XLA keeps wider than bf16 in one program, or adds in another order, may be rounded otherwise to float8.
    def near(got, wanted):
        got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
        assert np.linalg.norm(got - wanted) < 2**-5 * np.linalg.norm(wanted)

    near(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1)))(xs[0], w)[1], wanted[1])
    _, scanned = jax.jit(lambda xs, w: jax.lax.scan(lambda _, x: (None, jax.grad(loss, 1)(x, w)), None, xs))(xs[:1], w)
    near(scanned[0], wanted[1])
    of_mapped = jax.jit(jax.grad(lambda w: jax.vmap(loss, (0, None))(xs[:1], w).sum()))(w)
    near(of_mapped, wanted[1])

    # The tangent is a product of the quantized tangent, so is that of a gradient, which second order is made of.
    y, tangent = jax.jvp(f, (xs[0], w), (xs[1], jnp.zeros_like(w)))
    if dot.recipe.gradients == "float8_e4m3fn":
        np.testing.assert_array_equal(tangent, each[1])
    np.testing.assert_array_equal(y, each[0])

    def second(product):
        def inner(x):
            return jnp.sum(jnp.sin(product(x, w).astype(jnp.float32)))

        found = jax.jit(jax.grad(lambda x: (jax.grad(inner)(x).astype(jnp.float32) ** 2).sum()))(xs[0] * BF16(0.01))
        return found.astype(jnp.float32)

    exact = second(jnp.matmul)
    assert 0.01 < jnp.linalg.norm(second(f) - exact) / jnp.linalg.norm(exact) < 0.3


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_dimensions(recipe):
    """Several contracted axes, in another order, and a result whose columns are the left operand's."""
    dot = always(recipe)
    x, w = arrays((4, 5, 6, 8), (8, 9, 5))
    y = dot(x, w, (((3, 1), (0, 2)), ((), ())))
    flat = x.transpose(0, 2, 3, 1).reshape(24, 40), w.transpose(0, 2, 1).reshape(40, 9)
    close(y.reshape(24, 9), dot(*flat, DIMS))
    assert dot(jnp.zeros((0, 4)), jnp.ones((4, 2)), DIMS).shape == (0, 2)


@pytest.mark.versions
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_over_devices(kind):
    x, w = arrays((8, 16, K), (K, 64), dtype=BF16)
    dot = always("row")
    grad = jax.jit(jax.grad(lambda x, w: dot(x, w, (((2,), (0,)), ((), ()))).astype(jnp.float32).sum(), (0, 1)))
    wanted = grad(x, w)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        lies = (x, jax.P("data")), (w, jax.P(None, "model"))
        put = [jax.device_put(y, jax.NamedSharding(mesh, spec)) for y, spec in lies]
        for a, b in zip(grad(*put), wanted, strict=True):
            close(a, b, 2**-7)


@pytest.mark.versions
def test_in_shard_map():
    """Of rows that are divided: each has a scale of its own, so results are the same."""
    x, w = arrays((16, 32), (32, 24))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    grad = jax.grad(lambda x, w: jnp.sin(always("row")(x, w, DIMS)).sum())
    mapped = jax.shard_map(grad, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data"))
    close(jax.jit(mapped)(x, w), grad(x, w))


def primitives(fn, *args):
    return [eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns]


def test_which_products_are_quantized():
    few, many = (jax.ShapeDtypeStruct((m, 8192), BF16) for m in (64, 16384))
    w = jax.ShapeDtypeStruct((8192, 8192), BF16)
    for recipe in RECIPES:
        auto = functools.partial(cutjax.fp8_dot_general(recipe), dimension_numbers=DIMS)
        assert "cutjax_fp8" in primitives(auto, many, w)
        assert primitives(auto, few, w) == ["dot_general"]
        highest = functools.partial(auto, precision="highest")
        assert primitives(highest, many, w) == ["dot_general"]
        with cutjax.use_backend("xla"):
            assert recipe != "block" or primitives(auto, many, w) == ["dot_general"]
    integers = jnp.ones((2, 2), jnp.int32)
    assert always("row")(integers, integers, DIMS).dtype == jnp.int32


def test_refusals():
    with pytest.raises(ValueError, match="unknown recipe 'rows'"):
        cutjax.fp8_dot_general("rows")
    with pytest.raises(ValueError, match="unknown policy"):
        cutjax.fp8_dot_general(policy="never")
    with pytest.raises(ValueError, match="gradients are float8_e4m3fn or float8_e5m2, got int8"):
        cutjax.fp8_dot_general(gradients="int8")
    with pytest.raises(TypeError, match="contract"):
        always("row")(jnp.ones((2, 3)), jnp.ones((2, 3)), DIMS)
    with pytest.raises(TypeError, match="fp8 must be a recipe"):
        cutjax.fuse(jnp.dot, fp8=8)  # pyright: ignore[reportArgumentType]
    assert hash(always("row")) == hash(always("row"))
    assert always("row") == always("row") != always("block")


@pytest.mark.versions
def test_flax_layers():
    from flax import linen, nnx

    dot = always("block")
    (x,) = arrays((4, 32), dtype=BF16)
    layer = nnx.Linear(32, 16, use_bias=False, dtype=BF16, dot_general=dot, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(x), dot(x, layer.kernel[...].astype(BF16), DIMS))
    dense = linen.Dense(16, use_bias=False, dtype=BF16, dot_general=dot)
    params = {"params": {"kernel": layer.kernel[...]}}
    np.testing.assert_array_equal(dense.apply(params, x), layer(x))
    heads = nnx.LinearGeneral(32, (2, 8), use_bias=False, dtype=BF16, dot_general=dot, rngs=nnx.Rngs(0))
    kernel = heads.kernel[...].astype(BF16).reshape(32, 16)
    np.testing.assert_array_equal(heads(x).reshape(4, 16), dot(x, kernel, DIMS))


@pytest.mark.versions
def test_fuse():
    """The gradient of a program, fused, is quantized as the derivative of a fused one: gradients are known by name."""

    def loss(params, x):
        def layer(h, w):
            return jax.nn.silu(h @ w), None

        h, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        return jnp.matmul(h, params["head"], precision="highest").astype(jnp.float32).var()

    layers, head, x = arrays((2, 32, 32), (32, 48), (2, 8, 32), dtype=BF16)
    params, dot = {"layers": layers * BF16(0.1), "head": head}, always("block", gradients=E5M2)
    step = jax.value_and_grad(loss)
    ours = cutjax.fuse(step, fp8=dot)
    value, grads = jax.jit(ours)(params, x)
    of_value, of_grads = jax.jit(jax.value_and_grad(cutjax.fuse(loss, fp8=dot)))(params, x)
    close(value, of_value, 1e-2)
    jax.tree.map(lambda a, b: close(a, b, 2**-6), grads, of_grads)
    plain = jax.jit(step)(params, x)[1]["layers"].astype(jnp.float32)
    error = jnp.linalg.norm(grads["layers"].astype(jnp.float32) - plain) / jnp.linalg.norm(plain)
    assert 0.01 < error < 0.2, error  # it is float8, and no more than that

    shown = str(cutjax.explain(ours, platform="cuda")(params, x))
    for roles in ("activations by weights", "gradients by weights", "gradients by activations"):
        assert f"block, {roles}, gradients float8_e5m2" in shown
    assert "bf16[2, 8, 32] x bf16[32, 48]" in shown  # the logits
    assert shown.count("asks for more than float8 has") >= 3
    kept = cutjax.fuse(step, fp8=lambda lhs, rhs: None)
    assert "float8:" not in str(cutjax.explain(kept, platform="cuda")(params, x)).replace("not float8:", "")
    auto = str(cutjax.explain(cutjax.fuse(step, fp8="block"), platform="cuda")(params, x))
    assert "not float8: " in auto
    assert "that quantize" in auto


def test_gradients_are_not_transposed():
    """JAX writes those of weights transposed, and transposes them: kernels would, and XLA then read them so."""

    def loss(params, x):
        a, b = params
        return jnp.einsum("bsd,dhk->bshk", x @ a, b).astype(jnp.float32).var()

    arguments = arrays((128, 256), (256, 2, 64), dtype=BF16), arrays((2, 128, 128), dtype=BF16)[0]
    step = jax.value_and_grad(loss)
    ours = cutjax.fuse(step, fp8=always("block"))
    jaxpr = jax.make_jaxpr(ours)(*arguments)
    assert str(jax.make_jaxpr(step)(*arguments)).count("= transpose[") == 2
    assert str(jaxpr).count("cutjax_fp8[") == 5
    assert "= transpose[" not in str(jaxpr)
    found, wanted = (
        jax.tree.leaves(jax.jit(f)(*arguments))
        for f in (ours, jax.value_and_grad(cutjax.fuse(loss, fp8=always("block"))))
    )
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 2**-6)


def test_the_choice_is_of_the_device():
    """Whatever was chosen for another one before."""
    x, w = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((16384, 8192), (8192, 8192)))
    for device, wide in (("NVIDIA A100-SXM4-80GB", True), ("NVIDIA H200", False)):
        shown = str(cutjax.explain(cutjax.fuse(jnp.matmul, fp8="tensor"), device=device)(x, w))
        assert ("not float8: architecture sm_80" in shown) == wide


@pytest.mark.parametrize("recipe", ["tensor", "row"])
def test_what_is_quantized_for_another_product_costs_nothing(recipe):
    """Keys of few heads are not worth a pass over the activations, but beside queries that have made it."""
    x, queries, keys = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((8192, 4096), (4096, 4096), (4096, 1024)))

    def both(x, keys, queries):
        return x @ keys, jnp.sin(x) @ queries, x @ queries

    def apart(x, keys, queries):
        return x @ keys, jnp.sin(x) @ queries

    for program, count in ((both, 3), (apart, 1)):
        shown = cutjax.explain(cutjax.fuse(program, fp8=recipe), device="NVIDIA H200")(x, keys, queries)
        assert sum(row.count for row in shown.rows if " f8_e4m3fn x " in str(row.choice.problem)) == count, shown


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_of_a_llama_layer(recipe):
    """All three products of 4096 tokens have kernels of float8, in the layout that wgmma reads."""
    x, w = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((4, 1024, 4096), (4096, 14336)))

    def loss(x, w):
        return always(recipe)(x, w, (((2,), (0,)), ((), ()))).astype(jnp.float32).sum()

    with cutjax.use_backend("cuda"):
        rows = cutjax.explain(jax.value_and_grad(loss, (0, 1)), platform="cuda")(x, w).rows
    names = [row.kernel for row in rows for _ in range(row.count)]
    passes = [name for name in names if name.startswith("quantize_")]
    names = [name for name in names if name not in passes]
    assert len(names) == 3, names
    assert all(name.startswith("sm90_f8_") and "_nt_" in name for name in names), names
    if recipe == "block":
        assert sum("scaled_1x128" in name for name in names) == 2
        assert sum("scaled_1x1" in name and "1x128" not in name for name in names) == 1
    of_x, of_w, of_dy = {
        "tensor": ("f8_e4m3fn_allxall", "f8_e4m3fn_allxall", "f8_e5m2_allxall"),
        "row": ("f8_e4m3fn_1xall",) * 3,
        "block": ("f8_e4m3fn_1x128", "f8_e4m3fn_128x128", "f8_e4m3fn_1x128"),
    }[recipe]
    once = [f"quantize_bf16_{of}_{order}" for of in (of_x, of_w) for order in ("own", "turned")]
    of_gradients = f"quantize_bf16_{of_dy}_own_turned"  # for either product: XLA keeps one
    assert sorted(passes) == sorted([*once, of_gradients, of_gradients])

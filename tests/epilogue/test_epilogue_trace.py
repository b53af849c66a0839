"""Functions traced into expressions: values, derivatives, equality, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from strategies import Case, epilogues

from cutjax.epilogue import emit
from cutjax.epilogue.expression import Node, OperandSpec, const
from cutjax.epilogue.trace import trace

pytestmark = pytest.mark.versions

SHAPE = (8, 16)
KEY = jax.random.key(7)


def accumulators(shape=SHAPE, count=1):
    return [2 * np.random.default_rng(i).standard_normal(shape, np.float32) for i in range(count)]


def traced(fn, *operands, shape=SHAPE, count=1):
    return trace(fn, [jax.ShapeDtypeStruct(shape, jnp.float32)] * count, operands)


def same(got, want, exact=False):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        if exact:
            np.testing.assert_array_equal(x, y)
        else:
            tolerance = 2e-6 if x.dtype == jnp.float32 else 1e-2
            np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=tolerance, atol=tolerance)


def check(fn, *operands, shape=SHAPE, count=1, exact=False):
    """The traced function equals the function."""
    accs = accumulators(shape, count)
    t = traced(fn, *operands, shape=shape, count=count)
    for spec, x in zip(t.epilogue.operands, t.operands, strict=True):
        assert x.shape == tuple(n if v else 1 for n, v in zip(shape, (*spec.batch, spec.row, spec.col), strict=True))
        assert x.dtype == spec.dtype
    both = jax.jit(lambda accs, found, operands: (t.finish(t.epilogue.apply(accs, found)), fn(*accs, *operands)))
    same(*both(accs, t.operands, operands), exact)
    assert str(t.epilogue)
    return t.epilogue


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "gelu_tanh": jax.nn.gelu,
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "leaky_relu": jax.nn.leaky_relu,
    "softplus": jax.nn.softplus,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "hard_tanh": jax.nn.hard_tanh,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_silu": jax.nn.hard_silu,
    "mish": jax.nn.mish,
    "squareplus": jax.nn.squareplus,
    "log_sigmoid": jax.nn.log_sigmoid,
    "soft_sign": jax.nn.soft_sign,
    "sparse_plus": jax.nn.sparse_plus,
    "sparse_sigmoid": jax.nn.sparse_sigmoid,
}


def test_activations():
    """Values, first and second derivatives; of all of them in one program, which XLA compiles once."""
    x = np.float32(np.linspace(-7, 7, 128).reshape(SHAPE))
    x[0, :4] = [0.0, -0.0, 3.0, -3.0]  # where relu and its like take sides
    epilogues = {name: traced(fn).epilogue for name, fn in ACTIVATIONS.items()}

    def taken(f):
        first = jax.grad(lambda x: f(x).sum())
        return f(x), first(x), jax.grad(lambda x: (first(x) * jnp.cos(x)).sum())(x)

    ours = jax.jit(lambda: {name: taken(lambda x, e=e: e.apply([x])[0]) for name, e in epilogues.items()})()
    plain = jax.jit(lambda: {name: taken(fn) for name, fn in ACTIVATIONS.items()})()
    for name in ACTIVATIONS:
        same(ours[name][0], plain[name][0])
        for mine, theirs in zip(ours[name], plain[name], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=name)


FLOATS = {
    "abs": jnp.abs,
    "add": lambda x: x + 1.5,
    "sub": lambda x: 1.5 - x,
    "mul": lambda x: x * x,
    "div": lambda x: 1 / x,
    "rem": lambda x: lax.rem(x, 1.5),
    "mod": lambda x: x % 1.5,
    "pow": lambda x: jnp.abs(x) ** 1.7,
    "cube": lambda x: x**3,
    "inverse": lambda x: x**-2,
    "max": lambda x: jnp.maximum(x, 0.3),
    "min": lambda x: jnp.minimum(x, 0.3),
    "clamp": lambda x: lax.clamp(-1.0, x, 1.0),
    "clip": lambda x: jnp.clip(x, -1, 1),
    "neg": lambda x: -x,
    "sign": jnp.sign,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "trunc": jnp.trunc,
    "round_away": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "is_finite": jnp.isfinite,
    "isnan": jnp.isnan,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "log": lambda x: jnp.log(jnp.abs(x)),
    "log2": lambda x: jnp.log2(jnp.abs(x)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "expm1": jnp.expm1,
    "tanh": jnp.tanh,
    "logistic": lax.logistic,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "asin": lambda x: jnp.arcsin(x / 20),
    "acos": lambda x: jnp.arccos(x / 20),
    "atan": jnp.arctan,
    "asinh": jnp.arcsinh,
    "acosh": lambda x: jnp.arccosh(1 + jnp.abs(x)),
    "atanh": lambda x: jnp.arctanh(x / 20),
    "atan2": lambda x: jnp.arctan2(x, 0.5),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x)),
    "cbrt": jnp.cbrt,
    "square": jnp.square,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erf_inv": lambda x: lax.erf_inv(x / 20),
    "nextafter": lambda x: jnp.nextafter(x, jnp.float32(0)),
    "copysign": lambda x: jnp.copysign(jnp.float32(2), x),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "where": lambda x: jnp.where(x > 0, x, 0.1),
    "compare": lambda x: ((x > 0) & (x <= 1)) | (x == 2) ^ ~(x != 3) | (x < -1) | (x >= 9),
    "logaddexp": lambda x: jnp.logaddexp(x, 0.5),
    "heaviside": lambda x: jnp.heaviside(x, jnp.float32(0.5)),
    "hypot": lambda x: jnp.hypot(x, jnp.float32(1)),
    "sinc": jnp.sinc,
    "float_power": lambda x: jnp.power(2.0, x),
    "nan_to_num": jnp.nan_to_num,
    "piecewise_cast": lambda x: x.astype(jnp.bfloat16) * jnp.bfloat16(1.5),
    "stop_gradient": lax.stop_gradient,
    "e4m3": lambda x: x.astype(jnp.float8_e4m3fn),
    "e5m2": lambda x: x.astype(jnp.float8_e5m2),
    "int8": lambda x: (x * 9).astype(jnp.int8),
    "uint8": lambda x: jnp.abs(x).astype(jnp.uint8),
    "bool": lambda x: x.astype(bool),
    "f16": lambda x: x.astype(jnp.float16),
    "constant": lambda x: jnp.ones_like(x),
    "remat": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "jit": jax.jit(lambda x: jnp.cos(x) * x),
    "barrier": lambda x: lax.optimization_barrier((x, x + 1.0))[1],
    "unit_axes": lambda x: (x[:, None, :] + 1.0)[:, 0, :],
    "squeeze": lambda x: jnp.squeeze(x[None] * 2.0, 0),
    "identity": lambda x: x,
    "signbit": jnp.signbit,
}


def check_all(functions, exact=False):
    """The same of functions of one accumulator, all in one program, which XLA compiles once; twice the same trace."""
    (acc,) = accumulators()
    found = {name: traced(fn) for name, fn in functions.items()}
    for name, t in found.items():
        assert t.epilogue.primal == traced(functions[name]).epilogue.primal, name
        assert str(t.epilogue)
    ours = jax.jit(lambda acc: {name: t.finish(t.epilogue.apply([acc], t.operands)) for name, t in found.items()})(acc)
    plain = jax.jit(lambda acc: {name: fn(acc) for name, fn in functions.items()})(acc)
    for name in functions:
        same(ours[name], plain[name], exact)


def test_float_functions():
    check_all(FLOATS)


BITS = {
    "add": lambda i: i + 3, "mul": lambda i: i * 3, "div": lambda i: lax.div(i, jnp.ones_like(i) * 3),
    "rem": lambda i: lax.rem(i, jnp.ones_like(i) * 3), "and": lambda i: i & 0x55, "or": lambda i: i | 5,
    "xor": lambda i: i ^ 0xFF, "not": lambda i: ~i, "shift_left": lambda i: i << 3, "shift_right": lambda i: i >> 2,
    "logical": lambda i: lax.shift_right_logical(i, jnp.ones_like(i)), "population_count": lax.population_count,
    "clz": lax.clz, "abs": lambda i: abs(i), "sign": lax.sign, "max": lambda i: lax.max(i, jnp.full_like(i, 2)),
    "power": lambda i: i**2, "compare": lambda i: i > 2, "narrow": lambda i: i.astype(jnp.int8),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8", "uint16"])
def test_integer_functions(dtype):
    def of(function):
        words = jnp.int32 if jnp.dtype(dtype).kind == "i" else jnp.uint32
        return lambda x: function(lax.bitcast_convert_type(x, words).astype(dtype))

    check_all({name: of(function) for name, function in BITS.items()}, exact=True)


def test_bitcast_back():
    check(
        lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF, jnp.float32), exact=True
    )


OPERANDS = {
    "scalar": ((), (False, False, False)), "col": ((16,), (False, False, True)), "row": ((8, 1), (False, True, False)),
    "full": ((8, 16), (False, True, True)), "batch": ((3, 1, 1), (True, False, False)),
    "batch_col": ((3, 1, 16), (True, False, True)), "batch_row": ((3, 8, 1), (True, True, False)),
    "all": ((3, 8, 16), (True, True, True)), "unit": ((1, 1), (False, False, False)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype"), list(zip(OPERANDS, itertools.cycle(("float32", "bfloat16", "int32", "bool")), strict=False))
)
def test_operands_broadcast(kind, dtype):
    shape, (batch, row, col) = OPERANDS[kind]
    x = (np.arange(np.prod(shape)) % 5).reshape(shape).astype(jnp.dtype(dtype))
    epilogue = check(lambda acc, x: acc + x.astype(jnp.float32), x, shape=(3, 8, 16))
    assert epilogue.operands == (OperandSpec(dtype, row, col, (batch,)),)


def test_axes_are_told_apart_where_sizes_are_equal():
    s = np.arange(8, dtype=np.float32)
    epilogue = check(lambda acc, s: acc * s[:, None] + s, s, shape=(8, 8))
    assert [(x.row, x.col) for x in epilogue.operands] == [(True, False), (False, True)]  # one array, read twice
    residual = np.arange(64, dtype=np.float32).reshape(8, 8)
    check(lambda acc, r: acc + r.T, residual, shape=(8, 8))  # an operand may be transposed
    with pytest.raises(NotImplementedError, match=r"axes exchanged, see .*test_epilogue_trace.py:\d+"):
        traced(lambda acc: acc + acc.T, shape=(8, 8))


@pytest.mark.parametrize("shape", [(1, 16), (8, 1), (1, 1), (0, 16), (2, 1, 8, 16), (1, 8, 16)])
def test_unusual_shapes(shape):
    b = np.arange(shape[-1], dtype=np.float32)

    def fn(acc, b):
        y = jax.nn.gelu(acc + b) + jnp.arange(shape[-2], dtype=jnp.float32)[:, None]
        return y, y.sum(-2), y.sum((-2, -1)), y.sum(-1, keepdims=True)

    check(fn, b, shape=shape)


def test_positions():
    check(lambda acc: jnp.tril(acc), exact=True)
    check(lambda acc: jnp.where(jnp.arange(8)[:, None] >= jnp.arange(16), acc, -jnp.inf), exact=True)
    epilogue = check(lambda acc: acc + lax.broadcasted_iota(jnp.float32, acc.shape, 0), shape=(3, 8, 16), exact=True)
    assert epilogue.positions == {"batch"}
    assert Node("iota", dtype="int32", params=("batch", 0)) in epilogue.nodes


def test_several_accumulators_and_outputs():
    check(lambda g, u: jax.nn.silu(g) * u, count=2)
    check(lambda a, b, c: (a * b + c, (a - c).astype(jnp.bfloat16)), count=3)
    check(lambda acc: {"y": acc, "z": [acc, (acc * 2.0).astype(jnp.float16)]}, exact=True)


def test_reductions():
    def fn(acc):
        y = acc * 2.0
        return y.astype(jnp.bfloat16), y.sum(0), y.max(1), y.min(), y.astype(jnp.bfloat16).sum(0)

    outs = check(fn).outputs
    assert [(x.reduce, x.axes, x.dtype) for x in outs] == [
        (None, (), "bfloat16"),
        ("sum", ("row",), "float32"),
        ("max", ("col",), "float32"),
        ("min", ("row", "col"), "float32"),
        ("sum", ("row",), "float32"),  # jnp adds bfloat16 in float32 and casts, which finish does
    ]
    check(lambda acc: (acc > 0).sum(-1), shape=(3, 8, 16), exact=True)
    # What follows a reduction is computed outside.
    check(
        lambda acc, s: (acc.mean(0), 448.0 / jnp.maximum(jnp.abs(acc).max(), 1e-6) * s, acc.sum() + s.sum()),
        np.ones(4, "f"),
    )


def test_captured_values():
    b, scale = jnp.arange(16.0), np.float32(0.5)
    epilogue = check(lambda acc: acc * scale + b)
    assert len(epilogue.operands) == 1
    assert const(0.5, "float32") in epilogue.nodes

    def loss(w, s, inside):
        def fn(acc, *given):
            w_, s_ = given or (w, s)
            return jnp.tanh(acc * s_ + w_)

        t = traced(fn, *(() if inside else (w, s)))
        return t.finish(t.epilogue.apply(accumulators(), t.operands)).sum()

    for inside, outside in zip(
        jax.grad(loss, (0, 1))(b, 0.5, True), jax.grad(loss, (0, 1))(b, 0.5, False), strict=True
    ):
        np.testing.assert_allclose(inside, outside)
    np.testing.assert_allclose(jax.jit(loss, static_argnums=2)(b, 0.5, True), loss(b, 0.5, False), rtol=1e-6)
    got = jax.vmap(lambda s: loss(b, s, True))(jnp.arange(3.0))
    np.testing.assert_allclose(got, [loss(b, s, False) for s in np.arange(3.0, dtype="f")], rtol=1e-5)


def test_one_function_may_see_new_captured_values():
    box = [jnp.ones(16)]
    fn = lambda acc: acc + box[0]  # noqa: E731
    first = traced(fn)
    box[0] = 2 * jnp.ones(16)
    second = traced(fn)
    assert first.epilogue == second.epilogue
    assert second.operands[0][0, 0] == 2.0


def test_work_on_operands_alone_is_done_outside():
    b = np.float32([3, 1, 2, 5] * 4)
    epilogue = check(lambda acc, b: acc + jnp.sort(b) + jnp.cumsum(b)[::-1] + jnp.linalg.norm(b), b)
    assert all(node.op in ("acc", "operand", "add") for node in epilogue.nodes)
    check(lambda acc, table: acc + table[2] + table[:, :1][3], np.arange(64, dtype=np.float32).reshape(4, 16))
    check(lambda acc, w: acc + (w @ w.T)[0], np.ones((16, 4), np.float32))

    def through(f):
        return jax.grad(lambda b: (f(b) ** 2).sum())(b)

    def fn(acc, b):
        return acc * jax.nn.softmax(b)

    def fused(b):
        t = traced(fn, b)
        return t.finish(t.epilogue.apply(accumulators(), t.operands))

    np.testing.assert_allclose(through(fused), through(lambda b: fn(accumulators()[0], b)), rtol=1e-4)


@pytest.mark.parametrize("shape", [(8, 16), (3, 8, 16)])
@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(3)], ids=["typed", "raw"])
def test_dropout_has_the_bits_of_jax_random(key, shape):
    def fn(acc, key):
        return jnp.where(jax.random.bernoulli(key, 0.9, acc.shape), acc / 0.9, 0.0)

    epilogue = check(fn, key, shape=shape, exact=True)
    assert [x.dtype for x in epilogue.operands] == ["uint32", "uint32"]  # the key: no mask is written
    assert [node.op for node in epilogue.nodes].count("random_bits") == 1
    assert len(epilogue.nodes) < 40
    check(lambda acc, key: acc + jax.random.uniform(jax.random.fold_in(key, 3), acc.shape), key, exact=True)
    check(lambda acc, key: acc + jax.random.normal(jax.random.split(key)[1], acc.shape[-1:]), key, exact=True)
    check(lambda acc, key: jax.random.bits(key, acc.shape, "uint8"), key, exact=True)
    check(lambda acc, key: jax.random.bits(key, acc.shape, "uint16"), key, exact=True)


def test_dropout_batched_keys_and_other_generators():
    keys = jax.random.split(KEY, 8)
    epilogue = check(lambda acc, keys: acc + jax.vmap(lambda k: jax.random.uniform(k, (16,)))(keys), keys, exact=True)
    assert [x.row for x in epilogue.operands] == [True, True]  # a key for each row
    # Another generator's bits are made outside, as one operand.
    epilogue = check(
        lambda acc, key: acc + jax.random.uniform(key, acc.shape), jax.random.key(1, impl="rbg"), exact=True
    )
    assert [(x.row, x.col) for x in epilogue.operands] == [(True, True)]


def test_equal_functions_are_equal():
    def one(acc, b):
        unused = jnp.sin(acc)
        del unused
        return jax.nn.gelu(acc + b) * 0.5

    two = jax.jit(lambda x, y: jax.nn.gelu(jnp.add(x, y[None, :])) * jnp.float32(0.5))
    b = jnp.ones(16)
    found = {traced(one, b).epilogue, traced(two, b).epilogue, traced(one, b, shape=(512, 16)).epilogue}
    inside = []

    def record(b):
        inside.append(traced(one, b).epilogue)
        return b.sum()

    jax.jit(record)(b)
    jax.grad(record)(b)
    jax.vmap(record)(jnp.ones((3, 16)))
    assert len({*found, *inside}) == 1
    assert traced(lambda acc, b: jax.nn.gelu(acc - b) * 0.5, b).epilogue not in found
    assert traced(lambda a: jnp.tanh(a) + jnp.tanh(a)).epilogue == traced(lambda a: (t := jnp.tanh(a)) + t).epilogue


def test_constants_are_equal_when_their_bits_are():
    assert const(0.0, "float32") != const(-0.0, "float32")
    assert const(jnp.nan, "float32") == const(float("nan"), "float32")
    assert const(1, "int32") != const(1.0, "float32")
    for value in (-0.0, jnp.inf, -jnp.inf, jnp.nan):
        check(lambda acc, v=value: jnp.full(acc.shape, v, jnp.float32), exact=True)
        assert np.signbit(traced(lambda acc: acc * 0.0 + jnp.float32(-0.0)).epilogue.apply(accumulators())[0]).any()


@jax.custom_vjp
def clipped(x, lo):
    return jnp.maximum(x, lo)


clipped.defvjp(lambda x, lo: (jnp.maximum(x, lo), x), lambda x, g: (jnp.where(x > 1, 0.0, 3.0 * g), None))


@jax.custom_jvp
def straight(x):
    return jnp.round(x)


straight.defjvps(lambda t, out, x: t)


def test_derivatives_are_the_functions_own():
    for fn in (
        lambda x: clipped(x, jnp.float32(-1.0)) * x,
        lambda x: straight(x) * x,
        lambda x: lax.stop_gradient(x) * x,
    ):
        t = traced(fn)
        x = accumulators()[0]
        for derivative in (jax.grad, lambda f: jax.grad(lambda y: jax.grad(f)(y).sum())):
            mine = derivative(lambda x, t=t: t.epilogue.apply([x])[0].sum())(x)
            np.testing.assert_allclose(mine, derivative(lambda x, fn=fn: fn(x).sum())(x), rtol=1e-6)
        assert not any(node.op in ("rule", "stop_gradient") for node in t.epilogue.primal.nodes)
        same(t.epilogue.primal.apply([x]), t.epilogue.apply([x]), exact=True)


def test_primal_drops_the_derivative():
    assert str(traced(jax.nn.relu).epilogue) == "max(acc, 0)"
    assert len(traced(jax.nn.relu).epilogue.primal.nodes) == 3


def test_readable():
    b = jnp.ones(16)
    fn = lambda acc, b: (jnp.tanh(acc + b).astype(jnp.bfloat16), acc.sum(0))  # noqa: E731
    assert str(traced(fn, b).epilogue) == "bf16(tanh(acc + x0)), sum(acc, row)"
    assert str(traced(lambda g, u: jax.nn.silu(g) * u, count=2).epilogue) == "(acc0 * logistic(acc0)) * acc1"


def test_apply_under_transformations():
    b = jnp.arange(16.0)
    t = traced(lambda acc, b: jax.nn.gelu(acc + b), b)
    accs = jnp.stack([accumulators()[0]] * 3)
    got = jax.vmap(lambda acc: t.epilogue.apply([acc], [b])[0])(accs)
    same(got, jax.nn.gelu(accs + b))
    same(
        jax.grad(lambda b: t.epilogue.apply([accs], [b])[0].sum())(b),
        jax.grad(lambda b: jax.nn.gelu(accs + b).sum())(b),
    )


def test_inside_shard_map():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    c = jnp.arange(16.0)

    def fn(acc, b):  # custom rules of both kinds, and a captured value that varies over no mesh axis
        return jax.nn.relu(acc + b) * clipped(acc, jnp.float32(-1.0)) + jax.nn.softplus(acc * c)

    def fused(acc, b):
        t = trace(fn, [jax.typeof(acc)], (b,))
        return t.finish(t.epilogue.apply([acc], t.operands))

    def over_devices(f):
        specs = (jax.P("i"), jax.P())
        return jax.jit(
            jax.grad(lambda *args: jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=jax.P("i"))(*args).sum())
        )

    args = (accumulators()[0], c)
    np.testing.assert_allclose(over_devices(fused)(*args), over_devices(fn)(*args), rtol=1e-5)


def test_numbers_as_operands_are_not_part_of_the_expression():
    epilogue = check(lambda acc, s: acc * s, 0.5)
    assert epilogue == traced(lambda acc, s: acc * s, np.float32(3)).epilogue
    assert len(epilogue.operands) == 1


@settings(max_examples=8, deadline=None)  # 200 are worth it after a change
@given(epilogues(kinds=["scalar", "col", "row", "full", "batch", "batch_col", "all"]))
def test_random_functions(case: Case):
    shape = (2, 8, 16)
    operands = case.arrays(shape)
    check(case, *operands, shape=shape, count=case.products)
    assert (
        traced(case, *operands, shape=shape, count=case.products).epilogue.primal
        == traced(dataclasses.replace(case), *operands, shape=shape, count=case.products).epilogue.primal
    )


# Bad input


def here(name: str) -> str:
    return rf"epilogue: {name} at .*test_epilogue_trace.py:\d+.*"


REFUSED = {
    "dot_general": lambda acc: acc @ jnp.ones((16, 16)),
    "sort": lambda acc: jnp.sort(acc),
    "gather": lambda acc: acc[jnp.array([1, 0, 2, 3, 4, 5, 6, 7])],
    "cumsum": lambda acc: jnp.cumsum(acc, 0),
    "concatenate": lambda acc: jnp.concatenate([acc[:, 8:], acc[:, :8]], 1),
    "split": lambda acc: jnp.repeat(jnp.split(acc, 2, axis=1)[0], 2, 1),
    "rev": lambda acc: acc[::-1],
    "dynamic_slice": lambda acc: lax.dynamic_slice(acc, (0, 0), (8, 16)) * 2.0,
    "argmax": lambda acc: acc.argmax(0),
    "reduce_prod": lambda acc: acc.prod(),
    "reduce_and": lambda acc: (acc > 0).all(),
    "scan": lambda acc: lax.fori_loop(0, 3, lambda i, x: x * 2.0, acc),
    "while": lambda acc: lax.while_loop(lambda x: x[0, 0] < 1.0, lambda x: x + 1.0, acc),
    "cond": lambda acc: lax.cond(acc[0, 0] > 0, lambda: acc, lambda: -acc),
    "conv_general_dilated": lambda acc: lax.conv(acc[None, None], jnp.ones((1, 1, 1, 1)), (1, 1), "SAME")[0, 0],
    "lgamma": lambda acc: lax.lgamma(acc),
    "pure_callback": lambda acc: jax.pure_callback(np.sin, acc, acc),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_is_not_elementwise(name):
    accepted = {"concatenate": "(slice|concatenate)", "conv_general_dilated": "(conv_general_dilated|dot_general)"}
    accepted |= {"cond": "(cond|slice|dynamic_slice)", "split": "(split|slice)"}
    with pytest.raises(NotImplementedError, match=here(accepted.get(name, name)) + " is no elementwise operation"):
        traced(REFUSED[name])


def test_refuses_side_effects_even_unused():
    from jax.experimental import io_callback

    with pytest.raises(NotImplementedError, match=here(r"debug_(callback|print)") + ".*side effect"):
        traced(lambda acc: (jax.debug.print("{}", acc), acc)[1])
    with pytest.raises(NotImplementedError, match=here("io_callback") + ".*side effect"):
        traced(lambda acc: jax.jit(lambda x: (io_callback(print, None, 1.0), x)[1])(acc))


def test_refuses_wrong_shapes():
    with pytest.raises(ValueError, match=r"returns shape \(16,\), expected the product's \(8, 16\)"):
        traced(lambda acc, b: b, jnp.ones(16))
    with pytest.raises(ValueError, match=r"returns shape \(5, 8, 16\).*operands must broadcast"):
        traced(lambda acc, b: acc + b, jnp.ones((5, 1, 1)))
    with pytest.raises(ValueError, match="returns no array"):
        traced(lambda acc: None)
    with pytest.raises((TypeError, ValueError), match="broadcast") as error:
        traced(lambda acc, b: acc + b, jnp.ones(15))
    assert "then operands: float32[8, 16], float32[15]" in "".join(error.value.__notes__)
    with pytest.raises(NotImplementedError, match=here("reshape") + ".*axes of size 1"):
        traced(lambda acc: acc.reshape(16, 8).reshape(8, 16))
    with pytest.raises(NotImplementedError, match=here("reduce_sum") + ".*batch axis"):
        traced(lambda acc: acc.sum(0), shape=(3, 8, 16))
    with pytest.raises(NotImplementedError, match=here("sub") + " combines a reduction"):
        traced(lambda acc: acc - acc.max())


def test_refuses_wrong_arguments():
    with pytest.raises(TypeError, match=r"<lambda> is called with 1 accumulator\(s\) and 1 operand\(s\)"):
        traced(lambda acc: acc, jnp.ones(16))
    with pytest.raises(TypeError, match=r"1 accumulator\(s\) and 0 operand\(s\): missing .*'b'"):
        traced(lambda acc, b: acc + b)


def test_wide_and_complex_numbers():
    """Kernels compute in them too, so `emit.reasons` has nothing to say."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        functions = [
            lambda acc, b: acc.astype(jnp.float64) * 2,
            lambda acc, b: acc.astype(jnp.float64) + b.astype(jnp.float64),
            lambda acc, b: acc * np.sqrt(2.0),
            lambda acc, b: acc + jax.nn.one_hot(jnp.arange(8), 16),
        ]
        for fn in functions:
            assert check(fn, np.ones(16)).outputs[0].dtype == "float64"
            assert emit.reasons(traced(fn, np.ones(16)).epilogue) == ()
        check(lambda acc, b: acc + b.astype(jnp.float32), np.ones(16))  # cast outside
        check(lambda acc: acc * 0.5 + jnp.arange(16).astype(jnp.float32), exact=True)
    with jax.numpy_dtype_promotion("standard"):
        for fn in (lambda acc: acc * 1j, lambda acc: jnp.exp(acc * (0.5 - 2j)), lambda acc: jnp.conj(acc + 0j)):
            check(lambda acc, fn=fn: (fn(acc).real, fn(acc).imag))
            (acc,), t = accumulators(), traced(fn)
            np.testing.assert_allclose(t.finish(t.epilogue.apply([acc])), fn(acc), rtol=1e-6)
    check(lambda acc: jnp.abs(acc.astype(jnp.complex64)))
    assert const(-0j, "complex64") != const(0j, "complex64")
    with pytest.raises(TypeError, match="computes in float8_e4m3b11fnuz, which no epilogue does"):
        traced(lambda acc: acc.astype(jnp.float8_e4m3b11fnuz))


def test_errors_of_the_function_are_its_own():
    def broken(acc):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error:
        traced(broken)
    assert "while tracing the epilogue broken" in "".join(error.value.__notes__)

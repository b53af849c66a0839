"""What every operation makes of its arguments: objects that stand for arrays, integers, dtypes, functions."""

from __future__ import annotations

import functools
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import OPERATIONS, arrays, operands

import cutjax

X, W, V = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones((4, 3))
SIZES = jnp.array([1, 1], jnp.int32)


class Parameter:
    """What a library keeps an array in."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value

    def __getitem__(self, i):
        return Parameter(self.value[i])


def wrappers():
    try:
        from flax import nnx
    except ImportError:
        return {"class": Parameter}
    return {"class": Parameter, "nnx.Variable": nnx.Variable, "nnx.Param": nnx.Param}


@pytest.mark.parametrize("wrapper", wrappers())
@pytest.mark.parametrize("name", OPERATIONS)
def test_objects_that_stand_for_arrays(name, wrapper):
    args, fn = operands(name), OPERATIONS[name].fn

    def wrapped(*args):
        return fn(*(wrappers()[wrapper](x) for x in args))

    assert str(jax.make_jaxpr(wrapped)(*args)) == str(jax.make_jaxpr(fn)(*args))


def test_a_group_offset_that_stands_for_an_array():
    found = arrays()

    @jax.jit
    def products(x, g, sizes, offset):
        offsets = 1, Parameter(offset)
        return [cutjax.grouped_gemm(x, g[:2], sizes, group_offset=offset) for offset in offsets]

    np.testing.assert_array_equal(*products(found["x"], found["g"], found["sizes"], jnp.int32(1)))


INTEGERS = {
    "route: k": lambda k: cutjax.route(X, k=k).indices,
    "load_balance_loss: k": lambda k: cutjax.load_balance_loss(X, k),
    "moe: k": lambda k: cutjax.moe(X, X, jnp.ones((3, 3, 4)), jnp.ones((3, 3, 4)), jnp.ones((3, 4, 3)), k),
    "grouped_outer: groups": lambda k: cutjax.grouped_outer(X, X, SIZES, group_offset=0, groups=k),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    expected = str(jax.make_jaxpr(lambda: INTEGERS[name](2))())
    for two in (np.int64(2), np.uint8(2), np.array(2), jnp.int32(2)):
        assert str(jax.make_jaxpr(lambda two=two: INTEGERS[name](two))()) == expected
    for wrong in (True, np.True_, 2.0, "2", jnp.ones(2)):
        with pytest.raises(TypeError, match=f"{name} must be an int, got"):
            INTEGERS[name](wrong)
    with pytest.raises(TypeError, match=f"{name} must be an int, got"):
        jax.jit(INTEGERS[name])(2)


def test_integers_of_a_config():
    assert cutjax.Config(np.int64(64), bn=np.int32(32)) == cutjax.Config(64, bn=32)
    assert type(cutjax.Config(np.int64(64)).bm) is int
    with pytest.raises(ValueError, match="bm=True, expected an int"):
        cutjax.Config(bm=True)
    with pytest.raises(ValueError, match=r"bm=64\.0, expected an int"):
        cutjax.Config(bm=64.0)


DTYPES = {
    "gemm: out_dtype": lambda t: cutjax.gemm(X, W, out_dtype=t),
    "gemm: out_dtype with an epilogue": lambda t: cutjax.gemm(X, W, out_dtype=t, epilogue=lambda a: a),
    "mlp: out_dtype": lambda t: cutjax.mlp(X, W, V, out_dtype=t),
    "grouped_gemm: out_dtype": lambda t: cutjax.grouped_gemm(X, W[None], SIZES[:1], out_dtype=t),
    "grouped_outer: out_dtype": lambda t: cutjax.grouped_outer(X, X, SIZES, out_dtype=t),
    "grouped_mlp: out_dtype": lambda t: cutjax.grouped_mlp(X, W[None], V[None], SIZES[:1], out_dtype=t),
    "ragged_dot_general: preferred_element_type": lambda t: cutjax.ragged_dot(
        X, W[None], SIZES[:1], preferred_element_type=t
    ),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name):
    with pytest.warns(UserWarning, match="Explicitly requested dtype float64 is not available") as found:
        assert DTYPES[name](jnp.float64).dtype == jnp.float32
    assert [warning.filename for warning in found] == [__file__]
    assert DTYPES[name](float).dtype == jnp.float32  # no warning, as with jnp
    with jax.enable_x64(True), warnings.catch_warnings():
        assert DTYPES[name](jnp.float64).dtype == jnp.float64
    for wrong in ("floaty", 3):
        with pytest.raises(TypeError, match=f"{name.split(' with')[0]} must be a dtype, got"):
            DTYPES[name](wrong)


def test_a_list_of_dtypes_is_a_tuple_of_them():
    def both(t):
        return [x.dtype for x in cutjax.gemm(X, W, epilogue=lambda a: (a, a), out_dtype=t)]

    assert both([None, jnp.bfloat16]) == both((None, jnp.bfloat16)) == [jnp.float32, jnp.bfloat16]
    (y,) = cutjax.grouped_gemm(X, W[None], SIZES[:1], epilogue=lambda a: (a,), out_dtype=[jnp.bfloat16])
    assert y.dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="without an epilogue there is one result"):
        cutjax.gemm(X, W, out_dtype=[None])
    for name in ("mlp: out_dtype", "grouped_outer: out_dtype"):
        with pytest.raises(TypeError, match=rf"{name} must be a dtype, got \[None\]"):
            DTYPES[name]([None])


@pytest.mark.parametrize("wrong", ["silu", None, 3])
def test_an_activation_that_is_no_function(wrong):
    message = "{}: activation must be a function, such as jax.nn.silu, got"
    with pytest.raises(TypeError, match=message.format("mlp")):
        cutjax.mlp(X, W, V, activation=wrong)
    with pytest.raises(TypeError, match=message.format("grouped_mlp")):
        cutjax.grouped_mlp(X, W[None], V[None], SIZES[:1], activation=wrong)
    with pytest.raises(TypeError, match=message.format("moe")):
        cutjax.moe(X, X, jnp.ones((3, 3, 4)), jnp.ones((3, 3, 4)), jnp.ones((3, 4, 3)), 2, activation=wrong)


# What messages about an epilogue say of where: this file, whatever the function is.


def sorts(acc):
    return jnp.sort(acc)


@jax.custom_jvp
def ruled(acc):
    return jnp.sort(acc)


ruled.defjvp(lambda p, t: (ruled(*p), t[0]))


@jax.custom_vjp
def ruled_back(acc):
    return jnp.cumsum(acc)


ruled_back.defvjp(lambda x: (ruled_back(x), x), lambda x, g: (g * x,))


MESSAGES = {
    "a library's function": jnp.sort,
    "a jitted one": jax.jit(sorts),
    "one jitted inside": lambda acc: jax.jit(sorts)(acc) + 1,
    "partial": functools.partial(jnp.sort, axis=0),
    "lambda": lambda acc: jnp.cumsum(acc, 0),
    "softmax": jax.nn.softmax,
    "softmax inside": lambda acc: jax.nn.softmax(acc),
    "reduction and accumulator": lambda acc: acc - acc.sum(0),
    "the same jitted": jax.jit(lambda acc: acc - acc.max()),
    "side effect": lambda acc: (jax.debug.print("{}", acc), acc)[1],
    "side effect, jitted": jax.jit(lambda acc: (jax.debug.print("{}", acc), acc)[1]),
    "custom_jvp": ruled,
    "custom_jvp inside": lambda acc: ruled(acc),
    "custom_vjp": ruled_back,
    "custom_vjp inside": lambda acc: ruled_back(acc),
    "axes": lambda acc: acc + acc[:, :1],
    "dtype": lambda acc: acc.astype(jnp.float16).astype(jnp.float8_e4m3b11fnuz),
    "checkpoint": jax.checkpoint(sorts),
    "vmap": jax.vmap(sorts),
    "exchanged axes": lambda acc: acc.T @ acc,
    "exchanged": lambda acc: acc + acc[:3, :3].T.sum(),
}


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
def test_the_place_in_a_message_is_the_users(kind, grouped):
    for warm in (False, True):  # jax caches traces, which have the place of their first use
        if warm and kind not in ("side effect", "side effect, jitted"):
            jax.eval_shape(MESSAGES[kind], jnp.ones((4, 4)))
        product = functools.partial(cutjax.grouped_gemm, X, W[None], SIZES[:1])
        product = product if grouped else functools.partial(cutjax.gemm, jnp.ones((4, 3)), W)
        with pytest.raises((NotImplementedError, TypeError)) as error:
            product(epilogue=MESSAGES[kind])
        place = re.search(r"(?: at |, see )(\S*?):(\d+)", str(error.value))
        assert place, str(error.value)
        assert place[1] == __file__
        assert 1 < int(place[2]) <= len(inspect.getsource(inspect.getmodule(Parameter)).splitlines())

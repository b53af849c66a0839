"""Rows copied by index on the device, beside XLA's gather: every byte is the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.binding import lowering
from cutjax.kernels import gather
from cutjax.kernels.device import device_of
from cutjax.primitives.routing import dispatch_p, to_slots

pytestmark = pytest.mark.gpu

KERNEL = "sm90_gather_"
# tokens, experts of a token, elements of a row, dtype: rows of 16 bytes, of odd multiples of them, of several pieces
CASES = [
    (1, 1, 8, "bfloat16"),
    (37, 3, 24, "bfloat16"),
    (1000, 8, 7168, "bfloat16"),
    (513, 2, 2056, "float16"),
    (300, 1, 1028, "float32"),
    (129, 32, 48, "int8"),
    (200, 4, 16, "bool"),
    (77, 6, 131, "complex128"),
    (4096, 2, 4096, "float8_e4m3fn"),
]


def bits(shape, dtype, seed=0):
    """Values of any bits, NaN among them."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return jnp.asarray((raw > 127)[..., 0] if dtype == "bool" else raw.view(jnp.dtype(dtype))[..., 0])


def same(got, expected):
    got, expected = (np.ascontiguousarray(x).view(np.uint8) for x in (got, expected))
    np.testing.assert_array_equal(got, expected)


def both(fn, *args):
    """The function by the kernel, which must run, and by XLA."""
    with cutjax.use_backend("cuda"):
        compiled = jax.jit(fn).lower(*args)
        assert KERNEL in compiled.as_text()
        got = compiled.compile()(*args)
    with cutjax.use_backend("xla"):
        return got, jax.jit(fn)(*args)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows(case):
    tokens, k, d, dtype = case
    with jax.enable_x64(dtype == "complex128"):
        routing = cutjax.route(jax.random.normal(jax.random.key(0), (tokens, 64), jnp.float32), k)
        same(*both(lambda x, routing: routing.dispatch(x), bits((tokens, d), jnp.dtype(dtype)), routing))


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)], ids=str)
def test_batches(mapped):
    logits = jax.random.normal(jax.random.key(0), (3, 50, 8) if mapped[1] == 0 else (50, 8), jnp.float32)
    x = bits((3, 50, 136) if mapped[0] == 0 else (50, 136), jnp.bfloat16)
    same(*both(jax.vmap(lambda x, logits: cutjax.route(logits, 3).dispatch(x), mapped), x, logits))


def test_slots_of_no_pair_are_zeros():
    tokens, k, slots, d = 500, 4, 3000, 520
    rng = np.random.default_rng(0)
    places, pairs = rng.permutation(slots)[:1800], rng.permutation(tokens * k)[:1800]
    of_slot, of_pair = np.full(slots, tokens * k, np.int32), np.full(tokens * k, slots, np.int32)
    of_slot[places], of_pair[pairs] = pairs, places
    arrays = bits((tokens, d), jnp.bfloat16), jnp.asarray(of_slot), jnp.asarray(of_pair.reshape(tokens, k))
    got, expected = both(to_slots, *arrays)
    same(got, expected)
    assert not np.asarray(got, np.float32)[of_slot == tokens * k].any()


@pytest.mark.parametrize("config", [gather.Config(1, 2, 128), gather.Config(2, 3, 1024), gather.Config(7, 4, 8192)])
def test_buffers(config):
    """Other buffers than those that ship: stages that are used often, and much shared memory."""
    logits, x = jax.random.normal(jax.random.key(0), (3000, 16), jnp.float32), bits((3000, 1000), jnp.bfloat16)
    routing = cutjax.route(logits, 4)
    arrays = x, routing.permutation, routing.inverse
    call = gather.Kernel(gather.Problem.of(*arrays, device_of(lowering.target())), config).call()
    result = jax.ShapeDtypeStruct((12000, 1000), jnp.bfloat16)
    (got,) = jax.jit(lambda *xs: lowering.launch(call, [result], *xs))(*arrays)
    same(got, dispatch_p.bind(*arrays, fill=False, backend="xla"))


def test_it_repeats():
    """A wrong wait shows once in many launches."""
    logits, x = jax.random.normal(jax.random.key(0), (8192, 64), jnp.float32), bits((8192, 2880), jnp.bfloat16)
    routing = cutjax.route(logits, 4)
    with cutjax.use_backend("cuda"):
        run = jax.jit(routing.dispatch)
    expected = dispatch_p.bind(x, routing.permutation, routing.inverse, fill=False, backend="xla")
    equal = jax.jit(lambda got: jnp.all(jax.lax.bitcast_convert_type(got, jnp.uint16) == words))
    words = jax.lax.bitcast_convert_type(expected, jnp.uint16)
    assert all(bool(equal(run(x))) for _ in range(50))


def test_gradient():
    """That of a dispatch is a combine, and the other way round."""
    routing = cutjax.route(jax.random.normal(jax.random.key(0), (300, 16), jnp.float32), 4)
    x = bits((300, 64), jnp.int8).astype(jnp.float32)

    def pulled(x, routing):
        out, pull = jax.vjp(lambda x: routing.combine(routing.dispatch(x) ** 2), x)
        return out, *pull(x)

    for got, expected in zip(*both(pulled, x, routing), strict=True):
        same(got, expected)

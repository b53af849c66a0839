"""cutjax.fuse: attention of few query rows, two products with a softmax between them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, mesh_of, scaled
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import cutjax
from cutjax.binding import walk

always = functools.partial(cutjax.fuse, policy="always")
BF16, F32 = jnp.bfloat16, jnp.float32
B, S, H, G, D = 2, 72, 8, 4, 16  # sequences, keys, heads, heads of keys, elements


def found(fn, *args):
    """Returns the attention of a program, each with its expression."""
    products, _ = walk.products(fn, args, {}, "cuda")
    eqns = [x.eqn for x in products if x.eqn.primitive.name == "cutjax_attention"]
    return [str(eqn.params["expression"]) for eqn in eqns]


def normal(*shape, seed=0, dtype=BF16):
    return scaled(seed, shape, dtype) * shape[-1] ** 0.5


def caches(heads=G, size=D, order="bshd"):
    sizes = {"b": B, "s": S, "h": heads, "d": size}
    return [normal(*(sizes[axis] for axis in order), seed=seed) for seed in (1, 2)]


def decoding(q, k, v, position):
    """A step of grouped queries ``[batch, time, heads, size]``, as the benchmark's model has it."""
    batch, time, heads, size = q.shape
    q = q.reshape(batch, time, k.shape[2], -1, size)
    scores = jnp.einsum("btkqd,bskd->bkqts", q, k).astype(F32) * size**-0.5
    visible = jnp.arange(k.shape[1]) <= (position + jnp.arange(time))[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bkqts,bskd->btkqd", weights, v).reshape(batch, time, heads, -1)


def of_jax(q, k, v, lengths, bias, mask):
    ones = jnp.ones_like(lengths)
    how = {"key_value_seq_lengths": lengths, "query_seq_lengths": ones, "implementation": "xla"}
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, bias, mask, **how)


def of_flax(q, k, v, mask):
    return nn.dot_product_attention(q, k, v, mask=mask)


def heads_first(q, k, v, bias):
    """By hand, with a bound, and caches ``[batch, heads, keys, size]``."""
    scores = jnp.einsum("bhd,bhsd->bhs", q, k, preferred_element_type=F32)
    scores = jnp.tanh(scores / 20) * 20 + bias.astype(F32)
    shifted = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    weights = shifted / shifted.sum(-1, keepdims=True)
    return jnp.einsum("bhs,bhsd->bhd", weights.astype(q.dtype), v)


def keys_in_front(q, k, v, lengths):
    """One head of keys for all, ``[keys, batch, size]``, and a mask that is no infinity."""
    scores = jnp.einsum("bhd,sbd->bhs", q, k, preferred_element_type=F32) / 4
    scores = jnp.where(jnp.arange(S) < lengths[:, None, None], scores, jnp.finfo(F32).min)
    return jnp.einsum("bhs,sbd->bhd", jax.nn.softmax(scores).astype(q.dtype), v)


def transposed(q, k, v):
    """Of caches that are transposed first: the kernel reads them as they lie."""
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return jax.nn.softmax(jnp.einsum("bhtd,bhsd->bhts", q, k) / BF16(4)) @ v


def repeated(q, k, v, mask):
    """Grouped queries by keys that are repeated, and a slope of each head by its number."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2).swapaxes(1, 2) for x in (k, v))
    scores = jnp.einsum("bthd,bhsd->bhts", q, k, preferred_element_type=F32)
    scores = scores - jnp.arange(S, dtype=F32) / S * jnp.exp2(-jnp.arange(H, dtype=F32))[:, None, None]
    return jnp.einsum("bhts,bhsd->bthd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(q.dtype), v)


def matrix(q, k, v):
    return jax.nn.softmax((q @ k.T).astype(F32)).astype(q.dtype) @ v


def _lengths(*values):
    return np.asarray(values, np.int32)


MASK = np.arange(S) < _lengths(40, 60)[:, None, None, None]
CASES = {
    "decoding": (decoding, (normal(B, 1, H, D), *caches(), jnp.int32(50))),
    "several steps": (decoding, (normal(B, 3, H, D), *caches(), jnp.int32(50))),
    "values of another size": (decoding, (normal(B, 1, H, D), caches()[0], caches(size=32)[1], jnp.int32(S))),
    "jax.nn": (of_jax, (normal(B, 1, H, D), *caches(), _lengths(30, 70), normal(B, H, 1, S, seed=3, dtype=F32), MASK)),
    "flax": (of_flax, (normal(B, 1, H, D), *caches(H), MASK)),
    "heads first": (heads_first, (normal(B, G, D), *caches(order="bhsd"), normal(G, S, seed=3))),
    "keys in front": (
        keys_in_front,
        (normal(B, H, D), *(x[:, :, 0].swapaxes(0, 1) for x in caches()), _lengths(9, 60)),
    ),
    "transposed": (transposed, (normal(B, G, 2, D), *caches())),
    "repeated": (repeated, (normal(B, 2, H, D), *caches(), MASK)),
    "a matrix": (matrix, (normal(H, D), normal(S, D, seed=1), normal(S, D, seed=2))),
    "vmap": (jax.vmap(matrix), (normal(3, H, D), normal(3, S, D, seed=1), normal(3, S, D, seed=2))),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    fn, args = CASES[name]
    args = [jnp.asarray(x) for x in args]
    assert len(found(always(fn), *args)) == 1
    got, want = jax.jit(always(fn))(*args), fn(*args)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    close(got.astype(F32), want.astype(F32), 2**-5)


def test_the_expression_is_of_positions_and_numbers():
    fn, args = CASES["decoding"]
    (text,) = found(always(fn), *args)
    assert "col" in text
    assert "x1" not in text  # the position alone is read, no mask


@pytest.mark.parametrize("name", ["transposed", "repeated"])
def test_caches_are_read_as_they_lie(name):
    fn, args = CASES[name]
    products, _ = walk.products(always(fn), [jnp.asarray(x) for x in args], {}, "cuda")
    (eqn,) = (x.eqn for x in products if x.eqn.primitive.name == "cutjax_attention")
    assert [x.aval.shape for x in eqn.invars[1:3]] == [(B, S, G, D)] * 2


def test_masks_that_differ():
    """What a mask is made of is part of what is built once: two steps differ by a comparison alone."""
    q, k, v = CASES["a matrix"][1]

    def both(q, k, v):
        def masked(compare):
            visible = compare(lax.iota(jnp.int32, S), jnp.int32(10))[None]
            return jax.nn.softmax(jnp.where(visible, (q @ k.T).astype(F32), -jnp.inf)).astype(q.dtype) @ v

        return masked(lax.lt), masked(lax.ge), masked(lax.le)

    assert len(found(always(both), q, k, v)) == 3
    for got, want in zip(jax.jit(always(both))(q, k, v), both(q, k, v), strict=True):
        close(got.astype(F32), want.astype(F32), 2**-5)


@pytest.mark.parametrize("fill", [-jnp.inf, -1e30, float(jnp.finfo(F32).min)])
def test_rows_that_see_no_key(fill):
    """NaN where the mask is infinite, a mean of all values where it is not: as in plain JAX."""

    def masked(q, k, v, mask):
        scores = jnp.where(mask, (q @ k.T).astype(F32), fill)
        return jax.nn.softmax(scores).astype(q.dtype) @ v

    args = *CASES["a matrix"][1], np.arange(H)[:, None] > 2
    args = [jnp.asarray(x) for x in args]
    assert found(always(masked), *args)
    got, want = always(masked)(*args), masked(*args)
    np.testing.assert_array_equal(np.isnan(got.astype(F32)), np.isnan(want.astype(F32)))
    close(got[3:].astype(F32), want[3:].astype(F32), 2**-5)


def test_derivatives_are_those_of_the_program():
    fn, args = CASES["decoding"]
    fused = always(fn)

    def loss(f):
        return lambda *arrays: jnp.square(f(*arrays, args[3]).astype(F32)).sum()

    got, want = (jax.grad(loss(f), (0, 1, 2))(*args[:3]) for f in (fused, fn))
    for x, y in zip(got, want, strict=True):
        close(x.astype(F32), y.astype(F32), 2**-5)
    # The gradient is what is fused: scores are read by its backward pass, and stay.
    assert not found(always(jax.grad(loss(fn), (0, 1, 2))), *args[:3])


def test_values_are_transposed():
    """What is linear in the values stays so."""
    fn, (q, k, v) = matrix, CASES["a matrix"][1]
    ct = normal(*q.shape, seed=5)
    got, want = (jax.linear_transpose(lambda v, f=f: f(q, k, v), v)(ct)[0] for f in (always(fn), fn))
    close(got.astype(F32), want.astype(F32), 2**-5)


def test_names_are_seen_by_policies():
    """The scores have one: under a policy that saves it the derivative keeps them, as without fuse."""
    q, k, v = CASES["a matrix"][1]

    def named(q, k, v):
        scores = checkpoint_name((q @ k.T).astype(F32), "scores") / 2
        return jnp.square((jax.nn.softmax(checkpoint_name(scores, "halved")).astype(q.dtype) @ v).astype(F32)).sum()

    assert len(found(always(named), q, k, v)) == 1
    policy = jax.checkpoint_policies.save_only_these_names("scores")
    fused, plain = (jax.grad(jax.checkpoint(f, policy=policy)) for f in (always(named), named))
    close(fused(q, k, v).astype(F32), plain(q, k, v).astype(F32), 2**-5)


def test_batched_and_in_loops():
    fn, (q, k, v, position) = CASES["decoding"]
    fused = always(fn)
    qs, ks, vs = (jnp.stack([x, x * 2, x / 2]) for x in (q, k, v))
    close(
        jax.vmap(fused, (0, 0, 0, None))(qs, ks, vs, position),
        jax.vmap(fn, (0, 0, 0, None))(qs, ks, vs, position),
        2**-5,
    )
    # Keys that all share are not written out for each.
    assert not found(jax.vmap(fused, (0, None, None, None)), qs, k, v, position)
    close(
        jax.vmap(fused, (0, None, None, None))(qs, k, v, position),
        jax.vmap(fn, (0, None, None, None))(qs, k, v, position),
        2**-5,
    )

    def steps(f):
        def step(caches, i):
            k, v = (lax.dynamic_update_slice_in_dim(x, x[:, :1] + 1, i, 1) for x in caches)
            return (k, v), f(q, k, v, i)

        return lambda k, v: lax.scan(step, (k, v), jnp.arange(3))

    assert len(found(always(steps(fn)), k, v)) == 1
    for x, y in zip(jax.tree.leaves(always(steps(fn))(k, v)), jax.tree.leaves(steps(fn)(k, v)), strict=True):
        close(x.astype(F32), y.astype(F32), 2**-5)


def uses_scores(q, k, v):
    scores = (q @ k.T).astype(F32)
    return jax.nn.softmax(scores).astype(q.dtype) @ v, scores


def returns_weights(q, k, v):
    weights = jax.nn.softmax((q @ k.T).astype(F32)).astype(q.dtype)
    return weights @ v, weights


def over_queries(q, k, v):
    return jax.nn.softmax((q @ k.T).astype(F32), 0).astype(q.dtype) @ v


def other_maximum(q, k, v):
    scores = (q @ k.T).astype(F32)
    powers = jnp.exp(scores - (scores * 2).max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True)).astype(q.dtype) @ v


def exact(q, k, v):
    return jax.nn.softmax(q.astype(F32) @ k.T.astype(F32)) @ v.astype(F32)


def computed_keys(q, k, v):
    return matrix(q, k.astype(jnp.int8).astype(BF16), v)


def at_temperatures(q, k, v):
    """Scores that are repeated by what multiplies them."""
    scores = (q @ k.T).astype(F32)[None] * jnp.array([1.0, 0.5])[:, None, None]
    return jnp.einsum("tqs,sd->tqd", jax.nn.softmax(scores).astype(q.dtype), v)


STAYS = [uses_scores, returns_weights, over_queries, other_maximum, exact, computed_keys, at_temperatures]


@pytest.mark.parametrize("fn", STAYS)
def test_what_stays(fn):
    """Scores or weights in memory, another softmax, products in float32, keys that a product computes as it reads."""
    args = CASES["a matrix"][1]
    assert not found(always(fn), *args)
    close(jax.tree.leaves(always(fn)(*args))[0].astype(F32), jax.tree.leaves(fn(*args))[0].astype(F32), 2**-5)


def test_many_rows_stay():
    assert found(always(matrix), normal(32, D), *CASES["a matrix"][1][1:])
    assert not found(always(matrix), normal(33, D), *CASES["a matrix"][1][1:])


def test_divided_over_devices():
    """Sequences and heads may be divided; each device has a kernel for its own."""
    fn, (q, k, v, position) = CASES["decoding"]
    mesh = mesh_of(data=2, tensor=4)
    for spec in (jax.P("data"), jax.P(None, None, "tensor"), jax.P("data", None, "tensor")):
        args = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in (q, k, v)]
        close(jax.jit(always(fn))(*args, position), fn(q, k, v, position), 2**-5)

    def by_position(q, k, v):
        scores = jnp.einsum("bhd,bshd->bhs", q, k, preferred_element_type=F32)
        slopes = jnp.arange(G, dtype=F32)[:, None] + jnp.arange(B, dtype=F32)[:, None, None]
        weights = jax.nn.softmax(scores - slopes * jnp.arange(S, dtype=F32) / S)
        return jnp.einsum("bhs,bshd->bhd", weights.astype(q.dtype), v)

    whole = normal(B, G, D), k, v
    specs = jax.P("data", "tensor"), *[jax.P("data", None, "tensor")] * 2
    args = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(whole, specs, strict=True)]
    assert found(always(by_position), *whole)
    close(jax.jit(always(by_position))(*args), by_position(*whole), 2**-5)
    assert "all-gather" not in str(jax.jit(always(by_position)).lower(*args).compile().as_text())


def test_explain_says_what_it_costs():
    fn, (q, *_) = CASES["decoding"]
    k = jax.ShapeDtypeStruct((16, 1024, 8, 128), BF16)
    q = jax.ShapeDtypeStruct((16, 1, 32, 128), BF16)
    report = cutjax.explain(cutjax.fuse(fn), device="NVIDIA H200")(q, k, k, jax.ShapeDtypeStruct((), jnp.int32))
    assert "attention in one kernel" in str(report)
    few = jax.ShapeDtypeStruct((16, 32, 8, 128), BF16)  # too few keys to gain
    report = cutjax.explain(cutjax.fuse(fn), device="NVIDIA H200")(q, few, few, jax.ShapeDtypeStruct((), jnp.int32))
    assert "attention in one kernel" not in str(report)

"""Rows that a program scatters by the order of a sort, as plain code of experts does: cutjax.fuse gathers them."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from checks import close, integers, normal, same
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType

import cutjax

pytestmark = pytest.mark.versions

T, K, D, E = 12, 3, 8, 4
N = T * K
X, W, S = integers(0, (T, D)), integers(1, (D, D)), integers(2, (T, K))
CHOSEN = jnp.array(integers(3, (T, K), jnp.int32) + 2) % E


def order_of(chosen):
    return jnp.argsort(chosen.reshape(-1))


def gather(x, w, s, chosen):
    """As in most code: rows gathered, weighted, and gathered back."""
    order = order_of(chosen)
    out = (x[order // K] @ w) * s.reshape(-1)[order][:, None]
    return out[jnp.argsort(order)].reshape(T, K, D).sum(1)


def added(x, w, s, chosen):
    place = order_of(chosen) // K
    return jnp.zeros_like(x).at[place].add(x[place] @ w)


def added_to(x, w, s, chosen):
    place = order_of(chosen) // K
    return x.at[place].add(x[place] @ w)


def segments(x, w, s, chosen):
    place = order_of(chosen) // K
    return jax.ops.segment_sum(jnp.take(x, place, axis=0, mode="clip") @ w, place, T)


def taken(x, w, s, chosen):
    order = order_of(chosen)
    return (
        jnp.take(jnp.take(x, order // K, axis=0) @ w, jnp.argsort(order, stable=False), axis=0).reshape(T, K, D).sum(1)
    )


def repeated(x, w, s, chosen):
    order = order_of(chosen)
    return (jnp.repeat(x, K, axis=0)[order] @ w)[jnp.argsort(order)].reshape(T, K, D).sum(1)


def tiled(x, w, s, chosen):
    """Pairs by choice, then by token."""
    order = order_of(chosen.T)
    return (x[order % T] @ w)[jnp.argsort(order)].reshape(K, T, D).sum(0)


def of_numbers(x, w, s, chosen):
    """The numbers of tokens are sorted."""
    place = jnp.repeat(jnp.arange(T), K)[order_of(chosen)]
    return jnp.zeros_like(x).at[place].add(x[place] @ w, mode="drop")


def inverse_scattered(x, w, s, chosen):
    order = order_of(chosen)
    inverse = jnp.zeros(N, order.dtype).at[order].set(jnp.arange(N, dtype=order.dtype)).reshape(T, K)
    return (x[order // K] @ w)[inverse].sum(1)


def put_back(x, w, s, chosen):
    order = order_of(chosen)
    return jnp.zeros((N, D), x.dtype).at[order].set(x[order // K] @ w).reshape(T, K, D).sum(1)


def by_pairs(x, w, s, chosen):
    """The numbers of an axis of tokens and one of choices, rows of two axes."""
    order = order_of(chosen)
    back = jnp.argsort(order).reshape(T, K)
    out = jnp.zeros((N, 2, D // 2), x.dtype).at[back].add((jnp.repeat(x, K, axis=0) @ w).reshape(T, K, 2, D // 2))
    return out.reshape(N, D)[back].sum(1)


def with_keys(x, w, s, chosen):
    """Several arrays in one sort."""
    _, order, _ = lax.sort((chosen.reshape(-1), jnp.arange(N), s.reshape(-1)), num_keys=1)
    return jnp.zeros_like(x).at[order // K].add(x[order // K] @ w)


def remade(x, w, s, chosen):
    return jax.checkpoint(functools.partial(gather, chosen=chosen))(x, w, s)


def looped(x, w, s, chosen):
    def body(x, _):
        return jax.checkpoint(functools.partial(gather, chosen=chosen))(x, w, s) % 5, None

    return lax.scan(body, x, None, length=2)[0]


def zeros_sorted(x, w, s, chosen):
    """An iota of one, repeated, is no iota."""
    _, place = lax.sort((chosen.reshape(-1)[:T], jnp.broadcast_to(jnp.arange(1), (T,))), num_keys=1)
    return jnp.zeros_like(x).at[place].add(x @ w)


def one_row(x, w, s, chosen):
    """A permutation of one, and indices made of it: each row comes to the same place."""
    place = jnp.broadcast_to(jnp.argsort(chosen[0, :1]), (T,))
    return jnp.zeros_like(x).at[place].add(x @ w)


GATHERED = [gather, added, added_to, segments, taken, repeated, tiled, of_numbers, inverse_scattered, put_back]
GATHERED += [by_pairs, with_keys, remade, looped]


def unknown(x, w, s, chosen):
    """Numbers that come as they are: some twice, others never."""
    place = chosen.reshape(-1)
    return jnp.zeros_like(x).at[place].add(x[place] @ w)


def fewer_places(x, w, s, chosen):
    """Of the last row of a token there is no place, and of the first one two."""
    order = order_of(chosen)
    return jnp.zeros((T - 1, D), x.dtype).at[order // K].add(x[order // K] @ w, mode="drop")


def more_places(x, w, s, chosen):
    order = order_of(chosen)
    return jnp.ones((T + 1, D), x.dtype).at[order // K].add(x[order // K] @ w)


def before_the_first(x, w, s, chosen):
    """Python's -1 is the last row."""
    order = order_of(chosen)
    return jnp.zeros((N, D), x.dtype).at[order - 1].add(x[order // K] @ w)


def beyond_the_last(x, w, s, chosen):
    order = order_of(chosen)
    return jnp.zeros((N, D), x.dtype).at[order + 1].set(x[order // K] @ w, mode="drop")


def clipped(x, w, s, chosen):
    order = order_of(chosen)
    return jnp.zeros((N, D), x.dtype).at[order + 1].add(x[order // K] @ w, mode="clip")


def uneven(x, w, s, chosen):
    """The first place has more rows than the others."""
    place = jnp.maximum(order_of(chosen) // K, 1)
    return jnp.zeros_like(x).at[place].add(x[place] @ w)


def part(x, w, s, chosen):
    order = order_of(chosen)[:-K]
    return jnp.zeros_like(x).at[order // K].add(x[order // K] @ w)


def sorted_values(x, w, s, chosen):
    """The keys themselves are no permutation."""
    place = jnp.sort(chosen.reshape(-1))
    return jnp.zeros_like(x).at[place].add(x[place] @ w)


def greatest(x, w, s, chosen):
    place = order_of(chosen) // K
    return jnp.full_like(x, -1e3).at[place].max(x[place] @ w)


def last_of_several(x, w, s, chosen):
    """Of rows for one place any may stay: each token's are equal."""
    place = order_of(chosen) // K
    return jnp.zeros_like(x).at[place].set(x[place] @ w)


LEFT = [unknown, fewer_places, more_places, before_the_first, beyond_the_last, clipped, uneven, part, sorted_values]
LEFT += [greatest, last_of_several, zeros_sorted, one_row]


def gradients(fn, of_each=True):
    """The sum of a function's squares, and its gradients in x, w and s."""
    return jax.value_and_grad(lambda *args: (fn(*args) ** 2).sum() if of_each else fn(*args).sum(), (0, 1, 2))


def scatters_of_rows(fn, *args):
    """The scatters of a program of whole rows, which are no lists of numbers."""

    def count(jaxpr):
        found = 0
        for eqn in jaxpr.eqns:
            found += eqn.primitive.name.startswith("scatter") and eqn.invars[0].aval.ndim > 1
            found += sum(map(count, jaxprs_in_params(eqn.params)))
        return found

    return count(jax.make_jaxpr(fn)(*args).jaxpr)


@pytest.mark.parametrize("fn", GATHERED, ids=lambda fn: fn.__name__)
def test_gathered(fn):
    """No row is scattered, forward or backward; values and gradients are exact."""
    for program in (fn, gradients(fn)):
        fused = cutjax.fuse(program)
        assert scatters_of_rows(program, X, W, S, CHOSEN) or program is fn
        assert not scatters_of_rows(fused, X, W, S, CHOSEN)
        same(fused(X, W, S, CHOSEN), jax.jit(program)(X, W, S, CHOSEN))


def experts(x, w, s, chosen, beside=False):
    """Rows of which only products in groups read, forward and backward, or something else does too."""
    order, sizes = order_of(chosen), jnp.bincount(chosen.reshape(-1), length=E).astype(jnp.int32)
    rows = x[order // K]
    out = lax.ragged_dot(rows, jnp.stack([w] * E), sizes) * s.reshape(-1)[order][:, None]
    out = out + rows if beside else out
    return out[jnp.argsort(order)].reshape(T, K, D).sum(1)


@pytest.mark.parametrize("beside", [False, True])
def test_rows_for_experts(beside):
    """They are dispatched, as a kernel does, where nothing else might be computed of them in the same pass."""
    fn = functools.partial(experts, beside=beside)
    for program in (fn, gradients(fn)):
        fused = cutjax.fuse(program)
        text = str(jax.make_jaxpr(fused)(X, W, S, CHOSEN))
        assert text.count("cutjax_dispatch[") == (not beside)
        same(fused(X, W, S, CHOSEN), jax.jit(program)(X, W, S, CHOSEN))


@pytest.mark.parametrize("fn", LEFT, ids=lambda fn: fn.__name__)
def test_left(fn):
    """What need not be a permutation is scattered, with the same result."""
    fused = cutjax.fuse(fn)
    assert scatters_of_rows(fused, X, W, S, CHOSEN)
    same(fused(X, W, S, CHOSEN), jax.jit(fn)(X, W, S, CHOSEN))
    same(*(jax.jit(gradients(x))(X, W, S, CHOSEN) for x in (fused, fn)))


def test_applied():
    """A scatter that has a function of what lies there, and no use of its updates; JAX has no derivative of it."""

    def applied(x, w, s, chosen):
        order = order_of(chosen)
        return (x[order // K] @ w).at[order].apply(lambda x: x * 3)

    same(cutjax.fuse(applied)(X, W, S, CHOSEN), jax.jit(applied)(X, W, S, CHOSEN))


def of_float(x, w, s, chosen):
    """A number that is no integer, in a condition of indices."""

    @jax.checkpoint
    def add(order, x, at):
        return jnp.zeros_like(x).at[jnp.where(at > 0.2, order // 2, order)].add(x @ w)

    return add(order_of(chosen), jnp.repeat(x, K, axis=0), 0.5)


def of_quotient(x, w, s, chosen):
    choose = jax.jit(lambda order: jnp.where(lax.div(jnp.float32(0.5), jnp.float32(0.2)) > 2.2, order // 2, order))
    return jnp.zeros((N, D)).at[choose(order_of(chosen))].add(x[order_of(chosen) // K] @ w)


def infinite(x, w, s, chosen):
    return jnp.where(x > 1, x @ w, -jnp.inf), jnp.clip(x @ w, 0, jnp.inf), jnp.median(x), order_of(chosen)


@jax.custom_jvp
def rows_at(x, order):
    return x[order]


rows_at.defjvp(lambda given, tangents: (rows_at(*given), tangents[0][given[1]]))


def without_tangents(x, w, s, chosen):
    """The tangents of integers are zeros of no size."""
    return jax.grad(lambda x: jnp.sin(rows_at(x @ w, order_of(chosen) // K)).sum())(x)


def empty(x, w, s, chosen):
    return order_of(chosen[:0]), x @ w


def axes_of_one(x, w, s, chosen):
    """Integers repeated along them, by jax.vmap of a gradient and by an operation."""

    def set_rows(x, order):
        return jnp.sin(jnp.zeros_like(x).at[order].set(x @ w)).sum()

    equal = lax.eq(jnp.broadcast_to(jnp.arange(N)[:, None], (N, N)), jnp.arange(N)[None])
    order = order_of(chosen) + 0 * equal.sum(1)
    return jax.vmap(jax.grad(set_rows))(x[None], jnp.argsort(s[None, :, 0])), x[order // K] @ w


def iota_in_call(x, w, s, chosen):
    """The numbers of elements, beside their order, are in no such order."""
    place = jax.jit(lambda order: lax.iota(order.dtype, N) + 0 * order)(order_of(chosen))
    return jnp.zeros((N, D)).at[place].add(x[place // K] @ w)


def int8(x, w, s, chosen):
    """Of 128 elements, a number that int8 does not have."""
    _, order = lax.sort((jnp.tile(chosen.reshape(-1), 4)[:128], lax.iota("int8", 128)), num_keys=1)
    dims = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lax.scatter_add(jnp.zeros((128, D)), order[:, None], jnp.tile(x, (11, 1))[:128] @ w, dims)


SEEN = [of_float, of_quotient, infinite, without_tangents, empty, axes_of_one, iota_in_call, int8]


@pytest.mark.parametrize("fn", SEEN, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("policy", ["auto", "always"])
def test_same(fn, policy):
    """What else comes beside a sort does not mislead."""
    same(cutjax.fuse(fn, policy=policy)(X, W, S, CHOSEN), jax.jit(fn)(X, W, S, CHOSEN))


def test_no_rows():
    empty = jnp.zeros((0, D)), W, jnp.zeros((0, K)), jnp.zeros((0, K), jnp.int32)

    def program(x, w, s, chosen):
        place = order_of(chosen) // K
        return jnp.zeros_like(x).at[place].add(x[place] @ w), jnp.ones((T, D)).at[place].add(x[place] @ w)

    same(cutjax.fuse(program)(*empty), program(*empty))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.complex64])
def test_dtypes(dtype):
    x, w = X.astype(dtype), W.astype(dtype)
    for fn in (added, added_to, put_back):
        same(cutjax.fuse(fn)(x, w, S, CHOSEN), jax.jit(fn)(x, w, S, CHOSEN))


def test_sums_are_rounded_once():
    """Of 16 bits a scatter rounds each sum, in whatever order."""
    x, w = normal(4, (T, D), jnp.bfloat16), normal(5, (D, D), jnp.bfloat16)
    place = order_of(CHOSEN) // K
    rows = jax.jit(lambda x, w: x[place] @ w)(x, w).astype(jnp.float32)
    exact = jnp.zeros((T, D)).at[place].add(rows).astype(x.dtype)
    same(cutjax.fuse(added)(x, w, S, CHOSEN), exact)


@pytest.mark.parametrize("fn", [gather, added_to, put_back], ids=lambda fn: fn.__name__)
def test_derivatives_of_the_fused(fn):
    """Of the rewritten program, in both modes, twice, and batched."""
    fused, args = cutjax.fuse(functools.partial(fn, chosen=CHOSEN)), (X, W, S)
    plain = functools.partial(fn, chosen=CHOSEN)
    same(gradients(fused)(*args), gradients(plain)(*args))
    same(jax.jvp(fused, args, args), jax.jvp(plain, args, args))
    second = [jax.hessian(lambda x, f=f: (f(x, W, S) ** 2).sum())(X) for f in (fused, plain)]
    same(*second)
    batch = jnp.stack([X, 2 * X])
    same(jax.vmap(fused, (0, None, None))(batch, W, S), jax.vmap(plain, (0, None, None))(batch, W, S))


@pytest.mark.parametrize("fn", [gather, added, repeated], ids=lambda fn: fn.__name__)
def test_of_a_batch(fn):
    """jax.vmap inside: each example has an order of its own."""
    xs, chosen = jnp.stack([X, 2 * X]), jnp.stack([CHOSEN, CHOSEN[::-1]])

    def loss(xs, w, s):
        return (jax.vmap(fn, (0, None, None, 0))(xs, w, s, chosen) ** 2).sum()

    same(cutjax.fuse(jax.grad(loss, (0, 1, 2)))(xs, W, S), jax.grad(loss, (0, 1, 2))(xs, W, S))


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(check_vma):
    """On each device of a mesh, of its own tokens."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x, s, chosen = (jnp.tile(a, (4, 1)) for a in (X, S, CHOSEN))
    specs = jax.P("d"), jax.P(), jax.P("d"), jax.P("d")

    def run(x, w, s, chosen):
        return gradients(gather)(x, w, s, chosen)[1][0]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=jax.P("d"), check_vma=check_vma)
    fused = cutjax.fuse(mapped)
    assert not scatters_of_rows(fused, x, W, s, chosen)
    same(fused(x, W, s, chosen), jax.jit(mapped)(x, W, s, chosen))


CHOSEN_OF_4 = jnp.concatenate([CHOSEN, CHOSEN[::-1], (CHOSEN + 1) % E, CHOSEN])


@pytest.mark.parametrize("fn", [gather, added_to, tiled, by_pairs], ids=lambda fn: fn.__name__)
def test_around_shard_map(fn):
    """The gradient of a shard_map is another one, to which the first gives its indices."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x, s = (jnp.tile(a, (4, 1)) for a in (X, S))
    specs = jax.P("d"), jax.P(), jax.P("d"), jax.P("d")
    program = gradients(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=jax.P("d")))
    assert scatters_of_rows(program, x, W, s, CHOSEN_OF_4)
    for is_set in (False, True):
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            fused = cutjax.fuse(program)
            assert not scatters_of_rows(fused, x, W, s, CHOSEN_OF_4)
            same(fused(x, W, s, CHOSEN_OF_4), jax.jit(program)(x, W, s, CHOSEN_OF_4))


@pytest.mark.parametrize("fn", [gather, added_to, tiled, by_pairs], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("each", [False, True])
def test_around_scan(fn, each):
    """The gradient of a loop is another one: of indices that are the same in each step, or slices of what it made."""

    def program(x, w, s, chosen):
        def body(x, chosen_here):
            return fn(x, w, s, chosen_here if each else chosen) % 5, None

        return lax.scan(body, x, jnp.stack([chosen, chosen[::-1]]))[0]

    fused = cutjax.fuse(gradients(program))
    assert scatters_of_rows(gradients(program), X, W, S, CHOSEN)
    assert not scatters_of_rows(fused, X, W, S, CHOSEN)
    same(fused(X, W, S, CHOSEN), jax.jit(gradients(program))(X, W, S, CHOSEN))


def test_one_function_of_several_indices():
    """What is known of one call's indices is not taken for another's, whichever comes first."""

    @jax.jit
    def add(x, w, place):
        return jnp.zeros_like(x).at[place].add((x[place] @ w) @ w) + sum(x @ w for _ in range(70))  # too much to open

    def program(x, w, s, chosen):
        place = order_of(chosen) // K
        other = chosen.reshape(-1)
        return add(x, w, place) + add(x, w, other), lax.scan(lambda x, i: (add(x, w, i), None), x, other[None])[0]

    def alone(x, w, s, chosen):
        place = order_of(chosen) // K
        return add(x, w, place) + add(x, w, place[::1])

    same(cutjax.fuse(program)(X, W, S, CHOSEN), jax.jit(program)(X, W, S, CHOSEN))
    same(cutjax.fuse(alone)(X, W, S, CHOSEN), jax.jit(alone)(X, W, S, CHOSEN))


def test_indices_of_all_devices():
    """Orders of devices' own tokens, beside each other, are no order of all."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x = jnp.tile(X, (4, 1))
    orders = jax.shard_map(order_of, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))

    def run(x, w, order):
        place = order // K
        return jnp.zeros_like(x).at[place].add(x[place] @ w)

    def program(x, w, chosen):
        of_all = jax.shard_map(run, mesh=mesh, in_specs=(jax.P(), jax.P(), jax.P()), out_specs=jax.P())
        return of_all(x, w, orders(chosen)), run(x, w, orders(chosen))

    fused = cutjax.fuse(program)
    assert scatters_of_rows(fused, x, W, CHOSEN_OF_4) == 2
    same(fused(x, W, CHOSEN_OF_4), jax.jit(program)(x, W, CHOSEN_OF_4))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_divided_by_xla(kind):
    """Where XLA divides a program over a mesh rows are scattered as before; not where there is one device."""
    with jax.set_mesh(jax.make_mesh((4,), ("d",), axis_types=(kind,))):
        fused = cutjax.fuse(gradients(gather))
        assert scatters_of_rows(fused, X, W, S, CHOSEN)
        same(jax.jit(fused)(X, W, S, CHOSEN), jax.jit(gradients(gather))(X, W, S, CHOSEN))
    with jax.set_mesh(jax.make_mesh((1,), ("d",), axis_types=(kind,))):
        assert not scatters_of_rows(cutjax.fuse(gradients(added)), X, W, S, CHOSEN)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("d")))
    close(jax.jit(cutjax.fuse(gradients(gather)))(x, W, S, CHOSEN), jax.jit(gradients(gather))(x, W, S, CHOSEN))


def test_nothing_sorted():
    """Programs that sort nothing are as they were."""
    fused = jax.make_jaxpr(cutjax.fuse(unknown))(X, W, S, CHOSEN)
    assert "cutjax_combine" not in str(fused)

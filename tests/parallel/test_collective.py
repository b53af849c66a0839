"""all_gather_gemm, gemm_reduce_scatter and mlp over devices: the unsharded values, in ppermutes and products alone."""

from __future__ import annotations

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from branches import jaxprs
from checks import close, integers, mesh_of, normal, same, scaled
from jax import lax
from jax.ad_checkpoint import checkpoint_policies
from jax.extend.core import Literal

import cutjax
from cutjax.binding import lowering
from cutjax.parallel import links

P = jax.P
M, K, N, SIZE = 16, 8, 16, 4
X, W, V = integers(0, (M, K)), integers(1, (K, N)), integers(2, (N, K))
ROWS, COLUMNS = P("i"), P(None, "i")


def over(f, in_specs, out_specs, size=SIZE, **kwargs):
    """The function on some of the devices; each has one of 8, or two axes."""
    devices = jax.devices()[:size]
    mesh = jax.sharding.Mesh(np.array(devices), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **kwargs)


def squares(f):
    return lambda *args: sum((y.astype(jnp.float32) ** 2).sum() for y in jax.tree.leaves(f(*args)))


def agree(f, plain, *args, tolerance=None):
    """Values and gradients in all arguments."""
    got, expected = jax.jit(
        lambda *args: [(g(*args), jax.grad(squares(g), range(len(args)))(*args)) for g in (f, plain)]
    )(*args)
    same(got, expected) if tolerance is None else close(got, expected, tolerance)


def collectives(f, *args):
    """How many of each kind the program asks XLA for."""
    found = collections.Counter()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if re.match("psum|all_gather|reduce_scatter|ppermute|all_to_all", eqn.primitive.name):
                found[eqn.primitive.name] += 1
            for inner in jaxprs(eqn.params):
                walk(inner)

    walk(jax.jit(f).trace(*args).jaxpr)
    return found


def gather(**kwargs):
    return functools.partial(cutjax.all_gather_gemm, **{"axis_name": "i", "route": "direct", **kwargs})


def scatter(**kwargs):
    return functools.partial(cutjax.gemm_reduce_scatter, **{"axis_name": "i", "route": "direct", **kwargs})


@pytest.mark.versions
@pytest.mark.parametrize(("size", "route"), [(1, "auto"), (2, "auto"), (2, "whole"), (8, "pieces"), (8, "direct")])
def test_values_and_gradients(size, route):
    def both(first, second):
        return lambda x, w, v: second(first(x, w) * 2, v)

    f = over(both(gather(route=route), scatter(route=route)), (ROWS, COLUMNS, ROWS), ROWS, size)
    agree(f, both(jnp.matmul, jnp.matmul), X, W, V)


def test_without_checking_what_varies():
    agree(over(gather(), (ROWS, COLUMNS), COLUMNS, check_vma=False), jnp.matmul, X, W)
    agree(over(scatter(), (COLUMNS, ROWS), ROWS, check_vma=False), jnp.matmul, X @ W, V)


@pytest.mark.parametrize(("layout", "route"), [("nt", "whole"), ("tn", "pieces"), ("tt", "direct")])
def test_layouts(layout, route):
    turned = lambda x, letter: x.mT if letter == "t" else x  # noqa: E731
    flip = lambda spec, letter: P(*((*spec, None)[:2])[::-1]) if letter == "t" else spec  # noqa: E731
    a, b = layout

    def plain(x, w):
        return turned(x, a) @ turned(w, b)

    f = over(gather(layout=layout, route=route), (flip(ROWS, a), flip(COLUMNS, b)), COLUMNS)
    agree(f, plain, turned(X, a), turned(W, b))
    g = over(scatter(layout=layout, route=route), (flip(COLUMNS, a), flip(ROWS, b)), ROWS)
    agree(g, plain, turned(X, a), turned(W, b))


def fused(acc, up, bias, scale, rest):
    return jax.nn.silu(acc) * (up + bias) * scale, (acc + rest).sum(-1, keepdims=True)


SAVED = [("recompute", "direct"), ("default", "whole"), ("default", "pieces")]


@pytest.mark.parametrize(("save", "route"), SAVED)
def test_epilogue(save, route):
    """Two products, operands by row, column, element; a reduction along columns, which are divided."""
    args = (
        normal(0, (M, K)),
        scaled(1, (K, N)),
        scaled(2, (K, N)),
        normal(3, (N,)),
        normal(4, (M, 1)),
        normal(5, (M, N)),
    )

    def local(x, w, u, *operands):
        y, total = gather(epilogue=fused, operands=operands, save=save, route=route)(x, (w, u))
        return y, lax.psum(total, "i")

    def plain(x, w, u, *operands):
        return fused(x @ w, x @ u, *operands)

    specs = ROWS, COLUMNS, COLUMNS, P("i"), P(), COLUMNS
    # Sums of 16 terms in another order.
    agree(over(local, specs, (COLUMNS, P())), plain, *args, tolerance=1e-5)


def test_epilogue_with_a_rule_of_its_own():
    @jax.custom_jvp
    def clipped(x):
        return jnp.clip(x, -1, 1)

    clipped.defjvp(lambda primals, dots: (clipped(*primals), dots[0]))  # straight through
    x, w = normal(0, (M, K)), scaled(1, (K, N))
    agree(over(gather(epilogue=clipped), (ROWS, COLUMNS), COLUMNS), lambda x, w: clipped(x @ w), x, w, tolerance=1e-5)


@pytest.mark.parametrize(("gated", "route"), [(False, "direct"), (True, "whole"), (True, "pieces")])
def test_mlp(gated, route):
    x, w, u, v = normal(0, (2, M, K)), scaled(1, (K, N)), scaled(2, (K, N)), scaled(3, (N, K))
    b1, b2 = normal(4, (N,)), normal(5, (K,))

    def local(x, w, u, v, b1, b2):
        more = {"gate": u} if gated else {}
        return cutjax.mlp(x, w, v, **more, b1=b1, b2=b2, axis_name="i", activation=jax.nn.silu, route=route)

    def plain(x, w, u, v, b1, b2):
        up = x @ w + b1
        return (jax.nn.silu(x @ u) * up if gated else jax.nn.silu(up)) @ v + b2

    rows = P(None, "i")
    specs = rows, COLUMNS, COLUMNS, ROWS, P("i"), P()
    agree(over(local, specs, rows), plain, x, w, u, v, b1, b2, tolerance=1e-5)


def mlp(x, w, v, **kwargs):
    return cutjax.mlp(x, w, v, activation=jnp.tanh, **{"axis_name": "i", "route": "direct", **kwargs})


@pytest.mark.versions
@pytest.mark.parametrize(("save", "route"), [("recompute", "direct"), ("default", "pieces")])
def test_second_derivatives_and_forward_mode(save, route):
    x, w, v, dx = normal(0, (M, K)), scaled(1, (K, N)), scaled(2, (N, K)), normal(3, (M, K))
    f = over(functools.partial(mlp, save=save, route=route), (ROWS, COLUMNS, ROWS), ROWS)

    def plain(x, w, v):
        return jnp.tanh(x @ w) @ v

    def derivatives(f):
        first = lambda x: jax.jvp(lambda x: f(x, w, v), (x,), (dx,))[1]  # noqa: E731
        second = jax.grad(lambda x, w, v: (jax.grad(squares(f))(x, w, v) * dx).sum(), (0, 1, 2))(x, w, v)
        return first(x), second

    got, expected = jax.jit(lambda: (derivatives(f), derivatives(plain)))()
    close(got, expected, 2e-5)  # two derivatives of sums in another order


@pytest.mark.versions
@pytest.mark.parametrize("route", ["direct", "pieces"])
def test_under_vmap_scan_and_remat(route):
    mlp = functools.partial(globals()["mlp"], route=route)
    x, w, v = normal(0, (3, M, K)), scaled(1, (2, K, N)), scaled(2, (2, N, K))

    def layers(layer, x, w, v):
        return lax.scan(lambda h, weights: (h + layer(h, *weights), None), x, (w, v))[0]

    policy = checkpoint_policies.save_only_these_names("cutjax_preactivation", "cutjax_hidden")
    each = over(
        lambda x, w, v: jax.vmap(lambda x: layers(jax.checkpoint(mlp, policy=policy), x, w, v))(x),
        (COLUMNS, P(None, None, "i"), COLUMNS),
        COLUMNS,
    )

    def plain(x, w, v):
        return layers(lambda h, w, v: jnp.tanh(h @ w) @ v, x, w, v)

    agree(each, plain, x, w, v, tolerance=1e-5)
    one = jax.vmap(over(mlp, (ROWS, COLUMNS, ROWS), ROWS), (0, None, None))  # an axis outside of shard_map
    close(jax.jit(one)(x, w[0], v[0]), jnp.tanh(x @ w[0]) @ v[0], 1e-5)


@pytest.mark.versions
def test_gradients_are_ppermutes_and_products():
    """Nothing is gathered or added up at once; the rows of x travel once, those of g once, and parts of two sums."""
    f = over(mlp, (ROWS, COLUMNS, ROWS), ROWS)
    args = X, W, V
    assert collectives(f, *args) == {"ppermute": 2 * (SIZE - 1)}
    assert collectives(jax.grad(squares(f), (0, 1, 2)), *args) == {"ppermute": 4 * (SIZE - 1)}
    g = over(gather(), (ROWS, COLUMNS), COLUMNS)
    assert collectives(jax.grad(squares(g), (0, 1)), X, W) == {"ppermute": 2 * (SIZE - 1)}
    h = over(scatter(), (COLUMNS, ROWS), ROWS)
    assert collectives(jax.grad(squares(h), (0, 1)), X @ W, V) == {"ppermute": 2 * (SIZE - 1)}


@pytest.mark.versions
def test_pieces_are_sent_beside_products():
    """A collective for each piece, in the gradient too, and none waits for what it could run beside."""
    f = over(functools.partial(mlp, route="pieces"), (ROWS, COLUMNS, ROWS), ROWS)
    assert collectives(f, X, W, V) == {"all_gather": 4, "reduce_scatter": 4}
    assert collectives(jax.grad(squares(f), (0, 1, 2)), X, W, V) == {"all_gather": 8, "reduce_scatter": 8}
    odd = over(gather(route="pieces"), (ROWS, COLUMNS), COLUMNS)
    assert collectives(odd, X[:12], W) == {"all_gather": 1}  # rows of a device that 4 and 2 do not divide


def awaited(f, *args):
    """For each collective, in order, how many products it waits for."""
    found = []

    def walk(jaxpr, given):
        known = dict(zip(jaxpr.invars, given, strict=True))
        for eqn in jaxpr.eqns:
            before = [known.get(x, frozenset()) for x in eqn.invars if not isinstance(x, Literal)]
            waits = frozenset().union(*before)
            inner = [eqn.params.get(name) for name in ("jaxpr", "call_jaxpr")]
            inner = next((getattr(x, "jaxpr", x) for x in inner if x is not None), None)
            if eqn.primitive in lowering.choosers:
                waits |= {eqn.outvars[0]}
            if eqn.primitive.name in ("all_gather", "reduce_scatter", "ppermute"):
                found.append((eqn.primitive.name, len(waits)))
            if inner is not None and len(inner.invars) == len(eqn.invars):
                given = [frozenset() if isinstance(x, Literal) else known.get(x, frozenset()) for x in eqn.invars]
                known |= dict(zip(eqn.outvars, walk(inner, given), strict=True))
            elif eqn.primitive.name == "optimization_barrier" or inner is None:
                known |= dict.fromkeys(eqn.outvars, waits)
        return [known.get(x, frozenset()) if not isinstance(x, Literal) else frozenset() for x in jaxpr.outvars]

    closed = jax.make_jaxpr(f)(*args)
    walk(closed.jaxpr, [frozenset()] * len(closed.jaxpr.invars))
    return found


@pytest.mark.parametrize("epilogue", [None, jax.nn.gelu], ids=["plain", "gelu"])
def test_a_piece_is_gathered_beside_the_product_of_the_one_before(epilogue):
    """XLA gathers what waits for no product before all of them."""
    f = over(gather(route="pieces", epilogue=epilogue), (ROWS, COLUMNS), COLUMNS)
    assert awaited(f, X, W) == [("all_gather", n) for n in (0, 0, 1, 2)]
    g = over(scatter(route="pieces"), (COLUMNS, ROWS), ROWS)
    assert [n for _, n in awaited(g, X @ W, V)] == [1, 2, 3, 4]
    h = over(functools.partial(mlp, route="pieces"), (ROWS, COLUMNS, ROWS), ROWS)
    assert awaited(h, X, W, V)[:4] == [("all_gather", n) for n in (0, 0, 1, 2)]
    there = over(gather(route="direct", epilogue=epilogue), (ROWS, COLUMNS), COLUMNS)
    assert awaited(there, X, W) == [("ppermute", n) for n in (0, 1, 2)]
    back = over(scatter(route="direct"), (COLUMNS, ROWS), ROWS)
    assert awaited(back, X @ W, V) == [("ppermute", n) for n in (1, 2, 3)]  # and then its own
    if epilogue is None:
        assert awaited(jax.grad(squares(f), (0, 1)), X, W)[:4] == [("all_gather", n) for n in (0, 0, 1, 2)]


@pytest.mark.versions
def test_transfers_of_the_gradients_wait_for_what_runs_beside_them():
    """Of pieces; and the transposes of what orders them add no zeros."""
    f = over(gather(route="pieces"), (ROWS, COLUMNS), COLUMNS)
    g = over(scatter(route="pieces"), (COLUMNS, ROWS), ROWS)
    h = over(functools.partial(mlp, route="pieces"), (ROWS, COLUMNS, ROWS), ROWS)
    forward = {"all_gather": (0, 0, 1, 2), "reduce_scatter": (1, 2, 3, 4)}
    for of, args, backward in (
        (f, (X, W), {"reduce_scatter": (5, 6, 7, 8)}),  # those of the weights are among them
        (g, (X @ W, V), {"all_gather": (4, 4, 5, 6)}),
        (h, (X, W, V), {"all_gather": (8, 8, 9, 10), "reduce_scatter": (13, 14, 15, 16)}),
    ):
        grad = jax.grad(squares(of), range(len(args)))
        found = awaited(grad, *args)
        assert found[-4 * len(backward) :] == [(name, n) for name, each in backward.items() for n in each]
        name, _ = found[0]
        assert [n for _, n in found[:4]] == list(forward[name])
        assert "add_any" not in str(jax.make_jaxpr(grad)(*args))


def test_parts_of_sums_are_computed_as_they_travel():
    """No pass rounds them after the product; the device's own are not rounded before they are added up."""
    x, v = (X @ W).astype(jnp.bfloat16), V.astype(jnp.bfloat16)
    for route, dtypes in (("whole", {"bf16"}), ("pieces", {"bf16"}), ("direct", {"bf16", "f32"})):
        f = over(scatter(route=route, reduce_dtype=jnp.bfloat16), (COLUMNS, ROWS), ROWS)
        rows = cutjax.explain(f, platform="cuda")(x, v).rows
        assert {str(row.choice.problem).split("-> ")[1].split()[0] for row in rows} == dtypes


def test_products_beside_transfers_take_a_tile_a_block():
    """A persistent kernel would wait for the SMs that a collective takes, with a share of all tiles left for each."""
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8192, 8192), (8192, 10240))]
    f = over(gather(route="pieces"), (ROWS, COLUMNS), COLUMNS)
    row, last = cutjax.explain(f, platform="cuda")(*args).rows
    kernel = row.choice.resolved
    assert (row.count, row.choice.problem.m, row.choice.config.schedule) == (3, 2048, "coop")
    assert kernel._launch(b"cubin").blocks_per_sm == 0
    assert (last.count, last.choice.problem.device.shared) == (1, False)  # nothing is left to arrive
    rows = cutjax.explain(jax.grad(squares(f), (0, 1)), platform="cuda")(*args).rows
    shared = {(row.choice.problem.layout, row.choice.problem.device.shared): row.count for row in rows}
    assert shared == {("nn", True): 3, ("nn", False): 1, ("nt", True): 3, ("nt", False): 1, ("tn", False): 1}


def routes(f, *args):
    """How many collectives of each kind "auto" moves rows by."""
    text = str(jax.jit(f).trace(*args).jaxpr)
    return {name: text.count(f"{name}[") for name in ("ppermute", "all_gather", "reduce_scatter")}


def test_the_route_is_the_one_predicted_to_be_fast():
    """Straight to each device where products take longer than permutes; else by a collective for each piece, or one."""

    def of(*shapes):
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def counts(ppermute=0, all_gather=0, reduce_scatter=0):
        return {"ppermute": ppermute, "all_gather": all_gather, "reduce_scatter": reduce_scatter}

    layer = over(functools.partial(mlp, route="auto"), (ROWS, COLUMNS, ROWS), ROWS)
    assert routes(layer, *of((8192, 8192), (8192, 28672), (28672, 8192))) == counts(ppermute=2 * (SIZE - 1))
    first = over(gather(route="auto"), (ROWS, COLUMNS), COLUMNS)
    assert routes(first, *of((8192, 8192), (8192, 10240))) == counts(all_gather=1)
    last = over(scatter(route="auto"), (COLUMNS, ROWS), ROWS)
    found = routes(last, *of((8192, 8192), (8192, 8192)))
    assert found in (counts(reduce_scatter=2), counts(reduce_scatter=4))  # parts of sums alone are hidden in part
    assert collectives(jax.grad(squares(layer), (0, 1, 2)), X, W, V) == {"all_gather": 2, "reduce_scatter": 2}


def test_a_route_is_chosen_for_empty_operands():
    """Nothing to send is no reason to fail. Only traced: XLA compiles no shard_map of unused operands."""
    first = over(gather(route="auto"), (ROWS, COLUMNS), COLUMNS)
    last = over(scatter(route="auto"), (COLUMNS, ROWS), ROWS)
    both = over(functools.partial(mlp, route="auto"), (ROWS, COLUMNS, ROWS), ROWS)
    none, wide = jnp.zeros((M, 0)), jnp.zeros((0, N))
    assert jax.eval_shape(first, none, wide).shape == (M, N)
    assert jax.eval_shape(last, X @ W, wide.T).shape == (M, 0)
    assert jax.eval_shape(both, none, wide, wide.T).shape == (M, 0)


def test_times_predicted_for_routes():
    assert links.pieces_us(1e6, 0, 10, 4) > links.whole_us(1e6, 0, 10)
    # The MLP of Llama 70B, whole on 4 H200s: measured 5376 us (collective-h200x4.json).
    assert links.whole_us(100e6, 201e6, 4328) == pytest.approx(5376, rel=0.05)
    # On 2, direct, in 16 bits: the timeline of the out projection is 916 us, that of the MLP 7682.
    assert links.direct_us([(422, 358)], [67e6], 2, 3.4e8) == pytest.approx(916, rel=0.05)
    times = [(2558, 2518), (1285, 1216)]
    assert links.direct_us(times, [67e6, 67e6], 2, 2.0e8) == pytest.approx(7682, rel=0.05)


def sent(f, *args):
    """The dtypes that a program sends, in order."""
    text = str(jax.jit(f).trace(*args).jaxpr)
    return re.findall(r":(\w+)\[[^\]]*\](?:\{[^}]*\})? = ppermute", text)


def test_parts_of_sums_travel_wide():
    x, w, v = (a.astype(jnp.bfloat16) for a in (X, W, V))
    n = SIZE - 1
    f = over(mlp, (ROWS, COLUMNS, ROWS), ROWS)
    assert sent(f, x, w, v) == n * ["bf16"] + n * ["f32"]
    assert collections.Counter(sent(jax.grad(squares(f), (0, 1, 2)), x, w, v)) == {"bf16": 2 * n, "f32": 2 * n}
    narrow = over(functools.partial(mlp, reduce_dtype=jnp.bfloat16), (ROWS, COLUMNS, ROWS), ROWS)
    assert sent(narrow, x, w, v) == 2 * n * ["bf16"]
    assert sent(jax.grad(squares(narrow), (0, 1, 2)), x, w, v) == 4 * n * ["bf16"]
    for dtype, parts in ((None, "f32"), (jnp.bfloat16, "bf16")):
        first = over(gather(route="direct", reduce_dtype=dtype), (ROWS, COLUMNS), COLUMNS)
        assert sent(jax.grad(squares(first)), x, w) == n * ["bf16"] + n * [parts]
    # Exact numbers: a sum of 8 devices' parts is rounded once, to what the unsharded product is.
    xs, vs = integers(0, (M, 64), jnp.bfloat16), integers(1, (64, K), jnp.bfloat16)
    g = over(scatter(), (COLUMNS, ROWS), ROWS, 8)
    same(jax.jit(g)(xs, vs), cutjax.gemm(xs, vs))


def test_the_gradient_of_weights_is_one_product():
    f = over(mlp, (ROWS, COLUMNS, ROWS), ROWS)
    rows = cutjax.explain(jax.grad(squares(f), (0, 1, 2)), platform="cuda")(X, W, V).rows
    depths = collections.Counter()
    for row in rows:
        problem = row.choice.problem
        depths[problem.k] += row.count * (problem.m in (K, N // SIZE))
    assert depths[M] == 2


@pytest.mark.versions
def test_kernels_of_shards():
    """Lowered for CUDA, each product is of one device's rows."""
    f = over(gather(epilogue=jax.nn.relu), (ROWS, COLUMNS), COLUMNS)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 512), (512, 2048)))
    rows = cutjax.explain(f, platform="cuda")(x, w).rows
    assert [row.count for row in rows] == [SIZE - 1, 1]  # those beside transfers, and the last
    for row in rows:
        problem = row.choice.problem
        assert (problem.m, problem.n, problem.k) == (4096 // SIZE, 2048 // SIZE, 512)
        assert row.choice.kernel is not None


@pytest.mark.versions
def test_errors():
    def fails(error, match, f, *args, specs=(ROWS, COLUMNS)):
        with pytest.raises(error, match=match):
            jax.jit(over(f, specs, COLUMNS)).trace(*args)

    fails(ValueError, "axis 'j' is not bound", functools.partial(cutjax.all_gather_gemm, axis_name="j"), X, W)
    fails(
        TypeError, "the name of one mesh axis, got", functools.partial(cutjax.all_gather_gemm, axis_name=("i",)), X, W
    )
    fails(ValueError, "unknown route 'both'", gather(route="both"), X, W)
    fails(ValueError, "unknown layout 'nx'", gather(layout="nx"), X, W)
    fails(ValueError, "contracting dimensions differ", gather(), X, V)
    fails(NotImplementedError, "reduces over rows", gather(epilogue=lambda acc: acc.sum(0)), X, W)
    by_row = lambda acc: acc + lax.broadcasted_iota(acc.dtype, acc.shape, 0)  # noqa: E731
    fails(NotImplementedError, "positions of rows", gather(epilogue=by_row), X, W)
    specs = COLUMNS, ROWS
    fails(ValueError, "rows do not divide over the 4 devices", scatter(), X[:6], integers(1, (K, N)), specs=specs)
    fails(TypeError, "reduce_dtype is int32", scatter(reduce_dtype=jnp.int32), X, W, specs=specs)
    with pytest.raises(ValueError, match="is not bound here"):
        cutjax.gemm_reduce_scatter(X, W, axis_name="i")
    with pytest.raises(ValueError, match="reduce_dtype without an axis_name"):
        cutjax.mlp(X, W, V, reduce_dtype=jnp.float32)


def test_another_axis_of_the_mesh():
    """Sequences over one axis, the layer over the other: gradients of weights are added up over the first."""
    mesh = mesh_of(j=2, i=4)
    specs = P("j", "i"), COLUMNS, ROWS
    f = jax.shard_map(mlp, mesh=mesh, in_specs=specs, out_specs=P("j", "i"))
    x, w, v = normal(0, (4, M, K)), scaled(1, (K, N)), scaled(2, (N, K))
    agree(f, lambda x, w, v: jnp.tanh(x @ w) @ v, x, w, v, tolerance=1e-5)

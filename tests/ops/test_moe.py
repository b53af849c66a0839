"""moe alone: its options, uneven routing, NaN, what runs, expert parallelism. Else: the battery."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, compare, mesh_of, multiplied, scaled, squares, types
from checks import saved as residuals
from jax import lax
from oracles import moe as dense

import cutjax
from cutjax.kernels.operand import Gathered

T, D, H, N, E = 10, 8, 12, 6, 4
P = jax.P


X, LOGITS = (
    scaled(0, (T, D)),
    4 * scaled(1, (T, E)),
)
GATE, UP, DOWN = (
    scaled(2, (E, D, H)),
    scaled(3, (E, D, H)),
    scaled(4, (E, H, N)),
)
ARGS = X, LOGITS, GATE, UP, DOWN


def gradient(f):
    return jax.grad(squares(f), range(5))


GRADIENT, MOE, ROUTE = jax.jit(gradient(cutjax.moe)), jax.jit(cutjax.moe), jax.jit(cutjax.route)
OPTIONS = {
    "k=1, gelu": {"k": 1, "activation": jax.nn.gelu},
    "all experts, not renormalized": {"k": E, "renormalize": False},
    "sigmoid with a bias": {"scoring": "sigmoid", "selection_bias": scaled(5, (E,))},
    "sigmoid, not renormalized": {"scoring": "sigmoid", "renormalize": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name):
    functions = [functools.partial(f, **OPTIONS[name]) for f in (cutjax.moe, dense)]
    compare(lambda f: lambda *args: (f(*args), gradient(f)(*args)), functions, ARGS, 1e-5)


@pytest.mark.parametrize(("batch", "layout"), [((2, 3), "nt")], ids=str)
def test_batches_and_layouts(batch, layout):
    x, logits = scaled(0, (*batch, T, D)), 4 * scaled(1, (*batch, T, E))
    bias = scaled(5, (*batch, T, E))  # one for each token, batched

    def fused(x, logits, *ws):
        ws = [w.mT for w in ws] if layout == "nt" else ws
        return cutjax.moe(x, logits, *ws, layout=layout, selection_bias=bias)

    args = x, logits, GATE, UP, DOWN
    expected = functools.partial(dense, selection_bias=bias)
    compare(lambda f: lambda *args: (f(*args), gradient(f)(*args)), (fused, expected), args, 1e-5)


# Routing that is not even.


def test_ties_and_experts_without_a_token():
    def plain(x, logits, gate, up, down):
        h = jax.nn.silu(jnp.einsum("td,edh->teh", x, gate[:2])) * jnp.einsum("td,edh->teh", x, up[:2])
        return jnp.einsum("teh,ehn->tn", h, down[:2]) / 2

    logits = np.zeros((T, E), np.float32)  # all to the first two experts
    compare(lambda f: f, (cutjax.moe, plain), (X, logits, GATE, UP, DOWN), 1e-5)
    for g in GRADIENT(X, logits, GATE, UP, DOWN)[2:]:
        assert np.asarray(g)[:2].all()
        assert not np.asarray(g)[2:].any()


def test_a_token_is_never_dropped():
    """All tokens on one expert, and a second that gets what is left."""
    logits = np.float32([[9, 0, 0, 0]] * (T - 1) + [[0, 9, 0, 0]])
    compare(lambda f: functools.partial(f, k=1), (cutjax.moe, dense), (X, logits, GATE, UP, DOWN), 1e-5)


def test_no_token():
    @jax.jit
    def got(*ws):
        y, pull = jax.vjp(lambda *ws: cutjax.moe(X[:0], LOGITS[:0], *ws), *ws)
        return y, pull(y)

    y, grads = got(GATE, UP, DOWN)
    assert y.shape == (0, N)
    close(grads, jax.tree.map(np.zeros_like, (GATE, UP, DOWN)))


@pytest.mark.parametrize("where", ["x", "logits", "weights"])
def test_nan_stays_where_it_is(where):
    args = [np.array(x) for x in ARGS]
    if where == "weights":  # of one expert: the tokens that chose it
        for i in (2, 3, 4):
            args[i][1] = np.nan
        bad = (np.asarray(ROUTE(LOGITS).indices) == 1).any(-1)
    else:  # of one token
        args[where == "logits"][3] = np.nan
        bad = np.arange(T) == 3
    assert 0 < bad.sum() < T
    np.testing.assert_array_equal(np.isnan(MOE(*args)), np.broadcast_to(bad[:, None], (T, N)))
    dx, dlogits, *dws = GRADIENT(*args)
    np.testing.assert_array_equal(np.isnan(dx).any(-1), bad)
    np.testing.assert_array_equal(np.isnan(dlogits).any(-1), bad)
    touched = np.asarray(ROUTE(args[1]).indices)[bad]  # the experts of the tokens concerned, and no others
    for dw in dws:
        found = set(np.flatnonzero(np.isnan(dw).any((1, 2))).tolist())
        assert found <= set(touched.ravel().tolist())
        assert found


# What runs.


def test_deterministic():
    for first, second in zip(GRADIENT(*ARGS), GRADIENT(*ARGS), strict=True):
        np.testing.assert_array_equal(first, second)


def test_no_floats_are_scattered_or_sorted():
    """The only scatter is that of the integers which invert the permutation, and only integers are sorted."""
    jaxpr = str(jax.make_jaxpr(gradient(cutjax.moe))(*ARGS))
    assert "scatter-add" not in jaxpr
    assert "scatter_add" not in jaxpr
    text = GRADIENT.lower(*ARGS).as_text()
    for name in ("scatter", "sort"):
        for dtypes in re.findall(rf'"stablehlo\.{name}"[^\n]*(?:\n(?!\s*}}\)).*)*\n\s*}}\) : (.*)', text):
            assert "xf" not in dtypes


def test_every_product_has_a_kernel():
    tokens, d, h, experts = 64, 128, 256, 8
    rows, shapes = 2 * tokens, ((tokens, d), (tokens, experts), *[(experts, d, h)] * 2, (experts, h, d))
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    fn = gradient(lambda *args: cutjax.moe(*args).astype(jnp.float32))
    found = []
    for row in multiplied(cutjax.explain(fn)(*args).rows):
        p = row.choice.problem
        assert row.choice.config is not None, row.choice.reasons
        found += [(p.divided, p.m, p.n, p.k, p.layout, len(row.outputs))] * row.count
    assert sorted(found) == sorted(
        [
            ("m", rows, h, d, "nn", 3),  # what the last product reads, and both accumulators
            ("m", rows, d, h, "nn", 0),
            ("m", rows, h, d, "nt", 3),  # the gradients of both accumulators, and of the rows' weights
            ("m", rows, d, 2 * h, "nt", 0),  # a sum of two
            ("k", h, d, rows, "tn", 0),
            ("k", d, h, rows, "tn", 2),
        ]
    )


def test_rows_that_are_read_where_they_are():
    """The first product and the weights' gradients gather; where no kernel does, the rows are copied."""
    tokens, d, h, experts = 64, 128, 256, 8
    shapes = ((tokens, d), (tokens, experts), *[(experts, d, h)] * 2, (experts, h, d))
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def problems(**how):
        fn = gradient(lambda *args: cutjax.moe(*args, gather="loads", **how).astype(jnp.float32))
        return multiplied(cutjax.explain(fn, platform="cuda")(*args).rows)

    found = [(row.choice.problem, row.count) for row in problems(backend="cuda") if row.choice.problem.a.gathered]
    assert [(p.divided, p.m, p.n, p.k, p.products, count) for p, count in found] == [
        ("m", 2 * tokens, h, d, 2, 1),
        ("k", d, h, 2 * tokens, 1, 2),
    ]
    assert {p.a.view for p, _ in found} == {Gathered(tokens, 2)}
    assert all(row.runs.startswith("sm90_") for row in problems(backend="cuda"))
    copied = [row for row in problems() if row.choice.problem.a.gathered and row.choice.problem.divided == "k"]
    assert {(row.runs, row.why.split("; ")[-1]) for row in copied} == {("XLA", "its rows are copied first")}
    fn = jax.jit(gradient(lambda *args: cutjax.moe(*args, gather="loads", backend="cuda").astype(jnp.float32)))
    text = fn.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("_gathered") == 3


def test_a_bias_of_experts_is_not_spread_to_tokens():
    args = *ARGS[:2], *ARGS[2:], scaled(5, (E,))
    jaxpr = jax.make_jaxpr(lambda *args: cutjax.moe(*args[:-1], selection_bias=args[-1]))(*args)
    (route,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cutjax_route")
    assert [x.aval.shape for x in route.invars] == [(T, E), (1, E)]


def saved(capsys, fn, *args) -> list[str]:
    """Types of the residuals that are neither weights nor indices."""
    return [x for x in types(residuals(capsys, fn, *args)) if x.startswith("bf16") and "," in x]


def test_what_is_saved(capsys):
    args = tuple(x.astype(jnp.bfloat16) for x in ARGS)
    rows, hidden = f"bf16[{2 * T},{D}]", f"bf16[{2 * T},{H}]"  # the rows; both accumulators, and the last one's operand
    assert saved(capsys, cutjax.moe, *args) == sorted([rows, *[hidden] * 3])
    assert saved(capsys, functools.partial(cutjax.moe, save="recompute"), *args) == [rows]
    loads = functools.partial(cutjax.moe, gather="loads")
    assert saved(capsys, loads, *args) == sorted([hidden] * 3)
    assert saved(capsys, functools.partial(loads, save="recompute"), *args) == []
    assert saved(capsys, jax.checkpoint(cutjax.moe), *args) == []
    names = "cutjax_routing", "cutjax_preactivation", "cutjax_hidden"
    without_rows = jax.checkpoint(cutjax.moe, policy=jax.checkpoint_policies.save_only_these_names(*names))
    assert saved(capsys, without_rows, *args) == [hidden] * 3
    text = str(jax.make_jaxpr(gradient(without_rows))(*ARGS))
    counts = {"cutjax_route": 1, "cutjax_dispatch": 3 + 2}
    assert {name: len(re.findall(rf"\b{name}\b", text)) for name in counts} == counts
    assert len(re.findall(r"cutjax_grouped_gemm\[\s+backend=auto\s+config=None\s+epilogue=(?!acc\n)", text)) == 2
    compare(gradient, (without_rows, dense), ARGS, 1e-5)


# Expert parallelism.


def divided(x, logits, gate, up, down, **options):
    """This device's experts, for all tokens of its shard; the sum over the devices."""
    offset = lax.axis_index("experts") * gate.shape[0]
    return lax.psum(cutjax.moe(x, logits, gate, up, down, group_offset=offset, **options), "experts")


@pytest.mark.parametrize(
    ("shape", "order", "gather"),
    [((1, 8), "grad inside", "copy"), ((2, 4), "grad outside", "copy"), ((2, 4), "grad inside", "loads")],
    ids=str,
)
def test_expert_parallelism(shape, order, gather):
    x, logits = (
        scaled(0, (16, D)),
        4 * scaled(1, (16, 8)),
    )
    args = (
        x,
        logits,
        scaled(2, (8, D, H)),
        scaled(3, (8, D, H)),
        scaled(4, (8, H, N)),
    )
    mesh = mesh_of(tokens=shape[0], experts=shape[1])
    specs = P("tokens"), P("tokens"), P("experts"), P("experts"), P("experts")
    expected = jax.jit(lambda *args: (dense(*args), gradient(dense)(*args)))(*args)
    of = functools.partial(divided, gather=gather)
    if order == "grad outside":
        f = jax.shard_map(of, mesh=mesh, in_specs=specs, out_specs=P("tokens"))
        got = jax.jit(lambda *args: (f(*args), gradient(f)(*args)))(*args)
    else:
        inside = jax.shard_map(
            lambda *args: (of(*args), gradient(of)(*args)),
            mesh=mesh,
            in_specs=specs,
            out_specs=(P("tokens"), specs),
        )
        got = jax.jit(inside)(*args)
    close(got, expected)


def test_expert_and_tensor_parallelism():
    """Each device has half of the experts, and of each a quarter of the hidden layer."""
    mesh = mesh_of(experts=2, hidden=4)

    def layer(*args):
        return lax.psum(divided(*args), "hidden")

    specs = P(), P(), P("experts", None, "hidden"), P("experts", None, "hidden"), P("experts", "hidden")
    f = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P())
    compare(lambda f: lambda *args: (f(*args), gradient(f)(*args)), (f, dense), ARGS, 1e-5)


def test_what_is_summed_over_devices_has_the_size_of_x():
    """The gradient is added over the devices for each token, not for each of its k rows."""
    mesh = mesh_of(experts=4)
    f = jax.shard_map(divided, mesh=mesh, in_specs=(P(), P(), P("experts"), P("experts"), P("experts")), out_specs=P())
    text = str(jax.make_jaxpr(jax.grad(squares(f), (0, 1)))(*ARGS))
    shapes = re.findall(r":\w+\[([\d,]*)\](?:\{[^}]*\})? = psum", text)
    assert sorted(shapes) == sorted([f"{T},{N}", f"{T},{D}", f"{T},2"])


def test_experts_of_no_device():
    """Parts that do not cover all experts give those tokens' part only, whatever the offset."""

    def in_parts(x, logits, *ws):
        of = ((0, 1), (1, 3), (3, 4))
        parts = [cutjax.moe(x, logits, *(w[i:j] for w in ws), group_offset=i) for i, j in of]
        return sum(parts[1:], parts[0])

    compare(lambda f: f, (in_parts, dense), ARGS, 1e-5)


# Errors.

REFUSED = [
    (ValueError, "moe: unknown layout 'tn'", {"layout": "tn"}),
    (ValueError, "moe: unknown save 'all'", {"save": "all"}),
    (ValueError, "moe: unknown gather 'none'", {"gather": "none"}),
    (ValueError, "moe: gather='loads' with fp8", {"gather": "loads", "fp8": "current"}),
    (ValueError, "moe: unknown backend 'gpu'", {"backend": "gpu"}),
    (ValueError, "moe: unknown scoring 'tanh'", {"scoring": "tanh"}),
    (ValueError, r"moe: k is 5, but router_logits \(10, 4\) are for 4 experts", {"k": 5}),
    (TypeError, "moe: k must be an int, got float", {"k": 1.0}),
    (ValueError, r"moe: x is \(9, 8\), router_logits is \(10, 4\): all axes but the last", {"x": X[1:]}),
    (TypeError, "moe: router_logits must be floating-point numbers, got int32", {"router_logits": LOGITS.astype(int)}),
    (ValueError, r"moe: selection_bias is \(3,\), which does not", {"selection_bias": jnp.ones(3)}),
    (ValueError, r"moe: w_gate must have rank 3, a matrix for each expert, got shape \(8, 12\)", {"w_gate": GATE[0]}),
    (ValueError, r"moe: w_gate is float32\[4,8,11\], but w_up is float32\[4,8,12\]", {"w_gate": GATE[..., 1:]}),
    (ValueError, r"moe: x is \(10, 7\), w_gate is \(4, 8, 12\), layout 'nn': d differs", {"x": X[:, 1:]}),
    (
        ValueError,
        r"moe: w_gate is \(4, 8, 12\), w_down is \(4, 11, 6\), layout 'nn': h differs",
        {"w_down": DOWN[:, 1:]},
    ),
    (ValueError, "moe: w_gate has 4 experts, w_down has 3", {"w_down": DOWN[1:]}),
    (
        ValueError,
        "moe: router_logits are for 4 experts, but the weights are those of 3; .* group_offset says which",
        {"w_gate": GATE[1:], "w_up": UP[1:], "w_down": DOWN[1:]},
    ),
    (TypeError, "moe: w_gate is float32, but w_down is bfloat16", {"w_down": DOWN.astype(jnp.bfloat16)}),
    (TypeError, "group_offset must be one integer", {"group_offset": 1.5}),
    (ValueError, "the activation must return one array", {"activation": lambda z: (z, z)}),
]


@pytest.mark.parametrize(("error", "match", "options"), REFUSED, ids=[case[1][:40] for case in REFUSED])
def test_refused(error, match, options):
    names = ("x", "router_logits", "w_gate", "w_up", "w_down")
    with pytest.raises(error, match=match):
        cutjax.moe(**(dict(zip(names, ARGS, strict=True)) | options))

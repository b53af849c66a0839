"""Every public operation on small operands: what tests of all of them share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import cutjax

M, K, N, EXPERTS = 12, 8, 16, 4


def _ints(seed, *shape, dtype=jnp.float32):
    return jax.random.randint(jax.random.key(seed), shape, -2, 3).astype(dtype)


def arrays() -> dict[str, jax.Array]:
    """The operands by name; a function, because tests make them under other settings."""
    return {
        "x": _ints(0, M, K),
        "w": _ints(1, K, N),
        "v": _ints(2, N, K),
        "b": _ints(3, N),
        "c": _ints(4, K),
        "g": _ints(5, EXPERTS, K, N),
        "u": _ints(6, EXPERTS, K, N),
        "d": _ints(7, EXPERTS, N, K),
        "s": _ints(8, M, 1),
        "of_groups": _ints(9, EXPERTS, 1, N),
        "dy": _ints(10, M, N),
        "to": _ints(11, EXPERTS, K, N),
        "sizes": jnp.array([5, 0, 4, 2], jnp.int32),
        "logits": jax.random.normal(jax.random.key(12), (M, EXPERTS), jnp.float32),
        "bias": jax.random.normal(jax.random.key(13), (EXPERTS,), jnp.float32),
    }


def _biased(acc, b):
    return jax.nn.gelu(acc + b[None, :])


def _ragged_contracted(x, dy, sizes):
    return cutjax.ragged_dot_general(x, dy, sizes, jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], []))


# Name -> (function, the names of its operands). Of integers and routing alone nothing is differentiated.
OPERATIONS = {
    "gemm": (cutjax.gemm, "x w"),
    "gemm, layout": (lambda x, v: cutjax.gemm(x, v, layout="nt"), "x v"),
    "gemm, epilogue": (lambda x, w, b: cutjax.gemm(x, w, epilogue=_biased, operands=(b,)), "x w b"),
    "gemm, two products": (
        lambda x, w, g: cutjax.gemm(x, (w, g[0]), epilogue=lambda p, q: jax.nn.silu(p) * q),
        "x w g",
    ),
    "gemm, reductions": (
        lambda x, w, s: cutjax.gemm(x, w, epilogue=lambda a, s: (a * s, a.sum(0), a.max(1)), operands=(s,)),
        "x w s",
    ),
    "gemm, recompute": (
        lambda x, w, b: cutjax.gemm(x, w, epilogue=_biased, operands=(b,), save="recompute"),
        "x w b",
    ),
    "mlp": (lambda x, w, v: cutjax.mlp(x, w, v), "x w v"),
    "mlp, all": (lambda x, w, v, b, c: cutjax.mlp(x, w, v, gate=w, b1=b, b2=c, activation=jax.nn.silu), "x w v b c"),
    "mlp, recompute": (lambda x, w, v, b, c: cutjax.mlp(x, w, v, b1=b, b2=c, save="recompute"), "x w v b c"),
    "grouped_gemm": (cutjax.grouped_gemm, "x g sizes"),
    "grouped_gemm, offset": (lambda x, g, sizes: cutjax.grouped_gemm(x, g[:2], sizes, group_offset=1), "x g sizes"),
    "grouped_gemm, epilogue": (
        lambda x, g, sizes, s, of_groups: cutjax.grouped_gemm(
            x, g, sizes, epilogue=lambda a, s, b: (jax.nn.gelu(a + b) * s, a.sum(0)), operands=(s, of_groups)
        ),
        "x g sizes s of_groups",
    ),
    "grouped_outer": (cutjax.grouped_outer, "x dy sizes"),
    "grouped_outer, accumulate": (
        lambda x, dy, sizes, to: cutjax.grouped_outer(x, dy, sizes, accumulate=to),
        "x dy sizes to",
    ),
    "grouped_mlp": (
        lambda x, g, u, d, sizes, s: cutjax.grouped_mlp(x, g, d, sizes, gate=u, row_scale=s),
        "x g u d sizes s",
    ),
    "grouped_mlp, recompute": (
        lambda x, g, d, sizes: cutjax.grouped_mlp(x, g, d, sizes, save="recompute", group_offset=0),
        "x g d sizes",
    ),
    "ragged_dot": (cutjax.ragged_dot, "x g sizes"),
    "ragged_dot_general": (_ragged_contracted, "x dy sizes"),
    "route": (lambda logits: cutjax.route(logits).weights, "logits"),
    "route, all": (
        lambda logits, bias: (
            cutjax.route(logits, k=3, scoring="sigmoid", renormalize=False, selection_bias=bias).weights
        ),
        "logits bias",
    ),
    "dispatch and combine": (
        lambda x, logits: cutjax.route(logits).combine(cutjax.route(logits).dispatch(x)),
        "x logits",
    ),
    "moe": (cutjax.moe, "x logits g u d"),
    "moe, all": (
        lambda x, logits, g, u, d, bias: cutjax.moe(
            x, logits, g, u, d, 3, renormalize=False, selection_bias=bias, save="recompute", group_offset=0
        ),
        "x logits g u d bias",
    ),
    "load_balance_loss": (cutjax.load_balance_loss, "logits"),
    "load_balance_loss, all": (
        lambda logits, bias: cutjax.load_balance_loss(logits, 3, scoring="sigmoid", selection_bias=bias),
        "logits bias",
    ),
    "router_z_loss": (cutjax.router_z_loss, "logits"),
}


def operands(name: str) -> list[jax.Array]:
    found = arrays()
    return [found[x] for x in OPERATIONS[name][1].split()]


def loss(name: str):
    """A scalar of everything the operation returns."""

    def scalar(*args):
        outs = jax.tree.leaves(OPERATIONS[name][0](*args))
        return sum(jnp.sin(x.astype(jnp.float32)).sum() for x in outs)

    return scalar


def differentiable(args) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))


def uses(name: str) -> dict[str, object]:
    """What is done with an operation: its values, its gradients in both modes, and batches of them."""
    fn, args = OPERATIONS[name][0], operands(name)
    wrt = differentiable(args)

    def forward(*args):
        def of(*xs):
            return fn(*[dict(zip(wrt, xs, strict=True)).get(i, x) for i, x in enumerate(args)])

        return jax.jvp(of, [args[i] for i in wrt], [args[i] for i in wrt])[1]

    return {
        "value": fn,
        "gradient": jax.grad(loss(name), wrt),
        "tangent": forward,
        "batch of values": lambda *args: jax.vmap(fn)(*(jnp.stack([x, x]) for x in args)),
        "batch of one": lambda *args: jax.vmap(fn, [0, *(None for _ in args[1:])])(
            jnp.stack([args[0], args[0]]), *args[1:]
        ),
        "batch of gradients": lambda *args: jax.vmap(jax.grad(loss(name), wrt))(*(jnp.stack([x, x]) for x in args)),
    }

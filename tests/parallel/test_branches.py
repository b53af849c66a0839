"""No device waits in a branch for devices that took another: every operation under shard_map, and its gradients."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from branches import waits
from checks import close, integers, normal, scaled, squares
from jax import lax
from operations import OPERATIONS, M, differentiable, operands

import cutjax

P = jax.P
DATA, MODEL = "data", "model"
T, D, H, E = 16, 8, 12, 8
ARGS = normal(0, (T, D)), normal(1, (T, E)), scaled(2, (E, D, H)), scaled(3, (E, D, H)), scaled(4, (E, H, D))
BETA = jnp.float32(1.5)


def mesh():
    axes = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), (DATA, MODEL), axis_types=axes, devices=jax.devices()[:4])


def loss(fn, specs, check_vma, args):
    """A scalar of what every device computes of its part of the arguments."""
    at = differentiable(args)

    def local(*args):
        outs = jax.tree.leaves(fn(*args))
        return sum(jnp.sin(x.astype(jnp.float32)).sum() for x in outs)[None]

    divided = jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=P((DATA, MODEL)), check_vma=check_vma)

    def total(*floats):
        found = dict(zip(at, floats, strict=True))
        return divided(*(found.get(i, x) for i, x in enumerate(args))).sum()

    return total, [args[i] for i in at]


def check(fn, specs, args, order=1, checks=(True, False)):
    """The program of a gradient has all of what is differentiated, so the last is the one to look at."""
    for check_vma in checks:
        total, floats = loss(fn, specs, check_vma, args)
        for _ in range(order):
            total = functools.partial(_summed, jax.grad(total, range(len(floats))))
        assert not waits(jax.make_jaxpr(total)(*floats))


def _summed(grad, *args):
    return sum(jnp.sin(x).sum() for x in grad(*args))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    args = operands(name)
    specs = tuple(P(DATA) if x.shape[0] == M else P() for x in args)
    check(OPERATIONS[name].fn, specs, args, checks=(len(name) % 2 == 0,))


LAYERS = {
    "exchange": ({"form": "exchange"}, 1),
    "exchange in one part": ({"form": "exchange", "room": 0.5, "parts": 1}, 2),
    "exchange, captured": ({"form": "exchange", "room": 0.5}, 1),
    "ragged": ({"form": "ragged", "room": 0.5, "parts": 1}, 1),
    "gather": ({"form": "gather"}, 2),
    "auto": ({"save": "recompute"}, 1),
}


def layer(*args, beta=None, **options):
    if beta is not None:
        options["activation"] = lambda x: jax.nn.silu(beta * x)
    return cutjax.moe(*args, k=2, expert_axis=MODEL, **options)


SPECS = (P((DATA, MODEL)),) * 2 + (P(MODEL),) * 3


@pytest.mark.parametrize("name", LAYERS)
def test_experts_over_devices(name):
    (options, order), captured = LAYERS[name], "captured" in name

    def fn(*args):
        return layer(*args[:5], beta=args[5] if captured else None, **options)

    checks = (list(LAYERS).index(name) % 2 == 0,)
    check(fn, (*SPECS, P())[: 5 + captured], (*ARGS, BETA)[: 5 + captured], order, checks)


def test_quantized_experts_over_devices():
    gate, up, down = (integers(i, w.shape, jnp.int8) for i, w in enumerate(ARGS[2:]))

    def fn(x, logits, scale):
        first = lax.axis_index(MODEL) * (E // 2)
        ws = (cutjax.Quantized(lax.dynamic_slice_in_dim(w, first, E // 2), scale) for w in (gate, up, down))
        return layer(x, logits, *ws, form="exchange", room=0.5, parts=1)

    check(fn, (*SPECS[:2], P()), (*ARGS[:2], jnp.ones((E // 2, 1, 1))))


@pytest.mark.parametrize("route", ["whole", "pieces", "direct"])
def test_collective_products(route):
    x, w, v = normal(0, (16, 8)), scaled(1, (8, 16)), scaled(2, (16, 8))
    specs = P((DATA, MODEL)), P(None, MODEL), P(MODEL)

    def both(x, w, v):
        h = cutjax.all_gather_gemm(x, w, axis_name=MODEL, route=route, epilogue=jnp.tanh)
        return cutjax.gemm_reduce_scatter(h, v, axis_name=MODEL, route=route)

    check(both, specs, (x, w, v), order=2)


def test_the_walk_finds_collectives_that_wait():
    def wrong(kind, check_vma):
        def local(x, w):
            total = lambda: lax.psum(x * w, MODEL).sum()  # noqa: E731
            if kind == "cond":
                return lax.cond(x.sum() > 0, total, lambda: lax.psum(x, MODEL).sum())[None]
            if kind == "while":
                return lax.while_loop(lambda c: c < x.sum(), lambda c: c + total() + 0 * x.sum(), 0 * x.sum())[None]
            if kind == "all devices":
                return lax.cond(lax.psum(x.sum(), MODEL) > 0, total, lambda: 0 * total())[None]
            return lax.cond(x.sum() > 0, lambda: (x * w).sum(), lambda: 0 * x.sum())[None]

        return lambda x, w: jax.shard_map(
            local, mesh=mesh(), in_specs=(P((DATA, MODEL)), P()), out_specs=P((DATA, MODEL)), check_vma=check_vma
        )(x, w).sum()

    args = jnp.ones(8), jnp.float32(2)
    for check_vma in (True, False):
        kinds = "cond", "while", "all devices", "none"
        assert [len(waits(jax.make_jaxpr(wrong(kind, check_vma))(*args))) for kind in kinds] == [2, 1, 0, 0]
    # The gradient of what is equal on all devices is a sum over them, where it is taken to vary.
    assert waits(jax.make_jaxpr(jax.grad(wrong("none", True), 1))(*args))


def main():
    """Compares gradients with those of one device: run in a process of its own, since what is wrong hangs."""
    even = jnp.eye(E)[np.arange(T) % E] + jnp.eye(E)[(np.arange(T) + E // 2) % E]
    full = (jnp.arange(E) < 2).astype(jnp.float32)  # both on the first device
    logits = ARGS[1] / 10 + 10 * jnp.where(jnp.arange(T)[:, None] < T // 2, full, even)
    args = ARGS[0], logits, *ARGS[2:]
    exchange = functools.partial(layer, form="exchange", room=1.0, parts=1)
    divided = jax.shard_map(exchange, mesh=mesh(), in_specs=SPECS, out_specs=SPECS[0])
    fns = divided, functools.partial(cutjax.moe, k=2)
    close(*(jax.jit(jax.grad(squares(f), range(len(args))))(*args) for f in fns))


def test_one_group_of_devices_overflows():
    """Its gradient took another branch than that of the others, and they waited for it in theirs."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    program = "import test_branches; test_branches.main()"
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=600)

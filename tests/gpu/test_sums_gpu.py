"""Sums of products, and several products of one a, on the device.

Small integers: equal to numpy bit for bit, in every dtype, layout and kind of groups, by every way to divide k. And
gradients of gated layers in normal numbers, near those of float64.
"""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import launches
import numpy as np
import problems
import products
import pytest
from products import Item

import cutjax
from cutjax import Config, MmaConfig
from cutjax.binding.lowering import target
from cutjax.kernels import families
from cutjax.kernels.device import device_of

pytestmark = pytest.mark.gpu

H = jnp.bfloat16
SECONDS = 120  # a test takes a few: longer is a block that waits for ever
LAYOUTS = {"dense": ("nn", "nt", "tn", "tt"), "rows": ("nn", "nt"), "k": ("tn",)}
CONTRACTIONS = ((256, 256), (64, 200), (72, 8, 136), (1000, 24), (33, 100), (8, 520))
# Pinned, so that each way to divide the contraction and to walk tiles is there.
PINNED = [
    (layout, config)
    for layout in LAYOUTS["dense"]
    for config in (
        Config(128, 256, stages=4, cluster_m=2),
        Config(128, 128, stages=4, schedule="pingpong", cluster_n=2),
        Config(128, 192, stages=4, schedule="pingpong", stream_k=True),
        Config(128, 256, stages=4, stream_k=True, cluster_m=2),
        Config(64, 64, stages=6, cluster_k=4),
        Config(128, 128, stages=4, splits=3),
        Config(128, 64, stages=6, swap=True, schedule="pingpong"),
        MmaConfig(64, 64, 32, 32, 32, splits=2),
        MmaConfig(64, 64, 64, 32, 32, 2, 3),
    )
]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One product and one of the kernels that serve it, both drawn by a number."""

    index: int

    def case(self) -> launches.Case | None:
        rng = random.Random(self.index)
        kind = ("dense", "rows", "dense", "k")[self.index % 4]
        ways = [way for way in products.WAYS if kind != "k" or products.WAYS[way][0] == products.WAYS[way][1]]
        way = ways[self.index // 4 % len(ways)] if self.index % 3 else rng.choice(("bf16", "f16"))
        epilogue = "several" if kind == "k" else rng.choice(products.epilogues(way, kind))
        m, n = (rng.choice((72, 200, 520, 1000, 1024)) for _ in "mn")
        ks = (rng.choice((200, 1000, 4096)),) if kind == "k" else rng.choice(CONTRACTIONS)
        batches = rng.choice((((), ()), ((), ()), ((3,), (1,)), ((1, 2), (4, 2)))) if kind == "dense" else ((), ())
        item = Item(
            way, kind, rng.choice(LAYOUTS[kind]), m, n, ks[0], epilogue, "", batches, "", self.index, more=ks[1:]
        )
        problem = item.problem.on(device_of(target()))
        served = [family for family in families.FAMILIES[:2] if not family.reasons(problem)]
        if not served:
            return None
        family = rng.choice(served)
        configs = list(family.configs(problem))
        for config in rng.sample(configs, len(configs)):
            kernel = family.resolve(problem, config)
            if not isinstance(kernel, tuple) and not kernel.unlaunchable():
                return launches.Case(problem, config, item.data, str(item))
        return None


def prepared(drawn: Drawn):
    case = drawn.case()
    return case and (case, *case.prepare())


DRAWN = [Drawn(i) for i in range(360)]
prefetch = problems.prefetching(DRAWN, prepared)


@pytest.mark.parametrize("drawn", DRAWN, ids=lambda drawn: str(drawn.index))
def test_exact(drawn, prefetch):
    found = prefetch.get(drawn)
    if found is None:
        pytest.skip("no kernel")
    case, call, arrays, expected = found
    wrong = launches.wrong(launches.run(case.problem, call, arrays), expected)
    assert not wrong, f"{case}: {wrong}"


@pytest.mark.parametrize(("layout", "config"), PINNED, ids=str)
def test_pinned(layout, config):
    """Contractions of whole blocks and of none, of tiles that are whole and not, of few tiles and of some waves."""
    for m, n, ks in ((264, 328, (1000, 24)), (2056, 1032, (264, 520)), (72, 64, (4096, 4104, 520))):
        item = Item("bf16", "dense", layout, m, n, ks[0], out="float32", seed=m, more=ks[1:])
        problem = item.problem.on(device_of(target()))
        found = families.resolve(problem, config)
        if isinstance(found, tuple):
            pytest.skip("; ".join(found))
        case = launches.Case(problem, config, item.data, str(item))
        call, arrays, expected = case.prepare()
        wrong = launches.wrong(launches.run(problem, call, arrays), expected)
        assert not wrong, f"{case}: {wrong}"


def gated(multiply):
    def layer(x, gate, up, down, *sizes):
        hidden = multiply(x, (gate, up), *sizes, epilogue=lambda p, q: jax.nn.silu(p) * q, backend="cuda")
        return multiply(hidden, down, *sizes, backend="cuda")

    return layer


def near(got, expected, name):
    for out, ref in zip(got, expected, strict=True):
        out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
        error = np.linalg.norm(out - ref) / np.linalg.norm(ref)
        problems.note_worst(name, float(error) / 1e-2)
        assert error <= 1e-2, (name, error)


@pytest.mark.parametrize("groups", [0, 7])
def test_gradients_of_gated_layers(groups):
    rng, lead = np.random.default_rng(0), (groups,) if groups else ()
    m, d, h = 1000, 264, 520
    shapes = (m, d), (*lead, d, h), (*lead, d, h), (*lead, h, d)
    args = [jnp.asarray(rng.standard_normal(s) * (s[-2] ** -0.5 if i else 1), H) for i, s in enumerate(shapes)]
    sizes = [jnp.asarray(rng.multinomial(m - 9, np.ones(groups) / groups), jnp.int32)] if groups else []
    multiply = cutjax.grouped_gemm if groups else cutjax.gemm
    g = jnp.asarray(rng.standard_normal((m, d)), H)

    def ours(*args):
        return jax.vjp(lambda *xs: gated(multiply)(*xs, *sizes), *args)[1](g)

    def plain(x, gate, up, down):
        dot = (lambda a, b: jax.lax.ragged_dot(a, b, *sizes)) if groups else jnp.matmul
        return dot(jax.nn.silu(dot(x, gate)) * dot(x, up), down)

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in args]
        expected = jax.vjp(plain, *wide)[1](jnp.asarray(np.asarray(g, np.float64)))
        expected = [np.asarray(x) for x in expected]
    text = jax.jit(ours).lower(*args).as_text()
    assert "_sum2" in text
    near(jax.jit(ours)(*args), expected, f"gradients of a gated layer in {groups} groups")


def test_several_weight_gradients_are_added_in_place():
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.integers(-2, 3, (700, n)), H) for n in (136, 264))
    sizes = jnp.array([100, 0, 333, 250], jnp.int32)
    tos = tuple(jnp.asarray(rng.integers(-2, 3, (4, 136, 264)), jnp.float32) for _ in range(2))
    run = jax.jit(
        lambda tos, x, dy: cutjax.grouped_outer(x, (dy, 2 * dy), sizes, accumulate=tos, backend="cuda"),
        donate_argnums=0,
    )
    expected = cutjax.grouped_outer(x, dy, sizes, out_dtype=jnp.float32, backend="xla")
    want = [np.asarray(to + (i + 1) * expected) for i, to in enumerate(tos)]
    for got, ref in zip(run(tos, x, dy), want, strict=True):
        np.testing.assert_array_equal(got, ref)

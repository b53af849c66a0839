"""Products of one operand under cutjax.fuse: what XLA makes of them, and several in one kernel."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same
from jax import lax

import cutjax
from cutjax.fusion import price
from cutjax.kernels import choose, xla

BF16 = jnp.bfloat16


def aval(*shape):
    return jax.ShapeDtypeStruct(shape, BF16)


def reports(fn, *args):
    return cutjax.explain(cutjax.fuse(fn), platform="cuda")(*args).fusion


def xla_us(report):
    return float(re.findall(r"XLA ([\d.]+) us", report.why)[0])


def ints(seed, shape):
    return jax.device_put(np.random.default_rng(seed).integers(-2, 3, shape).astype(BF16))


def projections(x, q, k, v):
    return jnp.sort(x @ q), jnp.sort(x @ k), jnp.sort(x @ v)


@pytest.mark.parametrize("side", ["left", "right"])
def test_xla_merges_products_of_one_operand(side):
    """Decoding's queries, keys and values: each alone would be a kernel, the one product of them would not."""
    fn = projections if side == "left" else lambda x, *ws: projections(x.T, *(w.T for w in ws))
    if side == "right":
        fn = lambda x, *ws: tuple(jnp.sort(w @ x) for w in ws)  # noqa: E731
    x, *ws = aval(16, 4096), *(aval(4096, n) for n in (4096, 1024, 1024))
    one = aval(4096, 6144)
    if side == "right":
        x, ws, one = aval(4096, 16), [aval(*w.shape[::-1]) for w in ws], aval(6144, 4096)
    found = reports(fn, x, *ws)
    assert [report.runs for report in found] == ["XLA"] * 3
    assert all("XLA's share of 3 products merged" in report.why for report in found)
    (whole,) = reports(lambda x, w: jnp.sort(x @ w if side == "left" else w @ x), x, one)
    assert sum(map(xla_us, found)) == pytest.approx(xla_us(whole), abs=0.2)  # each is printed to 0.1
    (alone,) = reports(lambda x, w: jnp.sort(x @ w if side == "left" else w @ x), x, ws[1])
    assert xla_us(found[1]) < 0.8 * xla_us(alone)


def test_large_and_dependent_products_are_not_merged():
    found = reports(projections, aval(16, 4096), *(aval(4096, 8192) for _ in range(3)))
    assert not any("merged" in report.why for report in found)

    def chain(x, w):
        y = x @ w
        return y, x @ jnp.sort(y)

    assert not any("merged" in report.why for report in reports(chain, aval(64, 64), aval(64, 64)))


@pytest.fixture
def xla_is_slow(monkeypatch):
    of_problem = price._of_problem
    slow = lambda *args: of_problem(*args).of_xla(100.0, 1)  # noqa: E731
    monkeypatch.setattr(price, "_of_problem", slow)
    monkeypatch.setattr(price, "GAIN", 0.0)
    monkeypatch.setattr(xla, "alone_us", lambda *_, **__: 100.0)
    choose._choose.cache_clear()
    yield
    choose._choose.cache_clear()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_several_products_in_one_kernel(xla_is_slow, count):
    def fn(x, *ws):
        return tuple(lax.sort(x @ w) for w in ws)

    x, ws = ints(0, (2, 8, 16)), [ints(1 + i, (16, 24)) for i in range(count)]
    fused = cutjax.fuse(fn)
    found = cutjax.explain(fused, platform="cuda")(x, *ws)
    assert [report.products for report in found.fusion] == [min(3, count)] * min(3, count) + [1] * (count - 3)
    assert len(found.rows) == 1 + (count == 4)
    same(fused(x, *ws), jax.jit(fn)(x, *ws))  # small integers: exact
    gradient = jax.grad(lambda *args: sum(y.astype(jnp.float32).sum() for y in cutjax.fuse(fn)(*args)), (0, 1))
    expected = jax.grad(lambda *args: sum(y.astype(jnp.float32).sum() for y in fn(*args)), (0, 1))
    same(gradient(x, *ws), expected(x, *ws))


def test_products_that_depend_on_each_other_stay_apart(xla_is_slow):
    def fn(x, w):
        y = x @ w
        return y, x @ lax.sort(y)

    args = ints(0, (8, 8)), ints(1, (8, 8))
    assert {report.products for report in reports(fn, *args)} == {1}
    close(cutjax.fuse(fn)(*args), jax.jit(fn)(*args), 2**-6)

"""Prologues that Hopper's kernels compute in shared memory, on the CPU: small integers, equal to numpy bit for bit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import launches
import numpy as np
import pytest

from cutjax import Config
from cutjax.epilogue.trace import trace
from cutjax.kernels import families
from cutjax.kernels.problem import Problem
from emulator import device

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def of_all(a, r, g, f, s):
    """Infinite past the end of k, where what is loaded is zero: that may not be seen."""
    odd = jax.lax.broadcasted_iota(jnp.int32, a.shape, 0) & 1
    return jnp.where(a == 0, jnp.inf, jnp.where(odd == 0, a * r * g + f, s - a))


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of x [m, k], changed, by w; of groups where sizes are given; of several w beside each other."""

    m: int
    n: int
    k: int
    config: Config
    layout: str = "nn"
    dtype: object = BF16
    sizes: tuple[int, ...] = ()
    products: int = 1
    narrow: bool = False
    batch: int = 0

    def shapes(self):
        x = (self.m, self.k) if self.layout[0] == "n" else (self.k, self.m)
        w = (self.k, self.n) if self.layout[1] == "n" else (self.n, self.k)
        return x, (len(self.sizes), *w) if self.sizes else (self.batch, *w) if self.batch else w

    def data(self):
        rng = np.random.default_rng(0)
        x, w = self.shapes()
        r, g = rng.integers(1, 3, (x[0], 1)).astype(np.float32), rng.integers(-1, 2, (1, x[1])).astype(self.dtype)
        f, s = rng.integers(-1, 2, x).astype(self.dtype), np.full((1, 1), 2, np.float32)
        ws = [rng.integers(-2, 3, w).astype(np.int8 if self.narrow else self.dtype) for _ in range(self.products)]
        return rng.choice([-2, -1, 1, 2], x).astype(self.dtype), ws, (r, g, f, s)

    def check(self, seeds):
        a, ws, operands = self.data()
        (*_, rows, columns), (*_, n) = a.shape, (self.n,)
        traced = trace(
            lambda a, *rest: of_all(a, *rest).astype(self.dtype),
            [jax.ShapeDtypeStruct(a.shape, self.dtype)],
            list(map(jnp.asarray, operands)),
        )
        acc = [jax.ShapeDtypeStruct((self.m, n), F32)] * self.products
        epilogue = trace(lambda *accs: sum(i * x for i, x in enumerate(accs, 1)), acc, []).epilogue
        batch = (self.batch,) if self.batch else ()
        more = {"batch": batch, "a_batch": (1,) * len(batch), "b_batch": batch}
        more |= {"groups": len(self.sizes), "ragged": "m" if self.sizes else ""}
        b_dtype = np.dtype(np.int8) if self.narrow else self.dtype
        asked = Problem.of(self.m, n, self.k, self.layout, self.dtype, b_dtype, F32, epilogue=epilogue, **more)
        asked = dataclasses.replace(asked, a=dataclasses.replace(asked.a, prologue=traced.epilogue.primal))
        kernel = families.resolve(asked, self.config)
        assert not isinstance(kernel, tuple), kernel
        made = np.asarray(of_all(*map(jnp.asarray, (a, *operands))).astype(self.dtype), np.float64)
        made = made if self.layout[0] == "n" else made.T
        wide = [np.asarray(w, np.float64) for w in ws]
        wide = [w if self.layout[1] == "n" else np.swapaxes(w, -1, -2) for w in wide]
        group = np.repeat(np.arange(len(self.sizes)), self.sizes)
        if self.sizes:
            found = [np.zeros((self.m, n))] * self.products
            for i, w in enumerate(wide):
                found[i] = np.zeros((self.m, n))
                found[i][: len(group)] = np.einsum("mk,mkn->mn", made[: len(group)], w[group])
        else:
            found = [made @ w for w in wide]
        expected = sum(i * x for i, x in enumerate(found, 1))
        context = [np.array(self.sizes, np.int32)] if self.sizes else []
        arrays = [a.reshape(*more["a_batch"], rows, columns), *ws, *context, *operands]
        assert asked.arrays == len(arrays), (asked.arrays, len(arrays))
        with device.emulated():
            call = kernel.call()
        for seed, eagerness in seeds:
            machine = device.Machine(seed=seed, eagerness=eagerness)
            wrong = launches.wrong(launches.run(asked, call, arrays, machine.execute), [expected])
            assert not wrong, (machine, kernel.name, wrong)


CASES = {
    "one warpgroup": Case(16, 136, 136, Config(64, 16, 64, 4, swap=True)),
    "two share a tile": Case(40, 200, 200, Config(128, 40, 64, 3, swap=True), "nt", F16),
    "in turns": Case(24, 264, 136, Config(64, 24, 64, 3, schedule="pingpong", swap=True)),
    "along m": Case(40, 136, 136, Config(64, 32, 64, 4, swap=True), "tn"),
    "along m, whole lines": Case(64, 128, 72, Config(128, 64, 64, 3, swap=True), "tt", F16),
    "deep stages": Case(8, 136, 264, Config(64, 8, 128, 3, swap=True)),
    "multicast": Case(16, 264, 136, Config(64, 16, 64, 3, cluster_m=2, swap=True)),
    "multicast of weights": Case(32, 136, 136, Config(64, 16, 64, 3, cluster_n=2, swap=True)),
    "cluster k": Case(16, 128, 264, Config(64, 16, 64, 4, cluster_k=2, swap=True)),
    "cluster k, two share a tile": Case(16, 128, 264, Config(128, 16, 64, 4, cluster_k=3, swap=True)),
    "stream k": Case(16, 200, 264, Config(64, 16, 64, 4, stream_k=True, swap=True)),
    "splits": Case(16, 128, 264, Config(64, 16, 64, 4, splits=2, swap=True)),
    "rows that are padded": Case(13, 136, 133, Config(64, 16, 64, 4, swap=True)),
    "pairs of columns": Case(16, 136, 134, Config(64, 16, 64, 4, swap=True)),
    "several products": Case(16, 136, 136, Config(64, 16, 64, 4, swap=True), products=2),
    "several products along k": Case(16, 136, 136, Config(128, 16, 64, 3, swap=True), "nt", products=3),
    "groups": Case(50, 136, 72, Config(64, 16, 64, 4, swap=True), sizes=(7, 0, 30)),
    "groups of pairs": Case(50, 136, 72, Config(128, 24, 64, 3, swap=True), "nt", sizes=(19, 1, 30), products=2),
    "narrow weights": Case(16, 136, 136, Config(128, 16, 64, 4, swap=True), "nt", narrow=True),
    "several matrices": Case(16, 72, 72, Config(64, 16, 64, 4, swap=True), batch=2),
}


@pytest.mark.parametrize("name", CASES)
def test_small_integers_are_exact(name):
    CASES[name].check([(0, 0), (1, 3)])

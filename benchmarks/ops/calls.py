"""Epilogues inlined, and called four elements at a time: ``python -m benchmarks run --op calls``.

Both forms of one kernel, in turns, on the same inputs; they must agree. Which form ships,
`cutjax.kernels.staging` says.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import cutjax
from benchmarks import timing
from benchmarks.measure import OPTIONS
from benchmarks.ops import fused
from benchmarks.record import Figures, Row
from benchmarks.suite import Run, Suite
from cutjax.epilogue import trace
from cutjax.kernels import epilogue_text
from cutjax.kernels.staging import Staging, plan_staging

REPS = 40
FORMS = {"inlined": False, "called": True}
MOST_RATIO = 1.01  # of the form that ships over the other


def _dropout(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def _gelu_derivative(x: jax.Array, z: jax.Array) -> jax.Array:
    return jax.vjp(functools.partial(jax.nn.gelu, approximate=False), z.astype(x.dtype))[1](x)[0]


# Of the accumulators, a key and an array of the result's shape.
EPILOGUES: dict[str, Callable[..., jax.Array]] = {
    "gelu": lambda x, key, z: jax.nn.gelu(x),
    "silu": lambda x, key, z: jax.nn.silu(x),
    "dropout": lambda x, key, z: _dropout(x, key),
    "gelu, dropout": lambda x, key, z: _dropout(jax.nn.gelu(x), key),
    "normal noise": lambda x, key, z: x + jax.random.normal(key, x.shape),
    "sin": lambda x, key, z: jnp.sin(x),
    "log_ndtr": lambda x, key, z: jax.scipy.special.log_ndtr(x),
    "gelu (erf form)'s derivative": lambda x, key, z: _gelu_derivative(x, z),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The product that each epilogue follows."""

    m: int
    n: int
    k: int
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """E.g. ``2048x2048x2048``."""
        return f"{self.m}x{self.n}x{self.k}"


def inputs(sizes: Sizes, seed: int) -> tuple[jax.Array, ...]:
    """Random normal x and z, weights that keep the product near unit variance, and a key."""
    m, n, k = sizes.m, sizes.n, sizes.k
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    x, w, z = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, ((m, k), (k, n), (m, n)), strict=True))
    return x, w * jnp.bfloat16(k**-0.5), jax.random.key(seed), z


def _ours(name: str, x: jax.Array, w: jax.Array, key: jax.Array, z: jax.Array) -> jax.Array:
    if name == fused.PLAIN:
        return cutjax.gemm(x, w, backend="cuda")
    return cutjax.gemm(x, w, epilogue=EPILOGUES[name], operands=(key, z), backend="cuda")


def ships(name: str) -> str:
    """The form that cutjax has of an epilogue."""
    accs, arrays = [jax.ShapeDtypeStruct((256, 384), jnp.float32)], [jax.random.key(0), jnp.zeros((256, 384))]
    epilogue = trace.trace(lambda *args: EPILOGUES[name](*args).astype(jnp.bfloat16), accs, arrays).epilogue
    return "called" if plan_staging(epilogue.primal).called else "inlined"


def compile_forms(sizes: Sizes) -> dict[tuple[str, str], Callable[..., Any]]:
    """Compiled functions by epilogue and form. Only the text differs: the configs are those that cutjax chooses."""
    args = jax.eval_shape(functools.partial(inputs, sizes), 0)
    found, piece = {}, epilogue_text._piece

    def forced(staging: Staging, called: bool) -> str:
        return piece(dataclasses.replace(staging, called=called))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for form, called in FORMS.items():
            with mock.patch.object(epilogue_text, "_piece", functools.partial(forced, called=called)):
                names = [fused.PLAIN, *EPILOGUES] if called else EPILOGUES
                jitted = {name: jax.jit(functools.partial(_ours, name), compiler_options=OPTIONS) for name in names}
                lowered = {name: pool.submit(fn.lower, *args) for name, fn in jitted.items()}
                found |= {(name, form): done.result().compile() for name, done in lowered.items()}
    return found


def measure(sizes: Sizes, run: Run) -> list[Row]:
    """Compares the results of the two forms, then times all forms of all epilogues in turns."""
    functions = compile_forms(sizes)
    sets = timing.input_sets(functools.partial(inputs, sizes))
    times = timing.measure({f"{name}, {form}": fn for (name, form), fn in functions.items()}, sets, REPS, run.method)
    rows = []
    for name in EPILOGUES:
        results = [functions[name, form](*sets[0]).astype(jnp.float32) for form in FORMS]
        # The compiler may fuse another multiplication and addition in one of them: a unit in the last place of bf16.
        close = jnp.allclose(*results, rtol=2**-7, atol=1e-5)
        own = ships(name)
        (other,) = FORMS.keys() - {own}
        plain, mine, theirs = (
            times[f"{n}, {form}"] for n, form in ((fused.PLAIN, "called"), (name, own), (name, other))
        )
        rows.append(
            Row(
                f"{sizes.name} {name}",
                kernel=" + ".join(mine.kernels),
                us=mine.us,
                iqr_us=mine.iqr_us,
                ratios={"other": theirs.us / mine.us},
                targets={"other": 1 / MOST_RATIO},
                peers={"other": Figures(theirs.us, theirs.iqr_us), fused.PLAIN: Figures(plain.us, plain.iqr_us)},
                figures={"ships": own, "different": int(jnp.sum(results[0] != results[1]))},
                failure="" if close else "the two forms disagree",
            )
        )
    return rows


# They differ by less than the host's clock can tell.
SUITE = Suite("calls", (Sizes(8192, 14336, 4096), Sizes(2048, 2048, 2048)), measure=measure, clocks=("cupti",))

"""Epilogues inlined, and called four elements at a time: ``python -m benchmarks.run --op calls``.

Both forms of one kernel, in turns, on the same inputs; they must agree. Which form ships,
`cutjax.kernels.sm90.staging` says.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import cutjax
from benchmarks import fused, report, timing
from cutjax.epilogue import trace
from cutjax.kernels.sm90 import text as sm90_text
from cutjax.kernels.sm90.staging import Staging, stage

SIZES = ((8192, 14336, 4096), (2048, 2048, 2048))
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
class Row:
    """One epilogue of one product, bf16 in and out.

    Attributes:
      case: the sizes and the epilogue.
      ships: the form that cutjax has.
      inlined_us, inlined_iqr_us, called_us, called_iqr_us: of the whole kernel.
      plain_us: our plain product in the same run.
      ratio: the form that ships over the other.
      most_ratio: the most that it may be.
      different: elements that the two forms do not agree on.
      failure: what is wrong, else "".
    """

    case: str
    ships: str
    inlined_us: float = math.nan
    inlined_iqr_us: float = math.nan
    called_us: float = math.nan
    called_iqr_us: float = math.nan
    plain_us: float = math.nan
    ratio: float = math.nan
    most_ratio: float = MOST_RATIO
    different: int = 0
    failure: str = ""


def inputs(sizes: tuple[int, int, int], seed: int) -> tuple[jax.Array, ...]:
    """Random normal x and z, weights that keep the product near unit variance, and a key."""
    m, n, k = sizes
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
    return "called" if stage(epilogue.primal).called else "inlined"


def compile_forms(sizes: tuple[int, int, int]) -> dict[tuple[str, str], Callable[..., Any]]:
    """Compiled functions by epilogue and form. Only the text differs: the configs are those that cutjax chooses."""
    args = jax.eval_shape(functools.partial(inputs, sizes), 0)
    found, piece = {}, sm90_text._piece

    def forced(staging: Staging, called: bool) -> str:
        return piece(dataclasses.replace(staging, called=called))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for form, called in FORMS.items():
            with mock.patch.object(sm90_text, "_piece", functools.partial(forced, called=called)):
                names = [fused.PLAIN, *EPILOGUES] if called else EPILOGUES
                jitted = {
                    name: jax.jit(functools.partial(_ours, name), compiler_options=fused.OPTIONS) for name in names
                }
                lowered = {name: pool.submit(fn.lower, *args) for name, fn in jitted.items()}
                found |= {(name, form): done.result().compile() for name, done in lowered.items()}
    return found


def measure(sizes: tuple[int, int, int], method: str) -> list[Row]:
    """Compares the results of the two forms, then times all forms of all epilogues in turns."""
    functions = compile_forms(sizes)
    sets = timing.input_sets(functools.partial(inputs, sizes))
    times = timing.measure({f"{name}, {form}": fn for (name, form), fn in functions.items()}, sets, REPS, method)
    rows = []
    for name in EPILOGUES:
        inlined, called = (times[f"{name}, {form}"] for form in FORMS)
        results = [functions[name, form](*sets[0]).astype(jnp.float32) for form in FORMS]
        different = int(jnp.sum(results[0] != results[1]))
        # The compiler may fuse another multiplication and addition in one of them: a unit in the last place of bf16.
        close = jnp.allclose(*results, rtol=2**-7, atol=1e-5)
        own = ships(name)
        rows.append(
            Row(
                case=f"{'x'.join(map(str, sizes))} {name}",
                ships=own,
                inlined_us=inlined.us,
                inlined_iqr_us=inlined.iqr_us,
                called_us=called.us,
                called_iqr_us=called.iqr_us,
                plain_us=times[f"{fused.PLAIN}, called"].us,
                ratio=called.us / inlined.us if own == "called" else inlined.us / called.us,
                different=different,
                failure="" if close else "the two forms disagree",
            )
        )
    return rows


def document(environment: dict[str, Any], method: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON of one run."""
    return {"op": "calls", **report.document(environment, method, None, rows)}


def print_rows(rows: Sequence[Row]) -> None:
    """The table a person reads."""
    for row in rows:
        print(
            f"{row.case:52} inlined {row.inlined_us:7.1f} us, called {row.called_us:7.1f}, plain {row.plain_us:7.1f}; "
            f"{row.ships} ships: {row.ratio:.3f} of the other (at most {row.most_ratio}), "
            f"{row.different} elements differ{row.failure and ': ' + row.failure}"
        )

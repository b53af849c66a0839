"""One dense product, the case of several suites."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cutjax


@dataclasses.dataclass(frozen=True)
class Dense:
    """One GEMM with both operands batched alike.

    Attributes:
      m, n, k, layout, batch, dtype: the problem; the result has the dtype of the inputs.
      tags: the sets this case belongs to.
      target: the least ratio to XLA we ask for (above 1 is faster than XLA), or None where we only report.
      of: the model and layer it was taken from, or "".
    """

    m: int
    n: int
    k: int
    layout: str = "nn"
    batch: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    tags: tuple[str, ...] = ()
    target: float | None = None
    of: str = ""

    @property
    def name(self) -> str:
        """A short unique name, e.g. ``64x2048x2048x64 nt``: batch sizes first."""
        sizes = "x".join(map(str, (*self.batch, self.m, self.n, self.k)))
        return f"{sizes} {self.layout}" + ("" if self.dtype == "bfloat16" else f" {self.dtype}")

    @property
    def a_shape(self) -> tuple[int, ...]:
        """``[..., m, k]``, or ``[..., k, m]`` when the layout begins with "t"."""
        return (*self.batch, *((self.m, self.k) if self.layout[0] == "n" else (self.k, self.m)))

    @property
    def b_shape(self) -> tuple[int, ...]:
        """``[..., k, n]``, or ``[..., n, k]`` when the layout ends with "t"."""
        return (*self.batch, *((self.k, self.n) if self.layout[1] == "n" else (self.n, self.k)))

    @property
    def problem(self) -> cutjax.Problem:
        """The case as a ``cutjax.Problem``."""
        dtype = np.dtype(jnp.dtype(self.dtype))
        return cutjax.Problem.of(
            self.m, self.n, self.k, self.layout, dtype, dtype, dtype, self.batch, self.batch, self.batch
        )

    def inputs(self, seed: int) -> tuple[jax.Array, jax.Array]:
        """Random normal operands."""
        return operands((self.a_shape, self.b_shape), (self.dtype, self.dtype))(seed)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Dense:
        """Returns the case of a recorded line."""
        m, n, k, layout, batch, dtype = (fields[name] for name in ("m", "n", "k", "layout", "batch", "dtype"))
        return cls(m, n, k, layout, tuple(batch), dtype)


@functools.cache
def operands(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> Callable[[int], Any]:
    """Returns a function of a seed that makes two arrays of random normal numbers; integers are 32 times as large."""

    def draw(key: jax.Array, shape: tuple[int, ...], name: str) -> jax.Array:
        dtype = jnp.dtype(name)
        if jnp.issubdtype(dtype, jnp.integer):
            return (32 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
        return jax.random.normal(key, shape, jnp.float32 if dtype.itemsize == 1 else dtype).astype(dtype)

    @jax.jit
    def make(seed):
        keys = jax.random.split(jax.random.key(seed, impl="rbg"))  # threefry takes longer than the products
        return tuple(draw(*each) for each in zip(keys, shapes, dtypes, strict=True))

    return make


def find(cases: Iterable[Any], name: str) -> Any:
    """The case of that name.

    Raises:
      ValueError: there is none.
    """
    for case in cases:
        if case.name == name:
            return case
    raise ValueError(f"no case named {name!r}")

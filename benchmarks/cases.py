"""Problems that several modules measure: one dense product, and rows in groups."""

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


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Rows sorted by group, each group with its own weights: x [m, k], w [groups, k, n]; bf16 throughout.

    Attributes:
      groups, m, n, k: the problem.
      tokens: how many tokens a model routes to these rows, or 0 where the case is of no model.
      nonempty: how many groups have rows, 0 for all.
      tags: the sets this case belongs to.
    """

    groups: int
    m: int
    n: int
    k: int
    tags: tuple[str, ...] = ()
    tokens: int = 0
    nonempty: int = 0

    @property
    def name(self) -> str:
        """A short unique name, e.g. ``8g 16384x14336x4096``."""
        groups = f"{self.groups}g" if not self.nonempty else f"{self.nonempty} of {self.groups}g"
        return f"{groups} {self.m}x{self.n}x{self.k}"

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Uneven sizes that add up to m, the same every time: shares drawn from a Dirichlet distribution of 2."""
        rng = np.random.default_rng([self.groups, self.m, self.n, self.k])
        count = self.nonempty or self.groups
        sizes = np.zeros(self.groups, np.int32)
        sizes[rng.permutation(self.groups)[:count]] = rng.multinomial(self.m, rng.dirichlet(np.full(count, 2.0)))
        return sizes

    @property
    def flops(self) -> int:
        """The FLOP of each of the three products."""
        return 2 * self.m * self.n * self.k

    def bytes(self, product: str) -> int:
        """The least that device memory moves: rows, and the weights that are read, or all that are written."""
        groups = self.groups if product == "dw" else int(np.count_nonzero(self.sizes))
        return 2 * (self.m * (self.k + self.n) + groups * self.k * self.n)

    def problem(self, product: str) -> cutjax.Problem:
        """``y = x w``, ``dx = dy w^T`` or ``dw = x^T dy`` as a ``cutjax.Problem``."""
        sizes = {"forward": (self.m, self.n, self.k), "dx": (self.m, self.k, self.n), "dw": (self.k, self.n, self.m)}
        layout = {"forward": "nn", "dx": "nt", "dw": "tn"}[product]
        return cutjax.Problem.of(*sizes[product], layout, groups=self.groups, ragged="k" if product == "dw" else "m")

    def targets(self, product: str) -> dict[str, float]:
        """The least ratios we ask for, by what our time is compared with.

        "dense": a dense product of the same FLOP; of dw where that takes longer than moving the bytes on an H200, of
        the others where groups have 1024 rows on average; "peers": the fastest of them; "torch": it alone; "copy": the
        measured copy bandwidth, where a model decodes.
        """
        targets = {"peers": 1.0}
        if product == "dw":
            targets["torch"] = 1.25
            if self.flops / 830e12 > self.bytes(product) / 4.3e12:
                targets["dense"] = 0.85
        elif self.m >= 1024 * (self.nonempty or self.groups):
            targets["dense"] = 0.90
        if "decode" in self.tags and product != "dw":
            targets["copy"] = 0.88
        return targets


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

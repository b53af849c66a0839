"""Networks of small layers beside the same in plain JAX: ``python -m benchmarks run --op networks``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import cutjax
from benchmarks.suite import Peer, Product, Suite

WORSE = 2.0  # how much farther from float32 than XLA's a result may be: layers and sums round in another order
LEAST = 1e-5


@dataclasses.dataclass(frozen=True)
class Network:
    """``hidden`` layers of a width between 3 inputs and one result.

    Attributes:
      width, hidden, rows: sizes.
      dtype: of x and the weights.
      targets: the least ratios to XLA asked for: of the result, of all gradients, and of a Laplacian.
      tags: by which it may be asked for.
    """

    width: int
    hidden: int
    rows: int
    dtype: str = "bfloat16"
    targets: tuple[float, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The sizes, e.g. ``4x64 of 1048576 bfloat16``."""
        return f"{self.hidden}x{self.width} of {self.rows} {self.dtype}"

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of all that is between layers."""
        return 3, *[self.width] * self.hidden, 1

    def inputs(self, seed: int) -> tuple[Any, ...]:
        """Rows, random normal, and weights and biases such that sums are."""
        key, *keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2 + self.hidden)
        pairs = list(itertools.pairwise(self.widths))
        draw = jax.random.normal
        ws = [draw(key, (k, n), self.dtype) / k**0.5 for key, (k, n) in zip(keys, pairs, strict=True)]
        return draw(key, (self.rows, 3), self.dtype), ws, [jnp.full(n, 0.1, self.dtype) for _, n in pairs]


CASES = (
    Network(64, 4, 1 << 20, targets=(5, 3, 2), tags=("64",)),
    Network(128, 4, 1 << 20, targets=(3, 2, 1.5), tags=("128",)),
    Network(64, 4, 1 << 20, "float32", targets=(5, 3, 2), tags=("64", "tf32")),
)


def plain(x: jax.Array, ws: Any, bs: Any) -> jax.Array:
    """The network in plain JAX."""
    for w, b in zip(ws[:-1], bs[:-1], strict=True):
        x = jnp.tanh(x @ w + b)
    return x @ ws[-1] + bs[-1]


def fused(x: jax.Array, ws: Any, bs: Any) -> jax.Array:
    """The network on kernels, which are asked for."""
    return cutjax.fused_mlp(x, ws, bs, jnp.tanh, backend="cuda")


def gradients(network: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The loss and all gradients of a network, the loss being its mean square."""
    return jax.value_and_grad(lambda *args: jnp.mean(network(*args).astype(jnp.float32) ** 2), (0, 1, 2))


def laplacian(network: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The sum of second derivatives by each row's inputs, forward over reverse."""

    def at(x: jax.Array, ws: Any, bs: Any) -> jax.Array:
        slope = jax.grad(lambda x: network(x, ws, bs)[0])
        return jnp.trace(jnp.stack([jax.jvp(slope, (x,), (e,))[1] for e in jnp.eye(3, dtype=x.dtype)]))

    return jax.vmap(at, (0, None, None))


FORMS = {"fwd": lambda network: network, "fwd+bwd": gradients, "laplacian": laplacian}


def products(case: Network) -> list[Product]:
    """The result, the gradients and the Laplacian; right is what is as near to float32 as XLA's."""
    flops = 2 * case.rows * sum(k * n for k, n in itertools.pairwise(case.widths))
    size = jnp.dtype(case.dtype).itemsize
    # Products by each matrix: forward; forward and twice backward; of values and cotangents, and of 3 tangents of both.
    of = {"fwd": (1, 4), "fwd+bwd": (3, 6), "laplacian": (8, 4)}

    def product(i: int, name: str, form: Callable[..., Any]) -> Product:
        def look(args: Any, out: Any, theirs: Any) -> Any:
            wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
            with jax.default_matmul_precision("highest"):
                right = form(plain)(*wide)

            def off(found: Any) -> jax.Array:
                pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
                return jnp.stack([jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y) for x, y in pairs])

            return off(out), off(theirs)

        def judge(seen: Any) -> tuple[float, str]:
            ours, theirs = seen
            most = float(max(ours))
            right = all(float(x) <= WORSE * float(y) + LEAST for x, y in zip(ours, theirs, strict=True))
            return most, "" if right else f"wrong: off by {list(map(float, ours))}, XLA by {list(map(float, theirs))}"

        times, moved = of[name]
        return Product(
            name,
            times * flops,
            moved * size * case.rows,
            lambda config: form(fused),
            {"xla": Peer(lambda: form(plain), check=False)},
            look,
            judge,
            beside="xla",
            targets={"xla": case.targets[i]} if case.targets else {},
        )

    return [product(i, name, form) for i, (name, form) in enumerate(FORMS.items())]


SUITE = Suite("networks", CASES, Network.inputs, products, clocks=("host",))

"""Layers that jit divides over all devices there are, beside plain JAX in the same shardings: ``--op sharded``.

A step is the forward and backward pass and a step of SGD, compiled as one program and timed in turns with plain JAX's.
Losses of the first steps must be those of plain JAX. ``--tag tiny`` is for virtual devices of a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from benchmarks.measure import peak_mib, reason
from benchmarks.ops.programs import CHECKED, LOSSES, Running, times
from benchmarks.record import Row
from benchmarks.suite import Run, Suite

RATE = 1e-3
P = jax.P
RESULT = "cutjax, sums in the result's dtype"
WAYS = ("jax", "cutjax", RESULT)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer, divided in a way.

    Attributes:
      name: a short unique name.
      tags: "suite" for the sizes that are reported, "tiny" for small ones.
      kind: "mlp", or "attention" for its projections.
      how: "tensor": columns of the first weights and rows of the last on each device; "data": tokens.
      tokens: of each device under "data", of all under "tensor".
      width, hidden: of the layer; the hidden width of attention is that of queries, keys and values together.
      target: the least ratio of plain JAX's time to ours.
    """

    name: str
    tags: tuple[str, ...]
    kind: str
    how: str
    tokens: int
    width: int
    hidden: int
    target: float = 1.0

    def shapes(self) -> list[tuple[int, int]]:
        """Returns the shapes of the weights, the last of which has its hidden axis first."""
        first = (self.width, self.hidden)
        return [first, first, first[::-1]] if self.kind == "mlp" else [first, (self.width, self.width)]

    def specs(self) -> tuple[jax.P, list[jax.P]]:
        """Returns the shardings of tokens [batch, sequence, width] and of the weights on the mesh axis "x"."""
        count = len(self.shapes())
        if self.how == "data":
            return P("x"), [P()] * count
        return P(), [P(None, "x")] * (count - 1) + [P("x", None)]

    def loss(self, way: str) -> Callable[..., jax.Array]:
        """Returns the mean square of the layer's results, a function of the weights and tokens."""
        ours = way != "jax"

        def mlp(ws: Any, x: jax.Array) -> jax.Array:
            gate, up, down = ws
            if ours:
                return cutjax.mlp(x, up, down, gate=gate, activation=jax.nn.silu)
            return (jax.nn.silu(x @ gate) * (x @ up)) @ down

        def attention(ws: Any, x: jax.Array) -> jax.Array:
            product = cutjax.gemm if ours else jnp.matmul
            return product(product(x, ws[0])[..., : self.width], ws[1])

        layer = mlp if self.kind == "mlp" else attention
        return lambda ws, x: (layer(ws, x).astype(jnp.float32) ** 2).mean()

    def step(self, way: str) -> Callable[[Any, jax.Array], tuple[Any, jax.Array]]:
        """Returns the function ``(weights, tokens) -> (weights, loss)``."""
        gradient = jax.value_and_grad(self.loss(way))

        def step(ws: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            value, grads = gradient(ws, x)
            return jax.tree.map(lambda w, g: w - RATE * g, ws, grads), value

        return step


class _Step(Running):
    """A compiled step. On a CPU one at a time: programs in flight at once wait for each other's collectives there."""

    def __call__(self) -> jax.Array:
        loss = super().__call__()
        return jax.block_until_ready(loss) if jax.default_backend() == "cpu" else loss


def _layers(kind: str, tokens: int, width: int, hidden: int, tag: str) -> list[Layer]:
    return [
        Layer(f"{'' if tag == 'suite' else tag + ' '}{kind}, {how}", (tag,), kind, how, tokens, width, hidden)
        for how in ("tensor", "data")
    ]


LAYERS = (  # Llama 70B's: 64 heads of queries, 8 of keys and of values, of 128 elements
    *_layers("mlp", 8192, 8192, 28672, "suite"),
    *_layers("attention", 8192, 8192, 10240, "suite"),
    *_layers("mlp", 64, 64, 128, "tiny"),
    *_layers("attention", 64, 64, 128, "tiny"),
)


def make(layer: Layer, mesh: jax.sharding.Mesh) -> tuple[list[jax.Array], jax.Array]:
    """Returns the weights and the tokens, on the devices."""
    of_x, of_ws = layer.specs()
    batch = mesh.size if layer.how == "data" else 1
    shapes = [(batch, layer.tokens, layer.width), *layer.shapes()]
    shardings = [jax.NamedSharding(mesh, spec) for spec in (of_x, *of_ws)]

    def arrays() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        scales = [1.0, *(shape[0] ** -0.5 for shape in shapes[1:])]
        drawn = zip(keys, shapes, scales, strict=True)
        return [(jax.random.normal(key, shape) * scale).astype(jnp.bfloat16) for key, shape, scale in drawn]

    x, *ws = jax.jit(arrays, out_shardings=shardings)()
    return ws, x


def measure_case(layer: Layer, run: Run) -> list[Row]:
    """Compiles each way, compares the losses of their first steps, and times them in turns."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, running = {}, {}
    expected: list[float] = []
    for name in WAYS:
        rows[name] = Row(layer.name, name)
        try:
            ws, x = make(layer, mesh)
            shardings = [w.sharding for w in ws], jax.NamedSharding(mesh, P())
            with cutjax.use_partial_sums("result" if name == RESULT else "float32"):
                compiled = jax.jit(layer.step(name), donate_argnums=0, out_shardings=shardings).lower(ws, x).compile()
            step = _Step(compiled, ws, x)
            losses = [float(step()) for _ in range(CHECKED)]
        except Exception as failure:  # the other way is measured all the same
            rows[name] = dataclasses.replace(rows[name], failure=reason(failure))
            continue
        expected = expected or losses
        error = float(np.max(np.abs(np.array(losses) / np.array(expected) - 1)))
        wrong = "" if error <= LOSSES else f"wrong: losses differ by {error:.3g} (at most {LOSSES})"
        figures = {"losses": losses, "devices": mesh.size}
        rows[name] = dataclasses.replace(
            rows[name], error=error, failure=wrong, peak_mib=peak_mib(compiled), figures=figures
        )
        running[name] = step
    return list(_timed(layer, rows, times(running) if len(running) == len(WAYS) else {}).values())


def _timed(layer: Layer, rows: Mapping[str, Row], taken: Mapping[str, list[float]]) -> dict[str, Row]:
    medians = {name: float(np.median(samples)) for name, samples in taken.items()}
    found = dict(rows)
    for name, samples in taken.items():
        low, high = np.percentile(samples, (25, 75))
        found[name] = dataclasses.replace(rows[name], us=medians[name], iqr_us=float(high - low))
        if name != "jax":
            ratios, targets = {"jax": medians["jax"] / medians[name]}, {"jax": layer.target}
            found[name] = dataclasses.replace(found[name], ratios=ratios, targets=targets)
    return found


SUITE = Suite("sharded", LAYERS, measure=measure_case, clocks=("host",))

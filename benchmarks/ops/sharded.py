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
OF_BLOCKS = {"jax": 1.0, "dropin": 0.99, "fuse": 1.03}  # ways, and the least ratios asked for


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer, divided in a way.

    Attributes:
      name: a short unique name.
      tags: "suite" for the sizes that are reported, "tiny" for small ones.
      kind: "mlp", or "attention" for its projections; "block": both, with residuals, as existing code.
      how: "tensor": columns of the first weights and rows of the last on each device; "data": tokens; "full": tokens,
        and rows of all weights, which are gathered before they are multiplied.
      tokens: of each device under "data", of all under the others and of a block.
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
        mlp, out = [first, first, first[::-1]], (self.width, self.width)
        return {"mlp": mlp, "attention": [first, out], "block": [(self.width, 3 * self.width), out, *mlp]}[self.kind]

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways to run it."""
        return tuple(OF_BLOCKS) if self.kind == "block" else WAYS

    def specs(self) -> tuple[jax.P, list[jax.P]]:
        """Returns the shardings of tokens [batch, sequence, width] and of the weights on the mesh axis "x"."""
        count = len(self.shapes())
        if self.how != "tensor":
            return P("x"), [P() if self.how == "data" else P("x")] * count
        columns, rows = P(None, "x"), P("x", None)
        return P(), [columns, rows, columns, columns, rows] if self.kind == "block" else [columns] * (count - 1) + [
            rows
        ]

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

        def block(ws: Any, x: jax.Array) -> jax.Array:
            product = cutjax.matmul if way == "dropin" else jnp.matmul
            qkv, out, gate, up, down = ws
            x = x + product(product(x, qkv)[..., : self.width], out)
            return x + product(jax.nn.silu(product(x, gate)) * product(x, up), down)

        layer = {"mlp": mlp, "attention": attention, "block": block}[self.kind]
        return lambda ws, x: (layer(ws, x).astype(jnp.float32) ** 2).mean()

    def step(self, way: str) -> Callable[[Any, jax.Array], tuple[Any, jax.Array]]:
        """Returns the function ``(weights, tokens) -> (weights, loss)``."""
        gradient = jax.value_and_grad(self.loss(way))
        gradient = cutjax.fuse(gradient) if way == "fuse" else gradient

        def step(ws: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            value, grads = gradient(ws, x)
            return jax.tree.map(lambda w, g: w - RATE * g, ws, grads), value

        return step


class _Step(Running):
    """A compiled step. On a CPU one at a time: programs in flight at once wait for each other's collectives there."""

    def __call__(self) -> jax.Array:
        loss = super().__call__()
        return jax.block_until_ready(loss) if jax.default_backend() == "cpu" else loss


def _layers(
    kind: str, tokens: int, width: int, hidden: int, tag: str, ways: tuple[str, ...] = ("tensor", "data")
) -> list[Layer]:
    return [
        Layer(f"{tag + ' ' if tag == 'tiny' else ''}{kind}, {how}", (tag,), kind, how, tokens, width, hidden)
        for how in ways
    ]


LAYERS = (  # Llama 70B's: 64 heads of queries, 8 of keys and of values, of 128 elements
    *_layers("mlp", 8192, 8192, 28672, "suite"),
    *_layers("attention", 8192, 8192, 10240, "suite"),
    *_layers("block", 16384, 4096, 14336, "block", ("data", "full", "tensor")),
    *_layers("mlp", 64, 64, 128, "tiny"),
    *_layers("attention", 64, 64, 128, "tiny"),
    *_layers("block", 64, 64, 128, "tiny", ("data", "full", "tensor")),
)


def make(layer: Layer, mesh: jax.sharding.Mesh) -> tuple[list[jax.Array], jax.Array]:
    """Returns the weights and the tokens, on the devices."""
    of_x, of_ws = layer.specs()
    batch = mesh.size if layer.how != "tensor" else 1
    tokens = layer.tokens // batch if layer.kind == "block" else layer.tokens
    shapes = [(batch, tokens, layer.width), *layer.shapes()]
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
    for name in layer.ways:
        rows[name] = Row(layer.name, name)
        try:
            ws, x = make(layer, mesh)
            shardings = [w.sharding for w in ws], jax.NamedSharding(mesh, P())
            with cutjax.use_partial_sums("float32" if name == "cutjax" else "result"):
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
    return list(_timed(layer, rows, times(running) if len(running) == len(rows) else {}).values())


def _timed(layer: Layer, rows: Mapping[str, Row], taken: Mapping[str, list[float]]) -> dict[str, Row]:
    medians = {name: float(np.median(samples)) for name, samples in taken.items()}
    found = dict(rows)
    for name, samples in taken.items():
        low, high = np.percentile(samples, (25, 75))
        found[name] = dataclasses.replace(rows[name], us=medians[name], iqr_us=float(high - low))
        if name != "jax":
            ratios, targets = {"jax": medians["jax"] / medians[name]}, {"jax": OF_BLOCKS.get(name, layer.target)}
            found[name] = dataclasses.replace(found[name], ratios=ratios, targets=targets)
    return found


SUITE = Suite("sharded", LAYERS, measure=measure_case, clocks=("host",))

"""Train a small transformer in flax.nnx on plain JAX, the drop-ins, cutjax.fuse or cutjax.flax, by one switch.

    python examples/transformer.py [--with jax|dropin|fuse|flax|all] [--experts N] [--config cpu|gpu] [--steps N]
                                   [--checkpoints FOLDER] [--text FILE] [--out transformer.png]

The model is in model.py, the switch in ways.py, the batches in data.py. With several ways, or "all", each trains the
same parameters on the same batches; the program prints a table, draws loss and throughput, and fails if the losses
part. With a folder for checkpoints and one way, a second run goes on where the first one ended, bit for bit;
serve.py writes text from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from data import TEXT, Batches, encode
from flax import nnx
from model import CONFIGS, Setup, build, init
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from ways import WAYS, way

BALANCE = 0.01  # the coefficient of the experts' load-balancing loss
READ = 10  # steps between two looks at the loss: each waits for the device

# Of the first 10 losses, and of the mean of the last quarter. Measured on a CPU, the ways differ in the first 10 by at
# most 1e-6 in f32 and 5e-4 in bf16; later training amplifies rounding, most where a token changes its expert: 2e-3.
TOLERANCES = {"float32": (1e-5, 1e-2), "bfloat16": (1e-2, 3e-2)}


@dataclasses.dataclass
class State:
    """All that training goes on from, but the batches' position, which is the number of steps."""

    params: nnx.State
    optimizer: optax.OptState


def make_optimizer(setup: Setup) -> optax.GradientTransformation:
    """AdamW with a warm-up, gradients clipped."""
    rate = optax.warmup_constant_schedule(0.0, setup.learning_rate, 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def make_step(setup: Setup, name: str) -> Callable:
    """Returns the jitted step ``(params, optimizer state, tokens) -> (params, optimizer state, cross-entropy)``."""
    graph, optimizer = build(setup, name), make_optimizer(setup)

    def loss(params, tokens):
        logits, balance, _ = nnx.merge(graph, params)(tokens[:, :-1])
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return cross_entropy + BALANCE * balance, cross_entropy

    gradient = way(name).transform(jax.value_and_grad(loss, has_aux=True))  # the line that fuses

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, optimizer_state, tokens):
        (_, cross_entropy), grads = gradient(params, tokens)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, cross_entropy

    return step


def fresh_state(setup: Setup) -> State:
    """Returns the parameters of seed 0, the same for all ways, and the optimizer's state."""
    params = init(setup)
    return State(params, jax.jit(make_optimizer(setup).init)(params))


class Checkpoints:
    """Checkpoints of orbax in a folder, beside the setup that they are of; no folder, no checkpoints."""

    def __init__(self, folder: pathlib.Path | None, every: int = 100):
        self.every, self.manager = every, None
        if folder is not None:
            options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
            self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, state: State, setup: Setup) -> None:
        if self.manager is not None and self.manager.latest_step() != step:
            arrays = {"params": state.params, "optimizer": state.optimizer}
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays), setup=ocp.args.JsonSave(dataclasses.asdict(setup))
                ),
            )

    def restore(self, state: State, setup: Setup) -> tuple[State, int]:
        """Returns the last checkpoint and how many steps it is of; the state given, and 0, where there is none."""
        if self.manager is None or (step := self.manager.latest_step()) is None:
            return state, 0
        if (saved := self.setup()) != (asked := dataclasses.replace(setup, steps=saved.steps)):
            sys.exit(f"the checkpoint in {self.manager.directory} is of {saved}, not of {asked}")
        arrays = {"params": state.params, "optimizer": state.optimizer}
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays)
        found = self.manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))["state"]
        return State(found["params"], found["optimizer"]), step

    def setup(self) -> Setup:
        """Returns the setup of the last checkpoint."""
        assert self.manager is not None
        step = self.manager.latest_step()
        if step is None:
            sys.exit(f"no checkpoint in {self.manager.directory}: train one with transformer.py --checkpoints")
        return Setup(**self.manager.restore(step, args=ocp.args.Composite(setup=ocp.args.JsonRestore()))["setup"])


@dataclasses.dataclass
class Curves:
    """The losses of the steps, the number of the first one, and the rate (step, tokens a second) of every few."""

    losses: list[float]
    first: int
    rates: list[tuple[int, float]]

    @property
    def rate(self) -> float:
        """The median, without the first, in which the step is compiled."""
        return float(np.median([rate for _, rate in self.rates[1:] or self.rates]))


def train(
    setup: Setup, name: str, text: np.ndarray, checkpoints: Checkpoints, progress: Progress
) -> tuple[State, Curves]:
    """Trains up to the setup's number of steps from the last checkpoint."""
    state, first = checkpoints.restore(fresh_state(setup), setup)
    step = make_step(setup, name)
    batches = Batches(text, setup.batch, setup.context, position=first)
    bar = progress.add_task(name, total=setup.steps, completed=first, loss=float("nan"), rate=0.0)
    curves, seen, start = Curves([], first, []), first, time.perf_counter()
    losses = []
    for number in range(first + 1, setup.steps + 1):
        state.params, state.optimizer, loss = step(state.params, state.optimizer, next(batches))
        losses.append(loss)
        if number % READ == 0 or number == setup.steps:
            latest, now = float(loss), time.perf_counter()
            rate = (number - seen) * setup.batch * setup.context / (now - start)
            curves.rates.append((number, rate))
            progress.update(bar, completed=number, loss=latest, rate=rate)
            seen, start = number, now
        if number % checkpoints.every == 0 or number == setup.steps:
            checkpoints.save(number, state, setup)
    curves.losses = [float(loss) for loss in losses]
    return state, curves


def differences(ours: Curves, theirs: Curves) -> tuple[float, float]:
    """Returns the largest difference of the first 10 losses, and that of the means of the last quarter."""
    a, b = np.array(ours.losses), np.array(theirs.losses)
    quarter = max(1, len(a) // 4)
    return float(np.abs(a - b)[:10].max()), float(abs(a[-quarter:].mean() - b[-quarter:].mean()))


def table(curves: dict[str, Curves]) -> Table:
    """A row a way: the loss, the rate, and how far the losses are from those of the first one.

    The ways train one after the other, so their rates tell little on a busy machine; benchmarks/ops/programs.py takes
    turns.
    """
    result = Table("way", "first loss", "last loss", "tokens/s", "largest difference, 10 steps")
    base = next(iter(curves.values()))
    for name, curve in curves.items():
        start, _ = differences(curve, base)
        result.add_row(name, f"{curve.losses[0]:.4f}", f"{curve.losses[-1]:.4f}", f"{curve.rate:,.0f}", f"{start:.1e}")
    return result


def plot(curves: dict[str, Curves], setup: Setup, out: pathlib.Path) -> None:
    """Draws loss and throughput."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("-", "--", "-.", ":"), strict=False):
        left.plot(curve.first + 1 + np.arange(len(curve.losses)), curve.losses, style, label=name)
        right.plot(*zip(*(curve.rates[1:] or curve.rates), strict=True), style, label=name)
    left.set(xlabel="step", ylabel="cross-entropy per byte (nats)")
    right.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
    experts = f", {setup.k} of {setup.experts} experts" if setup.experts else ""
    device = jax.devices()[0].device_kind
    figure.suptitle(f"width {setup.width}, {setup.layers} layers{experts}, {setup.dtype}, {device}")
    left.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def check(curves: dict[str, Curves], setup: Setup) -> None:
    """Ends the program with an error if a way's losses differ from the first one's by more than rounding explains."""
    (base, theirs), *others = curves.items()
    for name, ours in others:
        found, most = differences(ours, theirs), TOLERANCES[setup.dtype]
        if not (found[0] <= most[0] and found[1] <= most[1]):  # a NaN fails too
            sys.exit(f"FAILED: the losses of {name} differ from those of {base} by {found}, at most {most} is rounding")


def main(argv: Sequence[str] | None = None) -> dict[str, Curves]:
    """The command line; returns the curves by way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--with", dest="ways", default="jax", help=f"some of {', '.join(WAYS)}, by commas, or all")
    parser.add_argument("--config", choices=CONFIGS, help="sizes (default: what fits the device)")
    parser.add_argument("--experts", type=int, default=0, help="experts in each layer (default: none, a dense model)")
    parser.add_argument("--steps", type=int, help="the number of the last step")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="a folder to go on from and to save to; of one way")
    parser.add_argument("--set", type=json.loads, default={}, help="other fields of the setup, as in '{\"width\": 64}'")
    parser.add_argument("--text", type=pathlib.Path, default=TEXT, help="what to learn")
    parser.add_argument("--out", type=pathlib.Path, default="build/transformer.png", help="where the picture goes")
    args = parser.parse_args(argv)
    ways = WAYS if args.ways == "all" else tuple(args.ways.split(","))
    if unknown := set(ways) - set(WAYS):
        parser.error(f"unknown way {sorted(unknown)}, expected some of {WAYS} or all")
    if args.checkpoints and len(ways) > 1:
        parser.error("checkpoints are of one way")

    setup = CONFIGS[args.config or ("gpu" if jax.default_backend() == "gpu" else "cpu")]
    setup = dataclasses.replace(setup, experts=args.experts, **args.set)
    setup = dataclasses.replace(setup, steps=max(1, args.steps or setup.steps))
    text = encode(args.text.read_text())
    size = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: init(setup))))
    print(f"{size / 1e6:.1f} M weights, {setup.dtype}, on {jax.devices()[0].device_kind}; jax {jax.__version__}")

    curves = {}
    columns = (TextColumn("{task.description:>7}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}, {task.fields[rate]:,.0f} tokens/s")) as progress:
        for name in ways:
            _, curve = train(setup, name, text, Checkpoints(args.checkpoints), progress)
            if curve.losses:
                curves[name] = curve
    if not curves:
        print(f"the checkpoint in {args.checkpoints} has {setup.steps} steps or more: nothing to do")
        return curves
    Console().print(table(curves))
    plot(curves, setup, args.out)
    print(f"loss and throughput: {args.out}")
    check(curves, setup)
    return curves


if __name__ == "__main__":
    main()

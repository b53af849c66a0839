"""Train the transformer of model.py on a mesh: data, fully-sharded, tensor with sequence, and expert parallelism.

    python examples/parallel_lm.py --data 2 --model 4 [--fsdp] [--experts 8] [--virtual 8] [--steps 20] [--check]

The mesh is data x model. Batches are divided over "data"; with --fsdp parameters and optimizer are too, and gathered
where they are used. Over "model" are divided: heads; the sequence and the hidden axis of each MLP, whose products
overlap with the transfers (cutjax.mlp with axis_name); or, with --experts, the experts, which tokens travel to
(cutjax.moe with expert_axis). --virtual makes so many devices of a CPU. --check trains on one device as well and fails
if the losses part.

Several processes, each with its own devices, run the same command with

    --coordinator HOST:PORT --processes 2 --process 0      (and --process 1 on the other)

which becomes jax.distributed.initialize; under Slurm or Open MPI "--coordinator auto" finds the rest. On CPUs the
processes talk by gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from data import TEXT, Batches, encode
from flax import nnx
from model import CONFIGS, Setup, Transformer
from transformer import BALANCE, TOLERANCES, make_optimizer
from ways import GatedMLP, MoE, way

import cutjax

P = jax.P
TOKENS = P("data", "model")  # [batch, time, width]


class ParallelMLP(GatedMLP):
    """SwiGLU with the sequence and the hidden axis divided; its parameters are those of GatedMLP."""

    def __call__(self, x: jax.Array) -> jax.Array:
        def local(x, gate, up, down):
            return cutjax.mlp(x, up, down, gate=gate, activation=jax.nn.silu, axis_name="model")

        weights = [layer.kernel[...].astype(x.dtype) for layer in (self.gate, self.up, self.down)]
        specs = (TOKENS, P(None, "model"), P(None, "model"), P("model"))
        return jax.shard_map(local, in_specs=specs, out_specs=TOKENS)(x, *weights)


class ParallelMoE(MoE):
    """Experts divided over devices, and the tokens; its parameters are those of MoE."""

    def __call__(self, x: jax.Array, *, return_aux: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
        def local(x, logits, gate, up, down):
            return cutjax.moe(x, logits, gate, up, down, self.k, expert_axis="model")

        weights = [w[...].astype(self.dtype) for w in (self.gate_kernel, self.up_kernel, self.down_kernel)]
        logits = self.router(x)
        specs = (TOKENS, TOKENS, P("model"), P("model"), P("model"))
        y = jax.shard_map(local, in_specs=specs, out_specs=TOKENS)(x.astype(self.dtype), logits, *weights)
        return y, {"load_balance_loss": cutjax.load_balance_loss(logits, self.k)}


def spec_of(path: Any, x: Any, mesh: jax.sharding.Mesh, fsdp: bool) -> P:
    """Returns the sharding of a parameter, or of its optimizer state; an axis that does not divide is whole."""
    names = jax.tree_util.keystr(path)
    data = "data" if fsdp else None
    rules = {
        "'down_kernel'": ("model", None, data),
        "_kernel'": ("model", data, None),  # of experts
        "'router'": (data, None),
        "'gate'": (data, "model"),
        "'up'": (data, "model"),
        "'down'": ("model", data),
        "'query'": (data, "model", None),
        "'key'": (data, "model", None),
        "'value'": (data, "model", None),
        "'out'": ("model", None, data),
        "'embed'": (data, None),
        "'head'": (data, None),
    }
    axes = next((axes for name, axes in rules.items() if name in names), ())
    if len(axes) != x.ndim:
        return P()
    return P(
        *(axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, x.shape, strict=True))
    )


def shardings(tree: Any, mesh: jax.sharding.Mesh, fsdp: bool) -> Any:
    """Returns the sharding of every array of a tree of parameters."""
    of = lambda path, x: jax.NamedSharding(mesh, spec_of(path, x, mesh, fsdp))  # noqa: E731
    return jax.tree_util.tree_map_with_path(of, tree)


def train(setup: Setup, mesh: jax.sharding.Mesh, fsdp: bool, text: np.ndarray) -> list[float]:
    """Trains on a mesh; returns the losses."""
    here = way("dropin")._replace(gated_mlp=ParallelMLP, moe=ParallelMoE)
    optimizer = make_optimizer(setup)

    def init() -> nnx.State:
        return nnx.split(Transformer(setup, way("jax"), nnx.Rngs(0)))[1]  # the same numbers on every mesh

    with jax.set_mesh(mesh):
        graph = nnx.split(nnx.eval_shape(lambda: Transformer(setup, here, nnx.Rngs(0))))[0]
        places = shardings(jax.eval_shape(init), mesh, fsdp)
        params = jax.jit(init, out_shardings=places)()
        state_places = shardings(jax.eval_shape(optimizer.init, params), mesh, fsdp)
        state = jax.jit(optimizer.init, out_shardings=state_places)(params)

        def loss(params, tokens):
            logits, balance, _ = nnx.merge(graph, params)(tokens[:, :-1])
            cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
            return cross_entropy + BALANCE * balance, cross_entropy

        def step(params, state, tokens):
            (_, cross_entropy), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, cross_entropy

        step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(places, state_places, jax.NamedSharding(mesh, P())))
        batches, losses = Batches(text, setup.batch, setup.context), []
        divided = jax.NamedSharding(mesh, P("data"))
        for _ in range(setup.steps):
            batch = next(batches)  # every process makes all of it and keeps what its devices have
            tokens = jax.make_array_from_callback(batch.shape, divided, lambda at, batch=batch: batch[at])
            params, state, cross_entropy = step(params, state, tokens)
            losses.append(cross_entropy)
            if jax.default_backend() == "cpu":  # steps that wait for each other would take all threads of its devices
                cross_entropy.block_until_ready()
        return [float(x) for x in losses]


def check_sizes(setup: Setup, mesh: jax.sharding.Mesh) -> None:
    """Ends the program with an error where the sizes do not divide over the mesh."""
    data, model = mesh.shape["data"], mesh.shape["model"]
    hidden = ("experts", setup.experts) if setup.experts else ("hidden", setup.hidden)
    for name, size, by in (("batch", setup.batch, data), ("context", setup.context, model), (*hidden, model)):
        if size % by:
            sys.exit(f"{name} is {size}, which does not divide over {by} devices")


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The command line; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=int, help="devices along the batch (default: those that are left)")
    parser.add_argument("--model", type=int, default=1, help="devices along heads, sequence, hidden axis or experts")
    parser.add_argument("--fsdp", action="store_true", help='divide parameters and optimizer over "data" too')
    parser.add_argument("--experts", type=int, default=0, help="experts in each layer (default: none, a dense model)")
    parser.add_argument("--config", choices=CONFIGS, help="sizes (default: what fits the device)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", type=json.loads, default={}, help="other fields of the setup, as in '{\"width\": 64}'")
    parser.add_argument("--virtual", type=int, help="so many virtual devices of this process's CPU")
    parser.add_argument("--check", action="store_true", help="compare the losses with those of one device")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, or auto")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    args = parser.parse_args(argv)
    if args.virtual:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.virtual)
    if args.coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = None if args.coordinator == "auto" else args.coordinator
        jax.distributed.initialize(address, args.processes, args.process)
    data = args.data or jax.device_count() // args.model
    if data * args.model > jax.device_count():
        parser.error(f"a mesh of {data} x {args.model} devices, but there are {jax.device_count()}")
    setup = CONFIGS[args.config or ("gpu" if jax.default_backend() == "gpu" else "cpu")]
    setup = dataclasses.replace(setup, experts=args.experts, steps=args.steps, **args.set)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    devices = jax.devices()
    mesh = jax.make_mesh((data, args.model), ("data", "model"), axis_types=kinds, devices=devices[: data * args.model])
    check_sizes(setup, mesh)
    text = encode(TEXT.read_text())
    losses = train(setup, mesh, args.fsdp, text)
    if jax.process_index() == 0:
        print(f"{data} x {args.model} {devices[0].device_kind}: losses {', '.join(f'{x:.4f}' for x in losses)}")
    if args.check:
        one = jax.make_mesh((1, 1), ("data", "model"), axis_types=kinds, devices=jax.local_devices()[:1])
        expected = train(setup, one, False, text)
        found = float(np.abs(np.array(losses) - np.array(expected))[:10].max())
        if not found <= TOLERANCES[setup.dtype][0]:
            sys.exit(f"FAILED: the losses differ from those of one device by {found}")
        print(f"equal to one device's: at most {found:.1e} apart")
    return losses


if __name__ == "__main__":
    main()

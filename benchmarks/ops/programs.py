"""Training steps and decoding of whole models, each way of using cutjax beside plain JAX: ``--op programs``.

``python -m benchmarks run --op programs --tag a,c --peers jax,fuse`` measures some programs in some ways; a row is a
program in a way. Wall time over many steps, in turns. Losses and gradients must be those of plain JAX, or the row says
that they are not. With ``--method cupti`` each row also tells where the time of a step goes, by kernel. ``--tag tiny``
is for a CPU.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import timing
from benchmarks.measure import UNTUNED, peak_mib, reason
from benchmarks.record import Row
from benchmarks.suite import Run, Suite

WAYS = ("jax", "dropin", "fuse", "step", "flax")
RECIPES = ("fp8-tensor", "fp8-row", "fp8-block")
# Steps whose losses are compared; rounds of turns; and the least time of a turn, some ten steps, as a loop of training
# issues them: a turn of one step is its kernels and 7 ms of the host's and of waiting.
CHECKED, ROUNDS, ROUND_S = 4, 12, 0.4
# Ways round to bf16 in different places. On a CPU the small models' losses then differ by at most 6e-3 of the first,
# and their gradients by at most 2.1e-2 of their norm; without the gradient of one of 24 equal layers, by 0.2.
LOSSES, GRADIENTS = 1e-2, 5e-2
# Of float8: a product of float8_e4m3fn differs by 4e-2 (docs/low-precision.md), and gradients pass some of them.
FLOAT8 = 0.2
# Norms amplify that: where a program has some, its gradients are compared with those of float32, from which they may be
# so many times as far as plain JAX's.
EXACT, MORE = "float32", 1.5
OPTIMIZER = optax.adamw(1e-4)
State = Any


@dataclasses.dataclass(frozen=True)
class Program:
    """A model and what is done with it.

    Attributes:
      name: a short unique name.
      tags: its letter, "suite" for the sizes that are reported, "conv" for convolutional ones, "tiny" for small ones.
      model: a function of benchmarks/models/trained.py.
      sizes: its arguments.
      target: the least ratio of plain JAX's time to that of fuse and of cutjax.flax.
      trains: whether a step is one of AdamW's; else it is the loss alone.
      baselines: ways of plain JAX, of which the fastest counts.
      norms: whether the first step's gradients are compared with those in float32; else with plain JAX's.
      ways: those that are measured where none are asked for.
    """

    name: str
    tags: tuple[str, ...]
    model: str
    sizes: Mapping[str, Any] = dataclasses.field(hash=False)
    target: float
    trains: bool = True
    baselines: tuple[str, ...] = ("jax",)
    norms: bool = False
    ways: tuple[str, ...] = WAYS

    def make(self) -> Any:
        """Returns the model; imports Flax, which the other benchmarks do without."""
        from benchmarks.models import trained

        return getattr(trained, self.model)(**self.sizes)


LLAMA = {"width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336}
# DeepSeek-V2-Lite's experts; 8192 tokens, of which each expert gets 768 on average.
DEEPSEEK = {"width": 2048, "heads": 16, "kv_heads": 16, "hidden": 1408, "experts": 64, "k": 6, "shared": 2816}
SMALL = {"width": 64, "heads": 4, "kv_heads": 2, "hidden": 96}
EXPERTS = {**SMALL, "experts": 4, "k": 2, "shared": 32}
TOKENS, FEW = {"batch": 4, "length": 2048}, {"batch": 2, "length": 16}
SERVED = {"sequences": 16, "context": 1024, "steps": 16, "layers": 4, "vocabulary": 32000}
SMALL_SERVED = {"sequences": 4, "context": 16, "steps": 4, "layers": 1, "vocabulary": 101}
SMALL_GPT2 = {"width": 64, "heads": 4, "layers": 1, "context": 32, "vocabulary": 101}
SMALL_VIT = {"width": 64, "heads": 4, "hidden": 96, "layers": 1, "patch": 4, "classes": 10}


# As published, and batches as one device trains them.
IMAGES, SMALL_IMAGES = {"batch": 256, "side": 224}, {"batch": 8, "side": 32, "classes": 10}
SMALL_NETS = {
    "ResNet": {"width": 8, "depths": (1, 1)},
    "ConvNeXt": {"width": 8, "depths": (1, 1)},
    "EfficientNet": {"width": 8, "stages": ((1, 8, 1, 1, 3), (6, 16, 2, 2, 5)), "last": 32},
}
SMALL_VOICE = {"batch": 2, "frames": 8, "bands": 16, "width": 16, "rates": (4, 2), "sizes": (3, 5), "dilations": (1, 3)}
SMALL_VOLUMES = {"batch": 1, "side": 8, "widths": (8, 16)}
SMALL_UNET = {
    "batch": 2,
    "side": 8,
    "width": 32,
    "multiples": (1, 2),
    "blocks": 1,
    "attention": (False, True),
    "head": 16,
}


def _both(
    letter: str, name: str, model: str, target: float, sizes: Mapping[str, Any], tiny: Mapping[str, Any], **fields: Any
) -> list[Program]:
    """Returns a program as it is reported, and small."""
    reported = Program(name, ("conv" if model in CONVOLUTIONAL else "suite", letter), model, sizes, target, **fields)
    return [reported, Program(f"tiny {name}", ("tiny", f"tiny-{letter}"), model, tiny, target, **fields)]


CONVOLUTIONAL = ("classifier", "vocoder", "diffusion", "segmenter")


def _classifier(letter: str, name: str, kind: str, target: float, batch: int, **fields: Any) -> list[Program]:
    """Returns a program of a model of classifiers.py."""
    sizes, tiny = IMAGES | {"batch": batch}, SMALL_IMAGES | SMALL_NETS[kind]
    return _both(letter, name, "classifier", target, {"kind": kind} | sizes, {"kind": kind} | tiny, **fields)


PROGRAMS = (
    *_both("a", "llama block", "block", 1.05, TOKENS | LLAMA, FEW | SMALL, ways=(*WAYS, *RECIPES)),
    *_both(
        *("b", "deepseek block", "block", 3.0, TOKENS | DEEPSEEK, FEW | EXPERTS),
        baselines=("jax", "onehot"),
        ways=(*WAYS, *RECIPES),
    ),
    *_both("c", "gpt2 medium", "gpt2_model", 1.03, {"batch": 8, "length": 1024}, FEW | SMALL_GPT2),
    *_both("d", "vit b16", "vit_model", 1.03, {"batch": 64, "side": 224}, {"batch": 8, "side": 8} | SMALL_VIT),
    *_both("e", "decoding", "decoding", 1.10, SERVED | LLAMA, SMALL_SERVED | SMALL, trains=False, ways=(*WAYS, "int4")),
    Program(
        *("decoding 64", ("suite", "e"), "decoding", SERVED | LLAMA | {"sequences": 64}, 1.10),
        trains=False,
        ways=(*WAYS, "int4"),
    ),
    *_classifier("f", "resnet50", "ResNet", 1.15, 256, norms=True),
    *_classifier("g", "convnext-t", "ConvNeXt", 1.6, 128, norms=True),
    *_both("h", "hifi-gan", "vocoder", 2.5, {"batch": 16, "frames": 32}, SMALL_VOICE, norms=True),
    *_both("i", "diffusion u-net", "diffusion", 1.15, {"batch": 8, "side": 64}, SMALL_UNET, norms=True),
    *_both("j", "3-d u-net", "segmenter", 2.5, {"batch": 2, "side": 128}, SMALL_VOLUMES, norms=True),
    *_classifier("k", "efficientnet-b0", "EfficientNet", 1.4, 256, norms=True),
)


def make_step(program: Program, model: Any, name: str) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """Returns the function ``(state, inputs) -> (state, loss)`` of a way."""
    from benchmarks.models.ways import way

    found = way(name)
    loss = model.loss(found)
    if not program.trains:
        decode = found.transform(loss)
        return found.of_step(lambda params, inputs: (params, decode(params, inputs)))
    gradient = found.transform(jax.value_and_grad(loss))

    def step(state: State, inputs: Any) -> tuple[State, jax.Array]:
        params, optimizer_state = state
        value, grads = gradient(params, inputs)
        updates, optimizer_state = OPTIMIZER.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    return found.of_step(step)


def make_state(program: Program, model: Any) -> tuple[State, Any]:
    """Returns the first state, of "jax", and the inputs."""
    params, inputs = model.init(jax.random.key(0, impl="rbg"))
    return ((params, OPTIMIZER.init(params)) if program.trains else params), inputs


@dataclasses.dataclass
class Compiled:
    """The executable of a way, and what it took: seconds of tracing, and of lowering and compilation."""

    step: Any
    trace_s: float
    compile_s: float


def compile_way(program: Program, model: Any, name: str) -> Compiled:
    """Compiles the step of a way; the state is donated."""
    from benchmarks.models.ways import way

    state, inputs = jax.eval_shape(functools.partial(make_state, program, model))
    state = jax.eval_shape(functools.partial(model.params_of, way(name)), state)
    start = time.perf_counter()
    traced = jax.jit(make_step(program, model, name), donate_argnums=0).trace(state, inputs)
    traced_at = time.perf_counter()
    compiled = traced.lower().compile(UNTUNED if name == EXACT else {})
    return Compiled(compiled, traced_at - start, time.perf_counter() - traced_at)


def compile_ways(program: Program, model: Any, names: tuple[str, ...]) -> dict[str, Compiled | Exception]:
    """Compiles plain JAX first, alone: what XLA tunes then it is not disturbed in, and the rest, at once, finds."""
    found: dict[str, Compiled | Exception] = {}

    def compiled(name: str) -> Compiled | Exception:
        try:
            return compile_way(program, model, name)
        except Exception as error:  # the other ways are measured all the same
            return error

    first = [name for name in names if name in program.baselines]
    found |= {name: compiled(name) for name in first}
    rest = [name for name in names if name not in first]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(rest))) as pool:
        found |= zip(rest, pool.map(compiled, rest), strict=True)
    return found


class Running:
    """A compiled way with its state and inputs: a call is a step."""

    def __init__(self, step: Any, state: State, inputs: Any):
        self.step, self.state, self.inputs = step, state, inputs

    def __call__(self) -> jax.Array:
        self.state, loss = self.step(self.state, self.inputs)
        return loss


def times(running: Mapping[str, Running], turn_s: float | None = None, rest_s: float = 0.0) -> dict[str, list[float]]:
    """Microseconds of a step, a sample a turn; each round begins with another way.

    Args:
      running: the ways.
      turn_s: the least time of a turn.
      rest_s: how long the device rests before each turn.
    """
    turn_s = ROUND_S if turn_s is None else turn_s
    names, inner, samples = list(running), 1, {name: [] for name in running}
    for number in range(-1, ROUNDS):  # the round before the first measures how many steps a turn takes
        at = number % len(names)
        for name in names[at:] + names[:at]:
            time.sleep(rest_s)
            start = time.perf_counter()
            for _ in range(inner):
                loss = running[name]()
            jax.block_until_ready((loss, running[name].state))
            if number >= 0:
                samples[name].append(1e6 * (time.perf_counter() - start) / inner)
            seconds = time.perf_counter() - start
        inner = max(1, round(turn_s / seconds)) if number < 0 else inner
    return samples


def kernels(step: Running) -> dict[str, Any]:
    """The kernel time of a step and the kernels that take the most of it, by name."""
    try:
        records = timing.records([(step, ())])
    except Exception as error:
        return {"parts": reason(error)}
    total: dict[str, float] = collections.defaultdict(float)
    for name, us in records:
        total[name] += us
    parts = sorted(total.items(), key=lambda part: -part[1])[:40]
    return {"kernel_us": sum(total.values()), "kernels": len(records), "parts": parts}


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def first_steps(program: Program, step: Running) -> tuple[list[float], Any]:
    """Returns the losses of the first steps, and the gradients of the first one, as AdamW's first moment has them."""
    losses = [float(step())]
    gradients = _copied(step.state[1][0].mu) if program.trains else ()
    return [*losses, *(float(step()) for _ in range(CHECKED - 1))], gradients


@jax.jit
def _difference(found: Any, expected: Any) -> jax.Array:
    norm = optax.tree.norm(expected)
    return optax.tree.norm(jax.tree.map(jnp.subtract, found, expected)) / jnp.maximum(norm, 1e-30)


def measure_case(program: Program, run: Run) -> list[Row]:
    """Compiles all ways, compares their first steps with plain JAX's or float32's, and times them in turns."""
    from benchmarks.models.ways import way

    model = program.make()
    made = jax.jit(functools.partial(make_state, program, model))
    asked = tuple(name for name in program.ways if run.peers is None or name in run.peers)
    names = tuple(dict.fromkeys((*program.baselines, *asked)))
    rows = {name: Row(program.name, name) for name in names}
    running: dict[str, Running] = {}
    first: list[float] | None = None  # losses of the first way, plain JAX
    exact: Any = None  # gradients that those of others are compared with
    most = GRADIENTS
    compiled_ways = compile_ways(program, model, (*[EXACT] * program.norms, *names))
    for name in sorted(compiled_ways, key=lambda name: name != EXACT):
        compiled = compiled_ways.pop(name)
        try:
            if isinstance(compiled, Exception):
                raise compiled
            state, inputs = made()
            step = Running(compiled.step, model.params_of(way(name), state), inputs)
            del state
            losses, gradients = first_steps(program, step)
            exact = gradients if exact is None else exact
            difference = float(_difference(gradients, model.params_of(way(name), exact)))
            del gradients
        except Exception as error:  # such as too little memory; the other ways are measured all the same
            print(f"  {program.name} {name}: {reason(error)}", flush=True)
            if name in rows:
                rows[name] = dataclasses.replace(rows[name], failure=reason(error))
            continue
        seconds = f"traced in {compiled.trace_s:.0f} s, compiled in {compiled.compile_s:.0f}"
        print(f"  {program.name} {name}: {seconds}, losses {losses}, gradients differ by {difference:.3g}", flush=True)
        if name == EXACT:
            continue
        if first is None and difference > 0:
            most = MORE * difference
        first = first or losses
        error = float(np.max(np.abs(np.array(losses) - np.array(first))) / np.max(first))
        figures = {"losses": losses, "gradients": difference, "trace_s": compiled.trace_s}
        rows[name] = dataclasses.replace(
            rows[name],
            peak_mib=peak_mib(compiled.step),
            error=error,
            figures={**figures, "compile_s": compiled.compile_s},
            failure=_wrong(error, difference, FLOAT8 if name in RECIPES else most),
        )
        running[name] = step
    del exact
    if not any(name in running for name in program.baselines):
        return list(rows.values())
    taken = times(running)
    medians = {name: float(np.median(samples)) for name, samples in taken.items()}
    base = min((name for name in program.baselines if name in medians), key=medians.__getitem__)
    for name, samples in taken.items():
        rows[name] = _compared(program, rows[name], medians, rows[base].peak_mib, base, samples)
    if run.method == "cupti":
        for name, step in running.items():
            rows[name] = dataclasses.replace(rows[name], figures={**rows[name].figures, **kernels(step)})
    return list(rows.values())


def _wrong(losses: float, gradients: float, most: float) -> str:
    """Says that a way's losses are too far from plain JAX's, or its gradients from those asked for; "" if not."""
    if losses <= LOSSES and gradients <= most:
        return ""
    return f"wrong: losses differ by {losses:.3g} (at most {LOSSES}), gradients by {gradients:.3g} (at most {most:.3g})"


def _compared(
    program: Program, row: Row, medians: Mapping[str, float], base_mib: float, base: str, samples: list[float]
) -> Row:
    name = row.product
    low, high = np.percentile(samples, (25, 75))
    row = dataclasses.replace(
        row, us=medians[name], iqr_us=float(high - low), figures={**row.figures, "baseline": base}
    )
    if name in program.baselines:
        return row
    target = 0.99 if name == "dropin" else program.target
    ratios = {"jax": medians[base] / medians[name], "memory": base_mib / row.peak_mib}
    return dataclasses.replace(row, ratios=ratios, targets={"jax": target, "memory": 1.0})


SUITE = Suite(
    "programs",
    PROGRAMS,
    measure=measure_case,
    clocks=("host", "cupti"),
    versions=("flax", "optax"),
    environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"},
)

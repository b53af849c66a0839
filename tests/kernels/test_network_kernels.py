"""Kernels of small networks: every form on the emulated device, what a schedule keeps, refusals, and no spills."""

from __future__ import annotations

import dataclasses
import itertools

import gxx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import device
from jax import lax

import cutjax
from cutjax.dot_precision import canonical
from cutjax.kernels.device import reference
from cutjax.kernels.network import derivative
from cutjax.kernels.network.choose import choose, resolve
from cutjax.kernels.network.config import Config
from cutjax.kernels.network.kernel import Kernel
from cutjax.kernels.network.problem import Problem
from cutjax.kernels.network.program import Affine, Builder, Kind, Map, Outer, Program, Term, elementwise, reusing
from cutjax.kernels.network.schedule import OuterPhase, Schedule
from cutjax.primitives import network
from cutjax.runtime import compiler

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
needs_gxx = pytest.mark.skipif(not gxx.installed(), reason="needs g++")
X3, X6, X9 = (lax.DotAlgorithmPreset[f"BF16_BF16_F32_X{n}"] for n in (3, 6, 9))
FLOAT32 = canonical("highest", "test")


def layers(*widths, f=jnp.tanh):
    """The program of layers with biases."""
    pairs = list(itertools.pairwise(widths))
    b = Builder(
        [Kind("rows", widths[:1]), *(Kind("matrix", x) for x in pairs), *(Kind("vector", x[1:]) for x in pairs)]
    )
    function, value = elementwise(lambda x: [f(x)], 1)[0], 0
    for i in range(len(pairs)):
        (value,) = b.add(Affine((Term(value, 1 + i),), (1 + len(pairs) + i,)))
        if i < len(pairs) - 1:
            (value,) = b.add(Map(function, (value,)))
    return b.build([value])


def gradients(program: Program, of: tuple[bool, ...]) -> Program:
    """The gradients in some inputs, of inputs and the result's."""
    linear, _ = derivative.tangents(program, of)
    fixed, moving = len(program.inputs), sum(of)
    return derivative.cotangents(linear, (False,) * fixed + (True,) * moving, (True,) * len(program.outputs))[0]


def rows_alone(program: Program) -> tuple[bool, ...]:
    return tuple(i == 0 for i in range(len(program.inputs)))


def form(name: str, program: Program) -> Program:
    if name == "result":
        return program
    if name == "tangents":
        return derivative.tangents(program, (True,) * len(program.inputs))[0]
    if name == "gradients":
        return gradients(program, (True,) * len(program.inputs))
    slope = gradients(program, rows_alone(program))
    along, _ = derivative.tangents(slope, rows_alone(slope))
    both, _ = derivative.unrolled(along, (False,) * len(slope.inputs) + (True,), 2)
    if name == "second derivatives":
        return both
    return gradients(both, tuple(kind.name != "rows" for kind in both.inputs))


def problem(program, dtype="bfloat16", precision=None, arch="sm_80", rows=100, networks=1, own=None) -> Problem:
    given = tuple((dtype, networks > 1 and (own is None or own(kind))) for kind in program.inputs)
    of = dataclasses.replace(reference(arch), sms=2)  # blocks take several tiles
    dtypes = (dtype,) * len(program.outputs)
    return Problem(program.primal, rows, networks, given, dtypes, np.dtype(jnp.dtype(dtype)), precision, of)


def drawn(p: Problem):
    rng = np.random.default_rng(0)
    for kind, (dtype, own) in zip(p.program.inputs, p.given, strict=True):
        shape = (p.networks if own else 1, *((p.rows,) if kind.name == "rows" else ()), *kind.sizes)
        scale = kind.sizes[0] ** -0.5 if kind.name == "matrix" else 1.0
        yield np.asarray(jnp.asarray(rng.standard_normal(shape) * scale, dtype))


def computed(kernel: Kernel, arrays):
    """The results on the emulated device, in memory that is full of NaN."""
    with device.emulated():
        call = kernel.call()
    memory = [device.poison(x.shape, x.dtype) for x in call.results]
    written = device.execute(call, arrays, memory)
    assert call.finish is not None
    return call.finish([jnp.asarray(x) for x in written], arrays)


def expected(p: Problem, arrays):
    wide = [jnp.asarray(x, jnp.float32) for x in arrays]
    dtypes = ("float32",) * len(p.program.outputs)
    how = {"dtypes": dtypes, "dtype": np.dtype(np.float32), "precision": FLOAT32, "backend": "xla"}
    return network._reference(*wide, program=p.program, **how)


# Largest errors over the largest value: of two layers rounded to 8, 11 and 11 bits, and of parts.
ERRORS = {"bfloat16": 2e-2, "float16": 3e-3, "tf32": 4e-3, X3: 2e-4, X6: 5e-6, X9: 5e-6}
CASES = [
    ("result", "float16", None, Config(1, 2, chained=False)),
    ("result", "float32", X3, Config(2, 1)),
    ("tangents", "float32", None, Config(1, 1)),
    ("gradients", "bfloat16", None, Config(2, 1)),
    ("gradients", "float32", X9, Config(2, 1, chained=False, memory=True, memory_sums=True)),
    ("gradients", "float32", None, Config(2, 2)),
    ("gradients", "bfloat16", None, Config(1, 2, planes=True)),
    ("gradients", "float16", None, Config(8, 1, planes=True)),
    ("gradients of second derivatives", "float16", None, Config(3, 1, planes=True)),
    ("second derivatives", "float32", X6, Config(1, 1)),
    ("gradients of second derivatives", "float32", X9, Config(1, 1, chained=False, memory=True, memory_sums=True)),
]


@needs_nvrtc
@needs_gxx
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def test_on_the_emulated_device(case):
    """Widths of no multiple of 16, an input of 3, and a tile that is not full."""
    name, dtype, precision, config = case
    p = problem(form(name, layers(3, 20, 32, 1)), dtype, precision)
    arrays = list(drawn(p))
    error = ERRORS[precision or ("tf32" if dtype == "float32" else dtype)]
    for found, wanted in zip(computed(Kernel(p, config), arrays), expected(p, arrays), strict=True):
        assert found.dtype == dtype
        distance = np.abs(np.asarray(found, np.float32) - wanted).max() / np.abs(wanted).max()
        assert distance < error


BY_WGMMA = [
    ("result", (64, 64), Config(8, 1, blocks=3, wgmma=True)),
    ("result", (128, 64), Config(12, 1, wgmma=True)),
    ("tangents", (33, 64), Config(12, 1, wgmma=True)),
    ("gradients", (64, 64), Config(4, 1, planes=True, wgmma=True)),
    ("gradients", (128,), Config(4, 1, planes=True, wgmma=True)),
    ("gradients", (64, 16, 64), Config(4, 1, planes=True, wgmma=True)),  # no product with ones sums the bias's of 16
]
APART = Config(8, 1, memory=True, planes=True, wgmma=True, apart=True)
COPIED = dataclasses.replace(APART, copied=True)


@needs_nvrtc
@needs_gxx
@pytest.mark.parametrize("case", BY_WGMMA, ids=lambda case: f"{case[0]}, {case[2].warps}x{case[2].tiles}")
def test_wgmma_on_the_emulated_device(case):
    """Stages by wgmma, and sums of outer products."""
    name, hidden, config = case
    p = problem(form(name, layers(3, *hidden, 1)), arch="sm_90a", rows=300)
    kernel = Kernel(p, config)
    assert not kernel.reasons()
    arrays = list(drawn(p))
    for found, wanted in zip(computed(kernel, arrays), expected(p, arrays), strict=True):
        distance = np.abs(np.asarray(found, np.float32) - wanted).max() / np.abs(wanted).max()
        assert distance < ERRORS["bfloat16"] * len(hidden)


def assert_near(kernel, p, dtype):
    """Asserts that a kernel serves a problem, and computes what float64 does to a few roundings."""
    assert not kernel.reasons()
    arrays = list(drawn(p))
    for found, wanted in zip(computed(kernel, arrays), expected(p, arrays), strict=True):
        distance = np.abs(np.asarray(found, np.float32) - wanted).max() / np.abs(wanted).max()
        assert distance < ERRORS[dtype]


@needs_nvrtc
@needs_gxx
@pytest.mark.parametrize(
    ("widths", "f", "dtype", "networks"),
    [
        ((3, 128, 64, 128, 2), jnp.tanh, "bfloat16", 1),
        ((20, 120, 128), jax.nn.silu, "float16", 1),
        ((3, 120, 128, 2), jax.nn.silu, "bfloat16", 1),
        ((3, 128, 128, 1), jax.nn.sigmoid, "bfloat16", 2),
    ],
    ids=["tanh", "silu", "silu of two", "sigmoid"],
)
def test_sums_apart_on_the_emulated_device(widths, f, dtype, networks):
    """Factors narrow, and wide of two sizes; what functions read in planes, and stashed; rows of more than a tile."""
    p = problem(form("gradients", layers(*widths, f=f)), dtype, arch="sm_90a", rows=270, networks=networks)
    kernel = Kernel(p, APART)
    assert_near(kernel, p, dtype)


@needs_nvrtc
@needs_gxx
@pytest.mark.parametrize(
    ("widths", "f", "dtype", "networks"),
    [
        ((3, 128, 128, 128, 1), jnp.tanh, "bfloat16", 1),
        ((5, 128, 64, 128, 2), jnp.tanh, "float16", 2),
        ((7, 64, 128, 7), jax.nn.silu, "bfloat16", 1),
    ],
    ids=["tanh", "of two", "silu"],
)
def test_copied_planes_on_the_emulated_device(widths, f, dtype, networks):
    """Buffers in turns over several tiles, the last not full, of which warpgroups are done in any order."""
    p = problem(form("gradients", layers(*widths, f=f)), dtype, arch="sm_90a", rows=650, networks=networks)
    kernel = Kernel(p, COPIED)
    assert_near(kernel, p, dtype)


@needs_nvrtc
@needs_gxx
def test_sums_apart_of_small_integers_are_exact():
    """Of few weights that are not zero, so that all rows are whole numbers of 8 bits."""
    p = problem(form("gradients", layers(32, 128, 64, 128, f=lambda x: x * x)), arch="sm_90a", rows=200)
    rng = np.random.default_rng(1)
    arrays = [np.asarray(jnp.asarray(rng.integers(-1, 2, x.shape), x.dtype)) for x in drawn(p)]
    for i in (1, 2, 3):
        arrays[i] = np.where(rng.random(arrays[i].shape) < 0.5 / arrays[i].shape[1], arrays[i], 0).astype(
            arrays[i].dtype
        )
    p = dataclasses.replace(p, dtypes=("float32",) * len(p.dtypes))
    for found, wanted in zip(computed(Kernel(p, APART), arrays), expected(p, arrays), strict=True):
        assert np.abs(wanted).max() > 8
        np.testing.assert_array_equal(found, wanted)


def test_sums_are_apart_of_wide_networks():
    """Sums of 128 x 128 do not fit beside a network in registers; those of 64 x 64 do."""
    for width, apart in ((64, False), (128, True)):
        choice = choose(problem(form("gradients", layers(3, width, width, 1)), arch="sm_90a", rows=1 << 20))
        assert choice.resolved is not None
        assert choice.resolved.config.apart == apart
        assert len(choice.resolved.results) == (4 if apart else 2)


@needs_nvrtc
@needs_gxx
@pytest.mark.parametrize("own", ["matrix", "rows"])
def test_networks(own):
    """Several networks of the same rows, or rows of each and the same weights: sums are each network's."""
    p = problem(form("gradients", layers(3, 16, 1)), "float32", X9, networks=3, own=lambda kind: kind.name == own)
    arrays = list(drawn(p))
    for found, wanted in zip(computed(Kernel(p, Config(1, 1)), arrays), expected(p, arrays), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@needs_nvrtc
@needs_gxx
def test_small_integers_are_exact():
    """Sums of products of integers have no rounding in any order."""
    p = problem(form("gradients", layers(8, 16, 24, f=lambda x: x * x)), "bfloat16", rows=40)
    rng = np.random.default_rng(1)
    arrays = [np.asarray(jnp.asarray(rng.integers(-1, 2, x.shape), x.dtype)) for x in drawn(p)]
    arrays[1] = np.where(rng.random(arrays[1].shape) < 0.3, arrays[1], 0).astype(arrays[1].dtype)
    p = dataclasses.replace(p, dtypes=("float32",) * len(p.dtypes))
    for config in (Config(2, 1), Config(4, 2, planes=True), Config(2, 1, planes=True)):
        for found, wanted in zip(computed(Kernel(p, config), arrays), expected(p, arrays), strict=True):
            np.testing.assert_array_equal(found, wanted)


@needs_nvrtc
@needs_gxx
def test_a_program_on_the_emulated_device():
    """A Laplacian and a gradient through it, as jit lowers them."""
    keys = jax.random.split(jax.random.key(0), 4)
    ws = [jax.random.normal(key, shape) / 3 for key, shape in zip(keys, [(2, 16), (16, 16), (16, 1)], strict=False)]
    x = jax.random.normal(keys[3], (20, 2))

    def loss(ws, backend, precision):
        u = lambda x: cutjax.fused_mlp(x, ws, None, jnp.tanh, backend=backend, precision=precision)[0]  # noqa: E731
        laplacian = lambda x: jnp.stack([jax.jvp(jax.grad(u), (x,), (e,))[1] @ e for e in jnp.eye(2)]).sum()  # noqa: E731
        return (jax.vmap(laplacian)(x) ** 2).mean()

    slope = jax.value_and_grad(loss)
    wanted = jax.jit(lambda ws: slope(ws, "xla", "highest"))(ws)
    with device.emulated():
        found = jax.jit(lambda ws: slope(ws, "cuda", X9))(ws)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * float(np.abs(b).max())), found, wanted)


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("name", ["gradients", "second derivatives", "gradients of second derivatives"])
def test_stashed_values_do_not_meet(name, chained):
    """Each is made once, before it is read, and no other has its place while it is needed."""
    schedule = Schedule(form(name, layers(3, 20, 32, 1)), chained)
    slots, size = schedule.slots()
    assert set(slots) == set(schedule.lifetimes) == set(schedule.stashed)
    taken = {}
    for x, (first, last) in schedule.lifetimes.items():
        assert first <= last
        for place in range(slots[x], slots[x] + -(-schedule.width(x) // 16)):
            for at in range(first, last + 1):
                assert taken.setdefault((place, at), x) == x
                assert place < size


@pytest.mark.parametrize("name", ["gradients", "gradients of second derivatives"])
def test_planes_do_not_meet(name):
    """But for a function's result in the place of what it reads, in which there is one of the two at a time."""
    program = reusing(form(name, layers(3, 32, 32, 32, 1)))
    schedule = Schedule(program, True, True)
    places, size = schedule.plane_places(schedule.width)
    made = {x for x in places if not schedule.is_input(x)}
    assert set(places) == schedule.planes
    assert all(places[x] >= 0 and places[x] + schedule.width(x) <= size for x in places)
    for x, y in itertools.combinations(sorted(made), 2):
        (_, end), (first, _) = sorted((schedule.lifetimes[x], schedule.lifetimes[y]))
        apart = abs(places[x] - places[y]) >= schedule.width(x)
        assert apart or end <= first, (x, y)
        if end == first and not apart:
            assert places[x] == places[y]


def test_derivatives_read_the_factors_of_outer_products():
    """tanh is not computed again of what it was of; a function whose derivative does not have its result stays."""
    for f, again in ((jnp.tanh, False), (jax.nn.silu, True)):
        program = form("gradients", layers(3, 32, 32, 1, f=f))
        reused = reusing(program)
        assert (reused == program) == again
        maps = [step for step, _ in reused.numbered if isinstance(step, Map)]
        assert sum(node.op == "tanh" for step in maps for node in step.function.nodes) == 2 * (not again)
        assert reused.kinds == program.kinds


def test_phases_compute_everything_once():
    schedule = Schedule(form("gradients", layers(3, 20, 32, 1)), True)
    made = [x for stage in schedule.stages for x in stage.makes]
    assert sorted(made) == sorted(schedule.makers)
    pairs = sum(len(step.pairs) for step in schedule.program.steps if isinstance(step, Outer))
    assert pairs == sum(isinstance(phase, OuterPhase) for phase in schedule.phases) == 3


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"program": layers(3, 300, 1)}, "width 300, at most 256"),
        ({"arch": "sm_75"}, "sm_80 and later"),
        ({"dtype": "float32", "precision": FLOAT32}, "by FMA"),
        ({"program": layers(*[256] * 24)}, "shared memory"),
    ],
)
def test_refusals(changed, reason):
    fields = {"program": layers(3, 16, 1), **changed}
    choice = choose(problem(**fields))
    assert not choice.served
    assert any(reason in why for why in choice.reasons), choice.reasons


def test_empty_problems_launch_nothing():
    assert problem(layers(3, 16, 1), rows=0).flops == 0
    assert not choose(problem(layers(3, 16, 1), rows=0)).served


def test_the_launch_has_an_argument_for_each_array():
    kernel = resolve(problem(form("gradients", layers(3, 16, 1)), "float32", X9), Config(1, 1, False, True))
    assert isinstance(kernel, Kernel)
    names = [argument.name for argument in kernel.arguments]
    assert names == [*(f"in{i}" for i in range(6)), "out0", "partials", "stashes", "rows", "tiles", "blocks"]
    assert kernel.blocks <= kernel.tiles  # each begins its sums


@needs_nvrtc
@pytest.mark.compiles
@pytest.mark.versions
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_spills(arch):
    """Whatever is chosen for gradients, whose registers are scarcest."""
    choice = choose(problem(form("gradients", layers(3, 32, 32, 1)), arch=arch, rows=1 << 20))
    assert choice.resolved is not None
    planes = resolve(choice.problem, Config(4, 2, planes=True))
    assert isinstance(planes, Kernel)
    for kernel in (choice.resolved, planes):
        resources = kernel.compile().resources
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0


@needs_nvrtc
@pytest.mark.compiles
def test_no_spills_of_sums_apart():
    kernel = Kernel(problem(form("gradients", layers(3, 128, 128, 1)), arch="sm_90a", rows=1 << 20), APART)
    for resources in (kernel.compile().resources, kernel.compile_outer().resources):
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0


def test_functions_are_as_exact_as_what_reads_them():
    """What is only multiplied in bf16 is rounded there; a result, and what a function reads again, is not."""
    for dtype, coarse in (("bfloat16", True), ("float16", False), ("float32", False)):
        kernel = choose(problem(layers(16, 32, 32, 16), dtype, X3 if dtype == "float32" else None)).resolved
        assert ("= tanh_approx(acc" in kernel.source) == coarse
    b = Builder([Kind("rows", (16,)), Kind("matrix", (16, 16))])
    (y,) = b.add(Affine((Term(0, 1),), ()))
    (z,) = b.add(Map(elementwise(lambda x: [jnp.tanh(x)], 1)[0], (y,)))
    kernel = choose(problem(b.build([z]))).resolved
    assert "= tanhf(acc" in kernel.source

"""Rows copied by index: the kernel on the host, machine code, the plan of a launch, who refuses, what is lowered."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.export
import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest
from checks import mesh_of
from cubin import code_bytes, instructions, nvdisasm

import cutjax
from cutjax.binding import lowering
from cutjax.kernels import gather
from cutjax.kernels.device import reference
from cutjax.primitives.routing import dispatch_p, to_slots
from cutjax.runtime import compiler
from cutjax.runtime.launch import Int32, Int64, Pointer

needs_gxx = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")
needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason="needs NVRTC")
H = jnp.bfloat16


def aval(shape, dtype=H):
    return jax.ShapeDtypeStruct(shape, dtype)


def problem(
    tokens=48, rows=None, k=2, d=64, dtype=H, batch=(), shared=(), index=jnp.int32, arch="sm_90a"
) -> gather.Problem:
    """That of arrays, of which those of the numbers in `shared` have a batch of ones."""
    rows = tokens * k if rows is None else rows
    each = [tuple(1 for _ in batch) if i in shared else batch for i in range(3)]
    avals = aval((*each[0], tokens, d), dtype), aval((*each[1], rows), index), aval((*each[2], tokens, k), index)
    return gather.Problem.of(*avals, reference(arch))


def routed(rng, tokens, k):
    """A permutation of pairs, and its inverse."""
    permutation = rng.permutation(tokens * k)
    return permutation, np.argsort(permutation).reshape(tokens, k)


def expected(x, permutation, k):
    """What dispatch is by definition, zeros past the end."""
    tokens = x.shape[-2]
    batch = np.broadcast_shapes(x.shape[:-2], permutation.shape[:-1])
    x = np.broadcast_to(x, (*batch, *x.shape[-2:]))
    permutation = np.broadcast_to(permutation, (*batch, permutation.shape[-1]))
    found = np.take_along_axis(x, np.clip(permutation // k, 0, tokens - 1)[..., None], -2)
    return np.where((permutation < tokens * k)[..., None], found, 0)


def ran(asked, config, arrays, folder, blocks=2):
    """What the kernel writes, over NaN."""
    kernel = gather.Kernel(asked, config)
    assert not gather.why_not(asked)
    out = np.full((*asked.batch, asked.rows, asked.d), -1).astype(asked.dtype)
    arrays = [kernel_host.aligned(np.ascontiguousarray(x)) for x in (*arrays, out)]
    kernel_host.run(kernel, arrays, folder, blocks)
    return arrays[-1]


# tokens, k, d, dtype, config: rows in one piece, in several of which the last is short, more stages than pieces
HOST = {
    "pieces": (9, 2, 200, "int16", gather.Config(3, 3, 128)),
    "two stages": (40, 1, 16, "uint8", gather.Config(1, 2, 128)),
    "many stages": (5, 32, 70, "complex64", gather.Config(2, 6, 256)),
    "as shipped": (70, 8, 1100, "float64", gather.Config()),
}


@needs_gxx
@pytest.mark.parametrize("name", HOST)
def test_on_the_host(name, tmp_path):
    tokens, k, d, dtype, config = HOST[name]
    rng = np.random.default_rng(0)
    permutation, inverse = routed(rng, tokens, k)
    x = rng.integers(0, 99, (tokens, d)).astype(dtype)
    asked = problem(tokens, None, k, d, np.dtype(dtype))
    got = ran(asked, config, (x, permutation.astype(np.int32), inverse.astype(np.int32)), tmp_path)
    np.testing.assert_array_equal(got, expected(x, permutation, k))


@needs_gxx
@pytest.mark.parametrize("shared", [(0,), (1, 2)], ids=str)
def test_batches_and_slots_on_the_host(shared, tmp_path):
    """Slots of no pair are zeros; and whatever the inverse says, the result is what the permutation says."""
    batch, tokens, k, rows, d = (2, 2), 11, 3, 45, 40
    rng = np.random.default_rng(1)
    permutation = np.full((*batch, rows), tokens * k)
    inverse = np.full((*batch, tokens, k), rows)
    for at in itertools.product(*map(range, batch)):
        slots = rng.permutation(rows)[: tokens * k - 5]
        pairs = rng.permutation(tokens * k)[: slots.size]
        permutation[at][slots] = pairs
        inverse[at].reshape(-1)[pairs] = slots
    permutation[1, 1, :9] = rng.integers(0, tokens * k, 9)  # of several rows one is the pair's by the inverse
    inverse[1, 0, 0] = rng.integers(0, rows, k)
    x = rng.integers(1, 99, (*batch, tokens, d)).astype(np.float32)
    arrays = [y[:1, :1] if i in shared else y for i, y in enumerate((x, permutation, inverse))]
    asked = problem(tokens, rows, k, d, np.dtype("float32"), batch, shared)
    given = arrays[0], *(y.astype(np.int32) for y in arrays[1:])
    wanted = expected(arrays[0], arrays[1], k)
    if shared == (1, 2):
        wanted = np.broadcast_to(wanted, (*batch, rows, d))
    np.testing.assert_array_equal(ran(asked, gather.Config(2, 4, 128), given, tmp_path), wanted)


@needs_nvrtc
def test_machine_code():
    for config in (gather.Config(), gather.Config(7, 4, 4096)):
        kernel = gather.Kernel(problem(), config)
        cubin = compiler.compile_kernel(kernel.source, name=kernel.name, arch=gather.ARCH)
        assert "warning" not in cubin.log
        assert cubin.resources.spill_store_bytes == cubin.resources.stack_bytes == 0
        assert code_bytes(cubin.image) <= 16_000
        if nvdisasm():
            counts = instructions(cubin.image)
            assert counts["UBLKCP.S.G"] == counts["UBLKCP.G.S"] == config.stages


def test_the_plan():
    p = problem(16384, None, 8, 7168, batch=(3,), shared=(0,))
    kernel = gather.shipped(p)
    assert (kernel.name, kernel.pieces, kernel.piece_bytes) == ("sm90_gather_4x4x4096", 4, 3584)
    launch = kernel.launch(b"cubin")
    assert (launch.grid, launch.block, launch.blocks_per_sm) == ((3 * 16384, 1, 1), (256, 1, 1), 1)
    assert launch.shared_bytes == 4 * 4 * (4096 + 8) <= p.device.shared_bytes
    assert launch.params == (
        *(Pointer(i) for i in range(4)),
        *map(Int32, (3, 16384, 131072, 8, 14336, 3584, 4)),
        *map(Int64, (0, 131072, 131072)),
    )
    assert p.bytes == (16384 + 3 * 131072) * 14336
    assert p.xla_us == pytest.approx(3 * 1259.5, rel=0.05)  # as measured
    for d in (8, 2048, 2056, 2064, 4100, 7168, 50000):
        kernel = gather.shipped(problem(d=d))
        row, piece, pieces = kernel.problem.row_bytes, kernel.piece_bytes, kernel.pieces
        assert (pieces - 1) * piece < row <= pieces * piece
        assert piece % 128 == 0 < piece <= kernel.config.stage_bytes


REFUSED = [
    ({"d": 20}, "rows of 40 bytes: bulk copies move multiples of 16"),
    ({"arch": "sm_80"}, "sm_80: gathers by bulk copies are for sm_90a"),
    ({"arch": "sm_100a"}, "sm_100a: gathers by bulk copies are for sm_90a"),
    ({"dtype": jnp.int4}, "elements of int4: the kernel copies whole bytes"),
    ({"index": np.dtype("int64")}, "indices of int64: the kernel reads int32"),
    ({"k": 33}, "k = 33: a row is stored up to 32 times"),
    ({"rows": 0}, "a size is 0: nothing to launch"),
    ({"batch": (2**20,), "tokens": 2048, "k": 1, "d": 8}, r"pieces of up to 2,147,483,648 .* count with 32 bits"),
    ({"tokens": 2**28, "k": 8, "rows": 16}, "pairs of up to 2,147,483,648: kernels count with 32 bits"),
    ({"tokens": 1, "d": 2**30}, "bytes of a row of up to"),
]


@pytest.mark.parametrize(("fields", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_refused(fields, why):
    choice = gather.choose(problem(**{**fields, "dtype": jnp.dtype(fields.get("dtype", H))}), "cuda")
    assert not choice.served
    assert choice.kernel == "XLA"
    assert re.search(why, "; ".join(choice.reasons))


def test_batches_of_which_one_array_has_a_part_are_refused():
    avals = aval((3, 1, 8, 64)), aval((3, 2, 16), jnp.int32), aval((3, 2, 8, 2), jnp.int32)
    (why,) = gather.why_not(gather.Problem.of(*avals, reference("sm_90a")))
    assert "each has all of it or none" in why


def test_auto_takes_what_is_predicted_faster(monkeypatch):
    choose = functools.partial(gather.choose.__wrapped__, backend="auto")
    large, small, short = problem(16384, None, 8, 7168), problem(1, None, 1, 64), problem(65536, None, 8, 256)
    assert choose(large).kernel == "sm90_gather_4x4x4096"
    assert 550 < (choose(large).time_us or 0) < 620
    assert choose(short).kernel == "sm90_gather_6x4x4096"
    assert 100 < (choose(short).time_us or 0) < 120
    assert choose(small).reasons[0].startswith("XLA's gather is predicted to take")
    monkeypatch.setattr(gather, "SHARE", 0.1)
    assert not choose(large).served


# What is lowered.

T, E, K, D = 16, 4, 2, 64
WEIGHTS = dict.fromkeys(("w_gate", "w_up", "w_down"), jnp.ones((E, D, D), H))
LOGITS = np.random.default_rng(0).standard_normal((T, E)).astype(np.float32)


def lowered(fn, *args):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def no_compiler(monkeypatch):
    cubin = compiler.Cubin(b"cubin", compiler.Resources(None, None, None, None, None), "", 0.0, False)
    monkeypatch.setattr(gather, "compile_kernel", lambda *args, **kwargs: cubin)
    monkeypatch.setattr(compiler, "compiler_missing", lambda: None)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.versions
def test_lowered_by_name():
    routing, x = cutjax.route(LOGITS, K), jnp.ones((T, D), H)
    kernel = 'kernel = "sm90_gather_6x4x4096"'
    with cutjax.use_backend("cuda"):
        assert kernel in lowered(routing.dispatch, x)
        assert kernel not in lowered(routing.dispatch, x[:, :4])  # no error: XLA's gather
        assert kernel in lowered(jax.vmap(routing.dispatch), jnp.stack([x, x]))
        assert kernel in lowered(jax.linear_transpose(routing.combine, aval((T * K, D))), x)
        rows = lowered(lambda x, p, s: to_slots(x, p, s), x, aval((40,), jnp.int32), aval((T, K), jnp.int32))
        assert kernel in rows
        assert routing.dispatch(x).shape == (T * K, D)  # of this platform
        layer = functools.partial(cutjax.moe, router_logits=LOGITS, **WEIGHTS, backend="xla")  # says so itself
        assert "cutjax_launch" not in lowered(lambda x: layer(x), x)
    assert "cutjax_launch" not in lowered(routing.dispatch, x)
    checks = [jax.export.DisabledSafetyCheck.custom_call("cutjax_launch")]
    export = jax.export.export(jax.jit(lambda x: dispatched(routing, x)), platforms=["cuda"], disabled_checks=checks)
    assert kernel in export(x).mlir_module()


def dispatched(routing, x):
    with cutjax.use_backend("cuda"):
        return routing.dispatch(x)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.versions
def test_over_devices():
    """A kernel on each device inside shard_map; XLA's gather where XLA divides the program."""
    mesh, x = mesh_of(i=2), jnp.ones((2 * T, D), H)
    logits = jnp.concatenate([LOGITS, LOGITS])

    def layer(x, logits):
        return dispatched(cutjax.route(logits, K), x)

    p = jax.P("i")
    inside = jax.shard_map(layer, mesh=mesh, in_specs=(p, p), out_specs=p)
    assert "sm90_gather" in lowered(inside, x, logits)
    x, logits = (jax.device_put(y, jax.NamedSharding(mesh, p)) for y in (x, logits))
    assert "sm90_gather" not in lowered(layer, x, logits)


def test_explained():
    x = aval((T, D))
    explain = cutjax.explain(lambda x: cutjax.moe(x, LOGITS, **WEIGHTS, backend="cuda"), platform="cuda")
    rows = {row.runs: row for row in explain(x).rows}
    row = rows["sm90_gather_6x4x4096"]
    assert (row.why, row.backend) == ("bulk copies", "cuda")
    assert str(row.choice.problem) == f"rows bf16[{T},{D}] -> [{T * K},{D}]"
    assert "rows of 4 bytes" in rows["XLA"].why  # of the weights
    auto = cutjax.explain(lambda x: cutjax.moe(x, LOGITS, **WEIGHTS), platform="cuda")(x).rows
    assert any(row.why.startswith("XLA's gather is predicted to take") for row in auto)


def test_the_primitive_is_no_error_under_cuda():
    assert dispatch_p in lowering.optional <= set(lowering.choosers)

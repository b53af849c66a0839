"""cutjax.cuda_kernel without a GPU: the tutorial, and the transformations, by reference and by plan."""

from __future__ import annotations

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_kernels import X, Y, axpy_reference, lowered, make, mlir_bytes, plan, simple

import cutjax
from cutjax.ops import cuda_launch
from cutjax.runtime import compiler, cubin

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "cuda-kernel.md"
needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))

# The tutorial.


@functools.cache
def tutorial() -> tuple[dict, list[str]]:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    for block in blocks:
        exec(block, names)
    return names, blocks


def test_the_tutorial_runs_and_has_40_lines():
    names, _ = tutorial()
    x, w = names["x"], names["w"]
    np.testing.assert_array_equal(names["y"], names["reference"](x, w, 1e-6))
    dx = jax.grad(lambda x: names["reference"](x, w, 1e-6).astype(jnp.float32).sum())(x)
    np.testing.assert_array_equal(names["dx"], dx)
    (launch,) = [block for block in tutorial()[1] if "def launch" in block]
    assert sum(bool(line.strip()) for line in (names["SOURCE"] + launch).splitlines()) <= 40


@needs_nvrtc
@pytest.mark.parametrize("n", [8, 200, 4096, 16384])
def test_the_tutorials_kernel_compiles_lean(n):
    names, _ = tutorial()
    x, w = jax.ShapeDtypeStruct((3, 5, n), jnp.bfloat16), jax.ShapeDtypeStruct((n,), jnp.bfloat16)
    lines = plan(lambda x, w: names["rms_norm"](x, w, eps=1e-6), x, w)
    threads = {8: 64, 200: 64, 4096: 256, 16384: 1024}[n]
    assert lines == [
        f"rms_norm grid=15x1x1 block={threads}x1x1 cluster=1x1x1 shared_bytes=0 blocks_per_sm=0",
        *(f"pointer buffer={i} byte_offset=0" for i in range(3)),
        "float32 1e-06",
        f"int64 {15 * n}",
        f"int64 {n}",
    ]
    constants = {"N": n, "THREADS": threads, "EACH": -(-n // (8 * threads))}
    headers = [*cuda_launch.HEADERS["sm90/atoms.cuh"], "sm90/atoms.cuh"]
    text = cuda_launch.sources.source("rms_norm", constants, [*headers, names["SOURCE"]])
    built = compiler.compile_source(text, name="rms_norm", arch="sm_90a")
    assert "warning" not in built.log
    assert (built.resources.spill_store_bytes, built.resources.stack_bytes) == (0, 0)  # the row is in registers


@needs_nvrtc
def test_the_tutorials_columns_of_pixels():
    names, _ = tutorial()
    np.testing.assert_array_equal(names["means"], names["mean_reference"](names["images"]))
    assert plan(names["mean"], names["images"]) == [
        "mean_3x3 grid=9x2x1 block=128x1x1 cluster=1x1x1 shared_bytes=0 blocks_per_sm=0",
        "tensor_map buffer=0 byte_offset=0 dtype=7 swizzle=0 l2_bytes=128 dims=40,14,10,2 strides=160,2240,22400 "
        "mode=im2col lower=-1,-1 upper=-1,-1 channels=32 pixels=32 extent_bytes=44800",
        "pointer buffer=1 byte_offset=0",
    ]


def test_where_the_tutorials_kernel_does_not_serve_the_reference_runs():
    names, _ = tutorial()
    x, w = jnp.ones((2, 12), jnp.bfloat16), jnp.ones(12, jnp.bfloat16)
    (row,) = cutjax.explain(lambda x: names["rms_norm"](x, w, eps=0.1), platform="cuda")(x).rows
    assert (row.runs, row.why) == ("XLA", "rows are of bfloat16, in multiples of 8, not 12 of bfloat16")
    assert "cutjax_launch" not in lowered(lambda x: names["rms_norm"](x, w, eps=0.1), x)
    with pytest.raises(NotImplementedError, match=r"no kernel for rms_norm.*multiples of 8"):
        lowered(lambda x: names["rms_norm"](x, w, eps=0.1, backend="cuda"), x)


# Transformations, on the reference.


@pytest.mark.versions
def test_values_jit_and_eager():
    axpy = make()
    expected = axpy_reference(X, Y, 2.0)
    np.testing.assert_array_equal(axpy(X, Y, a=2.0), expected)
    np.testing.assert_array_equal(jax.jit(axpy, static_argnames="a")(X, Y, a=2.0), expected)
    assert axpy.__name__ == "axpy"


def test_keywords_of_other_types_are_other_programs():
    kernel = simple(
        lambda x, y, a: cutjax.CudaLaunch(1, 3),
        out=lambda x, a: x,
        reference=lambda x, a: x + 1.0 * isinstance(a, float),
    )
    assert kernel(jnp.zeros(3), a=1)[0] == 0
    assert kernel(jnp.zeros(3), a=1.0)[0] == 1
    scaled = make()
    assert not jnp.signbit(scaled(jnp.ones(3), jnp.full(3, -0.0), a=0.0)).any()
    assert jnp.signbit(scaled(jnp.ones(3), jnp.full(3, -0.0), a=-0.0)).all()


def derivatives(fn, *args):
    jvp = jax.jvp(fn, args, tuple(jnp.ones_like(x) * (i + 2) for i, x in enumerate(args)))
    out, pull = jax.vjp(fn, *args)
    return jvp, pull(out * 3), jax.jvp(lambda *xs: jax.vjp(fn, *xs)[1](out), args, args)


@pytest.mark.versions
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_derivatives_are_the_references(wrap):
    source = 'extern "C" __global__ void gate(const float* x, const float* y, float* z) {}'
    launch, out = lambda x, y, z: cutjax.CudaLaunch(1, 32), lambda x, y: x
    gate = cutjax.cuda_kernel(source, "gate", out=out, launch=launch, reference=lambda x, y: jnp.sin(x) * y)
    functions = gate, lambda x, y: jnp.sin(x) * y
    got, expected = jax.jit(lambda x, y: [derivatives(wrap(f), x, y) for f in functions])(X, Y)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, expected)  # 2 ulp: other fusions


def test_an_operand_and_a_result_that_are_integers_have_no_derivative():
    def reference(x, i):
        return x * i.astype(x.dtype), i + 1

    kernel = simple(lambda x, i, y, j: cutjax.CudaLaunch(1, 32), out=lambda x, i: (x, i), reference=reference)
    i = jnp.arange(300)
    np.testing.assert_array_equal(jax.grad(lambda x: kernel(x, i)[0].sum())(X), i)
    assert jax.jvp(lambda x: kernel(x, i), (X,), (X,))[1][1].dtype == jax.dtypes.float0


@pytest.mark.versions
def test_a_jvp_rule():
    def jvp(primals, tangents, a):
        return axpy(*primals, a=a), 100.0 * tangents[0]

    axpy = make(jvp=jvp)
    f = functools.partial(axpy, a=2.0)
    np.testing.assert_array_equal(jax.jvp(f, (X, Y), (Y, X))[1], 100.0 * Y)
    np.testing.assert_array_equal(jax.vmap(jax.grad(lambda x, y: f(x, y).sum()))(X[None], Y[None]), 0 * X[None] + 100)


@pytest.mark.versions
def test_a_vjp_rule():
    def forward(x, y, a):
        return axpy(x, y, a=a), x

    def backward(x, g, a):
        return 10.0 * a * g, x

    axpy = make(vjp=(forward, backward), reference=None)
    f = functools.partial(axpy, a=2.0)
    avals = jax.eval_shape(jax.vmap(jax.grad(lambda x, y: f(x, y).sum(), (0, 1))), X[None], Y[None])
    assert [x.shape for x in avals] == [(1, 300)] * 2
    axpy = make(vjp=(forward, backward))
    dx, dy = jax.grad(lambda x, y: axpy(x, y, a=2.0).sum(), (0, 1))(X, Y)
    np.testing.assert_array_equal(dx, np.full(300, 20.0))
    np.testing.assert_array_equal(dy, X)


VMAPS = [  # axes of the vmaps, the innermost last, and shapes of two operands, of five elements each example
    ([(0, 0)], (4, 5), (4, 5)),
    ([(1, None)], (5, 4), (5,)),
    ([(None, -1)], (5,), (5, 4)),
    ([(0, 0), (0, 0)], (2, 3, 5), (2, 3, 5)),
    ([(0, None), (None, 0)], (2, 5), (3, 5)),
    ([(0, 1), (1, None)], (2, 5, 3), (5, 2)),
    ([(None, 0), (None, 0), (0, None)], (4, 5), (2, 3, 5)),
    ([(0, None), (0, None)], (2, 1, 5), (5,)),
]


@pytest.mark.versions
@pytest.mark.parametrize("vmap", ["grid", "reference"])
@pytest.mark.parametrize(("axes", "x", "y"), VMAPS, ids=str)
def test_vmap(axes, x, y, vmap):
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (x, y))
    f, g = functools.partial(make(vmap=vmap), a=2.0), functools.partial(axpy_reference, a=2.0)
    for at in reversed(axes):
        f, g = jax.vmap(f, at), jax.vmap(g, at)

    def take(h):
        return lambda x, y: (h(x, y), jax.grad(lambda x, y: (h(x, y) ** 2).sum(), (0, 1))(x, y))

    got, expected = jax.jit(lambda x, y: [take(h)(x, y) for h in (f, g)])(x, y)
    np.testing.assert_array_equal(got[0], expected[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, expected)  # sums in another order


@needs_nvrtc
def test_vmap_by_the_grid_is_one_launch_and_copies_no_shared_operand():
    f = jax.vmap(functools.partial(make(), a=2.0), (0, None))
    x, y = jnp.ones((7, 300)), jnp.ones(300)
    assert plan(f, x, y) == [
        "axpy grid=3x1x7 block=128x1x1 cluster=1x1x1 shared_bytes=0 blocks_per_sm=0",
        *(f"pointer buffer={i} byte_offset=0" for i in range(3)),
        "float32 2",
        "int32 300",
        "int64 300",
        "int64 0",
    ]
    assert "(tensor<7x300xf32>, tensor<1x300xf32>) -> tensor<7x300xf32>" in lowered(f, x, y)
    nested = jax.vmap(f, (0, 0))  # y is shared by the inner alone
    assert plan(nested, x[None, :, :].repeat(2, 0), y[None].repeat(2, 0))[0].startswith("axpy grid=3x1x14 ")
    many = jnp.ones((65536, 1))
    (row,) = cutjax.explain(f, platform="cuda")(many, many[0]).rows
    assert (row.runs, row.why) == ("XLA", "vmap of 65536 examples: the z axis of a grid has at most 65535")


def test_vmap_by_the_reference_launches_nothing_and_says_so():
    f = jax.vmap(functools.partial(make(vmap="reference"), a=2.0))
    x = jnp.ones((7, 300))
    (row,) = cutjax.explain(f, platform="cuda")(x, x).rows
    assert (row.runs, row.why) == ("XLA", "vmap='reference': the reference runs under jax.vmap")
    with cutjax.use_backend("cuda"), pytest.raises(NotImplementedError, match=r"the reference runs under jax\.vmap"):
        lowered(f, x, x)


@pytest.mark.versions
@needs_nvrtc
def test_scan_and_shard_map():
    axpy = functools.partial(make(), a=2.0)

    def loop(x, ys):
        return jax.lax.scan(lambda x, y: (axpy(x, y), None), x, ys)[0]

    np.testing.assert_array_equal(loop(X, jnp.stack([Y, Y])), axpy_reference(axpy_reference(X, Y, 2.0), Y, 2.0))
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    f = jax.shard_map(axpy, mesh=mesh, in_specs=(jax.P("i"), jax.P()), out_specs=jax.P("i"))
    np.testing.assert_array_equal(jax.jit(f)(X, Y[:75]), axpy_reference(X, jnp.tile(Y[:75], 4), 2.0))
    assert "cutjax_launch" in lowered(f, X, Y[:75])
    # The rule's cotangent of y is each device's; that of y itself, which they share, is the sum.
    ruled = functools.partial(make(vjp=(lambda x, y, a: (axpy(x, y), x), lambda x, g, a: (a * g, g * x))), a=2.0)
    inside = jax.shard_map(ruled, mesh=mesh, in_specs=(jax.P("i"), jax.P()), out_specs=jax.P("i"))
    dx, dy = jax.jit(jax.grad(lambda x, y: inside(x, y).sum(), (0, 1)))(X, Y[:75])
    np.testing.assert_array_equal(dx, np.full(300, 2.0))
    np.testing.assert_array_equal(dy, X.reshape(4, 75).sum(0))
    divided = jax.device_put(X, jax.NamedSharding(mesh, jax.P("i")))
    assert "cutjax_launch" not in lowered(lambda x, y: axpy(x, y), divided, Y)  # XLA cannot divide a kernel


@pytest.mark.versions
@needs_nvrtc
def test_export():
    f = jax.jit(functools.partial(make(), a=2.0))
    exempt = [jax.export.DisabledSafetyCheck.custom_call("cutjax_launch")]
    exported = jax.export.export(f, platforms=("cpu", "cuda"), disabled_checks=exempt)(X, Y)
    restored = jax.export.deserialize(bytearray(exported.serialize()))
    np.testing.assert_array_equal(restored.call(X, Y), axpy_reference(X, Y, 2.0))
    image = mlir_bytes(restored.mlir_module(), "cubin")
    assert cubin.kernels(image) == {"axpy": (8, 8, 8, 4, 4, 8, 8)}

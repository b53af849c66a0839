"""cutjax.cuda_kernel without a GPU: launches of every kind, and the errors of everything a user may give it."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_kernels import X, Y, lowered, make, plan, simple

import cutjax
from cutjax.ops import cuda_launch
from cutjax.runtime import compiler
from cutjax.runtime.tensor_map import Im2col

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))


@needs_nvrtc
def test_cluster_shared_memory_tensor_map_and_scalars():
    source = """extern "C" __global__ void tile(const __grid_constant__ TensorMap map, float* y, int i, unsigned u,
                  long long l, float f, double d, const float* at) {
                y[0] = i + u + l + f + d + map.opaque[0] + *at;
              }"""

    def launch(x, y):
        return cutjax.CudaLaunch(
            grid=(4, 2),
            block=[32, 4],
            cluster=2,
            shared_bytes=100_000,
            blocks_per_sm=1,
            arguments=(
                x.tensor_map((16, 32), swizzle=128, l2_bytes=256),
                y,
                *(-1, np.uint32(2**32 - 1), np.int64(2**40), 0.5, np.float64(0.25)),
                x.pointer(3),
            ),
        )

    f = cutjax.cuda_kernel(source, "tile", out=lambda x: x, launch=launch, headers=("common/math.cuh",))
    x = jax.ShapeDtypeStruct((2, 64, 96), jnp.float32)
    assert plan(f, x) == [
        "tile grid=4x2x1 block=32x4x1 cluster=2x1x1 shared_bytes=100000 blocks_per_sm=1",
        "tensor_map buffer=0 byte_offset=0 dtype=7 swizzle=128 l2_bytes=256 dims=96,64,2 strides=384,24576 box=32,16,1 "
        "extent_bytes=49152",
        "pointer buffer=1 byte_offset=0",
        "int32 -1",
        "int32 -1",
        "int64 1099511627776",
        "float32 0.5",
        "float64 0.25",
        "pointer buffer=0 byte_offset=12",
    ]
    mapped = cuda_launch.Buffer((64, 96), np.dtype("f4"), 0, 5, np.int64(6144), batch_axis=True).tensor_map((16, 32))
    assert (mapped.dims, mapped.strides, mapped.box) == ((96, 64, 5), (384, 24576), (32, 16, 1))
    shared = cuda_launch.Buffer((3,), np.dtype("f4"), 0, batch_axis=True).tensor_map((4,))
    assert (shared.dims, shared.strides, shared.box) == ((3, 1), (16,), (4, 1))


def buffer(*shape, dtype="f4", **changes):
    return cuda_launch.Buffer(shape, np.dtype(dtype), 0, **changes)


def test_tensor_maps_of_every_rank():
    for rank in range(1, 6):
        made = buffer(*range(8, 8 + 4 * rank, 4)).tensor_map((4,), swizzle=0)
        assert (len(made.dims), made.dims[0], made.box) == (rank, 4 + 4 * rank, (4, *[1] * (rank - 1)))
        assert made.strides == tuple(4 * math.prod(made.dims[: i + 1]) for i in range(rank - 1))
    seen = buffer(2, 3, 4, 5, 6, 8).tensor_map((4, 8), shape=(-(-120 // 5), 5, 1, 48), swizzle=0)
    assert (seen.dims, seen.strides, seen.box) == ((48, 1, 5, 24), (192, 192, 960), (8, 4, 1, 1))
    with pytest.raises(ValueError, match="rank 1 to 5, not 6"):
        buffer(2, 3, 4, 5, 6, 8).tensor_map((8,))
    with pytest.raises(ValueError, match=r"of shape \(4, 8\) cannot be seen as one of shape \(4, 4\)"):
        buffer(4, 8).tensor_map((4,), shape=(4, 4))


def test_tensor_maps_with_element_strides_and_other_elements():
    made = buffer(6, 64, 96, batch=5, batch_axis=True).tensor_map((16, 32), element_strides=(2, 1), fill="nan")
    assert (made.dims, made.box, made.element_strides) == ((96, 64, 6, 5), (32, 16, 1, 1), (1, 2, 1, 1))
    assert made.fill == "nan"
    assert buffer(64, 96).tensor_map((16, 32), element="tfloat32").tma_dtype == 11
    packed = buffer(64, 192, dtype="u1").tensor_map((8, 128), element="16u6_align16b")
    assert (packed.dims, packed.strides, packed.box) == ((256, 64), (192,), (128, 8))
    halves = buffer(64, 256, dtype=jnp.int4, batch=2, batch_axis=True).tensor_map((8, 128), element="16u4_align8b")
    assert (halves.dims, halves.strides) == ((256, 64, 2), (128, 8192))
    with pytest.raises(ValueError, match="rows of 100 uint8 are no whole number of 16u6_align16b"):
        buffer(64, 100, dtype="u1").tensor_map((8, 128), element="16u6_align16b")
    with pytest.raises(ValueError, match=r"element strides \(1, 1, 1\) do not fit an array of shape \(64, 96\)"):
        buffer(64, 96).tensor_map((16, 32), element_strides=(1, 1, 1))


def test_im2col_maps():
    images = buffer(2, 5, 10, 14, 40, dtype="f2", batch=3, batch_axis=True)
    made = images.im2col_map((0, -1, -2), (-3, 1, 2), channels=32, pixels=64, pixel_strides=(1, 2, 3))
    assert (made.dims, made.strides) == ((40, 14, 10, 5, 6), (80, 1120, 11200, 56000))  # of all examples
    assert made.box == Im2col((-2, -1, 0), (2, 1, -3), 32, 64)
    assert made.element_strides == (1, 3, 2, 1, 1)
    row = images.im2col_map((1,), (-2,), channels=32, pixels=64, wide="w", swizzle=64)
    assert row.box == Im2col((1,), (-2,), 32, 64, "w")
    for shape, strides, message in (
        ((8, 8), (), r"im2col is of arrays of 3 to 5 axes, n, d, h, w and c, not of shape \(8, 8\)"),
        ((8, 8, 8), (1, 2), r"an image has 1 axes, got pixel strides \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            buffer(*shape).im2col_map((0,), (0,), 8, 8, pixel_strides=strides)


@needs_nvrtc
def test_launches_one_after_the_other():
    source = """extern "C" __global__ void half(const float* x, float* sums) { sums[blockIdx.x] = x[blockIdx.x]; }
                extern "C" __global__ void whole(const float* sums, float* y) { y[0] = sums[0] + sums[1]; }"""

    def launch(x, sums, y):
        return (
            cutjax.CudaLaunch(2, 1, arguments=(x, sums), entry="half"),
            cutjax.CudaLaunch(1, 1, arguments=(sums, y)),
        )

    def out(x):
        return jax.ShapeDtypeStruct((2,), x.dtype), jax.ShapeDtypeStruct((), x.dtype)

    f = cutjax.cuda_kernel(source, "whole", out=out, launch=launch)
    lines = plan(lambda x: f(x)[1], X[:2])
    assert [line.split()[0] for line in lines] == ["half", "pointer", "pointer", "whole", "pointer", "pointer"]
    assert [line.split()[1] for line in lines if "pointer" in line] == [f"buffer={i}" for i in (0, 1, 1, 2)]


@needs_nvrtc
def test_no_operand_and_several_results():
    source = 'extern "C" __global__ void count(int* y, float* z) { y[threadIdx.x] = z[threadIdx.x] = threadIdx.x; }'
    shapes = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.float32)
    f = cutjax.cuda_kernel(
        source,
        "count",
        out=lambda: shapes,
        launch=lambda y, z: cutjax.CudaLaunch(1, 8),
        reference=lambda: (jnp.arange(8, dtype=jnp.int32), jnp.arange(8.0)),
    )
    assert [x.tolist() for x in f()] == [list(range(8))] * 2
    assert len(plan(f)) == 3


def test_empty_results_need_no_kernel():
    for reference in (None, jnp.copy):
        f = simple(lambda x, y: cutjax.CudaLaunch(0, 0), reference=reference)
        assert f(jnp.zeros((0, 3))).shape == (0, 3)
        assert "cutjax_launch" not in lowered(f, jnp.zeros((0, 3)))


def test_explain_shows_it():
    (row,) = cutjax.explain(simple(name="copied"), platform="cuda")(X).rows
    assert (row.runs, str(row.choice.problem)) == ("copied", "copied(f32[300]) -> f32[300]")
    f = simple()
    (row,) = cutjax.explain(lambda x: f(f(x)), platform="cpu")(X).rows
    assert (row.count, row.runs, row.kernel) == (2, "XLA", "copy")


# Errors.


@needs_nvrtc
def test_a_compile_error_names_the_users_line(tmp_path):
    broken = '\n\nextern "C" __global__ void copy(const float* x, float* y) {\n  y[0] = nonsense;\n}'
    with pytest.raises(compiler.CompileError, match=r'copied\.cu\(4\): error: identifier "nonsense" is undefined'):
        lowered(simple(source=broken, name="copied"), X)
    path = tmp_path / "mine.cu"
    path.write_text(broken)
    with pytest.raises(compiler.CompileError, match=r"mine\.cu\(4\): error"):
        lowered(simple(source=path), X)


@needs_nvrtc
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("__global__ void copy(float* x, float* y) {}", r'no kernel \'copy\' .*_Z4copyPfS_\): declare it extern "C"'),
        ("__device__ void copy(float* x, float* y) {}", "no kernel 'copy' .it has no kernel."),
        ('extern "C" __global__ void copy(float* x) {}', "takes 1 parameters of 8 bytes, the launch passes 2"),
        ('extern "C" __global__ void copy() {}', "takes no parameter, the launch passes 2 parameters of 8, 8 bytes"),
        ('extern "C" __global__ void copy(float* x, float* y, int n) {}', "takes 3 parameters of 8, 8, 4 bytes"),
    ],
)
def test_a_kernel_unlike_its_launch_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        lowered(simple(source=source), X)


@pytest.mark.parametrize(
    ("launch", "error", "message"),
    [
        (lambda x, y: None, TypeError, "copy: launch must return a cutjax.CudaLaunch or a tuple of them, got None"),
        (lambda x, y: cutjax.CudaLaunch(0, 32), ValueError, "copy: launch: grid (0, 1, 1) is not within 1..("),
        (lambda x, y: cutjax.CudaLaunch((1, 65536), 32), ValueError, "grid (1, 65536, 1) is not within"),
        (lambda x, y: cutjax.CudaLaunch(1, 1025), ValueError, "block (1025, 1, 1) is not within"),
        (lambda x, y: cutjax.CudaLaunch(1, 2.0), TypeError, "block must be an int or up to three, got 2.0"),
        (lambda x, y: cutjax.CudaLaunch((1, 1, 1, 1), 32), ValueError, "grid must be an int or up to three"),
        (lambda x, y: cutjax.CudaLaunch(3, 32, cluster=2), ValueError, "is not a multiple of cluster (2, 1, 1)"),
        (lambda x, y: cutjax.CudaLaunch(1, 32, shared_bytes=-1), ValueError, "shared_bytes -1"),
        (lambda x, y: cutjax.CudaLaunch(1, 32, arguments=(x, X)), TypeError, "an array is an operand of the function"),
        (lambda x, y: cutjax.CudaLaunch(1, 32, arguments=(x, "1")), TypeError, "argument 1 of the launch cannot be of"),
        (lambda x, y: cutjax.CudaLaunch(1, 32, arguments=(2**31,)), ValueError, "argument 2147483648 does not"),
        (lambda x, y: cutjax.CudaLaunch(1, 32, arguments=(-(2**31) - 1,)), ValueError, "fit a C++ int; np.uint32 and"),
        (lambda x, y: cutjax.CudaLaunch(1, 32, arguments=(True,)), TypeError, "cannot be of type bool"),
        (lambda x, y: cutjax.CudaLaunch(1, 32, constants={"N": 0.5}), TypeError, "got 'N': 0.5"),
        (lambda x, y: cutjax.CudaLaunch(1, 32, constants={"N": 2**31}), ValueError, "N = 2147483648 does not fit"),
        (lambda x, y: cutjax.CudaLaunch(1, 32, entry="other"), ValueError, "no kernel 'other' in the text of copy.cu"),
        (lambda x, y: (), ValueError, "a call has 1 to 16 launches, not 0"),
        (lambda x, y: cutjax.CudaLaunch(1, 32, arguments=(x.tensor_map((1, 8)),)), ValueError, "does not fit an array"),
        (lambda x, y: cutjax.CudaLaunch(1, 32, arguments=(x.tensor_map((3,)),)), ValueError, "not a multiple of 16"),
        (lambda x: cutjax.CudaLaunch(1, 32), TypeError, "takes 1 positional argument but 2 were given"),
    ],
)
def test_a_launch_is_checked_where_the_function_is_called(launch, error, message):
    with pytest.raises(error, match=re.escape(message)):
        simple(launch)(X)


def test_the_grid_of_a_vmap_is_flat():
    with pytest.raises(ValueError, match=r"the grid is \(1, 1, 2\), but where vmap='grid' its z axis"):
        simple(lambda x, y: cutjax.CudaLaunch((1, 1, 2), 32), vmap="grid")(X)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f(X), TypeError, "axpy: missing a required argument: 'y': out takes (x, y, a), got 1 arrays, a="),
        (lambda f: f(X, X, X), TypeError, "axpy: multiple values for argument 'a': out takes (x, y, a), got 3 arrays"),
        (lambda f: f(X, Y, b=1), TypeError, "axpy: missing a required argument: 'a'"),
        (lambda f: f(X, [1.0]), TypeError, "axpy: operand 1 must be an array, got list"),
        (lambda f: f(X, jax.random.key(0)), TypeError, "axpy: operand 1 must be an array of numbers, got dtype key"),
        (lambda f: f(X, Y, a=X), TypeError, "axpy: keyword arguments are hashable constants"),
        (lambda f: f(X, Y, a=1.0, backend="gpu"), ValueError, "axpy: unknown backend 'gpu'"),
    ],
)
def test_a_call_is_checked(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(lambda *args, **keywords: make()(*args, **({"a": 1.0} if "b" not in keywords else {}) | keywords))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"entry": "saxpy"}, ValueError, "saxpy: no kernel 'saxpy' in the text of saxpy.cu"),
        ({"entry": "two words"}, ValueError, "entry must be an identifier"),
        ({"name": 'a"b'}, ValueError, "name must be an identifier"),
        ({"source": 3}, TypeError, "source must be text or a path, got int"),
        ({"out": None}, TypeError, "out must be a function"),
        ({"reference": 3}, TypeError, "reference must be a function, got int"),
        ({"vjp": abs}, TypeError, "vjp must be a tuple of two functions"),
        ({"vjp": (abs, abs), "jvp": abs}, ValueError, "jvp and vjp are both given"),
        ({"vmap": "auto"}, ValueError, "unknown vmap 'auto', expected one of ('reference', 'grid')"),
        ({"headers": ("cuda_bf16.h",)}, ValueError, "no header 'cuda_bf16.h', there are common/atoms.cuh, sm90/"),
        ({"headers": "sm90/atoms.cuh"}, TypeError, "write headers=('sm90/atoms.cuh',)"),
    ],
)
def test_an_unknown_argument_is_refused(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": lambda x: 3}, "out must return a jax.ShapeDtypeStruct or a tuple of them, got 3"),
        ({"out": lambda x: ()}, "out returns no result"),
        ({"reference": lambda x: x[1:]}, "copy: out says float32[300], the reference returns float32[299]"),
        ({"reference": lambda x: (x, x)}, "the reference returns float32[300], float32[300]"),
        ({"reference": lambda x: x.astype(int)}, "the reference returns int32[300]"),
    ],
)
def test_results_are_checked(changes, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        simple(**changes)(X)


def test_without_a_reference_every_other_way_is_an_error_that_says_so():
    f = simple(reference=None)
    with pytest.raises(NotImplementedError, match="copy: the program is compiled for a platform other than CUDA, and"):
        f(X)
    with pytest.raises(NotImplementedError, match="backend 'xla' runs no kernel, and there is no reference="):
        lowered(functools.partial(f, backend="xla"), X)
    with pytest.raises(NotImplementedError, match="copy: it has no derivative; give reference=, jvp= or vjp="):
        jax.make_jaxpr(jax.grad(lambda x: f(x).sum()))(X)
    with pytest.raises(NotImplementedError, match=r"jax.vmap needs reference= or vmap='grid'"):
        jax.make_jaxpr(jax.vmap(f))(X[None])

    def launch(x, y):
        raise NotImplementedError("only on Tuesdays")

    with pytest.raises(NotImplementedError, match="copy: only on Tuesdays, and there is no reference="):
        lowered(simple(launch, reference=None), X)


@needs_nvrtc
def test_backends():
    f = simple()
    assert "cutjax_launch" in lowered(functools.partial(f, backend="cuda"), X)
    assert "cutjax_launch" not in lowered(functools.partial(f, backend="xla"), X)
    with cutjax.use_backend("cuda"), pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        f(X)


def test_symbolic_and_divided_shapes_are_refused():
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(NotImplementedError, match="operand 0 has a symbolic shape"):
        jax.export.export(jax.jit(simple()))(jax.ShapeDtypeStruct((n,), jnp.float32))
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="divided over explicit mesh axes"):
        simple()(jax.device_put(X, jax.P("i")))


@needs_nvrtc
@pytest.mark.parametrize("header", cuda_launch.HEADERS)
def test_a_header_stands_with_those_it_needs(header):
    assert "cutjax_launch" in lowered(simple(headers=(header,)), X)

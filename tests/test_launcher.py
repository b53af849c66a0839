"""The native launcher, run by XLA on the CPU against a libcuda that only records (tests/native/fake_cuda.cc)."""

from __future__ import annotations

import concurrent.futures
import ctypes
import gc
import json
import pathlib
import shutil
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cutjax import _ffi
from cutjax.runtime.launch import Int32, Int64, Launch, Pointer, TensorMap

ROOT = pathlib.Path(__file__).parent.parent
TARGET = "cutjax_rehearsal"


def fake_cubin(payload: bytes) -> bytes:
    return b"FAKE" + struct.pack("<I", 8 + len(payload)) + payload


CUBIN = fake_cubin(b"code")  # the fixture `fake` gives each test one of its own, since a process loads a cubin once
MAP = TensorMap(0, jnp.dtype(jnp.float32), (64, 32), (256,), (32, 16), byte_offset=0)


def make_launch(**changes) -> Launch:
    fields = {"kernel": "kernel_mpil", "cubin": CUBIN, "grid": (1000, 3, 2), "block": (384, 1, 1)}
    params = (MAP, Pointer(1, 16), Int32(-7), Int64(-(2**40)))
    return Launch(**({**fields, "cluster": (1, 1, 1), "shared_bytes": 1000, "params": params} | changes))


class Fake:
    """The stand-in driver as a test sees it."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        library.fake_log.restype = ctypes.c_char_p

    def calls(self, name: str | None = None) -> list[dict]:
        lines = [json.loads(line) for line in self.library.fake_log().decode().splitlines()]
        return [line for line in lines if name in (None, line["call"])]

    def fail(self, call: str, status: int) -> None:
        self.library.fake_fail(call.encode(), status)


def register_on_cpu() -> None:
    jax.devices("cpu")  # what waits for the CPU is registered targets first, types second, and XLA refuses that order
    jax.ffi.register_ffi_type(f"{TARGET}_state", _ffi.state_type(), platform="cpu")
    jax.ffi.register_ffi_target(TARGET, _ffi.rehearsal_handlers(), platform="cpu")


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to build the stand-in libcuda")
    found = subprocess.run(
        [sys.executable, ROOT / "ffi/launcher/find_cuda_h.py"], capture_output=True, text=True, check=True
    )
    includes = [f"-I{folder}" for folder in found.stdout.strip().split(";") if folder]
    if not includes:
        pytest.skip("needs cuda.h: pip install nvidia-cuda-runtime")
    path = tmp_path_factory.mktemp("native") / "libfakecuda.so"
    source = ROOT / "tests/native/fake_cuda.cc"
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", *includes, source, "-o", path], check=True)
    _ffi.load_driver(str(path))
    register_on_cpu()
    return ctypes.CDLL(str(path))


@pytest.fixture
def fake(fake_library, request):
    global CUBIN
    CUBIN = fake_cubin(bytes(range(256)) + request.node.name.encode())
    jax.clear_caches()
    gc.collect()
    fake_library.fake_reset()
    return Fake(fake_library)


def caller(launch: Launch):
    """A jitted function of one f32[32, 64] that launches with its argument and one result as buffers."""
    attributes = launch.attributes()

    @jax.jit
    def call(x):
        return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((32, 64), jnp.float32), has_side_effect=True)(
            x, **attributes
        )

    return call


X = np.zeros((32, 64), np.float32)


def test_a_launch_passes_every_parameter(fake):
    x = jnp.asarray(X)
    result = caller(make_launch())(x).block_until_ready()
    (launched,) = fake.calls("cuLaunchKernelEx")
    tensor_map = {"dtype": 7, "swizzle": 3, "l2": 2, "dims": [64, 32], "strides": [256], "box": [32, 16]}
    assert launched == {
        "call": "cuLaunchKernelEx",
        "kernel": "kernel_mpil",
        "grid": [1000, 3, 2],
        "block": [384, 1, 1],
        "cluster": [0, 0, 0],
        "shared_bytes": 1000,
        "params": [
            {"address": x.unsafe_buffer_pointer()} | tensor_map,
            result.unsafe_buffer_pointer() + 16,
            -7,
            -(2**40),
        ],
    }
    assert fake.calls("cuKernelSetAttribute") == [{"call": "cuKernelSetAttribute", "value": 1000}]
    assert len(fake.calls("push")) == len(fake.calls("pop")) > 0
    assert len(fake.calls("relax")) == len(fake.calls("restore")) == 1


def test_the_cubin_arrives_whole(fake):
    caller(make_launch())(X).block_until_ready()
    (loaded,) = fake.calls("cuLibraryLoadData")
    assert bytes.fromhex(loaded["cubin"]) == CUBIN


def test_the_cubin_survives_export(fake):
    exported = jax.export.export(
        caller(make_launch()),
        platforms=["cpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(TARGET)],
    )(jax.ShapeDtypeStruct(X.shape, X.dtype))
    jax.block_until_ready(jax.export.deserialize(exported.serialize()).call(X))
    (loaded,) = fake.calls("cuLibraryLoadData")
    assert bytes.fromhex(loaded["cubin"]) == CUBIN


@pytest.mark.parametrize(
    ("grid", "cluster", "blocks_per_sm", "expected"),
    [
        ((1000, 1, 1), (1, 1, 1), 1, 132),
        ((1000, 1, 1), (1, 1, 1), 2, 264),
        ((100, 1, 1), (2, 1, 1), 1, 100),
        ((1000, 1, 1), (8, 1, 1), 1, 128),  # 132 is not a multiple of 8
        ((1000, 1, 1), (2, 1, 1), 0, 1000),
    ],
)
def test_a_persistent_grid_fits_the_device_in_whole_clusters(fake, grid, cluster, blocks_per_sm, expected):
    caller(make_launch(grid=grid, cluster=cluster, blocks_per_sm=blocks_per_sm))(X).block_until_ready()
    (launched,) = fake.calls("cuLaunchKernelEx")
    assert launched["grid"] == [expected, 1, 1]
    assert launched["cluster"] == ([0, 0, 0] if cluster == (1, 1, 1) else list(cluster))


def test_addresses_are_replaced_and_nothing_is_prepared_twice(fake):
    call = caller(make_launch())
    arguments = [jnp.asarray(X + i) for i in range(3)]
    results = [call(x).block_until_ready() for x in arguments]
    launched = fake.calls("cuLaunchKernelEx")
    assert [c["params"][0]["address"] for c in launched] == [x.unsafe_buffer_pointer() for x in arguments]
    assert [c["params"][1] for c in launched] == [r.unsafe_buffer_pointer() + 16 for r in results]
    assert len(fake.calls("cuTensorMapEncodeTiled")) == 1
    assert len(fake.calls("cuKernelSetAttribute")) == 1


def test_one_executable_on_many_threads(fake):
    call = caller(make_launch())
    x = jnp.asarray(X)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(lambda: call(x).block_until_ready()) for _ in range(200)]:
            future.result()
    launched = fake.calls("cuLaunchKernelEx")
    assert len(launched) == 200
    assert {c["params"][0]["address"] for c in launched} == {x.unsafe_buffer_pointer()}
    assert len(fake.calls("cuTensorMapEncodeTiled")) == 1


def test_each_device_is_prepared_once(fake):
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip("needs several CPU devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    mesh = jax.make_mesh((len(devices),), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    spec = jax.sharding.PartitionSpec("d")
    inner = caller(make_launch())
    call = jax.jit(jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(np.zeros((32 * len(devices), 64), np.float32), jax.sharding.NamedSharding(mesh, spec))
    for _ in range(3):
        call(x).block_until_ready()
    launched = fake.calls("cuLaunchKernelEx")
    shards = {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
    assert len(launched) == 3 * len(devices)
    assert {c["params"][0]["address"] for c in launched} == shards
    assert len(fake.calls("cuTensorMapEncodeTiled")) == len(devices)


def test_a_cubin_is_loaded_once(fake):
    first, second = caller(make_launch()), caller(make_launch(grid=(7, 1, 1)))
    other = caller(make_launch(cubin=fake_cubin(b"other")))
    for call in (first, second, other):
        call(X).block_until_ready()
    assert len(fake.calls("cuLibraryLoadData")) == 2
    del first, second, other, call
    jax.clear_caches()
    gc.collect()
    caller(make_launch())(X).block_until_ready()
    assert len(fake.calls("cuLibraryLoadData")) == 2


def expect_error(launch: Launch, *parts: str, x=X) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        caller(launch)(x).block_until_ready()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "call",
    ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "cuTensorMapEncodeTiled", "cuLaunchKernelEx"],
)
def test_a_driver_failure_is_an_error_that_says_where(fake, call):
    fake.fail(call, 719)
    expect_error(
        make_launch(),
        "ffi/launcher/launcher.cc:",
        f"{call}(",
        "CUDA_ERROR_FAKE (the test asked for it)",
        "kernel kernel_mpil",
    )
    assert len(fake.calls("push")) == len(fake.calls("pop"))
    assert len(fake.calls("relax")) == len(fake.calls("restore"))


def test_a_failed_preparation_is_tried_again(fake):
    call = caller(make_launch())
    fake.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(jax.errors.JaxRuntimeError):
        call(X).block_until_ready()
    call(X).block_until_ready()
    assert len(fake.calls("cuLaunchKernelEx")) == 1


def test_bad_code_and_a_missing_kernel(fake):
    expect_error(make_launch(cubin=b"not a cubin"), "cuLibraryLoadData")
    expect_error(make_launch(kernel="missing"), "cuLibraryGetKernel", "kernel missing")


def test_a_plan_beyond_the_buffers_is_refused(fake):
    too_many = make_launch(params=(MAP, Pointer(2), Int32(0), Int64(0)))
    expect_error(too_many, "the plan uses 3 buffers, the call has 1 arguments and 1 results")
    wide = TensorMap(0, jnp.dtype(jnp.float32), (64, 33), (256,), (32, 16))
    expect_error(
        make_launch(params=(wide, Pointer(1), Int32(0), Int64(0))),
        "a tensor map reaches 8448 bytes from offset 0 into buffer 0 of 8192 bytes",
    )
    expect_error(make_launch(params=(MAP, Pointer(1, 8193), Int32(0), Int64(0))), "a pointer reaches 0 bytes")


def test_a_plan_unlike_the_kernels_signature_is_refused(fake):
    expect_error(make_launch(kernel="kernel_mpi"), "it takes 3 parameters, the plan passes 4")
    expect_error(make_launch(kernel="kernel_mpll"), "parameter 2 has 8 bytes, the plan passes 4")


def test_a_malformed_plan_is_an_error_of_the_call(fake):
    attributes = make_launch().attributes() | {"grid": np.array([0, 1, 1], np.int64)}
    call = jax.jit(lambda x: jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, **attributes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"grid\[0\] is 0"):
        call(X).block_until_ready()


def test_the_cuda_handlers_register_and_say_that_a_cpu_has_no_stream(fake):
    jax.ffi.register_ffi_target("cutjax_launch_on_cpu", _ffi.handlers(), platform="cpu")
    attributes = make_launch().attributes()
    result = jax.ShapeDtypeStruct(X.shape, X.dtype)
    call = jax.jit(lambda x: jax.ffi.ffi_call("cutjax_launch_on_cpu", result)(x, **attributes))
    with pytest.raises(jax.errors.JaxRuntimeError, match="stream"):
        call(X).block_until_ready()


def test_no_driver_is_an_error_of_the_call():
    program = f"""
import jax, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import test_launcher as t
t._ffi.load_driver("/nonexistent/libcuda.so.1")
t.register_on_cpu()
try:
    t.caller(t.make_launch())(t.X).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=1800)
    assert "cannot open the NVIDIA driver /nonexistent/libcuda.so.1" in done.stdout

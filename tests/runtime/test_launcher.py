"""The native launcher, run by XLA on the CPU against a libcuda that only records (tests/native/fake_cuda.cc)."""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import gc
import pathlib
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_driver import Fake, build, fake_cubin
from tensor_maps import ENCODED

from cutjax import _ffi
from cutjax.runtime.launch import FORMAT, Call, Float32, Float64, Int32, Int64, Launch, Pointer, TensorMap

pytestmark = pytest.mark.versions

ROOT = pathlib.Path(__file__).parents[2]
TARGET = "cutjax_rehearsal"


CUBIN = fake_cubin(b"code")  # the fixture `fake` gives each test one of its own, since a process loads a cubin once
MAP, MAP_ENCODED = ENCODED["plain"]
CALLS = dict.fromkeys(("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "cuLaunchKernelEx"), "plain")
CALLS |= {f"cuTensorMapEncode{x}": x.lower() for x in ("Tiled", "Im2col", "Im2colWide")}


def make_launch(**changes) -> Launch:
    fields = {"kernel": "kernel_mpil", "cubin": CUBIN, "grid": (1000, 3, 2), "block": (384, 1, 1)}
    params = (MAP, Pointer(1, 16), Int32(-7), Int64(-(2**40)))
    return Launch(**({**fields, "cluster": (1, 1, 1), "shared_bytes": 1000, "params": params} | changes))


def register_on_cpu() -> None:
    jax.devices("cpu")  # what waits for the CPU is registered targets first, types second, and XLA refuses that order
    jax.ffi.register_ffi_type(f"{TARGET}_state", _ffi.state_type(), platform="cpu")
    jax.ffi.register_ffi_target(TARGET, _ffi.rehearsal_handlers(), platform="cpu")


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory):
    path = build(tmp_path_factory.mktemp("native"))
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


def caller(*launches: Launch, **changes):
    """A jitted function of one f32[32, 64] that launches with its argument and one result as buffers."""
    attributes = Call(launches).attributes() | changes

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
    assert launched == {
        "call": "cuLaunchKernelEx",
        "kernel": "kernel_mpil",
        "grid": [1000, 3, 2],
        "block": [384, 1, 1],
        "cluster": [0, 0, 0],
        "shared_bytes": 1000,
        "params": [
            {"address": x.unsafe_buffer_pointer()} | MAP_ENCODED,
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


@pytest.mark.parametrize("kind", ENCODED)
def test_every_kind_of_tensor_map_reaches_the_driver(fake, kind):
    tensor_map, encoded = ENCODED[kind]
    x = jnp.asarray(X)
    caller(make_launch(params=(tensor_map,), kernel="kernel_m"))(x).block_until_ready()
    (launched,) = fake.calls("cuLaunchKernelEx")
    assert launched["params"] == [{"address": x.unsafe_buffer_pointer() + tensor_map.byte_offset} | encoded]


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


@pytest.mark.parametrize("call", CALLS)
def test_a_driver_failure_is_an_error_that_says_where(fake, call):
    tensor_map, _ = ENCODED[CALLS[call]]
    fake.fail(call, 719)
    expect_error(
        make_launch(params=(tensor_map, Pointer(1), Int32(0), Int64(0))),
        "ffi/launcher/encode.cc:" if "Encode" in call else "ffi/launcher/launcher.cc:",
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
    with pytest.raises(jax.errors.JaxRuntimeError, match="number of launches is 0"):
        caller(make_launch(), plan=np.zeros(1, np.int64))(X).block_until_ready()


def release_0_1(launch: Launch) -> dict:
    """The attributes that cutjax gave the call before the plan had a format number."""
    attributes = {name: np.array(getattr(launch, name), np.int64) for name in ("grid", "block", "cluster")}
    attributes["params"] = np.array([word for param in launch.params for word in param.words], np.int64)
    attributes |= {"shared_bytes": np.int64(launch.shared_bytes), "blocks_per_sm": np.int64(launch.blocks_per_sm)}
    return attributes | {"kernel": launch.kernel, "cubin": launch.cubin}


def exported(attributes: dict) -> bytearray:
    """A serialized program of a call with these attributes, as another process would find it on disk."""
    result = jax.ShapeDtypeStruct(X.shape, X.dtype)
    exempt = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
    call = jax.jit(lambda x: jax.ffi.ffi_call(TARGET, result, has_side_effect=True)(x, **attributes))
    return jax.export.export(call, platforms=["cpu"], disabled_checks=exempt)(result).serialize()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda now, old: now | {"format": np.int64(FORMAT + 1)}, f"the program's has format {FORMAT + 1}"),
        (lambda now, old: {name: value for name, value in now.items() if name != "format"}, "has no format number"),
        (lambda now, old: old, "has no format number"),
        (lambda now, old: {"format": np.int64(0)}, "the program's has format 0"),
    ],
    ids=["later", "none", "release 0.1", "nothing else"],
)
def test_an_exported_program_of_another_format_is_refused(fake, change, found):
    attributes = change(Call((make_launch(),)).attributes(), release_0_1(make_launch()))
    program = jax.export.deserialize(exported(attributes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"plans of formats 1 to {FORMAT}, .*{found}.*re-export"):
        jax.block_until_ready(program.call(X))
    assert fake.calls() == []  # no driver is asked for anything


# The plan of make_launch as format 1 had it; its third word is the size of the cubin.
PLAN_1 = (1, 0, 0, 1000, 3, 2, 384, 1, 1, 1, 1, 1, 1000, 0, 4)
PLAN_1 += (0, 0, 0, 7, 2, 3, 2, 64, 32, 256, 32, 16, 1, 1, 16, 2, -7, 3, -(2**40))


def test_an_exported_program_of_format_1_runs(fake):
    plan = np.array([*PLAN_1[:2], len(CUBIN), *PLAN_1[3:]], np.int64)
    attributes = {"format": np.int64(1), "kernel": "kernel_mpil", "cubin": CUBIN, "plan": plan}
    jax.block_until_ready(jax.export.deserialize(exported(attributes)).call(X))
    (old,) = fake.calls("cuLaunchKernelEx")
    fake.library.fake_reset()
    caller(make_launch())(X).block_until_ready()
    (now,) = fake.calls("cuLaunchKernelEx")
    for launched in (old, now):
        del launched["params"][0]["address"], launched["params"][1]
    assert old == now
    assert old["params"][0] == MAP_ENCODED


@pytest.mark.parametrize(
    ("word", "value", "found"),
    [
        (2, 10**6, "cubin size is 1000000"),
        (16, 2, "the plan uses 3 buffers"),
        (17, 8192, "a tensor map reaches 8192 bytes from offset 8192"),
        (25, 4096, "a tensor map reaches"),
        (26, 33, "a tensor map reaches 8448 bytes"),
        (27, 2**39, "a tensor map reaches"),
        (34, 8193, "a pointer reaches 0 bytes from offset 8193"),
    ],
)
def test_an_exported_program_that_was_altered_is_refused(fake, word, value, found):
    """Sizes and places in the file itself."""
    attributes = Call((make_launch(),)).attributes()
    plan, program = attributes["plan"], exported(attributes)
    at, plan = program.index(plan.tobytes()), plan.copy()
    plan[word] = value
    program[at : at + plan.nbytes] = plan.tobytes()
    with pytest.raises(jax.errors.JaxRuntimeError, match=found):
        jax.block_until_ready(jax.export.deserialize(program).call(X))
    assert fake.calls("cuLaunchKernelEx") == []


def test_an_exported_program_of_this_format_runs(fake):
    program = jax.export.deserialize(exported(Call((make_launch(),)).attributes()))
    jax.block_until_ready(program.call(X))
    assert len(fake.calls("cuLaunchKernelEx")) == 1


def test_several_launches_run_in_order_on_the_same_buffers(fake):
    second = make_launch(kernel="second_pm", cubin=fake_cubin(b"second" + CUBIN), grid=(2, 1, 1), shared_bytes=7)
    second = dataclasses.replace(second, params=(Pointer(0, 32), dataclasses.replace(MAP, buffer=1)))
    third = make_launch(kernel="third_i", params=(Int32(3),), grid=(1000, 1, 1), blocks_per_sm=1)
    call, x = caller(make_launch(), second, third), jnp.asarray(X)
    for _ in range(2):
        fake.library.fake_reset()
        result = call(x).block_until_ready()
        launched = fake.calls("cuLaunchKernelEx")
        assert [c["kernel"] for c in launched] == ["kernel_mpil", "second_pm", "third_i"]
        assert [c["grid"] for c in launched] == [[1000, 3, 2], [2, 1, 1], [132, 1, 1]]
        assert [c["shared_bytes"] for c in launched] == [1000, 7, 1000]
        assert launched[0]["params"][0]["address"] == x.unsafe_buffer_pointer()
        assert launched[1]["params"][0] == x.unsafe_buffer_pointer() + 32
        assert launched[1]["params"][1]["address"] == result.unsafe_buffer_pointer()
        assert launched[2]["params"] == [3]
        assert len(fake.calls("push")) == len(fake.calls("pop"))
    assert not fake.calls("cuTensorMapEncodeTiled")  # prepared by the first call


def test_launches_with_one_cubin_load_it_once(fake):
    caller(make_launch(), make_launch(kernel="other_mpil"))(X).block_until_ready()
    assert len(fake.calls("cuLibraryLoadData")) == 1
    assert len(fake.calls("cuLibraryGetKernel")) == 2


def test_an_error_names_the_launch_it_is_of(fake):
    later = make_launch(kernel="later_mpi")
    with pytest.raises(jax.errors.JaxRuntimeError, match="kernel later_mpi: it takes 3 parameters, the plan passes 4"):
        caller(make_launch(), later)(X).block_until_ready()
    assert fake.calls("cuLaunchKernelEx") == []


def test_a_kernel_keeps_the_shared_memory_of_its_largest_launch(fake):
    sizes = (3000, 5000, 4000)
    calls = [caller(make_launch(kernel="sized_mpil", shared_bytes=n)) for n in sizes[:2]]
    calls.append(caller(*(make_launch(kernel="sized_mpil", shared_bytes=n) for n in sizes[1:])))
    for call in calls:
        call(X).block_until_ready()
    assert [c["value"] for c in fake.calls("cuKernelSetAttribute")] == [3000, 5000, 5000, 5000]


def test_floats_are_passed_by_value(fake):
    launch = make_launch(kernel="floats_fdff", params=(Float32(-0.1), Float64(0.1), Float32(1e40), Float32(-0.0)))
    caller(launch)(X).block_until_ready()
    (launched,) = fake.calls("cuLaunchKernelEx")
    floats = [struct.unpack("<f", struct.pack("<I", bits))[0] for bits in launched["params"][:1]]
    assert floats == [np.float32(-0.1)]
    assert launched["params"][1:] == [struct.unpack("<q", struct.pack("<d", 0.1))[0], 0x7F800000, 0x80000000]


def test_the_cuda_handlers_register_and_say_that_a_cpu_has_no_stream(fake):
    jax.ffi.register_ffi_target("cutjax_launch_on_cpu", _ffi.handlers(), platform="cpu")
    attributes = Call((make_launch(),)).attributes()
    result = jax.ShapeDtypeStruct(X.shape, X.dtype)
    call = jax.jit(lambda x: jax.ffi.ffi_call("cutjax_launch_on_cpu", result)(x, **attributes))
    with pytest.raises(jax.errors.JaxRuntimeError, match="stream"):
        call(X).block_until_ready()


def test_no_driver_is_an_error_of_the_call():
    program = f"""
import jax, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
sys.path.insert(0, {str(ROOT / "tests" / "runtime")!r})
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

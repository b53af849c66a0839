"""Device text of epilogues whose accumulators are float64, integers or complex: on the host it computes as JAX does."""

from __future__ import annotations

import ctypes
import math
import shutil

import epilogue_cases as cases
import epilogue_host as host
import gxx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cutjax.epilogue import emit
from cutjax.epilogue.expression import Output
from cutjax.epilogue.trace import trace
from cutjax.runtime import compiler, sources

pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|underflow):RuntimeWarning"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
SIZE = 4000


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def position(acc, scale):
    row, col = (lax.broadcasted_iota(jnp.int32, acc.shape, acc.ndim - k) for k in (2, 1))
    return acc * scale + jnp.where(row > col, row, col)


# Accumulators' dtype, a function, the operands' dtypes; "" is one more product.
FUNCTIONS = {
    "gelu": ("float64", lambda acc, b: jax.nn.gelu(acc + b, approximate=False), ["float64"]),
    "gelu_tanh": ("float64", lambda acc, b: jax.nn.gelu(acc + b), ["float64"]),
    "silu": ("float64", lambda acc, b: jax.nn.silu(acc) * b, ["float64"]),
    "softplus": ("float64", jax.nn.softplus, []),
    "derivative": ("float64", lambda acc, b: jax.vjp(jax.nn.gelu, acc)[1](b)[0], ["float64"]),
    "of_f32": ("float64", lambda acc, x, y: acc * x + y.astype(acc.dtype), ["float32", "bfloat16"]),
    "to_bf16": ("float64", lambda acc: jnp.tanh(acc).astype(jnp.bfloat16), []),
    "to_f32": ("float64", lambda acc: jnp.tanh(acc).astype(jnp.float32), []),
    "to_integers": ("float64", lambda acc: (acc * 1e10).astype(jnp.int64), []),
    "of_integers": ("float64", lambda acc, x, y: jnp.where(x > 3, acc * x, acc + y), ["int64", "uint64"]),
    "compared": ("float64", lambda acc, x: (acc > x) & jnp.isfinite(acc), ["float64"]),
    "clipped": ("float64", lambda acc: jnp.clip(jnp.round(acc * 3), -2, 1e300), []),
    "powers": ("float64", lambda acc: acc**5 + jnp.sign(acc) - lax.rsqrt(jnp.abs(acc) + 1) + jnp.cbrt(acc), []),
    "constants": ("float64", lambda acc: jnp.where(acc > 0, -jnp.inf, acc / 3 + 1e-300), []),
    "placed": ("float64", position, ["float64"]),
    "two": ("float64", lambda gate, up: jax.nn.silu(gate) * up, [""]),
    "dequantised": ("int32", lambda acc, s, t: acc.astype(jnp.float32) * s * t, ["float32", "float32"]),
    "dequantised_bf16": ("int32", lambda acc, s: jax.nn.gelu(acc * s).astype(jnp.bfloat16), ["float32"]),
    "requantised": ("int32", lambda acc, s: jnp.clip(jnp.round(acc * s), -128, 127).astype(jnp.int8), ["float32"]),
    "zero_point": ("int32", lambda acc, z: (acc - z.astype(jnp.int32) * 7) >> 3, ["int8"]),
    "unsigned": ("uint32", lambda acc, z: acc // 7 + z.astype(jnp.uint32), ["uint8"]),
    "wide_sum": ("int64", lambda acc, z: acc * z - (acc >> 5), ["int64"]),
    "linear": ("complex64", lambda acc, c: (2 - 1j) * acc + 0.5j * c, ["complex64"]),
    "linear128": ("complex128", lambda acc, c: (2 - 1j) * acc - c, ["complex128"]),
    "scaled": ("complex64", lambda acc, s, b: acc * s + b, ["float32", "float32"]),
    "parts": ("complex128", lambda acc: lax.complex(jnp.imag(acc), -jnp.real(acc)) + jnp.conj(acc), []),
    "modulus": ("complex128", lambda acc: jnp.abs(acc), []),
    "power": ("complex128", lambda acc, x: jnp.where(x > 0, acc**3, -acc), ["float64"]),
    "widened": ("complex64", lambda acc, c: acc.astype(jnp.complex128) * c, ["complex128"]),
    "a_number_made_complex": ("complex128", lambda acc: jnp.where(acc != 0, acc, 1), []),
    "real_made_complex": ("float64", lambda acc, c: acc * c, ["complex128"]),
}


def traced(name):
    dtype, fn, operands = FUNCTIONS[name]
    acc = jax.ShapeDtypeStruct((4, SIZE // 4), dtype)
    arrays = [jnp.ones(acc.shape, x) for x in operands if x]
    with jax.numpy_dtype_promotion("standard"):
        return trace(fn, [acc] * (1 + operands.count("")), arrays).epilogue


def samples(dtype, seed):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        low, high = (0, 200) if dtype.kind == "u" else (-100, 100)
        return (rng.integers(low, high, SIZE) * (12345 if dtype.itemsize > 2 else 1)).astype(dtype)
    if dtype.kind == "c":
        return (rng.standard_normal(SIZE) + 1j * rng.standard_normal(SIZE)).astype(dtype)
    return (3 * rng.standard_normal(SIZE)).astype(dtype)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    with jax.enable_x64(True):
        return host.Host(tmp_path_factory.mktemp("wide"), [traced(name) for name in FUNCTIONS])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_computes_as_jax(name, library):
    epilogue = traced(name)
    assert epilogue.accumulator == FUNCTIONS[name][0]
    accs = [samples(epilogue.accumulator, seed) for seed in range(epilogue.products)]
    operands = [samples(spec.dtype, 10 + i) for i, spec in enumerate(epilogue.operands)]
    got = library(list(FUNCTIONS).index(name), *operands, accs=accs)
    # The loop of the host counts 1024 columns a row.
    shape = (4, 1024) if epilogue.positions else (1, SIZE)
    pad = math.prod(shape) - SIZE
    arrays = [np.pad(x, (0, pad)).reshape(shape) for x in (*accs, *operands)]
    wanted = jax.jit(epilogue.apply)(arrays[: epilogue.products], arrays[epilogue.products :])
    for x, y in zip(got, wanted, strict=True):
        y = np.asarray(y).reshape(-1)[:SIZE]
        assert x.dtype == y.dtype
        if y.dtype.kind in "iub":
            # A float that two libraries round to either side of a half, or of a whole number, is one apart.
            assert np.max(np.abs(x.astype(np.int64) - y.astype(np.int64))) <= (name == "requantised")
            assert np.mean(x == y) > 0.99
        else:
            # Functions of both libraries err by a few units in the last place, sums of two may cancel: in the
            # derivative of gelu, of cubes.
            unit = float(jnp.finfo(y.dtype).eps) * (32 if name == "derivative" else 1)
            x, y = (v.astype(np.complex128 if v.dtype.kind == "c" else np.float64) for v in (x, y))
            np.testing.assert_allclose(x, y, rtol=32 * unit, atol=32 * unit)


# ---- every function in float64: against scipy's, its specials too ----


@pytest.fixture(scope="module")
def smooth(tmp_path_factory):
    epilogues = [host.unary(op, "float64") for op in cases.SMOOTH]
    return host.Host(tmp_path_factory.mktemp("smooth"), epilogues)


@pytest.mark.parametrize("op", cases.SMOOTH)
def test_functions_in_float64(op, smooth):
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.standard_normal(1000), [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]])
    (got,) = smooth(list(cases.SMOOTH).index(op), x)
    wanted = cases.SMOOTH[op](x)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
    # Newton's steps of the host's erf_inv end within 1e-14; all else is a few units of 2e-16.
    np.testing.assert_allclose(got, wanted, rtol=1e-13 if op == "erf_inv" else 4e-15, atol=1e-15)


EXACT = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": lambda x: np.copysign(np.sign(x), x),
    "floor": np.floor,
    "ceil": np.ceil,
    "sqrt": np.sqrt,
    "square": np.square,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "rem": np.fmod,
    "nextafter": np.nextafter,
    "eq": np.equal,
    "lt": np.less,
    "is_finite": np.isfinite,
}
BINARY = ("add", "sub", "mul", "div", "max", "min", "rem", "nextafter", "eq", "lt")
SPECIAL = np.array([0.0, -0.0, 1.5, -2.5, 5e-324, -1e-310, 1.7e308, 1e-300, 3.0, np.inf, -np.inf, np.nan])
CONVERTED = ["float32", "bfloat16", "int8", "uint8", "int32", "uint32", "int64", "uint64", "bool"]


def test_float64_is_exact(tmp_path):
    """Bit by bit, but for the sign of a zero that max and min take, and the bits of a NaN."""
    boolean = ("eq", "lt", "is_finite")
    epilogues = [
        (host.binary if op in BINARY else host.unary)(op, "float64", "bool" if op in boolean else None) for op in EXACT
    ]
    library = host.Host(tmp_path, epilogues)
    a, b = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
    for i, op in enumerate(EXACT):
        args = (a, b)[: 1 + (op in BINARY)]
        (got,) = library(i, *args)
        wanted = EXACT[op](*args)
        np.testing.assert_array_equal(got, wanted, err_msg=op)
        if got.dtype == np.float64 and op not in ("max", "min"):
            real = ~np.isnan(wanted)
            np.testing.assert_array_equal(np.signbit(got)[real], np.signbit(wanted)[real], err_msg=op)


def test_conversions_of_float64(tmp_path):
    pairs = [("float64", x) for x in CONVERTED] + [(x, "float64") for x in CONVERTED]
    library = host.Host(tmp_path, [host.unary("convert_element_type", *pair) for pair in pairs])
    rng = np.random.default_rng(2)
    many = np.concatenate([SPECIAL, np.ldexp(1.0, np.arange(-30, 70)), 1e5 * rng.standard_normal(500)])
    many = np.concatenate([many, -many])
    many = many[(np.abs(many) >= 2.0**-126) | (many == 0) | np.isnan(many)]  # XLA on the CPU flushes f32's subnormals
    for i, (source, target) in enumerate(pairs):
        x = many if source == "float64" else np.asarray(jnp.asarray(many).astype(source))
        (got,) = library(i, x)
        wanted = np.asarray(jax.jit(lambda x, target=target: x.astype(target))(x))
        if source == target == "float64" or target in ("float32", "float64", "bfloat16"):
            got, wanted = got.astype(np.float64), wanted.astype(np.float64)
        np.testing.assert_array_equal(got, wanted, err_msg=f"{source} {target}")


def test_what_no_kernel_computes():
    for op, dtype in (("exp", "complex64"), ("digamma", "float64")):
        assert emit.reasons(host.unary(op, dtype)) == (f"kernels have no {op} in {dtype}",)
    to_real = host.unary("neg", "complex64", shown="float32")
    assert emit.reasons(to_real) == ("kernels do not convert complex64 to float32",)


REDUCED = {
    "sum": ["float32", "float64", "int32", "uint32", "int64", "complex64", "complex128"],
    "max": ["float32", "float64", "int32", "uint32", "int64", "bool"],
    "min": ["float32", "float64", "int32", "uint32", "uint64", "bool"],
}
REDUCTIONS = [Output(0, dtype, reduce, ("row",)) for reduce in REDUCED for dtype in REDUCED[reduce]]


def test_reductions_combine(tmp_path):
    """Any values from the identity on, in the carrier of the dtype."""
    functions = []
    for i, out in enumerate(REDUCTIONS):
        identity, combined = emit.reduction(out)
        carrier = emit.CARRIERS[out.dtype]
        functions.append(
            f'extern "C" void reduce{i}(int n, const {carrier}* x, {carrier}* y) {{\n  {carrier} all = {identity};\n'
            f"  for (int t = 0; t < n; ++t) all = {combined.format('all', 'x[t]')};\n  *y = all;\n}}\n"
        )
    text = f'#include "{host.SHIM}"\n{"".join(map(sources._file, sources.MATH))}' + "".join(functions)
    library = gxx.build(tmp_path, text)
    for i, out in enumerate(REDUCTIONS):
        x = (
            np.arange(-3, 9).astype(out.dtype)
            if out.dtype != "bool"
            else np.array([True] * (out.reduce == "min") + [False])
        )
        y = np.zeros((), host.carrier(out.dtype))
        getattr(library, f"reduce{i}")(x.size, *(ctypes.c_void_p(v.ctypes.data) for v in (x, y)))
        assert y == getattr(np, out.reduce or "")(x).astype(out.dtype), out


# ---- the device compiler ----


def test_all_compile_for_the_device():
    pytest.importorskip("cuda.bindings", reason="NVRTC's bindings are not installed")
    epilogues = [traced(name) for name in FUNCTIONS]
    epilogues += [host.unary(op, "float64") for op in (*cases.SMOOTH, "is_finite", "sign", "floor")]
    epilogues += [host.binary(op, "float64") for op in ("pow", "atan2", "rem", "nextafter", "max")]
    epilogues += [host.unary("convert_element_type", "float64", target) for target in CONVERTED]
    parts = [*map(sources._file, ("common/atoms.cuh", *sources.MATH))]
    calls = []
    for i, epilogue in enumerate(epilogues):
        parts.append(f"namespace e{i} {{\n{emit.emit(epilogue)}}}\n")
        acc = emit.CARRIERS[epilogue.accumulator.name]
        accs = [f"static_cast<const {acc}*>(p[{j}])[t]" for j in range(epilogue.products)]
        dtypes = [spec.dtype for spec in epilogue.operands] + [out.dtype for out in epilogue.outputs]
        at = [f"static_cast<{emit.CARRIERS[x]}*>(p[{j}])[t]" for j, x in enumerate(dtypes, epilogue.products)]
        at[len(epilogue.operands) : len(epilogue.operands)] = ["t", "t"]
        call = f"const {acc} acc[] = {{{', '.join(accs)}}}; e{i}::epilogue_element(acc, {', '.join(at)});"
        calls.append(f"  if (which == {i}) {{ {call} }}\n")
    for i, out in enumerate(REDUCTIONS):
        combined = emit.reduction(out)[1].format("*x", "__shfl_xor_sync(~0u, *x, 4)")
        carrier = emit.CARRIERS[out.dtype]
        calls.append(f"  if (which == -{i + 1}) {{ auto x = static_cast<{carrier}*>(p[0]) + t; *x = {combined}; }}\n")
    body = "".join(calls)
    parts.append(f'extern "C" __global__ void elements(int which, void** p) {{\n  int t = threadIdx.x;\n{body}}}\n')
    cubin = compiler.compile_kernel("".join(parts), name="elements", arch="sm_90a")
    assert "warning" not in cubin.log, cubin.log

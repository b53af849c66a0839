"""Device text of epilogues: every operation compiles under NVRTC, and on the host computes what the reference does."""

from __future__ import annotations

import shutil

import epilogue_host as host
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from cutjax import _codegen, _compile, _emit
from cutjax._trace import trace

# What overflows or is NaN here does so on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|underflow):RuntimeWarning")

HALVES = ("bfloat16", "float16")
FLOATS = ("float32", *HALVES)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32))
ALL = (*FLOATS, *FLOAT8, *INTEGERS, "bool")

EXACT_UNARY = ["neg", "abs", "sign", "floor", "ceil", "sqrt", "square"]
EXACT_BINARY = ["add", "sub", "mul", "div", "max", "min", "rem"]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
INTEGER_UNARY = ["abs", "neg", "sign", "square", "not", "population_count", "clz"]
INTEGER_BINARY = [
    *("add", "sub", "mul", "div", "rem", "max", "min", "and", "or", "xor"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic"),
]
# Of float64; where JAX's own value of a special argument differs from scipy's, JAX's counts.
SMOOTH = {
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": special.expit,
    "tanh": np.tanh,
    "erf": special.erf,
    "erfc": special.erfc,
    "erf_inv": lambda x: np.copysign(special.erfinv(x), x),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
}


def bits(dtype):
    return np.dtype(f"uint{np.dtype(dtype).itemsize * 8}")


def grid(dtype, count=20000):
    """All values of a dtype of 8 or 16 bits; of a longer one the special ones and a sample of all."""
    if dtype == "bool":
        return np.array([False, True])
    dtype = np.dtype(dtype)
    if dtype.itemsize <= 2:
        return np.arange(256**dtype.itemsize, dtype=bits(dtype)).view(dtype)
    rng = np.random.default_rng(7)
    some = rng.integers(0, 2**32, count, dtype=np.uint32).view(dtype)
    if dtype.kind in "iu":
        edges = [0, 1, 2, 3, 7, 31, 32, 33, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
        return np.concatenate([np.array(edges, np.uint32).view(dtype), np.arange(-40, 40).astype(dtype), some])
    near = rng.standard_normal(count).astype(dtype) * 4
    return np.concatenate([specials(dtype), near, some])


def specials(dtype):
    dtype = np.dtype(dtype)
    half = np.arange(-20, 20) / 2
    powers = np.ldexp(1.0, np.arange(-150, 128))
    around = np.array([126.5, 127, 127.5, 128, 255.5, 256, 448, 464, 464.5, 480, 57344, 61439, 61440, 65504, 65519.99])
    around = np.concatenate([around, [65520, 2.0**31 - 128, 2.0**31, 2.0**32, 2.0**63, 3e38, np.inf, np.nan, 0.0]])
    values = np.concatenate([half, powers, around, -powers, -around])
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(dtype)


def pairs(dtype):
    """Every pair of some values."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu" and dtype.itemsize == 1:
        some = grid(dtype)
    elif dtype.kind in "iu":
        some = grid(dtype, 100)[:180]
        if dtype.itemsize == 2:
            some = np.concatenate([np.arange(-40, 40), [127, 128, 255, 2**15 - 1, 2**15, 2**16 - 1]]).astype(dtype)
    elif dtype.kind == "b":
        some = grid("bool")
    else:
        rng = np.random.default_rng(3)
        some = np.concatenate([specials(dtype)[::3], (rng.standard_normal(60) * 3).astype(dtype)])
        some = np.concatenate([some, np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]).astype(dtype)])
    a, b = np.meshgrid(some, some)
    return a.ravel(), b.ravel()


def subnormal(x):
    """Where XLA on the CPU flushes: f32, and with it what is computed in f32."""
    x = np.asarray(x)
    if x.dtype.kind in "iub":
        return np.zeros(x.shape, bool)
    x = np.abs(x.astype(np.float64))
    return (x > 0) & (x < 2**-126)


def same(a, b):
    """Equal bits, except that any NaN equals any other."""
    if a.dtype.kind in "iub":
        return a == b
    return (a.view(bits(a.dtype)) == b.view(bits(b.dtype))) | (np.isnan(a) & np.isnan(b))


def check(got, wanted, inputs, where=True):
    wrong = ~same(got, np.asarray(wanted).astype(got.dtype)) & where
    at = np.flatnonzero(wrong)[:5]
    assert not len(at), [(tuple(x[i] for x in inputs), got[i], wanted[i]) for i in at]


def reference(epilogue, *operands):
    shape = (1, operands[0].size)
    acc = jnp.zeros(shape)
    return [np.asarray(x)[0] for x in epilogue.apply([acc] * epilogue.products, [x.reshape(shape) for x in operands])]


def _cases():
    """Name to (epilogue, arguments) of everything compared bit by bit with the reference."""
    cases = {}
    for dtype in FLOATS:  # shown as f32, which asks for the accurate form of each
        for op in EXACT_UNARY:
            cases[f"{op}-{dtype}"] = host.unary(op, dtype, shown="float32"), (grid(dtype),)
        for method in (0, 1):
            cases[f"round{method}-{dtype}"] = host.unary("round", dtype, params=(method,)), (grid(dtype),)
        for mantissa in ((8, 7), (5, 10)):
            epilogue = host.unary("reduce_precision", dtype, params=mantissa)
            cases[f"reduce_precision{mantissa}-{dtype}"] = epilogue, (grid(dtype),)
        cases[f"is_finite-{dtype}"] = host.unary("is_finite", dtype, "bool"), (grid(dtype),)
        for op in EXACT_BINARY:
            cases[f"{op}-{dtype}"] = host.binary(op, dtype, shown="float32"), pairs(dtype)
        for op in COMPARISONS:
            cases[f"{op}-{dtype}"] = host.binary(op, dtype, "bool"), pairs(dtype)
        a, b = pairs(dtype)
        clamp = host.expression(lambda node, x, y, z, d=dtype: node("clamp", x, y, z, dtype=d), [dtype] * 3, dtype)
        cases[f"clamp-{dtype}"] = clamp, (np.full_like(a, -1.5), a, b)
    for dtype in INTEGERS:
        for op in INTEGER_UNARY[1 if dtype[0] == "u" else 0 :]:
            cases[f"{op}-{dtype}"] = host.unary(op, dtype), (grid(dtype),)
        cases[f"integer_pow-{dtype}"] = host.unary("integer_pow", dtype, params=(5,)), (grid(dtype),)
        for op in INTEGER_BINARY:
            cases[f"{op}-{dtype}"] = host.binary(op, dtype), pairs(dtype)
        for op in COMPARISONS:
            cases[f"{op}-{dtype}"] = host.binary(op, dtype, "bool"), pairs(dtype)
        a, b = pairs(dtype)
        clamp = host.expression(lambda node, x, y, z, d=dtype: node("clamp", x, y, z, dtype=d), [dtype] * 3, dtype)
        cases[f"clamp-{dtype}"] = clamp, (np.full_like(a, 3), a, b)
    for op in ("and", "or", "xor", "eq", "ne", "max", "min"):
        cases[f"{op}-bool"] = host.binary(op, "bool"), pairs("bool")
    cases["not-bool"] = host.unary("not", "bool"), (grid("bool"),)
    for source in ALL:
        for target in ALL:
            if source != target:
                epilogue = host.unary("convert_element_type", source, target)
                cases[f"convert-{source}-{target}"] = epilogue, (grid(source),)
    sizes = {2: ("int16", "uint16", *HALVES), 4: ("int32", "uint32", "float32")}
    for source, target in [(a, b) for group in sizes.values() for a in group for b in group if a != b]:
        epilogue = host.unary("bitcast_convert_type", source, target)
        cases[f"bitcast-{source}-{target}"] = epilogue, (grid(source),)
    for which in ("bool", "int32"):
        count = 2 if which == "bool" else 4
        epilogue = host.expression(
            lambda node, i, *x: node("select_n", i, *x), [which] + ["float32"] * count, "float32"
        )
        size = 64
        index = (np.arange(size) % count).astype(which)
        cases[f"select-{which}"] = epilogue, (index, *np.arange(count * size, dtype=np.float32).reshape(count, size))
    return cases


CASES = _cases()
SMOOTH_CASES = {f"{op}-{dtype}": (op, dtype) for op in SMOOTH for dtype in FLOATS}


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = host.Host(tmp_path_factory.mktemp("exact"), [epilogue for epilogue, _ in CASES.values()])
    return lambda name, *arrays: library(list(CASES).index(name), *arrays)[0]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, exact):
    epilogue, arguments = CASES[name]
    got = exact(name, *arguments)
    (wanted,) = reference(epilogue, *arguments)
    where = ~np.any([subnormal(x) for x in (*arguments, wanted, got)], axis=0)
    if name.startswith("reduce_precision(5") or name == "reduce_precision(8, 7)-float16":
        where &= ~(
            np.abs(arguments[0].astype(np.float32)) < 2**-14
        )  # XLA's does not round subnormal f16 to the nearest
    if name.startswith("bitcast-float16"):
        where &= ~np.isnan(arguments[0])  # any NaN of f16 becomes one
    if name.startswith(("max", "min", "clamp")):  # XLA takes either zero
        where &= ~((got == 0) & (wanted == 0))
    if where.size > 4:
        assert where.mean() > 0.3
    check(got, wanted, arguments, where)


NUMPY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt, "neg": np.negative}
NUMPY |= {"abs": np.abs, "floor": np.floor, "ceil": np.ceil, "square": np.square, "round1": np.rint, "rem": np.fmod}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", NUMPY)
def test_subnormals_are_kept(op, dtype, exact):
    arguments = CASES[f"{op}-{dtype}"][1]
    with np.errstate(all="ignore"):
        wanted = NUMPY[op](*(x.astype(np.float32) for x in arguments)).astype(dtype).astype(np.float32)
    check(exact(f"{op}-{dtype}", *arguments), wanted, arguments)


@pytest.mark.parametrize("target", [*HALVES, *FLOAT8])
@pytest.mark.parametrize("source", FLOATS)
def test_subnormals_convert(source, target, exact):
    if source == target:
        pytest.skip("no conversion")
    (argument,) = CASES[f"convert-{source}-{target}"][1]
    with np.errstate(all="ignore"):
        wanted = argument.astype(np.float32).astype(target)
    check(exact(f"convert-{source}-{target}", argument), wanted, (argument,))


# ---- functions that round: within units of the last place of float64's value, the same specials as JAX ----


def ulps(got, true, dtype):
    """The distance in units of the last place of the true value's binade."""
    information = jnp.finfo(dtype)
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(true), 1e-300))), information.minexp)
    return np.abs(got.astype(np.float64) - true) / 2.0 ** (exponent - information.nmant)


@pytest.fixture(scope="module")
def smooth(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    epilogues = [host.unary(op, dtype, shown="float32") for op, dtype in SMOOTH_CASES.values()]
    library = host.Host(tmp_path_factory.mktemp("smooth"), epilogues)
    return lambda name, *arrays: library(list(SMOOTH_CASES).index(name), *arrays)[0]


@pytest.mark.parametrize("name", SMOOTH_CASES)
def test_maps_to_the_right_function(name, smooth):
    """That the function is the right one, its specials too; how accurate CUDA's is, tests/gpu/test_accuracy.py says."""
    op, dtype = SMOOTH_CASES[name]
    x = grid(dtype)
    if op in ("sin", "cos", "tan"):
        x = x[~(np.abs(x.astype(np.float32)) > 1e5)]
    got = smooth(name, x)
    true = SMOOTH[op](x.astype(np.float64))
    with np.errstate(over="ignore"):
        rounded = true.astype(np.float32).astype(dtype).astype(np.float32)
    special_value = ~np.isfinite(rounded) | (rounded == 0)
    check(got, rounded, (x,), special_value)
    largest = float(jnp.finfo(dtype).max)
    ok = np.isfinite(rounded) & (np.abs(true) < largest)
    bound = 0.52 if dtype in HALVES else 8.0
    assert np.max(ulps(got, true, dtype)[ok], initial=0) <= bound


# ---- fast forms: their error, the hardware's worst included, over every value ----


def traced(fn, *operands, accs=1):
    """The epilogue of a function of accumulators and of operands, given by dtype."""
    acc = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    arrays = [jnp.ones((2, 3), dtype) for dtype in operands]
    return trace(fn, [acc] * accs, arrays).epilogue


def cast(fn, dtype):
    return lambda *args: fn(*args).astype(dtype)


ACTIVATIONS = {
    "gelu": (jax.nn.gelu, lambda x: x * special.expit(2 * np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * x**3))),
    "gelu_erf": (lambda x: jax.nn.gelu(x, approximate=False), lambda x: x * special.ndtr(x)),
    "silu": (jax.nn.silu, lambda x: x * special.expit(x)),
    "silu_by_hand": (lambda x: x / (1 + jnp.exp(-x)), lambda x: x * special.expit(x)),
    "gelu_by_hand": (lambda x: 0.5 * x * (1 + jax.lax.erf(x * np.float32(0.5**0.5))), lambda x: x * special.ndtr(x)),
    "sigmoid": (jax.nn.sigmoid, special.expit),
    "tanh": (jnp.tanh, np.tanh),
    "softplus": (jax.nn.softplus, lambda x: np.logaddexp(x, 0)),
    "exp": (jnp.exp, np.exp),
    "mish": (jax.nn.mish, lambda x: x * np.tanh(np.logaddexp(x, 0))),
    "elu": (jax.nn.elu, lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)))),
    "relu": (jax.nn.relu, lambda x: np.maximum(x, 0)),
}


FAST = {f"{name}-{dtype}": (name, dtype) for name in ACTIVATIONS for dtype in HALVES}


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    epilogues = [traced(cast(ACTIVATIONS[name][0], dtype)) for name, dtype in FAST.values()]
    library = host.Host(tmp_path_factory.mktemp("fast"), epilogues)
    return lambda name, x: library(list(FAST).index(name), accs=[x], raw=True)[0]


@pytest.mark.parametrize("name", FAST)
def test_the_fast_form_hides_in_the_rounding(name, fast):
    """Before its rounding to 16 bits a fast activation errs by less than 0.3 of what the rounding may add."""
    function, dtype = FAST[name]
    x = np.concatenate([grid("bfloat16").astype(np.float32), grid("float16").astype(np.float32), grid("float32")])
    x = x[np.isfinite(x) & (np.abs(x) < 1e4)]
    got = fast(name, x).astype(np.float64)
    true = ACTIVATIONS[function][1](x.astype(np.float64))
    information = jnp.finfo(dtype)
    normal_result = (np.abs(true) >= max(float(information.tiny), 2.0**-100)) & (np.abs(true) <= float(information.max))
    share = np.abs(got - true) / np.abs(true) / 2.0 ** -(information.nmant + 2)  # of half a unit in the last place
    worst = np.max(share[normal_result])
    print(f"{name}: {worst:.3f} of half a unit, at {x[normal_result][np.argmax(share[normal_result])]}")  # pytest -rP
    assert worst < 0.3
    # Below the normal numbers only the absolute error shows.
    small = np.abs(true) < float(information.tiny)
    unit = max(float(information.smallest_subnormal), 2.0**-126 * (100 if dtype == "bfloat16" else 0))
    assert np.all(np.abs(got - true)[small] < unit)
    specials = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
    wanted = np.asarray(ACTIVATIONS[function][0](jnp.asarray(specials)))
    check(fast(name, specials).astype(dtype), wanted.astype(dtype), (specials,))


# ---- which form is chosen ----


@pytest.mark.parametrize(
    ("fn", "dtype", "wanted", "unwanted"),
    [
        (jnp.tanh, "bfloat16", "tanh_approx", "tanhf"),
        (jnp.tanh, "float8_e4m3fn", "tanh_approx", "tanhf"),
        (jnp.tanh, "float16", "tanhf", "approx"),
        (jnp.tanh, "float32", "tanhf", "approx"),
        (jax.nn.gelu, "bfloat16", "coarse_logistic", "tanh"),
        (jax.nn.gelu, "float16", "fine_logistic", "tanh"),
        (jax.nn.gelu, "float32", "tanhf", "logistic"),
        (lambda x: jax.nn.silu(x) - 3 * x, "bfloat16", "fine_logistic", "coarse"),  # a sum may cancel
        (lambda x: jax.nn.silu(x) * 3, "bfloat16", "coarse_logistic", "fine"),
        (lambda x: jnp.exp(x) + 1, "bfloat16", "fine_exp", "expf"),
        (lambda x: jnp.exp(x) - 1, "bfloat16", "expf", "fine"),  # cancels wherever x is small
        (lambda x: 1 - jnp.tanh(x), "bfloat16", "coarse_logistic(acc[0], (-2.0f))", "tanh"),
        (lambda x: 1 - jax.lax.erf(x), "bfloat16", "coarse_erfc_bf16(acc[0])", "erff"),
        (lambda x: 1 - jax.nn.sigmoid(x), "bfloat16", "coarse_logistic(acc[0], (-1.0f))", " - "),
        (lambda x: jnp.sin(jnp.exp(x)), "bfloat16", "expf", "fine"),  # sin magnifies its argument's error
        (lambda x: jnp.where(jnp.exp(x) > 2, x, 0.0), "bfloat16", "expf", "fine"),  # so does a comparison
        (lambda x: jnp.exp(x).astype(jnp.int8).astype(jnp.float32), "bfloat16", "expf", "fine"),
        (lambda x: x / 3, "bfloat16", "* 0.333333", "/"),
        (lambda x: 3 / x, "bfloat16", "div_full", "/"),
        (lambda x: x / 3, "float32", "/ 3.0f", "*"),
        (lambda x: jnp.sqrt(x), "bfloat16", "sqrt_approx", "sqrtf"),
    ],
)
def test_the_outputs_decide_the_form(fn, dtype, wanted, unwanted):
    body = _emit.emit(traced(cast(fn, dtype))).split("{", 1)[1]
    assert wanted in body
    assert unwanted not in body


def test_the_strictest_output_decides():
    both = _emit.emit(traced(lambda x: (jnp.tanh(x).astype(jnp.bfloat16), jnp.tanh(x))))
    assert "tanhf" in both
    assert "approx" not in both
    total = _emit.emit(traced(lambda x: (jnp.tanh(x).astype(jnp.bfloat16), jnp.tanh(x).sum(0))))
    assert "tanhf" in total
    unused = _emit.emit(traced(lambda x: (jnp.tanh(x).astype(jnp.bfloat16), x > 0)))
    assert "tanh_approx" in unused


# ---- the contract ----


def test_the_signature():
    def fn(acc, gate, mask, row, small):
        y = jnp.where(mask, acc * gate, row) + small.astype(jnp.float32)
        return y.astype(jnp.float16), acc > gate, acc.astype(jnp.uint8), y.max()

    text = _emit.emit(traced(fn, "bool", "float32", "int8", accs=2))
    head = text.splitlines()[1]
    assert head == (
        "DEVICE void epilogue_element(const float (&acc)[2], bool x0, float x1, int x2, int row, int col, "
        "float& y0, bool& y1, u32& y2, float& y3) {"
    )


@pytest.mark.parametrize("dtype", [*HALVES, *FLOAT8])
def test_a_short_output_is_not_yet_rounded(dtype):
    text = _emit.emit(traced(cast(lambda x: x * 3, dtype)))
    assert "round_" not in text
    again = _emit.emit(traced(lambda x: ((t := (x * 3).astype(dtype)), t.astype(jnp.float32) + x)))
    assert again.count("round_") == 1  # for the sum, not for the first output
    assert "y0 = v2;" in again
    largest = _emit.emit(traced(lambda x: (x * 3).astype(dtype).max()))
    assert largest.count("round_") == 1  # a reduced output is what it says


def test_16_bit_arithmetic_rounds_each_time():
    text = _emit.emit(traced(lambda x: (x.astype(jnp.bfloat16) * 3 + 1).astype(jnp.float32)))
    assert text.count("round_bf16") == 3


def test_iota_and_constants():
    def fn(x):
        row, col = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
        return jnp.where(row >= col, x * np.float32(-0.0), -jnp.inf)

    text = _emit.emit(traced(fn))
    assert "= row;" in text
    assert "= col;" in text
    assert "(-0.0f)" in text
    assert "__uint_as_float(0xff800000u)" in text


def test_what_cannot_be_emitted_is_said_at_once():
    epilogue = host.expression(lambda node, x: node("cumsum", node("digamma", x)), ["float32"], "float32")
    assert _emit.reasons(epilogue) == ("kernels have no digamma in float32", "kernels have no cumsum in float32")
    with pytest.raises(NotImplementedError, match="digamma in float32; kernels have no cumsum"):
        _emit.emit(epilogue)
    double = host.unary("neg", "float64")
    assert _emit.reasons(double) == ("kernels do not compute in float64",)
    place = host.expression(lambda node: node("iota", dtype="int32", params=("batch", 0)), [], "int32")
    assert _emit.reasons(place) == ("kernels have no iota over batches in int32",)


# ---- the device compiler ----


def device_source(epilogues):
    """A kernel that runs each on one element of every array."""
    parts = [_codegen._file("atoms.cuh"), _codegen._file("math.cuh")]
    body = []
    for i, epilogue in enumerate(epilogues):
        parts.append(f"namespace e{i} {{\n{_emit.emit(epilogue)}}}\n")
        arguments = [
            f"static_cast<const {_emit.CARRIERS[s.dtype]}*>(p[{j + 1}])[t]" for j, s in enumerate(epilogue.operands)
        ]
        arguments += ["t", "t"]
        at = 1 + len(epilogue.operands)
        arguments += [
            f"static_cast<{_emit.CARRIERS[o.dtype]}*>(p[{at + j}])[t]" for j, o in enumerate(epilogue.outputs)
        ]
        body.append(f"  if (which == {i}) e{i}::epilogue_element({', '.join(['acc', *arguments])});\n")
    parts.append('extern "C" __global__ void elements(int which, void** p) {\n  int t = threadIdx.x;\n')
    parts.append("  const float acc[1] = {static_cast<const float*>(p[0])[t]};\n" + "".join(body) + "}\n")
    return "".join(parts)


def compiled(epilogues):
    pytest.importorskip("cuda.bindings", reason="NVRTC's bindings are not installed")
    cubin = _compile.compile_source(device_source(epilogues), name="elements", arch="sm_90a")
    assert "warning" not in cubin.log, cubin.log
    assert (cubin.resources.spill_store_bytes, cubin.resources.spill_load_bytes) == (0, 0)
    return cubin


def test_every_exact_operation_compiles():
    compiled([epilogue for epilogue, _ in CASES.values()])


@pytest.mark.parametrize("out", FLOATS)
def test_every_function_compiles(out):
    compiled([host.unary(op, dtype, shown=out) for op in SMOOTH for dtype in FLOATS])
    compiled([host.binary(op, "float32", shown=out) for op in ("pow", "atan2", "rem", "nextafter")])


def test_every_activation_compiles_lean():
    for name, (fn, _) in ACTIVATIONS.items():
        cubin = compiled([traced(cast(fn, "bfloat16"))])
        assert cubin.resources.registers <= 24, name


# ---- functions of two arguments ----


@pytest.mark.parametrize(("op", "function"), [("pow", np.power), ("atan2", np.arctan2)])
def test_functions_of_two_arguments(op, function, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = host.Host(tmp_path, [host.binary(op, "float32")])
    a, b = pairs("float32")
    (got,) = library(0, a, b)
    true = function(a.astype(np.float64), b.astype(np.float64))
    wanted = true.astype(np.float32)
    special_value = ~np.isfinite(wanted) | (wanted == 0)
    check(got, wanted, (a, b), special_value)
    assert np.max(ulps(got, true, "float32")[~special_value]) <= 8


@pytest.mark.parametrize("power", [-3, -1, 0, 1, 2, 3, 4, 7])
def test_integer_pow(power, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = host.Host(tmp_path, [host.unary("integer_pow", "float32", params=(power,))])
    x = grid("float32", 2000)
    (got,) = library(0, x)
    (wanted,) = reference(host.unary("integer_pow", "float32", params=(power,)), x)
    close = subnormal(x.astype(np.float64) ** abs(power))  # which XLA flushes
    close |= np.isclose(got, wanted, rtol=1e-6, atol=1e-37) | same(got, wanted)
    assert close.all(), (x[~close][:5], got[~close][:5], wanted[~close][:5])

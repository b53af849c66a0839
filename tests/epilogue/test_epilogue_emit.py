"""Device text of epilogues: every operation compiles under NVRTC, and on the host computes what the reference does."""

from __future__ import annotations

import shutil

import epilogue_cases as cases
import epilogue_host as host
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from epilogue_cases import ACTIVATIONS, CASES, FAST, FLOAT8, FLOATS, HALVES, SMOOTH, SMOOTH_CASES, cast, check, traced

from cutjax.epilogue import emit
from cutjax.runtime import compiler, sources

# What overflows or is NaN here does so on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|underflow):RuntimeWarning")


def taken(given):
    """The name of the case that a test of exact values takes, by its parameters."""
    if "source" in given:
        return "convert-{source}-{target}".format(**given)
    return given["name"] if "name" in given else "{op}-{dtype}".format(**given)


@pytest.fixture(scope="module")
def names(request):
    """The cases that run: of all, which take ten seconds to compile, `make test` runs a part."""
    tests = (item for item in request.session.items if item.path == request.path and "exact" in item.fixturenames)
    return tuple(name for name in dict.fromkeys(taken(item.callspec.params) for item in tests) if name in CASES)


@pytest.fixture(scope="module")
def exact(names, tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = host.Host(tmp_path_factory.mktemp("exact"), [CASES[name][0] for name in names])
    return lambda name, *arrays: library(names.index(name), *arrays)[0]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, names, exact):
    # The host's div.full errs by 2^-22 of any result, which is 4 units of the smallest of a binade, and is rounded.
    cases.check_exact(name, exact(name, *CASES[name][1]), quotient=4.5, names=names)


NUMPY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "sqrt": np.sqrt, "neg": np.negative}
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
    x = cases.smooth_grid(op, dtype)
    cases.check_smooth(op, dtype, x, smooth(name, x), 0.52 if dtype in HALVES else 8.0)


# ---- fast forms: their error, the hardware's worst included, over every value ----


def derivative(function):
    return lambda acc, z: jax.vjp(function, z.astype(jnp.float32))[1](acc)[0]


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """Activations of accumulators; with an operand, their derivatives there times the accumulators."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    epilogues = [traced(cast(ACTIVATIONS[name][0], dtype)) for name, dtype in FAST.values()]
    epilogues += [traced(cast(derivative(ACTIVATIONS[name][0]), dtype), dtype) for name, dtype in FAST.values()]
    library = host.Host(tmp_path_factory.mktemp("fast"), epilogues)
    return lambda name, x, *z: library(list(FAST).index(name) + len(z) * len(FAST), *z, accs=[x], raw=True)[0]


@pytest.mark.parametrize("name", FAST)
def test_the_fast_form_hides_in_the_rounding(name, fast):
    x = cases.fast_grid()
    share = cases.check_fast(name, x, fast(name, x), fast(name, cases.SPECIALS))
    print(f"{name}: {share:.3f} of half a unit in the last place")  # pytest -rP


@pytest.mark.parametrize("dtype", HALVES)
def test_derivatives_of_activations(dtype, fast):
    """They use a tanh or an exponential several times, so no form may be changed under another that reads it."""
    rng = np.random.default_rng(3)
    g = rng.standard_normal(20000).astype(np.float32)
    z = (3 * rng.standard_normal(g.size)).astype(dtype)
    for name in ACTIVATIONS:
        got = fast(f"{name}-{dtype}", g, z)
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            wanted = np.asarray(jax.vjp(ACTIVATIONS[name][0], jnp.asarray(z, np.float64))[1](g.astype(np.float64))[0])
        # 1 + tanh(x) and erf(x) are rounded to f32, and a sum of two terms may cancel: 2^-22 of either.
        unit = np.abs(wanted) * 2.0 ** -(jnp.finfo(dtype).nmant + 1) + 1e-5 * np.abs(g)
        assert np.max(np.abs(got - wanted) / unit) < 0.6, name


def test_the_derivative_of_silu_far_from_zero(fast):
    """Where the exponential that logistic(x) and logistic(-x) share overflows, or is zero."""
    z = np.array([-200, -90, -88, 88, 90, 200, np.nan], jnp.bfloat16)
    got = fast("silu-bfloat16", np.ones(z.size, np.float32), z)
    np.testing.assert_allclose(got, [0, 0, 0, 1, 1, 1, np.nan], atol=1e-35, rtol=1e-6)


# ---- which form is chosen ----


@pytest.mark.parametrize(
    ("fn", "dtype", "wanted", "unwanted"),
    [
        (jnp.tanh, "bfloat16", "tanh_approx", "tanhf"),
        (jnp.tanh, "float8_e4m3fn", "tanh_approx", "tanhf"),
        (jnp.tanh, "float16", "tanhf", "approx"),
        (jnp.tanh, "float32", "tanhf", "approx"),
        (jax.nn.gelu, "bfloat16", "fine_logistic", "tanh"),
        (jax.nn.gelu, "float16", "fine_logistic", "tanh"),
        (jax.nn.gelu, "float32", "tanhf", "logistic"),
        (lambda x: jax.nn.silu(x) - 3 * x, "bfloat16", "fine_logistic", "coarse"),  # a sum may cancel
        (lambda x: jax.nn.silu(x) * 3, "bfloat16", "fine_logistic", "expf"),
        (lambda x: jnp.exp(x) + 1, "bfloat16", "fine_exp", "expf"),
        (lambda x: jnp.exp(x) - 1, "bfloat16", "expf", "fine"),  # cancels wherever x is small
        (lambda x: 1 - jnp.tanh(x), "bfloat16", "fine_logistic(acc[0], (-2.0f))", "tanh"),
        (lambda x: 1 - jax.lax.erf(x), "bfloat16", "coarse_erfc_bf16(acc[0])", "erff"),
        (lambda x: 1 - jax.nn.sigmoid(x), "bfloat16", "fine_logistic(acc[0], (-1.0f))", " - "),
        (
            lambda x: jax.nn.sigmoid(x) * (1 - jax.nn.sigmoid(x)),
            "bfloat16",
            "fine_logistic_falling(acc[0], 1.0f)",
            "(-1",
        ),
        (lambda x: jnp.sin(jnp.exp(x)), "bfloat16", "expf", "fine"),  # sin magnifies its argument's error
        (lambda x: jnp.where(jnp.exp(x) > 2, x, 0.0), "bfloat16", "expf", "fine"),  # so does a comparison
        (lambda x: jnp.exp(x).astype(jnp.int8).astype(jnp.float32), "bfloat16", "expf", "fine"),
        (lambda x: x / 3, "bfloat16", "* 0.333333", "/"),
        (lambda x: 3 / x, "bfloat16", "div_full", "/"),
        (lambda x: x / 3, "float32", "div_full", "*"),
        (lambda x: jnp.floor(x / 3), "float32", "/ 3.0f", "div_full"),
        (lambda x: jnp.sqrt(x), "bfloat16", "sqrt_approx", "sqrtf"),
    ],
)
def test_the_outputs_decide_the_form(fn, dtype, wanted, unwanted):
    body = emit.emit(traced(cast(fn, dtype))).split("{", 1)[1]
    assert wanted in body
    assert unwanted not in body


def test_the_strictest_output_decides():
    both = emit.emit(traced(lambda x: (jnp.tanh(x).astype(jnp.bfloat16), jnp.tanh(x))))
    assert "tanhf" in both
    assert "approx" not in both
    total = emit.emit(traced(lambda x: (jnp.tanh(x).astype(jnp.bfloat16), jnp.tanh(x).sum(0))))
    assert "tanhf" in total
    unused = emit.emit(traced(lambda x: (jnp.tanh(x).astype(jnp.bfloat16), x > 0)))
    assert "tanh_approx" in unused


@pytest.mark.parametrize(
    ("axis", "beside", "wanted"),
    [(0, jnp.bfloat16, "fine"), (1, jnp.bfloat16, "accurate"), (0, jnp.float32, "accurate")],
)
def test_a_sum_over_rows_hides_what_fine_terms_err_by(axis, beside, wanted):
    text = emit.emit(traced(lambda x: (x.astype(beside), jax.nn.silu(x).sum(axis))))
    assert f"{wanted}_logistic" in text


# ---- the contract ----


def test_the_signature():
    def fn(acc, gate, mask, row, small):
        y = jnp.where(mask, acc * gate, row) + small.astype(jnp.float32)
        return y.astype(jnp.float16), acc > gate, acc.astype(jnp.uint8), y.max()

    text = emit.emit(traced(fn, "bool", "float32", "int8", accs=2))
    head = text.splitlines()[1]
    assert head == (
        "DEVICE void epilogue_element(const float (&acc)[2], bool x0, float x1, int x2, int row, int col, "
        "float& y0, bool& y1, u32& y2, float& y3) {"
    )


@pytest.mark.parametrize("dtype", [*HALVES, *FLOAT8])
def test_a_short_output_is_not_yet_rounded(dtype):
    text = emit.emit(traced(cast(lambda x: x * 3, dtype)))
    assert "round_" not in text
    again = emit.emit(traced(lambda x: ((t := (x * 3).astype(dtype)), t.astype(jnp.float32) + x)))
    assert again.count("round_") == 1  # for the sum, not for the first output
    assert "y0 = v2;" in again
    largest = emit.emit(traced(lambda x: (x * 3).astype(dtype).max()))
    assert largest.count("round_") == 1  # a reduced output is what it says


def test_16_bit_arithmetic_rounds_each_time():
    text = emit.emit(traced(lambda x: (x.astype(jnp.bfloat16) * 3 + 1).astype(jnp.float32)))
    assert text.count("round_bf16") == 3


def test_iota_and_constants():
    def fn(x):
        row, col = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
        return jnp.where(row >= col, x * np.float32(-0.0), -jnp.inf)

    text = emit.emit(traced(fn))
    assert "= row;" in text
    assert "= col;" in text
    assert "(-0.0f)" in text
    assert "__uint_as_float(0xff800000u)" in text


def test_places_in_the_batch(tmp_path):
    def fn(node, x):
        places = [("batch", 2), ("row",), ("batch", 0)]
        outer, row, inner = (node("iota", dtype="int32", params=params) for params in places)
        return node("add", node("mul", outer, x, dtype="int32"), node("add", row, inner, dtype="int32"), dtype="int32")

    epilogue = host.expression(fn, ["int32"], "int32")
    assert emit.places(epilogue) == [("batch", 0), ("batch", 2)]
    assert "int row, int col, int batch0, int batch2, int& y0" in emit.emit(epilogue)
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    t = np.arange(3000)
    (got,) = host.Host(tmp_path, [epilogue])(0, t)
    np.testing.assert_array_equal(got, t % 5 * t + t // 1024 + t % 3)


def test_what_cannot_be_emitted_is_said_at_once():
    epilogue = host.expression(lambda node, x: node("cumsum", node("digamma", x)), ["float32"], "float32")
    assert emit.reasons(epilogue) == ("kernels have no digamma in float32", "kernels have no cumsum in float32")
    with pytest.raises(NotImplementedError, match="digamma in float32; kernels have no cumsum"):
        emit.emit(epilogue)
    small = host.unary("neg", "float4_e2m1fn")
    assert emit.reasons(small) == ("kernels do not compute in float4_e2m1fn",)


# ---- the device compiler ----


def device_source(epilogues):
    """A kernel that runs each on one element of every array."""
    parts = [*map(sources._file, ("common/atoms.cuh", *sources.MATH))]
    body = []
    for i, epilogue in enumerate(epilogues):
        parts.append(f"namespace e{i} {{\n{emit.emit(epilogue)}}}\n")
        arguments = [
            f"static_cast<const {emit.CARRIERS[s.dtype]}*>(p[{j + 1}])[t]" for j, s in enumerate(epilogue.operands)
        ]
        arguments += ["t", "t"]
        at = 1 + len(epilogue.operands)
        arguments += [f"static_cast<{emit.CARRIERS[o.dtype]}*>(p[{at + j}])[t]" for j, o in enumerate(epilogue.outputs)]
        body.append(f"  if (which == {i}) e{i}::epilogue_element({', '.join(['acc', *arguments])});\n")
    parts.append('extern "C" __global__ void elements(int which, void** p) {\n  int t = threadIdx.x;\n')
    parts.append("  const float acc[1] = {static_cast<const float*>(p[0])[t]};\n" + "".join(body) + "}\n")
    return "".join(parts)


def compiled(epilogues):
    pytest.importorskip("cuda.bindings", reason="NVRTC's bindings are not installed")
    cubin = compiler.compile_kernel(device_source(epilogues), name="elements", arch="sm_90a")
    assert "warning" not in cubin.log, cubin.log
    assert (cubin.resources.spill_store_bytes, cubin.resources.spill_load_bytes) == (0, 0)
    return cubin


def test_every_exact_operation_compiles():
    """Each with one of the dtypes that have a carrier, and each conversion to a dtype with one of those from it."""

    def kind(name, epilogue):
        outs = tuple(out.dtype if name.startswith("convert") else emit.CARRIERS[out.dtype] for out in epilogue.outputs)
        return name.partition("-")[0], tuple(emit.CARRIERS[x.dtype] for x in epilogue.operands), outs

    kinds = {kind(name, epilogue): epilogue for name, (epilogue, _) in CASES.items()}
    assert len(kinds) < len(CASES) / 2
    compiled(list(kinds.values()))


@pytest.mark.parametrize("out", FLOATS)
def test_every_function_compiles(out):
    """Of each dtype with one of results: converting is tested above."""
    source = FLOATS[FLOATS.index(out) - 1]
    unary = [host.unary(op, source, shown=out) for op in SMOOTH]
    compiled([*unary, *(host.binary(op, "float32", shown=out) for op in ("pow", "atan2", "rem", "nextafter"))])


def test_every_activation_compiles_lean():
    cubin = compiled([traced(cast(fn, "bfloat16")) for fn, _ in ACTIVATIONS.values()])
    assert cubin.resources.registers <= 24  # those of the one that takes most


# ---- functions with parameters, and of two arguments ----

POWERS = (-3, -1, 0, 1, 2, 3, 4, 7)
OTHERS = {op: host.binary(op, "float32") for op in ("pow", "atan2")}
OTHERS |= {power: host.unary("integer_pow", "float32", params=(power,)) for power in POWERS}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = host.Host(tmp_path_factory.mktemp("others"), list(OTHERS.values()))
    return lambda name, *arrays: library(list(OTHERS).index(name), *arrays)[0]


@pytest.mark.parametrize(("op", "function"), [("pow", np.power), ("atan2", np.arctan2)])
def test_functions_of_two_arguments(op, function, others):
    a, b = cases.pairs("float32")
    got = others(op, a, b)
    true = function(a.astype(np.float64), b.astype(np.float64))
    wanted = true.astype(np.float32)
    special_value = ~np.isfinite(wanted) | (wanted == 0)
    check(got, wanted, (a, b), special_value)
    assert np.max(cases.ulps(got, true, "float32")[~special_value]) <= 8


@pytest.mark.parametrize("power", POWERS)
def test_integer_pow(power, others):
    x = cases.grid("float32", 2000)
    got = others(power, x)
    (wanted,) = cases.reference(OTHERS[power], x)
    close = cases.subnormal(x.astype(np.float64) ** abs(power))  # which XLA flushes
    close |= np.isclose(got, wanted, rtol=1e-6, atol=1e-37) | cases.same(got, wanted)
    assert close.all(), (x[~close][:5], got[~close][:5], wanted[~close][:5])


# ---- the compiler's stack ----


def test_no_text_nests_deep():
    """One of 500 cases: nested, its ternaries ended the process where a thread with a small stack compiled them."""
    many = host.expression(
        lambda node, i, *x: node("select_n", i, *x * 250), ["int32", "float32", "float32"], "float32"
    )
    depths = np.cumsum([(c == "(") - (c == ")") for c in emit.emit(many)])
    assert depths.max() <= 12  # log2 of 500, and two of the call
    assert depths[-1] == 0

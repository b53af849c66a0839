"""Cases for generated epilogues, on the host (test_epilogue_emit.py) and on a device (gpu/test_accuracy.py)."""

from __future__ import annotations

import functools

import epilogue_host as host
import jax
import jax.numpy as jnp
import numpy as np
from checks import rounding
from scipy import special

from cutjax.epilogue.trace import trace

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
    """True where XLA on the CPU flushes: f32, and with it what is computed in f32."""
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
    """Returns the results of an epilogue as JAX computes them on the CPU."""
    shape = (1, operands[0].size)
    with jax.default_device(jax.devices("cpu")[0]):
        acc = jnp.zeros(shape)
        apply = rounding(lambda acc, operands: epilogue.apply([acc] * epilogue.products, operands))
        results = apply(acc, [x.reshape(shape) for x in operands])
    return [np.asarray(x)[0] for x in results]


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
    words = ["uint32"] * 3
    bits = host.expression(lambda node, *x: node("random_bits", *x, dtype="uint32"), words, "uint32")
    cases["random_bits"] = bits, tuple(np.random.default_rng(5).integers(0, 2**32, (3, 1000), np.uint32))
    return cases


CASES = _cases()


@functools.cache
def _references(names):
    """Computes some of CASES in JAX on the CPU, in one program."""

    def everything(arguments):
        acc = jnp.zeros((1, 1))
        return {name: CASES[name][0].apply([acc] * CASES[name][0].products, x)[0][0] for name, x in arguments.items()}

    with jax.default_device(jax.devices("cpu")[0]):
        rows = {name: [x.reshape(1, -1) for x in CASES[name][1]] for name in names}
        return jax.tree.map(np.asarray, rounding(everything)(rows))


SMOOTH_CASES = {f"{op}-{dtype}": (op, dtype) for op in SMOOTH for dtype in FLOATS}


def ulps(got, true, dtype):
    """The distance in units of the last place of the true value's binade."""
    information = jnp.finfo(dtype)
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(true), 1e-300))), information.minexp)
    return np.abs(got.astype(np.float64) - true) / 2.0 ** (exponent - information.nmant)


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


def check_exact(name, got, quotient=2, names=tuple(CASES)):
    """Bit by bit the reference of `CASES`, but for what XLA on the CPU flushes, and quotients of floats.

    Those are within so many units in the last place of float32: by PTX's div.full two. ``names`` are the cases that are
    compared, whose references are compiled together.
    """
    _, arguments = CASES[name]
    op, _, dtype = name.partition("-")
    if op == "div" and dtype in FLOATS:
        numerator, denominator = (x.astype(np.float64) for x in arguments)
        # What is rounded to 16 bits may be a tie, which the error in float32 decides.
        check_close(op, dtype, arguments, numerator / denominator, got, quotient if dtype == "float32" else 0.51)
        return
    wanted = _references(names)[name]
    where = ~np.any([subnormal(x) for x in (*arguments, wanted, got)], axis=0)
    if name.startswith("reduce_precision(5") or name == "reduce_precision(8, 7)-float16":
        where &= ~(np.abs(arguments[0].astype(np.float32)) < 2**-14)  # XLA does not round subnormal f16
    if name.startswith("bitcast-float16"):
        where &= ~np.isnan(arguments[0])  # any NaN of f16 becomes one
    if name.startswith(("max", "min", "clamp")):  # XLA takes either zero
        where &= ~((got == 0) & (wanted == 0))
    if where.size > 4:
        assert where.mean() > 0.3
    check(got, wanted, arguments, where)


def smooth_grid(op, dtype, count=20000):
    """Arguments of a function; sin, cos and tan of large ones in f32 are another matter on the host."""
    x = grid(dtype, count)
    return x[~(np.abs(x.astype(np.float32)) > 1e5)] if op in ("sin", "cos", "tan") else x


def check_smooth(op, dtype, x, got, bound):
    """Asserts that a function is as close to float64's value as `check_close` says; returns the largest error."""
    return check_close(op, dtype, (x,), SMOOTH[op](x.astype(np.float64)), got, bound)


def check_close(op, dtype, inputs, true, got, bound):
    """Asserts that specials are those of float64's value, rounded, and all else within units of the last place of it.

    Returns the largest error, in units of the last place.
    """
    rounded = true.astype(np.float32).astype(dtype).astype(np.float32)
    special_value = ~np.isfinite(rounded) | (rounded == 0)
    largest = float(jnp.finfo(dtype).max)
    at_overflow = (np.abs(true) > 0.999 * largest) & (np.abs(true) < 1.001 * largest)  # infinite or not
    underflows = (rounded == 0) & (true != 0)  # may be the smallest number as well
    assert (np.abs(got[underflows]) <= float(jnp.finfo(dtype).smallest_subnormal)).all()
    check(got, rounded, inputs, special_value & ~at_overflow & ~underflows)
    assert np.isfinite(got[~special_value & ~at_overflow]).all()
    error = np.where(np.isfinite(rounded) & np.isfinite(got), ulps(got, true, dtype), 0)
    worst = int(np.argmax(error))
    at = ", ".join(repr(x[worst]) for x in inputs)
    assert error[worst] <= bound, f"{op} {dtype}: {error[worst]:.2f} units at {at}: {got[worst]!r}"
    return error[worst]


def check_fast(name, x, got, of_specials):
    """Asserts that before it is rounded to 16 bits a fast activation errs by less than 0.3 of what rounding may add.

    Returns that share.
    """
    function, dtype = FAST[name]
    got = got.astype(np.float64)
    true = ACTIVATIONS[function][1](x.astype(np.float64))
    information = jnp.finfo(dtype)
    tiny = float(information.tiny)
    normal_result = (np.abs(true) >= max(tiny, 2.0**-100)) & (np.abs(true) <= float(information.max))
    share = np.abs(got - true) / np.maximum(np.abs(true), 1e-300) / 2.0 ** -(information.nmant + 2)
    share = np.where(normal_result, share, 0)
    worst = int(np.argmax(share))
    assert share[worst] < 0.3, f"{name}: {share[worst]:.2f} of half a unit at {x[worst]!r}: {got[worst]!r}"
    # Below the normal numbers only the absolute error shows, and f32's subnormal results may be zero.
    small = np.abs(true) < tiny
    unit = float(information.smallest_subnormal) if dtype == "float16" else 2.0**-119
    assert np.all(np.abs(got - true)[small] < unit)
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = np.asarray(ACTIVATIONS[function][0](jnp.asarray(SPECIALS)))
    check(of_specials.astype(dtype), wanted.astype(dtype), (SPECIALS,))
    return share[worst]


SPECIALS = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)


def fast_grid(count=20000):
    """Arguments of an activation: every value of bf16 and f16, and some of f32."""
    x = np.concatenate(
        [grid("bfloat16").astype(np.float32), grid("float16").astype(np.float32), grid("float32", count)]
    )
    return x[np.isfinite(x) & (np.abs(x) < 1e4)]

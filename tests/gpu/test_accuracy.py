"""Generated epilogues on the device, element by element: the bounds of docs/accuracy.md hold for CUDA's functions too.

Every value of bf16 and f16, and a million of f32. A kernel of its own runs them, so that no GEMM stands between.
"""

from __future__ import annotations

import epilogue_cases as cases
import epilogue_host as host
import jax
import numpy as np
import problems
import pytest

from cutjax.binding.lowering import target
from cutjax.epilogue import emit
from cutjax.runtime import compiler, sources
from cutjax.runtime.launch import TARGET, Call, Int32, Launch, Pointer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|underflow):RuntimeWarning"),
]

THREADS = 256
F32_COUNT = 1 << 20
# Units in the last place. CUDA's documented bounds, and one for what is computed around them.
ULPS = {
    "exp": 2,
    "exp2": 2,
    "expm1": 2,
    "log": 2,
    "log1p": 2,
    "logistic": 4,
    "tanh": 3,
    "erf": 3,
    "erfc": 5,
    "erf_inv": 6,
    "rsqrt": 3,
    "cbrt": 2,
    "sin": 3,
    "cos": 3,
    "tan": 5,
    "asin": 3,
    "acos": 3,
    "atan": 3,
    "sinh": 4,
    "cosh": 3,
    "asinh": 4,
    "acosh": 5,
    "atanh": 4,
}


def source(epilogue):
    """A kernel of one thread an element: arrays of carriers in, arrays of carriers out."""
    carriers = [emit.CARRIERS[spec.dtype] for spec in epilogue.operands]
    results = [emit.CARRIERS[out.dtype] for out in epilogue.outputs]
    parameters = [f"const float* a{i}" for i in range(epilogue.products)]
    parameters += [f"const {carrier}* p{i}" for i, carrier in enumerate(carriers)]
    parameters += [f"{carrier}* q{i}" for i, carrier in enumerate(results)]
    accs = ", ".join(f"a{i}[t]" for i in range(epilogue.products))
    arguments = ["acc", *(f"p{i}[t]" for i in range(len(carriers))), "t / 1024", "t % 1024"]
    arguments += [f"q{i}[t]" for i in range(len(results))]
    return (
        f"{''.join(map(sources._file, ('common/atoms.cuh', *sources.MATH)))}{emit.emit(epilogue)}"
        f'extern "C" __global__ void elements({", ".join(parameters)}, int n) {{\n'
        f"  int t = blockIdx.x * {THREADS} + threadIdx.x;\n  if (t >= n) return;\n"
        f"  const float acc[{epilogue.products}] = {{{accs}}};\n"
        f"  epilogue_element({', '.join(arguments)});\n}}\n"
    )


def on_device(epilogue, *operands, accs=(), raw=False):
    """The outputs of every element; ``raw``: not yet rounded to their dtypes."""
    size = (*accs, *operands)[0].size
    arrays = list(accs) or [np.zeros(size, np.float32)] * epilogue.products
    arrays += [np.asarray(x).astype(host.carrier(s.dtype)) for x, s in zip(operands, epilogue.operands, strict=True)]
    shapes = [jax.ShapeDtypeStruct((size,), host.carrier(out.dtype)) for out in epilogue.outputs]
    buffers = range(len(arrays) + len(shapes))
    launch = Launch(
        kernel="elements",
        cubin=compiler.compile_kernel(source(epilogue), name="elements", arch=target().arch).image,
        grid=(-(-size // THREADS), 1, 1),
        block=(THREADS, 1, 1),
        params=(*(Pointer(i) for i in buffers), Int32(size)),
    )
    call = jax.jit(lambda *xs: jax.ffi.ffi_call(TARGET, shapes)(*xs, **Call((launch,)).attributes()))
    results = [np.asarray(x) for x in call(*arrays)]
    return [x if raw else x.astype(out.dtype) for x, out in zip(results, epilogue.outputs, strict=True)]


@pytest.mark.parametrize("name", cases.CASES)
def test_equals_the_reference(name):
    epilogue, arguments = cases.CASES[name]
    cases.check_exact(name, on_device(epilogue, *arguments)[0])


@pytest.mark.parametrize("name", cases.SMOOTH_CASES)
def test_functions(name):
    op, dtype = cases.SMOOTH_CASES[name]
    x = cases.grid(dtype, F32_COUNT)
    (got,) = on_device(host.unary(op, dtype, shown="float32"), x)
    # In 16 bits the error in f32 is added to half a unit.
    bound = ULPS[op] if dtype == "float32" else 0.51
    worst = cases.check_smooth(op, dtype, x, got, bound)
    print(f"{name}: {worst:.3f} units in the last place")  # pytest -rP
    problems.note_worst(f"error of {name}", worst / bound)


@pytest.mark.parametrize("name", cases.FAST)
def test_the_fast_form_hides_in_the_rounding(name):
    function, dtype = cases.FAST[name]
    epilogue = cases.traced(cases.cast(cases.ACTIVATIONS[function][0], dtype))
    x = cases.fast_grid(F32_COUNT)
    got, of_specials = (on_device(epilogue, accs=[values], raw=True)[0] for values in (x, cases.SPECIALS))
    share = cases.check_fast(name, x, got, of_specials)
    print(f"{name}: {share:.3f} of half a unit in the last place")  # pytest -rP
    problems.note_worst(f"error of {name} in half units", share / 0.3)


@pytest.mark.parametrize(("op", "function", "bound"), [("pow", np.power, 5), ("atan2", np.arctan2, 4)])
def test_functions_of_two_arguments(op, function, bound):
    a, b = cases.pairs("float32")
    (got,) = on_device(host.binary(op, "float32"), a, b)
    true = function(a.astype(np.float64), b.astype(np.float64))
    wanted = true.astype(np.float32)
    special_value = ~np.isfinite(wanted) | (wanted == 0)
    cases.check(got, wanted, (a, b), special_value)
    worst = np.max(cases.ulps(got, true, "float32")[~special_value])
    print(f"{op}: {worst:.3f} units in the last place")
    assert worst <= bound

"""Convolutions against their oracle by hand: random ones, and what is special to the function and the drop-ins.

The battery transforms them; here are dtypes, layouts, epilogues, refusals, problems of kernels and what is left to lax.
"""

from __future__ import annotations

import re

import convolutions
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, integers, normal, same
from jax import lax

import cutjax
from cutjax.kernels.choose import choose

LAST = ("NHWC", "HWIO", "NHWC")
COUNT = 24  # a second each; 1,000 after a change of the product: convolutions of seeds on from any


@pytest.mark.parametrize("seed", range(COUNT))
def test_random(seed):
    """Values, both gradients, mixed second derivatives and each vmap, in integers: exact in any order."""
    conv = convolutions.drawn(seed)
    x, dx, w, dw = (integers(4 * seed + i, (conv.lhs, conv.rhs)[i > 1]) for i in range(4))

    def fn(x, w):
        return cutjax.conv_general_dilated(x, w, **conv.arguments)

    @jax.jit
    def program(x, dx, w, dw, g):
        y, pull = jax.vjp(fn, x, w)
        mixed = jax.jvp(lambda x: jax.vjp(fn, x, w)[1](g)[1], (x,), (dx,))[1]
        xs, ws = jnp.stack([x, dx]), jnp.stack([w, dw], -1)
        batches = jax.vmap(fn, (0, None))(xs, w), jax.vmap(fn, (None, -1))(x, ws), jax.vmap(fn, (0, -1))(xs, ws)
        return y, *pull(g), mixed, batches

    places = ((0, 0), (0, 1), (1, 0), (1, 1))
    values = {(i, j): convolutions.convolved((x, dx)[i], (w, dw)[j], conv) for i, j in places}
    g = integers(seed, values[0, 0].shape)
    batches = (((0, 0), (1, 0)), ((0, 0), (0, 1)), ((0, 0), (1, 1)))
    expected = (
        values[0, 0],
        *convolutions.gradients(x, w, g, conv),
        convolutions.gradients(dx, w, g, conv)[1],
        tuple(np.stack([values[at] for at in pair]) for pair in batches),
    )
    jax.tree.map(np.testing.assert_array_equal, program(x, dx, w, dw, g), expected)


DTYPES = [
    ("float32", None),
    ("bfloat16", None),
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("float8_e4m3fn", "float32"),
    ("int8", None),
    ("int8", "int32"),
    ("uint8", "uint32"),
    ("float64", None),
]


@pytest.mark.parametrize(("dtype", "preferred"), DTYPES)
def test_dtypes_are_those_of_lax(dtype, preferred):
    with jax.enable_x64(dtype == "float64"):
        _compare_dtypes(dtype, preferred)


def _compare_dtypes(dtype, preferred):
    conv = convolutions.drawn(3)
    x, w = integers(0, conv.lhs).astype(dtype), integers(1, conv.rhs).astype(dtype)

    def of(module):
        return lambda x, w: module.conv_general_dilated(x, w, **conv.arguments, preferred_element_type=preferred)

    got = of(cutjax)(x, w)
    aval = jax.eval_shape(of(lax), x, w)
    assert (got.shape, got.dtype, got.weak_type) == (aval.shape, aval.dtype, aval.weak_type)
    wide = convolutions.convolved(np.asarray(x.astype("float32")), np.asarray(w.astype("float32")), conv)
    np.testing.assert_array_equal(
        got, wide.astype(np.int64).astype(got.dtype) if "int" in dtype else wide.astype(got.dtype)
    )
    if jnp.issubdtype(got.dtype, jnp.floating) and dtype != "float8_e4m3fn":
        grads = jax.grad(lambda x, w: of(cutjax)(x, w).astype("float32").sum(), (0, 1))(x, w)
        assert {g.dtype.name for g in grads} == {dtype}


X, W, B = normal(0, (4, 6, 7, 8)) / 2, normal(1, (3, 3, 8, 16)) / 4, normal(2, (16,))


def lax_conv(x, w, strides=(1, 1), padding="SAME", **more):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=LAST, **more)


EPILOGUES = {
    "of a channel": (lambda a, b: jax.nn.silu(a + b), (B[None, None, None],)),
    "of a pixel": (lambda a, s: a * s, (normal(3, (4, 6, 7, 1)),)),
    "of an image": (lambda a, s: a * s, (normal(4, (4, 1, 1, 16)),)),
    "of a row and a column": (lambda a, s, t: a * s + t, (normal(5, (6, 1, 1))[None], normal(6, (7, 16))[None, None])),
    "residual": (lambda a, r: jnp.tanh(a) + r, (normal(7, (4, 6, 7, 16)),)),
    "moments": (lambda a: (a, a.sum((0, 1, 2)), (a * a).sum((0, 1, 2))), ()),
    "moments of images": (lambda a: (a, a.sum((1, 2)), (a * a).sum((1, 2))), ()),
    "a pixel's": (lambda a: (a.sum(-1), a.max(-1), a.min((0, 1, 2, 3))), ()),
    "positions": (
        lambda a: a * lax.broadcasted_iota(jnp.float32, a.shape, 2) + lax.broadcasted_iota("int32", a.shape, 3),
        (),
    ),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name):
    """Operands broadcast as arrays with channels last, and reductions are of axes of these; values and gradients."""
    fn, operands = EPILOGUES[name]

    def ours(x, w, *operands):
        return cutjax.conv(x, w, epilogue=fn, operands=operands)

    def plain(x, w, *operands):
        return fn(lax_conv(x, w), *operands)

    @jax.jit
    def program(*args):
        def both(f):
            y, pull = jax.vjp(f, *args)
            return y, pull(jax.tree.map(jnp.cos, y))

        return both(ours), both(plain)

    with jax.numpy_dtype_promotion("standard"):
        close(*program(X, W, *operands), 1e-4)


def test_epilogue_of_two_products_and_in_another_layout():
    def ours(x, w, v):
        numbers = ("NCHW", "OIHW", "NCHW")
        x, w, v = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), v.transpose(3, 2, 0, 1)
        gate = lambda p, q: (jnp.tanh(p) * jax.nn.sigmoid(q), p.sum((1, 2)))  # noqa: E731
        y, moments = cutjax.conv(x, (w, v), padding=1, dimension_numbers=numbers, epilogue=gate)
        return y.transpose(0, 2, 3, 1), moments

    def plain(x, w, v):
        p, q = lax_conv(x, w), lax_conv(x, v)
        return jnp.tanh(p) * jax.nn.sigmoid(q), p.sum((1, 2))

    close(*jax.jit(lambda *args: (ours(*args), plain(*args)))(X, W, W[::-1]), 1e-5)


PADDED = [("SAME", None, False), ("VALID", (1, 2), False), (((1, 0), (2, 1)), None, True)]


@pytest.mark.parametrize(("padding", "dilation", "consistent"), PADDED)
@pytest.mark.parametrize(("layout", "kernel"), [("NCHW", True), ("NHWC", True), ("NHWC", False)])
def test_transposed(layout, kernel, padding, dilation, consistent):
    """lax.conv_transpose in its ways to pad, whose weights are read as they lie."""
    x = integers(0, (2, 5, 4, 3) if layout == "NHWC" else (2, 3, 5, 4))
    w = integers(1, (3, 2, 4, 3) if kernel else (3, 2, 3, 4))
    args = (2, 3), padding, dilation, (layout, "HWIO", layout), kernel, None, None, consistent

    @jax.jit
    def both(x, w):
        def of(module):
            y, pull = jax.vjp(lambda x, w: module.conv_transpose(x, w, *args), x, w)
            return y, pull(jnp.round(jnp.cos(jnp.arange(y.size)).reshape(y.shape) * 3))

        return of(cutjax), of(lax)

    same(*both(x, w))
    assert "rev" not in str(jax.make_jaxpr(lambda x, w: cutjax.conv_transpose(x, w, *args))(x, w))


def kinds(fn, *args):
    """What a kernel for Hopper is asked for, of a function and its gradients: the views of a and b, and the layout."""

    def both(*args):
        y, pull = jax.vjp(fn, *args)
        return y, pull(y)

    found = []
    for row in cutjax.explain(both, arch="sm_90a")(*args).rows:
        p = row.choice.problem
        found.append((p.layout, *(type(x.view).__name__ if x.view else "" for x in (p.a, p.bs[0])), (p.m, p.n, p.k)))
    return found


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def test_problems():
    """Each product, and both of its gradients: windows and taps, and matrices where the memory is that already."""
    x, w = of(8, 14, 14, 64), of(3, 3, 64, 32)
    pixels, taps = 8 * 14 * 14, 9 * 64
    assert kinds(cutjax.conv, x, w) == [
        ("nn", "Im2col", "", (pixels, 32, taps)),
        ("tn", "Im2col", "", (taps, 32, pixels)),
        ("nt", "Im2col", "Taps", (pixels, 64, 9 * 32)),
    ]
    assert kinds(cutjax.conv, x, of(1, 1, 64, 32)) == [
        ("nn", "", "", (pixels, 32, 64)),
        ("tn", "", "", (64, 32, pixels)),
        ("nt", "", "", (pixels, 64, 32)),
    ]
    patches = kinds(lambda x, w: cutjax.conv(x, w, window_strides=2, padding="VALID"), of(8, 14, 64), of(2, 64, 32))
    assert patches == [("nn", "", "", (56, 32, 128)), ("tn", "", "", (128, 32, 56)), ("nt", "", "", (56, 128, 32))]


def test_gradients_of_transposed_convolutions_are_of_no_zeros():
    def fn(x, w):
        return cutjax.conv_transpose(x, w, (2, 2), "SAME")

    rows = cutjax.explain(jax.grad(lambda x, w: fn(x, w).astype("float32").sum(), (0, 1)), arch="sm_90a")(
        of(8, 14, 14, 64), of(4, 4, 64, 32)
    ).rows
    assert {row.choice.problem.a.view.spread for row in rows} == {(1, 1)}
    assert {row.choice.problem.flops for row in rows} == {2 * 8 * 14 * 14 * 16 * 64 * 32}


def test_fewer_axes():
    """Axes along which nothing is convolved are images, or one axis."""
    rows = [
        cutjax.explain(cutjax.conv, arch="sm_90a")(of(2, 4, 6, 8, 16), of(*k, 16, 16)).rows[0]
        for k in ((1, 3, 3), (3, 1, 1))
    ]
    views = [row.choice.problem.a.view for row in rows]
    assert [(view.images, view.image, view.window) for view in views] == [(8, (6, 8), (3, 3)), (2, (4, 48), (3, 1))]


def test_what_a_kernel_of_rows_cannot():
    def explained(fn, operands=()):
        (row,) = cutjax.explain(lambda x, w, *s: cutjax.conv(x, w, epilogue=fn, operands=s), arch="sm_90a")(
            X, jnp.ones((1, 1, 8, 16)), *operands
        ).rows
        return row

    assert "single axes of the rows" in explained(lambda a: (a, a.sum((1, 2)))).why
    moments = explained(lambda a, r: (a + r, a.sum((0, 1, 2))), (jnp.ones((4, 6, 7, 16)),)).choice.problem
    assert (moments.m, moments.epilogue.outputs[1].axes, moments.epilogue.operands[0].batch) == (168, ("row",), ())
    spread = explained(lambda a, s: a * s, (jnp.ones((4, 1, 1, 16)),)).choice.problem.epilogue.operands[0]
    assert (spread.row, spread.col) == (True, True)


def test_copies_are_explained():
    (row,) = cutjax.explain(lambda x, w: cutjax.conv_general_dilated(x, w, (1, 1), "SAME"))(
        of(2, 8, 6, 6), of(4, 8, 3, 3)
    ).rows
    assert "lhs is transposed, of 1152 bytes" in row.why
    assert "the result is transposed" in row.why


def test_copies_count():
    """What XLA's own convolution need not transpose: it does so too in 16 bits, of images of two axes."""

    def moved(dtype, *shapes):
        avals = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        one = (1,) * (len(shapes[0]) - 2)
        jaxpr = jax.make_jaxpr(lambda x, w: cutjax.conv_general_dilated(x, w, one, "SAME"))(*avals)
        (found,) = [eqn.params["hints"].moved for eqn in jaxpr.eqns if "hints" in eqn.params]
        return found

    assert moved("bfloat16", (4, 64, 16, 16), (64, 64, 3, 3)) == 0
    assert moved("float32", (4, 64, 16, 16), (64, 64, 3, 3)) == 4 * (2 * 4 * 64 * 256 + 64 * 64 * 9)
    assert moved("bfloat16", (4, 64, 256), (64, 64, 3)) == 2 * (2 * 4 * 64 * 256 + 64 * 64 * 3)
    problem = cutjax.Problem(4096, 4096, 4104)
    much = {"lead": 0.5, "moved": 1 << 40}
    kernel, xla, asked = choose(problem, lead=0.5), choose(problem, **much), choose(problem, backend="cuda", **much)
    assert (kernel.served, xla.served, asked.served) == (True, False, True)
    assert "us of transposes" in xla.reasons[0]


def test_lowering_for_cuda():
    """The kernel of a 1x1 convolution takes images where it has a matrix, epilogue, sums and splits of k included."""

    def fn(x, w, r):
        return cutjax.conv(x, w, epilogue=lambda a, r: (a + r.astype(a.dtype), a.sum((0, 1, 2))), operands=(r,))

    args = of(8, 28, 28, 250), of(1, 1, 250, 128), of(8, 28, 28, 128)
    for config in (cutjax.Config(128, 128, 64, 4), cutjax.Config(128, 128, 64, 4, splits=2)):
        pinned = lambda x, w, r, config=config: cutjax.conv(  # noqa: E731
            x, w, epilogue=lambda a, r: (a + r.astype(a.dtype), a.sum((0, 1, 2))), operands=(r,), config=config
        )
        text = jax.jit(pinned).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert len(re.findall("cutjax_launch", text)) == 1
    with cutjax.use_backend("cuda"):
        assert "cutjax_launch" in jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("shape", [(0, 6, 7, 8), (2, 0, 7, 8), (2, 6, 7, 0)])
def test_zero_sizes(shape):
    x, w = jnp.ones(shape), jnp.ones((3, 3, shape[-1], 4))
    expected = jax.eval_shape(lax_conv, x, w)
    got = cutjax.conv(x, w)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert not np.asarray(got).any()
    grads = jax.grad(lambda x, w: cutjax.conv(x, w).sum(), (0, 1))(x, w)
    assert not any(np.asarray(g).any() for g in grads)


def test_windows_of_zeros_alone():
    """Between the elements of a spread image, say: there is no kernel, and nothing to compute."""
    x, w = jnp.ones((2, 8, 1)), jnp.ones((1, 1, 1))
    arguments = {"window_strides": 3, "padding": 4, "lhs_dilation": 3}
    assert not np.asarray(cutjax.conv(x, w, **arguments)).any()
    with cutjax.use_backend("cuda"):
        (row,) = cutjax.explain(lambda x, w: cutjax.conv(x, w, **arguments), arch="sm_90a")(x, w).rows
    assert (row.runs, row.choice.problem.flops) == ("XLA", 0)


def test_xla_reads_nothing_outside():
    """jax 0.10.2 on CPUs: errors of 1e11."""
    x, w = integers(0, (1, 9, 3)), integers(1, (3, 3, 1))
    arguments = {"window_strides": (3,), "padding": ((-1, 1),), "dimension_numbers": ("NWC", "WIO", "NWC")}
    expected = convolutions.convolved(x, w, convolutions.Convolution(x.shape, w.shape, arguments))
    np.testing.assert_array_equal(cutjax.conv_general_dilated(x, w, **arguments), expected)


REFUSED = {
    "channels": ({"w": jnp.ones((3, 3, 7, 16))}, ValueError, "feature"),
    "groups": ({"feature_group_count": 3}, ValueError, "feature_group_count"),
    "no groups": ({"feature_group_count": 0}, ValueError, "feature_group_count"),
    "strides": ({"window_strides": (1, 2, 3)}, ValueError, "window_strides"),
    "a float": ({"window_strides": 1.5}, TypeError, "window_strides"),
    "no stride": ({"window_strides": 0}, (TypeError, ValueError), "stride"),
    "padding": ({"padding": "HALF"}, (RuntimeError, ValueError), "padding"),
    "pairs": ({"padding": ((1, 1),)}, ValueError, "padding"),
    "spread": ({"lhs_dilation": 2}, ValueError, "padding"),
    "numbers": ({"dimension_numbers": ("NHWC", "HWIO", "NHWX")}, TypeError, "dimension"),
    "a vector": ({"x": jnp.ones((4, 8))}, ValueError, "rank|expected"),
    "images": ({"x": jnp.ones((4, 7, 8))}, ValueError, "spatial axes"),
    "two weights": ({"w": (W, W)}, TypeError, "epilogue"),
    "precision": ({"precision": "exact"}, ValueError, "Precision"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_name_the_function(what):
    given, error, words = REFUSED[what]
    with pytest.raises(error, match=rf"(?s)^conv: .*({words})"):
        cutjax.conv(**{"x": X, "w": W, **given})


@pytest.mark.parametrize("name", ["lhs_dilation", "rhs_dilation"])
def test_dilations_of_another_length_are_errors_of_lax(name):
    for module in (lax, cutjax):
        with pytest.raises(ValueError, match="dilation factors to have same dimension-size"):
            module.conv_general_dilated(X, W, (1, 1), [(1, 1), (1, 1)], dimension_numbers=LAST, **{name: (2,)})


@pytest.mark.parametrize("what", ["channels", "groups", "padding", "strides", "dtypes"])
def test_errors_of_drop_ins_are_those_of_lax(what):
    arguments = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": LAST}
    x, w = X, W
    if what == "channels":
        w = w[:, :, :5]
    elif what == "dtypes":
        w = w.astype(jnp.bfloat16)
    else:
        arguments |= {
            "groups": {"feature_group_count": 3},
            "padding": {"padding": "X"},
            "strides": {"window_strides": (1,)},
        }[what]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as of_lax:
        lax.conv_general_dilated(x, w, **arguments)
    with pytest.raises(type(of_lax.value), match=re.escape(str(of_lax.value))):
        cutjax.conv_general_dilated(x, w, **arguments)


def test_what_is_left_to_lax():
    """No axes, or four of them; sizes of images that are not known."""
    for d in (0, 4):
        x, w = integers(0, (2, 3, *[3] * d)), integers(1, (4, 3, *[2] * d))
        one = (1,) * d
        same(cutjax.conv_general_dilated(x, w, one, "VALID"), lax.conv_general_dilated(x, w, one, "VALID"))
        with cutjax.use_backend("cuda"), pytest.raises(NotImplementedError, match="one to three axes"):
            cutjax.conv_general_dilated(x, w, one, "VALID")
    (size,) = jax.export.symbolic_shape("size")
    fn = jax.jit(lambda x, w: cutjax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAST))
    exported = jax.export.export(fn, platforms=["cpu"])(jax.ShapeDtypeStruct((4, size, 7, 8), X.dtype), W)
    close(exported.call(X, W), lax_conv(X, W))


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", "VALID"])
def test_images_of_sizes_that_are_not_known(padding):
    """By jax.lax, the epilogue in plain JAX; in a layout of its own."""

    def fn(x, w, b):
        def epilogue(acc, b):
            return jax.nn.silu(acc + b), acc.sum((0, 1, 2))

        shared = {"window_strides": 2, "padding": padding}
        plain = cutjax.conv(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), **shared)
        first = cutjax.conv(
            jnp.moveaxis(x, -1, 1),
            w,
            dimension_numbers=("NCHW", "HWIO", "NCHW"),
            epilogue=epilogue,
            operands=(b,),
            out_dtype=(jnp.bfloat16, None),
            **shared,
        )
        return plain, first

    args = X, W, normal(2, (16,))
    some = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, h, w, 8"), X.dtype)
    exported = jax.export.export(jax.jit(fn), platforms=["cpu", "cuda"])(some, *args[1:])
    close(exported.call(*args), jax.jit(fn)(*args), 1e-2)
    with cutjax.use_backend("cuda"), pytest.raises(NotImplementedError, match=r"conv: .* needs known sizes"):
        jax.eval_shape(fn, some, *args[1:])


def test_spellings():
    """Integers for all axes, numpy's, lists; and the precision of the scope."""
    expected = cutjax.conv(X, W, window_strides=(2, 2), padding=((1, 1), (1, 1)), rhs_dilation=(2, 2))
    for one in (2, np.int32(2), [2, 2], np.array([2, 2])):
        same(cutjax.conv(X, W, window_strides=one, padding=1, rhs_dilation=one), expected)
    same(cutjax.conv(X, W, window_strides=2, padding=[1, (1, 1)], rhs_dilation=2), expected)
    with jax.default_matmul_precision("highest"):
        text = str(jax.make_jaxpr(cutjax.conv)(X, W))
    assert "HIGHEST" in text


def test_mixed_dtypes():
    """As in gemm: integers of 8 bits stay beside bfloat16, the scale of a channel is an epilogue; the rest promotes."""
    x, w = integers(0, X.shape, jnp.bfloat16), integers(1, W.shape, jnp.int8)

    def fn(x, w, out_dtype=jnp.float32):
        return cutjax.conv(
            x, w, epilogue=lambda a, s: a * s, operands=(2 * jnp.ones((1, 1, 1, 16)),), out_dtype=out_dtype
        )

    expected = 2 * lax_conv(x.astype("float32"), w.astype("float32"))
    same(fn(x, w), expected)
    assert [v.aval.dtype.name for v in jax.make_jaxpr(fn)(x, w).eqns[-1].invars[:2]] == ["bfloat16", "int8"]
    with jax.numpy_dtype_promotion("standard"):
        same(fn(x.astype("float32"), w.astype("bfloat16"), None), expected)

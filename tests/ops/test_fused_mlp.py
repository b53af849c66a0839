"""Networks of small layers: derivatives of every order against plain JAX, in programs of kernels and in products."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, mesh_of, normal

import cutjax
from cutjax.binding import lowering
from cutjax.ops import fused_mlp as module

SIZES = (2, 8, 12, 1)


@functools.cache
def parameters():
    ws = [normal(i, (k, n)) / np.sqrt(k) for i, (k, n) in enumerate(itertools.pairwise(SIZES))]
    return [*ws], [normal(9 + i, (n,)) / 4 for i, n in enumerate(SIZES[1:])]


def plain(x, ws, bs, act=jnp.tanh, last=None):
    for i, (w, b) in enumerate(zip(ws, bs, strict=True)):
        x = jnp.matmul(x, w, precision="highest") + (0 if b is None else b)
        function = last if i == len(ws) - 1 else act
        x = x if function is None else function(x)
    return x


def ours(x, ws, bs, act=jnp.tanh, last=None):
    return cutjax.fused_mlp(x, ws, bs, act, output_activation=last, precision="highest")


def loss(u):
    return lambda *args: (u(*args) ** 2).sum()


def laplacian(u):
    """Forward over reverse."""

    def at(x, *args):
        slope = jax.grad(lambda x: u(x, *args)[0])
        return sum(jax.jvp(slope, (x,), (e,))[1][i] for i, e in enumerate(jnp.eye(2)))

    return jax.vmap(at, (0, None, None))


FORMS = {
    "result": lambda u: u,
    "gradients": lambda u: jax.grad(loss(u), (0, 1, 2)),
    "jvp": lambda u: lambda *args: jax.jvp(u, args, args),
    "jvp of jvp": lambda u: lambda x, *rest: jax.jvp(lambda x: jax.jvp(lambda x: u(x, *rest), (x,), (x,)), (x,), (x,)),
    "jvp of gradients": lambda u: lambda *args: jax.jvp(jax.grad(loss(u), (0, 1, 2)), args, args),
    "gradients of gradients": lambda u: jax.grad(
        lambda *args: sum((t**2).sum() for t in jax.tree.leaves(jax.grad(loss(u), (0, 1, 2))(*args))), (0, 1, 2)
    ),
    "hessian": lambda u: jax.vmap(jax.hessian(lambda *args: u(*args)[0]), (0, None, None)),
    "laplacian": laplacian,
    "training by a laplacian": lambda u: jax.grad(lambda *args: (laplacian(u)(*args) ** 2).mean(), (1, 2)),
    "gradients of each row": lambda u: jax.vmap(jax.grad(lambda *args: u(*args)[0], (0, 1, 2)), (0, None, None)),
    "remat": lambda u: jax.grad(jax.checkpoint(loss(u)), (0, 1, 2)),
}


@pytest.mark.versions
@pytest.mark.parametrize("backend", ["auto", "cuda"])
@pytest.mark.parametrize("form", FORMS)
def test_derivatives(form, backend):
    args = (normal(20, (6, 2)), *parameters())
    expected = jax.jit(FORMS[form](plain))(*args)
    with cutjax.use_backend(backend):
        found = jax.jit(FORMS[form](ours))(*args)
    jax.tree.map(lambda x, y: close(x, y, 2e-5), found, expected)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]


@pytest.mark.parametrize("axes", [(None, 0, 0), (0, 0, 0), (0, None, None), (None, 0, None)])
def test_ensembles(axes):
    """Networks, rows, and both; and rows of networks that are mapped again."""
    several = lambda x: jnp.stack([x, 1.5 * x, x - 1])  # noqa: E731
    args = [
        jax.tree.map(several, x) if axis == 0 else x
        for x, axis in zip((normal(20, (6, 2)), *parameters()), axes, strict=True)
    ]
    for form in ("result", "gradients"):
        expected = jax.vmap(FORMS[form](plain), axes)(*args)
        with cutjax.use_backend("cuda"):
            found = jax.vmap(FORMS[form](ours), axes)(*args)
        jax.tree.map(lambda x, y: close(x, y, 2e-5), found, expected)
    twice = jax.vmap(jax.vmap(ours, (0, None, None)), (None, 0, 0))
    ws, bs = jax.tree.map(several, parameters())
    with cutjax.use_backend("cuda"):
        found = twice(normal(21, (2, 6, 2)), ws, bs)
    close(found, jax.vmap(jax.vmap(plain, (0, None, None)), (None, 0, 0))(normal(21, (2, 6, 2)), ws, bs), 2e-5)


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_an_ensemble_on_explicit_mesh_axes(backend):
    """Results and gradients lie as the networks do."""
    mesh = mesh_of(jax.sharding.AxisType.Explicit, i=2)
    ws = [normal(i, (2, *w.shape)) for i, w in enumerate(parameters()[0])]
    x = normal(9, (5, 2))

    def gradient(u, ws):
        return jax.grad(lambda ws: jnp.sin(jax.vmap(lambda w: u(x, w, [None] * 3))(ws)).sum())(ws)

    with jax.set_mesh(mesh), cutjax.use_backend(backend):
        found = jax.jit(functools.partial(gradient, ours))(jax.device_put(ws, jax.P("i")))
    assert all(jax.typeof(g).sharding.spec[0] == "i" for g in found)
    jax.tree.map(lambda a, b: close(a, b, 2e-5), found, gradient(plain, ws))


@pytest.mark.parametrize("shape", [(2,), (0, 2), (3, 4, 2)])
def test_any_number_of_axes(shape):
    ws, bs = parameters()
    x = jnp.asarray(normal(3, (*shape, 1)))[..., 0] if shape != (0, 2) else jnp.zeros(shape)
    for backend in ("auto", "cuda"):
        with cutjax.use_backend(backend):
            close(ours(x, ws, bs), plain(x, ws, bs), 2e-5)
            slope = jax.grad(loss(ours), (0, 1, 2))(x, ws, bs)
        jax.tree.map(lambda a, b: close(a, b, 2e-5), slope, jax.grad(loss(plain), (0, 1, 2))(x, ws, bs))


def test_weights_may_be_one_array_and_biases_missing():
    ws, x = normal(0, (3, 8, 8)) / 3, normal(1, (5, 8))
    close(cutjax.fused_mlp(x, ws, None, jax.nn.relu), plain(x, list(ws), [None] * 3, jax.nn.relu), 1e-5)
    biases = [None, normal(2, (8,)), None]
    found = cutjax.fused_mlp(x, ws, biases, jax.nn.silu, output_activation=jnp.tanh, backend="cuda")
    close(found, plain(x, list(ws), biases, jax.nn.silu, jnp.tanh), 1e-5)


@pytest.mark.parametrize("act", [jax.nn.relu, jax.nn.gelu, jnp.sin, lambda x: jnp.where(x > 0, x, x**3)])
def test_activations(act):
    args = (normal(20, (6, 2)), *parameters())
    with cutjax.use_backend("cuda"):
        found = FORMS["gradients"](functools.partial(ours, act=act))(*args)
    expected = FORMS["gradients"](functools.partial(plain, act=act))(*args)
    jax.tree.map(lambda x, y: close(x, y, 2e-5), found, expected)


def test_an_activation_with_parameters_is_made_of_products():
    (x, ws, bs), beta = (normal(20, (6, 2)), *parameters()), jnp.float32(1.3)
    of = lambda u: jax.grad(lambda beta: (u(x, ws, bs, lambda t: t * jax.nn.sigmoid(beta * t)) ** 2).sum())  # noqa: E731
    close(of(ours)(beta), of(plain)(beta), 1e-5)


def test_an_activation_with_parameters_of_each_column():
    ws, slopes, x = normal(0, (3, 8, 8)) / 3, normal(2, (8,)), normal(1, (5, 8))

    def of(u):
        return jax.grad(lambda slopes: u(x, list(ws), [None] * 3, lambda t: jnp.where(t > 0, t, slopes * t)).sum())

    close(of(ours)(slopes), of(plain)(slopes), 1e-5)


def test_narrow_dtypes_round_as_plain_layers_do():
    x, (ws, bs) = normal(20, (64, 2)), parameters()
    x, ws, bs = jax.tree.map(lambda t: t.astype(jnp.bfloat16), (x, ws, bs))
    wide = jax.tree.map(lambda t: t.astype(jnp.float32), (x, ws, bs))
    expected = FORMS["gradients"](plain)(*wide)
    with cutjax.use_backend("cuda"):
        found = FORMS["gradients"](ours)(x, ws, bs)
    assert all(t.dtype == jnp.bfloat16 for t in jax.tree.leaves(found))
    scale = lambda y: float(jnp.abs(y).max())  # noqa: E731
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a.astype(np.float32), b, atol=0.03 * scale(b)), found, expected
    )


def test_one_result_alone_needs_no_others():
    """jit leaves out the sums that nothing reads."""
    args = (normal(20, (6, 2)), *parameters())
    with cutjax.use_backend("cuda"):
        jaxpr = jax.make_jaxpr(lambda *args: jax.grad(loss(ours))(*args))(*args)
    programs = [eqn.params["program"] for eqn in _equations(jaxpr.jaxpr)]
    assert [program.sums for program in programs] == [False, False]


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cutjax_network":
            yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _equations(inner)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"weights": []}, ValueError, "weights is empty"),
        ({"weights": np.ones((2, 2), np.float32)}, ValueError, r"one array \(2, 2\)"),
        ({"weights": [np.ones((3, 4), np.float32)]}, ValueError, r"weights\[0\] is \(3, 4\), expected 2 rows"),
        ({"biases": [np.ones(3, np.float32)]}, ValueError, "as many as weights, 3, got 1"),
        ({"activation": 3}, TypeError, "activation must be a function, got int"),
        ({"activation": lambda x: x[:1]}, ValueError, "activation must return one array"),
        (
            {"activation": lambda x: jax.lax.complex(x, x)},
            TypeError,
            "activation returns complex64, but the product is of float32",
        ),
        ({"biases": [np.ones(8, np.complex64)] * 2 + [None]}, TypeError, r"biases\[0\] must be real numbers"),
        ({"x": np.float32(1)}, TypeError, "x must be an array"),
        ({"x": np.ones((2, 2), np.complex64), "weights": [np.ones((2, 1), np.complex64)]}, TypeError, "floating-point"),
        ({"weights": [np.ones((2, 1), np.float32), np.ones((1, 1), jnp.bfloat16)]}, TypeError, "in one dtype"),
    ],
)
def test_refusals(how, error, message):
    ws, bs = parameters()
    biases = bs if "weights" not in how else None
    arguments = {"x": np.ones((4, 2), np.float32), "weights": ws, "biases": biases, "activation": jnp.tanh} | how
    with pytest.raises(error, match=message):
        cutjax.fused_mlp(**arguments)


def test_what_is_no_elementwise_function_is_refused():
    with pytest.raises(NotImplementedError):
        cutjax.fused_mlp(np.ones((4, 2), np.float32), *parameters(), jax.nn.softmax)


def test_the_program_of_layers():
    """A layer is two steps, and the last one of which there is no activation is one."""
    program = module._program([(2, 8), (8, 1)], [True, False], jnp.tanh, None)
    assert program is not None
    assert [type(step).__name__ for step in program.steps] == ["Affine", "Map", "Affine"]
    assert program.flops(10) == 2 * 10 * (2 * 8 + 8)


@pytest.mark.parametrize(
    ("width", "layers", "forward", "gradient"),
    [(64, 1, True, True), (128, 3, True, True), (128, 6, True, False), (136, 1, False, False)],
)
def test_auto_takes_kernels_where_they_were_faster(width, layers, forward, gradient, monkeypatch):
    """Sums of six matrices 128 wide are added up in memory: of three that took 4454 us, all of plain JAX 2570."""
    monkeypatch.setattr(lowering, "on_cuda", lambda: True)
    x, shapes = jnp.zeros((1 << 14, 3), jnp.bfloat16), [(3, width), *[(width, width)] * layers]
    ws = [jnp.zeros(shape, jnp.bfloat16) for shape in shapes]
    result = functools.partial(cutjax.fused_mlp, biases=None, activation=jnp.tanh, backend="auto")
    assert ("cutjax_network" in str(jax.make_jaxpr(result)(x, ws))) == forward
    of_ws = jax.make_jaxpr(jax.grad(lambda ws: result(x, ws).sum()))(ws)
    assert ("cutjax_gemm" not in str(of_ws)) == gradient


@pytest.mark.parametrize(("where", "kernels"), [({"platform": "cuda"}, 1), ({"device": "NVIDIA H200"}, 1), ({}, 0)])
def test_explain_shows_the_kernel_that_runs_on_the_platform_asked_for(where, kernels):
    x, ws = jnp.zeros((1 << 14, 3), jnp.bfloat16), [jnp.zeros(shape, jnp.bfloat16) for shape in ((3, 64), (64, 1))]
    rows = cutjax.explain(functools.partial(cutjax.fused_mlp, activation=jnp.tanh), **where)(x, ws).rows
    assert sum(row.runs.startswith("network_") for row in rows) == kernels
    assert len(rows) == (kernels or 2)

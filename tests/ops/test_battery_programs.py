"""Every operation over devices and in programs of their own: shard_map, export, other platforms, symbolic sizes."""

from __future__ import annotations

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, inexact, mesh_of, multiplied, stacked
from operations import OPERATIONS, both, expected, in_turn, main, of_floats, operands

import cutjax

P = jax.P


def floats(fn):
    return lambda *args: inexact(fn(*args))


def gradient(fn, args):
    """Of everything the function returns, which is returned too."""
    f, xs = of_floats(floats(fn), args)

    def loss(*xs):
        found = f(*xs)
        return sum(jnp.sin(y).sum() for y in found), found

    return jax.grad(loss, range(len(xs)), has_aux=True)(*xs)


@pytest.mark.versions
@pytest.mark.parametrize("name", in_turn(0))
def test_shard_map(name):
    """A device for each of two calls, all operands divided or the first alone; gradients inside and of the whole."""
    op, args = OPERATIONS[name], operands(name)
    mesh, n = mesh_of(i=2), len(args)
    counts = {1, n} if main(name) and n < 4 else {n}

    def divide(args, count):
        members = [[stacked(x, 0)[i] if k < count else x for k, x in enumerate(args)] for i in range(2)]
        return [jnp.stack([each[k] for each in members]) if k < count else args[k] for k in range(n)]

    def ours(args, count):
        specs = tuple(P("i") if k < count else P() for k in range(n))
        over = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P("i"))

        def local(args):
            return [x[0] if k < count else x for k, x in enumerate(args)]

        inside = over(lambda *args: gradient(op.fn, local(args))[0][0][None])(*args)
        return gradient(over(lambda *args: [y[None] for y in floats(op.fn)(*local(args))]), args), inside

    def plain(args, count):
        grads, values = gradient(jax.vmap(floats(op.plain), [0 if k < count else None for k in range(n)]), args)
        return (grads, values), grads[0]  # of an operand that is divided, as the first is

    @jax.jit
    def program(*args):
        operands = [(divide(args, count), count) for count in counts]
        return [[f(*given) for given in operands] for f in (ours, plain)]

    close(*program(*args), 1e-4)


@pytest.mark.versions
@pytest.mark.parametrize("name", in_turn(0))
def test_export(name):
    """A program with its gradient, written and read again."""
    args = operands(name)
    exported = jax.export.export(both(name), platforms=["cpu"])(*args)
    close(jax.export.deserialize(exported.serialize()).call(*args), expected(name))


@pytest.mark.versions
@pytest.mark.parametrize("name", in_turn(1))
def test_symbolic_sizes(name):
    """Any number of rows, or a refusal that names what does not take it."""
    op, args = OPERATIONS[name], operands(name)
    (m,) = jax.export.symbolic_shape("m + 1", constraints=["m >= 7"])
    rows = args[0].shape[0]
    shapes = [jax.ShapeDtypeStruct((m, *x.shape[1:]) if x.shape[0] == rows else x.shape, x.dtype) for x in args]
    export = jax.export.export(jax.jit(op.fn), platforms=["cpu", "cuda"])
    if not op.symbolic:
        with pytest.raises(NotImplementedError, match=r"^[a-z_]*: .*(symbolic shape|needs known sizes)"):
            export(*shapes)
        return
    exported = export(*shapes)
    close(exported.call(*args), expected(name)[0])


@pytest.mark.parametrize("name", ["gemm, epilogue", "grouped_gemm"])
def test_gradients_of_symbolic_sizes(name):
    """Exported for CUDA alone, where a kernel would run; under a batch of a size that is not known, too."""
    fn, args = OPERATIONS[name].fn, operands(name)
    (b,) = jax.export.symbolic_shape("b")
    batched = lambda x, *rest: jax.vmap(lambda x: gradient(fn, (x, *rest)))(x)  # noqa: E731
    shapes = [jax.ShapeDtypeStruct((b, *args[0].shape), args[0].dtype), *args[1:]]
    jax.export.export(jax.jit(batched), platforms=["cuda"])(*shapes)
    exported = jax.export.export(jax.jit(batched), platforms=["cpu"])(*shapes)
    given = stacked(args[0], 0), *args[1:]
    close(exported.call(*given), jax.jit(batched)(*given), 1e-4)


def test_a_kernel_that_is_asked_for_needs_known_sizes():
    (m,) = jax.export.symbolic_shape("m")
    export = jax.export.export(jax.jit(lambda x, w: cutjax.gemm(x, w, backend="cuda")), platforms=["cuda"])
    with pytest.raises(NotImplementedError, match=r"gemm: kernels are compiled for known sizes, not \(m, 8\)"):
        export(jax.ShapeDtypeStruct((m, 8), jnp.float32), jnp.ones((8, 4)))


@pytest.mark.versions
@pytest.mark.parametrize("name", OPERATIONS)
def test_cuda(name):
    """In 16 bits: the kernels of the program are those that explain names; all else has its reason."""
    args = [np.asarray(x) for x in operands(name)]
    args = [x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
    if "bfloat16" not in OPERATIONS[name].dtypes:
        args = operands(name)

    def fn(*args):
        return OPERATIONS[name].fn(*args), gradient(OPERATIONS[name].fn, args)[0]

    rows = cutjax.explain(fn, platform="cuda")(*args).rows
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r'@cutjax_launch.*?kernel = "([\w ]+)"', text)  # of several launches the first is told
    named = {call.split()[0] for call in calls}
    assert {row.runs for row in rows} - {"XLA"} == named
    assert all(row.why or row.choice.reasons for row in rows if row.runs == "XLA")


@pytest.mark.parametrize("name", in_turn(1))
def test_backends(name):
    """In a scope, which is part of what jit keeps; the strict one says why it refuses."""
    op, args = OPERATIONS[name], operands(name)
    fn = jax.jit(op.fn)
    fn.lower(*args)
    with cutjax.use_backend("xla"):
        close(fn(*args), expected(name)[0])
    with cutjax.use_backend("cuda"):
        rows = multiplied(cutjax.explain(op.fn)(*args).rows)
    if rows and "cuda" not in {device.platform for device in jax.devices()}:
        with cutjax.use_backend("cuda"), pytest.raises(NotImplementedError, match=r"needs an NVIDIA GPU|known sizes"):
            fn(*args)

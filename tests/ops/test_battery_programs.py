"""Every operation over devices and in programs of their own: shard_map, export, other platforms, symbolic sizes."""

from __future__ import annotations

import re

import jax
import jax.export
import jax.numpy as jnp
import pytest
from checks import close, compare, inexact, mesh_of, stacked
from operations import OPERATIONS, of_floats, operands

import cutjax

P = jax.P


def floats(fn):
    return lambda *args: inexact(fn(*args))


def gradient(fn, args):
    f, xs = of_floats(floats(fn), args)
    return jax.grad(lambda *xs: sum(jnp.sin(y).sum() for y in f(*xs)), range(len(xs)))(*xs)


@pytest.mark.versions
@pytest.mark.parametrize("name", OPERATIONS)
def test_shard_map(name):
    """A device for each of two calls, all operands divided or the first alone; gradients inside and of the whole."""
    op, args = OPERATIONS[name], operands(name)
    mesh = mesh_of(i=2)

    def divide(args, count):
        members = [[stacked(x, 0)[i] if k < count else x for k, x in enumerate(args)] for i in range(2)]
        return [jnp.stack([each[k] for each in members]) if k < count else args[k] for k in range(len(args))]

    def take(fn):
        def of(*args):
            found = []
            for count in {1, len(args)} if len(args) < 4 else {len(args)}:
                operands = divide(args, count)

                def local(*args, count=count):
                    return [x[0] if k < count else x for k, x in enumerate(args)]

                def value(*args, local=local):
                    return [y[None] for y in floats(fn)(*local(*args))]

                if fn is op.plain:
                    axes = [0 if k < count else None for k in range(len(args))]
                    whole = jax.vmap(floats(fn), axes)
                    one = jax.vmap(lambda *args: gradient(fn, args)[0], axes)(*operands)
                else:
                    specs = tuple(P("i") if k < count else P() for k in range(len(args)))
                    whole = jax.shard_map(value, mesh=mesh, in_specs=specs, out_specs=P("i"))
                    one = jax.shard_map(
                        lambda *args, local=local: gradient(fn, local(*args))[0][None],
                        mesh=mesh, in_specs=specs, out_specs=P("i"),
                    )(*operands)  # fmt: skip
                found.append((whole(*operands), gradient(whole, operands), one))
            return found

        return of

    compare(take, (op.fn, op.plain), args, 1e-4)


@pytest.mark.versions
@pytest.mark.parametrize("name", OPERATIONS)
def test_export(name):
    """A program with its gradient, written and read again."""
    args = operands(name)
    both = jax.jit(lambda *args: (OPERATIONS[name].fn(*args), gradient(OPERATIONS[name].fn, args)))
    read = jax.export.deserialize(jax.export.export(both, platforms=["cpu"])(*args).serialize())
    close(jax.tree.leaves(read.call(*args)), jax.tree.leaves(both(*args)))


@pytest.mark.versions
@pytest.mark.parametrize("name", OPERATIONS)
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
    for count in (8, rows):
        cut = [x[:count] if x.shape[0] == rows else x for x in args]
        close(jax.tree.leaves(exported.call(*cut)), jax.tree.leaves(op.fn(*cut)))


@pytest.mark.parametrize("name", ["gemm, epilogue", "grouped_gemm", "mlp", "moe"])
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
def test_cuda(name, compile_nothing):
    """In 16 bits: the kernels of the program are those that explain names; all else has its reason."""
    del compile_nothing
    args = [x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands(name)]
    if "bfloat16" not in OPERATIONS[name].dtypes:
        args = operands(name)
    for fn in (OPERATIONS[name].fn, lambda *args: gradient(OPERATIONS[name].fn, args)):
        rows = cutjax.explain(fn, platform="cuda")(*args).rows
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        named = set(re.findall(r'@cutjax_launch.*?kernel = "(\w+)"', text))
        assert {row.runs for row in rows} - {"XLA"} == named
        assert all(row.why or row.choice.reasons for row in rows if row.runs == "XLA")


@pytest.mark.parametrize("backend", ["auto", "xla"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_backends(name, backend):
    """In a scope, which is part of what jit keeps; the strict one says why it refuses."""
    op, args = OPERATIONS[name], operands(name)
    fn = jax.jit(op.fn)
    expected = fn(*args)
    with cutjax.use_backend(backend):
        close(fn(*args), expected)
    rows = cutjax.explain(op.fn)(*args).rows
    if rows and "cuda" not in {device.platform for device in jax.devices()}:
        with cutjax.use_backend("cuda"), pytest.raises(NotImplementedError, match=r"needs an NVIDIA GPU|known sizes"):
            fn(*args)

"""cutjax.patch: what it reaches, what it leaves alone, and that it is undone."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from jax import lax

import cutjax
from cutjax.tuning import command

BF16 = jnp.bfloat16
X, W = jnp.ones((256, 128), BF16), jnp.ones((128, 256), BF16)
pytestmark = pytest.mark.usefixtures("kernels_win")


def layer(x, w):
    return jax.nn.relu(x @ w)


def has_kernel(fn, *args):
    return "cutjax_" in str(jax.make_jaxpr(fn)(*args))


CONVOLVED = jnp.ones((2, 16, 16, 64), BF16), jnp.ones((3, 3, 64, 64), BF16)
HEADS = jnp.ones((2, 128, 2, 64), BF16)


def convolution(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


# Each with how many products it has. By no name of ours.
REACHED = {
    "operator": (1, layer, (X, W)),
    "einsum": (1, lambda x, w: jnp.einsum("mk,kn->nm", x, w), (X, W)),
    "dot_general": (1, lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))), (X, W)),
    "ragged_dot": (1, lambda x, w: lax.ragged_dot(x, w[None], jnp.array([256])), (X, W)),
    "convolution": (1, convolution, CONVOLVED),
    "attention": (2, lambda x: jax.nn.dot_product_attention(x, x, x), (HEADS,)),
    "gradient": (3, jax.value_and_grad(lambda x, w: (layer(x, w) ** 2).sum(dtype=jnp.float32), (0, 1)), (X, W)),
    "scan": (1, lambda x, w: lax.scan(lambda c, _: (layer(c, w) @ w.T, None), x, length=2)[0][:, :1] @ w[:1], (X, W)),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", REACHED)
def test_reached(name):
    products, fn, args = REACHED[name]
    with cutjax.patch() as patched:
        fused = jax.jit(fn)
    with jax.numpy_dtype_promotion("standard"):  # as a program of others has it
        expected = jax.tree.leaves(jax.jit(fn)(*args))
        for x, y in zip(jax.tree.leaves(fused(*args)), expected, strict=True):
            close(x, y, 2**-6)
    (program,) = patched.programs
    assert program.kernels >= 1
    assert program.products >= products


@pytest.mark.versions
def test_undone():
    """After an exception too; blocks nest, and each knows the programs that were made in it."""

    def layer(x, w):
        return jax.nn.relu(x @ w)

    original, before = jax.jit, jax.jit(layer)
    with cutjax.patch() as outer:
        with contextlib.suppress(KeyError), cutjax.patch() as inner:
            first = jax.jit(layer)
            raise KeyError
        assert jax.jit is not original
        second = jax.jit(lambda x, w: layer(x, w))
        assert not has_kernel(before, X, W)  # what was jitted before is unaffected
    assert jax.jit is original
    assert has_kernel(first, X, W)
    assert has_kernel(second, X, W)
    assert not has_kernel(jax.jit(layer), X, W)
    assert [x.name for x in outer.programs] == ["layer", "<lambda>"]
    assert str(inner).splitlines()[1:] == ["  layer: 1 of 1 products"]


UNSEEN = (
    "cutjax.patch: no product was seen in a function that was jitted in the block\n"
    "  functions that were jitted before the block are unaffected: jit them in it, or import there what does"
)


def test_says_that_what_was_jitted_before_is_unaffected():
    before = jax.jit(lambda x, w: layer(x, w))
    with cutjax.patch() as patched:
        before(X, W)
        assert str(patched) == UNSEEN
        inside, sums = jax.jit(lambda x, w: before(x, w)), jax.jit(lambda x: x.sum())
        sums(X)
    assert str(patched) == UNSEEN
    inside(X, W)  # what is in it counts, whenever that was jitted, and whenever it is called
    assert str(patched) == "cutjax.patch: kernels for\n  <lambda>: 1 of 1 products"
    assert not has_kernel(before, X, W)


def test_what_others_put_around_stays(monkeypatch):
    original = jax.jit
    monkeypatch.setattr(jax, "jit", original)  # restored at the end, whatever comes
    with cutjax.patch():
        ours = jax.jit
        jax.jit = theirs = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    assert jax.jit is theirs
    assert not has_kernel(jax.jit(layer), X, W)
    assert jax.jit(layer)(X, W).shape == (256, 256)


@pytest.mark.versions
def test_other_threads_are_left_alone():
    found, inside, done = [], threading.Event(), threading.Event()

    def patching():
        with cutjax.patch():
            inside.set()
            assert done.wait(60)
            found.append(has_kernel(jax.jit(layer), X, W))

    thread = threading.Thread(target=patching)
    original = jax.jit
    thread.start()
    assert inside.wait(60)
    assert jax.jit is not original
    found.append(has_kernel(jax.jit(layer), X, W))
    done.set()
    thread.join(60)
    assert found == [False, True]
    assert jax.jit is original


@pytest.mark.versions
def test_threads_that_patch_at_once():
    """Each has its own blocks, in blocks and by exceptions too, whichever ends first; jax.jit comes back at the end."""
    original, turn, found = jax.jit, threading.Barrier(2, timeout=60), {}

    def work(name, first):
        with contextlib.suppress(ZeroDivisionError), cutjax.patch() as outer:
            turn.wait()  # both are in a block
            with contextlib.suppress(KeyError), cutjax.patch() as inner:
                deep = jax.jit(functools.partial(layer))
                turn.wait()  # both are in two
                if first:
                    raise KeyError
            turn.wait()  # one is in its outer block by an exception, both have one left
            shallow = jax.jit(functools.partial(layer))
            if first:
                raise ZeroDivisionError
            turn.wait()  # the first is in none, and this one still is
            late = jax.jit(functools.partial(layer))
        if first:
            plain = jax.jit(functools.partial(layer))
            turn.wait()
        fused = [deep, shallow] if first else [deep, shallow, late]
        found[name] = [has_kernel(fn, X, W) for fn in fused], [len(x.programs) for x in (outer, inner)]
        if first:
            found["plain"] = has_kernel(plain, X, W)

    threads = [threading.Thread(target=work, args=(name, name == "a")) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {"a": ([True] * 2, [2, 1]), "b": ([True] * 3, [3, 1]), "plain": False}
    assert jax.jit is original


def test_traced_once():
    """However often a function is jitted; what is made of it lives as long, and no longer."""
    traced = []

    def squares():
        def fn(x):
            traced.append(x)
            return x @ x

        with cutjax.patch():
            for _ in range(3):
                jax.jit(fn)(X[:128])
            wrapped = functools.wraps(fn)(lambda x: x @ x @ x)  # wraps copies what a function has
            close(jax.jit(wrapped)(X[:128]), X[:128] * 128**2, 0)
        return weakref.ref(fn)

    kept = squares()
    assert len(traced) == 1
    traced.clear()
    gc.collect()
    assert kept() is None


@pytest.mark.versions
def test_calls_of_jitted_functions_are_fused_with_what_is_around():
    """A function has one program by itself, and is part of another's."""
    with cutjax.patch() as patched:
        product = jax.jit(lambda x, w: x @ w)
        whole = jax.jit(lambda x, w: jax.nn.gelu(product(x, w)))
    large = jax.ShapeDtypeStruct((4096, 4096), BF16)
    text = str(jax.make_jaxpr(whole)(large, large))
    assert "tanh(" in text[text.index("epilogue=") :].splitlines()[0]
    assert "epilogue=bf16(acc)" in str(jax.make_jaxpr(product)(large, large))
    assert [x.kernels for x in patched.programs] == [1, 1]


@pytest.mark.versions
def test_arguments_of_jit():
    """Static and donated ones, by number and by name, as a decorator with options, and methods."""
    with cutjax.patch():

        @functools.partial(jax.jit, static_argnames="scale", donate_argnames="w")
        def named(x, w, *, scale):
            return w + scale * (x.T @ x)

        @jax.jit(static_argnums=1)
        def numbered(x, times):
            return times * (x @ x.T)

        class Layer:
            @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, -1))
            def __call__(self, w, x):
                return w + x @ x.T, x

    w = jnp.ones((128, 128), jnp.float32)
    x = X.astype(jnp.float32)
    close(named(x, w + 0, scale=2), w + 2 * (x.T @ x), 1e-6)
    close(named(x, w=w + 0, scale=3), w + 3 * (x.T @ x), 1e-6)
    close(numbered(x, 3), 3 * (x @ x.T), 1e-6)
    close(Layer()(jnp.ones((256, 256)), x + 0)[0], 1 + x @ x.T, 1e-6)
    assert list(inspect.signature(named).parameters) == ["x", "w", "scale"]
    assert (named.__name__, named.__module__) == ("named", __name__)
    donated = named.lower(x, w, scale=2).args_info
    assert [leaf.donated for leaf in jax.tree.leaves(donated)] == [False, True]


@jax.tree_util.register_pytree_node_class
class Tree:
    """A static argument that is a pytree, of what has no hash, or of arrays."""

    def __init__(self, *leaves):
        self.leaves = leaves

    def tree_flatten(self):
        return self.leaves, None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


STATIC = [3, True, None, "a", np.int64(3), np.float32(0.5), np.str_("a"), np.dtype("int8"), (3, np.int32(2)), Tree({3})]
STATIC += [jnp.tanh, Tree([2.0]), Tree(X), lambda x: x]


@pytest.mark.versions
@pytest.mark.parametrize("value", STATIC, ids=lambda x: type(x).__name__)
def test_static_arguments_are_what_they_are(value):
    """In whatever place, beside a donated one, by number and by name."""
    seen = []

    def fn(static, w, *, named):
        seen.extend((static, named))
        return w + w.T @ w

    with cutjax.patch():
        jitted = jax.jit(fn, static_argnums=0, static_argnames="named", donate_argnums=1)
    close(jitted(value, jnp.ones((128, 128)), named=value), jnp.full((128, 128), 129.0), 1e-6)
    assert len(seen) == 2
    assert all(x is value for x in seen)


@pytest.mark.versions
def test_scaled_matmul_stays_as_it_is():
    """No kernel multiplies by its scales; beside it products are ours."""
    values, scales = jnp.ones((1, 128, 128), jnp.float8_e4m3fn), jnp.ones((1, 128, 4), jnp.float8_e8m0fnu)
    with cutjax.patch() as patched:
        fn = jax.jit(lambda x, w: jax.nn.scaled_matmul(values, values, scales, scales) + layer(x, w)[:128, :128])
    with jax.numpy_dtype_promotion("standard"):
        text = str(jax.make_jaxpr(fn)(X, W))
    assert "scaled_matmul" in text
    assert "cutjax_gemm" in text
    assert [program.products for program in patched.programs] == [1]
    operands = [cutjax.Quantized(values, scales)] * 2
    close(cutjax.gemm(*operands, layout="nt", out_dtype=jnp.float32), jnp.full((1, 128, 128), 128.0), 0)


def test_errors_are_those_of_jax():
    with cutjax.patch():
        with pytest.raises(TypeError, match="callable"):
            jax.jit(3)
        with pytest.raises(TypeError, match="unexpected keyword"):
            jax.jit(layer, nothing=1)
        with pytest.raises(TypeError, match="dot_general"):
            jax.jit(layer)(X, X)


SCRIPT = """
import sys
import jax.numpy as jnp
from beside import layer
assert __name__ == "__main__"
print(*sys.argv[1:], layer(jnp.ones((8, 16))).shape)
sys.exit(3)
"""
BESIDE = """
from jax import jit
layer = jit(lambda x: x @ x.T)
"""


@pytest.mark.parametrize("module", [False, True])
def test_run(module, tmp_path, monkeypatch, capsys):
    """A program beside its own modules, with options that are its own; its exit is ours."""
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text(BESIDE)
    if module:
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    original, argv, path = jax.jit, sys.argv, sys.path
    which = ["-m", "program"] if module else [str(tmp_path / "program.py")]
    with jax.numpy_dtype_promotion("standard"), pytest.raises(SystemExit, match="3"):
        command.main(["run", *which, "-m", "--steps", "5"])
    out = capsys.readouterr()
    assert out.out == "-m --steps 5 (8, 8)\n"
    assert out.err.splitlines()[0] == "cutjax.patch: kernels for"
    assert (jax.jit, sys.argv, sys.path) == (original, argv, path)


def test_run_of_nothing(capsys):
    with pytest.raises(SystemExit):
        command.main(["run", "nowhere.py"])
    assert "no such file: nowhere.py" in capsys.readouterr().err


def test_command_line(tmp_path):
    """As a user types it."""
    (tmp_path / "program.py").write_text("import sys; print(sys.path[0], sys.argv)")
    command = [sys.executable, "-m", "cutjax", "run", "program.py", "--x"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout == f"{tmp_path} ['program.py', '--x']\n"
    assert found.stderr == UNSEEN + "\n"

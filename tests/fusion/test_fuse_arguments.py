"""The arguments of cutjax.fuse, and what decorated functions look like: no program serves another argument."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import struct
from typing import assert_type

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same, scaled

import cutjax

X = scaled(0, (4, 4))


class Traced:
    """A fused function of an array and another argument, which counts how often it is traced."""

    def __init__(self, fn):
        self.count = 0

        def counting(x, other):
            self.count += 1
            return fn(x @ x, other)

        self.fused = cutjax.fuse(counting, policy="always")

    def __call__(self, other):
        return self.fused(X, other)


@dataclasses.dataclass
class Mutable:
    scale: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


class Comparing:
    """Hashable, and compared as it is told."""

    def __init__(self, compare):
        self.compare = compare

    def __hash__(self):
        return hash(self.compare)

    def __eq__(self, other):
        return self.compare()


@pytest.mark.parametrize(
    ("argument", "which"),
    [
        (Mutable(2.0), r"args\[1\]"),
        ({"a": [1, Mutable(2.0)]}, r"args\[1\]\['a'\]\[1\]"),
        ({1, 2}, r"args\[1\]"),
        (bytearray(2), r"args\[1\]"),
        (slice(np.zeros(2), 3), r"args\[1\]"),
    ],
)
def test_what_could_change_unseen_is_refused(argument, which):
    with pytest.raises(TypeError, match=rf"fuse: {which} of counting is a \w+: .*must be hashable.*unhashable type"):
        Traced(lambda y, _: y)(argument)


def test_keywords_are_named():
    with pytest.raises(TypeError, match=r"fuse: kwargs\['config'\] of <lambda> is a Mutable"):
        cutjax.fuse(lambda x, config: x)(X, config=Mutable(1.0))


def test_equal_values_share_a_program_and_others_do_not():
    traced = Traced(lambda y, config: y * config.scale)
    for scale in (2.0, 3.0, 2.0):
        close(traced(Frozen(scale)), X @ X * scale)
    assert traced.count == 2


def test_objects_are_themselves_as_for_jit():
    """An object without a comparison of its own is the same object, whatever becomes of it; as a static argument."""

    class Config:
        scale = 2.0

    config = Config()
    traced = Traced(lambda y, config: y * config.scale)
    jitted = jax.jit(lambda x, config: x @ x * config.scale, static_argnums=1)
    for config.scale in (2.0, 3.0):
        close(traced(config), jitted(X, config))
    close(traced(copy.copy(config)), X @ X * 3.0)


@pytest.mark.parametrize("compare", [lambda: 1 / 0, lambda: np.ones(2) == 1])
def test_comparisons_that_raise_do_so_as_for_jit(compare):
    traced, first = Traced(lambda y, _: y), Comparing(compare)
    for _ in range(2):  # it is itself
        traced(first)
    with pytest.raises(ValueError, match=r"__eq__|equality"):
        traced(Comparing(compare))


def random_number(rng):
    """A number, or a string that looks like one, of those that are easily taken for each other."""
    real = [0.0, -0.0, 1.0, -1.0, float("nan"), -float("nan"), float("inf"), 0, 1, -1, True, False]
    kind = rng.integers(4)
    value = real[rng.integers(len(real))]
    if kind == 0:
        return complex(value, real[rng.integers(len(real))])
    return str(value) if kind == 1 else value


def bits(value):
    parts = (value.real, value.imag) if isinstance(value, complex) else (value,) if isinstance(value, float) else ()
    return type(value), *(struct.pack("d", x) for x in parts), () if parts else value


def random_argument(rng):
    """Numbers, in slices, tuples and dicts; and what is the same of two that one program may serve."""
    values = [random_number(rng) for _ in range(3)]
    known = tuple(map(bits, values))
    match rng.integers(3):
        case 0:
            return slice(*values), ("slice", known)
        case 1:
            return tuple(values), ("tuple", known)
        case _:
            return {"a": values[0], "b": values[1:]}, ("dict", known)


def test_random_arguments_are_told_apart_by_type_and_bits():
    got, seen = [], set()
    fused = cutjax.fuse(lambda x, other: got.append(other) or x)
    for seed in (*range(50), *range(50)):
        argument, known = random_argument(np.random.default_rng(seed))
        got.clear()
        fused(X, argument)
        assert len(got) == (known not in seen)  # traced once, and hit afterwards
        assert all(repr(other) == repr(argument) for other in got)
        seen.add(known)


def test_zeros_of_either_sign():
    traced = Traced(lambda y, zero: y * 0 + math.copysign(1, zero))
    assert traced(0.0)[0, 0] == 1
    assert traced(-0.0)[0, 0] == -1


def test_explain_takes_the_same_arguments():
    def fn(x, count, mode, *, part):
        for _ in range(count):
            x = jnp.tanh(x @ x) if mode == "tanh" else x
        return x[part]

    reports = cutjax.explain(cutjax.fuse(fn, policy="always"))(X, 3, "tanh", part=slice(0, 2)).fusion
    assert [report.runs for report in reports] == ["fused"] * 3
    layer = Layer(2.0)
    assert len(cutjax.explain(layer.method)(X, power=2).fusion) == 1


def test_a_slice_is_traced_once():
    traced = Traced(lambda y, part: y[part])
    for stop in (2, 3, 2, 3):
        same(traced(slice(0, stop)), jax.jit(lambda x: x @ x)(X)[:stop])
    assert traced.count == 2


def test_scalars_of_numpy_are_arrays_and_its_strings_are_not():
    traced = Traced(lambda y, other: y * 2 if isinstance(other, str) else y * other)
    for other in (np.float32(2), np.float32(3), np.str_("a"), np.str_("a")):
        close(traced(other), X @ X * (2 if isinstance(other, str) else other))
    assert traced.count == 2


def test_what_stands_for_an_array_is_refused_as_by_jit():
    class Holder:
        value = X

        def __jax_array__(self):
            return self.value

    for wrap in (jax.jit, cutjax.fuse):
        with pytest.raises(ValueError, match="__jax_array__"):
            wrap(lambda x: x)(Holder())


class Counting(nnx.Module):
    def __init__(self):
        self.linear, self.calls = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.linear(x)


def test_modules_of_nnx_are_pytrees_as_for_jit():
    """Parameters are seen as they are at each call; what a function does to its copy of them is lost."""
    found = []
    for wrap in (jax.jit, cutjax.fuse):
        model, apply = Counting(), wrap(lambda model, x: jnp.tanh(model(x)))
        first = apply(model, X)
        model.linear.kernel[...] = model.linear.kernel[...] * 2
        gradient = jax.grad(lambda model, apply=apply: apply(model, X).sum())(model)
        found.append((first, apply(model, X), model.calls[...], jax.tree.leaves(gradient)))
    close(*found)


def test_state_of_nnx_is_a_result():
    def apply(graph, state, x):
        model = nnx.merge(graph, state)
        return jnp.tanh(model(x)), nnx.state(model)

    graph, state = nnx.split(Counting())
    fused = cutjax.fuse(apply, policy="always")
    for _ in range(2):
        y, state = fused(graph, state, X)
    assert nnx.merge(graph, state).calls[...] == 2
    close(y, apply(*nnx.split(Counting()), X)[0])


def test_modules_of_linen_are_values():
    calls = []

    class Layer(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x):
            calls.append(self.width)
            return jnp.tanh(nn.Dense(self.width)(x))

    params = Layer(4).init(jax.random.key(0), X)
    expected = Layer(4).apply(params, X)
    calls.clear()
    fused = cutjax.fuse(lambda layer, params, x: layer.apply(params, x), policy="always")
    for _ in range(2):
        close(fused(Layer(4), params, X), expected)
    assert calls == [4]


class Layer:
    def __init__(self, scale):
        self.scale = scale

    @cutjax.fuse
    def method(self, x: jax.Array, *, power: int = 1) -> jax.Array:
        """Scales."""
        return jnp.tanh(x @ x) * self.scale**power

    @staticmethod
    @cutjax.fuse
    def static(x):
        return jnp.tanh(x @ x)

    @classmethod
    def of(cls, x):
        return x @ x


def test_methods():
    for scale in (2.0, 3.0):
        layer = Layer(scale)
        expected = jnp.tanh(X @ X) * scale**2
        close(layer.method(X, power=2), expected)
        close(Layer.method(layer, X, power=2), expected)
        close(cutjax.fuse(layer.method)(X, power=2), expected)
        close(cutjax.fuse(functools.partial(layer.method, power=2))(X), expected)
        close(layer.static(X), jnp.tanh(X @ X))
    close(cutjax.fuse(Layer.of)(X), X @ X)


def test_a_fused_function_looks_like_the_function():
    assert Layer.method.__name__ == "method"
    assert Layer.method.__doc__ == "Scales."
    assert list(inspect.signature(Layer.method).parameters) == ["self", "x", "power"]
    assert list(inspect.signature(Layer(1.0).method).parameters) == ["x", "power"]
    assert inspect.signature(cutjax.fuse(functools.partial(Layer.method, power=2))).parameters["power"].default == 2
    assert inspect.unwrap(Layer.static)(X).shape == X.shape
    assert_type(Layer(1.0).method(X, power=2), jax.Array)  # by pyright

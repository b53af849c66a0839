"""cutjax.fuse: the products of a function with what is computed around them, as kernels, without a change to it."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from cutjax.binding import ahead, walk
from cutjax.epilogue.jaxpr import bind_equation
from cutjax.fusion.fp8 import Recipes, recipe_of
from cutjax.fusion.inline import without_idle
from cutjax.fusion.jaxprs import is_literal
from cutjax.fusion.report import tell
from cutjax.fusion.rewrite import POLICIES, Rewriter

P = ParamSpec("P")
R = TypeVar("R")


def _is_array(x: Any) -> bool:
    """True if jax.jit traces an argument, or is to say why it cannot, as of what only stands for an array."""
    array = isinstance(x, jax.Array | np.ndarray | np.generic) and not isinstance(x, str | bytes)
    return array or hasattr(type(x), "__jax_array__")


class _Static:
    """A leaf of the arguments that is no array: two are equal where one program serves both."""

    def __init__(self, value: Any):
        self.value, self._key = value, _key(value)
        self._hash = hash(self._key)  # of the value as it was traced, whatever becomes of it

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Static) and self._hash == other._hash and self._key == other._key


def _key(value: Any) -> Any:
    """Returns the key of equal arguments: type and value, of numbers all bits (1 and True, 0.0 and -0.0 differ)."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
    if kind is slice:  # hashable since Python 3.12 alone
        return kind, *map(_key, (value.start, value.stop, value.step))
    return kind, value


def _static(value: Any, place: int, args: Any, kwargs: Any, name: str) -> _Static:
    """Returns the static leaf at a place among those of the arguments.

    Raises:
      TypeError: if it has no hash: nothing would tell when it changes.
    """
    try:
        return _Static(value)
    except TypeError as error:
        path = jax.tree_util.tree_leaves_with_path((args, kwargs))[place][0]
        which = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
        raise TypeError(
            f"fuse: {which} of {name} is a {type(value).__name__}: an argument that is no array must be hashable, so "
            f"that a change of it is seen, but {error}. A frozen dataclass is; what holds arrays can be a pytree "
            "(jax.tree_util.register_dataclass)"
        ) from None


def _donated(args: Sequence[Any], argnums: Sequence[int], name: str) -> set[int]:
    """Returns the positions that are donated of so many arguments; negative ones count from the last."""
    count = len(args)
    if outside := [i for i in argnums if not -count <= i < count]:
        raise ValueError(f"fuse: donate_argnums has {outside}, but {name} was called with {count} positional arguments")
    return {i % count for i in argnums}


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the name of the function to what tracing it raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while cutjax.fuse traced {name}")
        raise


def _looks_for_nan() -> bool:
    """True if JAX runs a jitted function without jit, to find the operation that made a NaN."""
    config: Any = jax.config
    return (config.jax_debug_nans or config.jax_debug_infs) and not isinstance(jnp.zeros(()), Tracer)


def fuse(
    fn: Callable[P, R],
    *,
    donate_argnums: int | Sequence[int] = (),
    policy: str = "auto",
    fp8: Recipes = None,
) -> Callable[P, R]:
    """Returns the same function with each product and the elementwise operations around it as one kernel.

    The function is traced; each product in it, each convolution, and what is made of its result element by element (a
    bias, an activation, a residual, a mask, dropout, a gate by a second product of the same left operand, sums for the
    gradient of a bias), become one kernel where that is predicted to be faster by 1% than XLA. All else stays. Between
    the operations of one kernel 16-bit values are not rounded; what it writes is, to the dtype that it had.
    Products are found in ``jit``, ``scan``, ``while_loop``, ``cond``, ``checkpoint``, custom rules and ``shard_map``;
    those of a backward pass where the gradient is what is fused: ``jax.jit(cutjax.fuse(jax.value_and_grad(loss)))``.

    Like ``jax.jit``: called outside of jit it compiles, and the function should be pure. Unlike it, arguments that are
    no arrays, Python's numbers among them, are seen as they are, so different ones are compiled anew: as its static
    arguments they must be hashable, and are compared by ``==``, numbers by their type and all bits.

    Args:
      fn: a function of pytrees of arrays. Its derivatives, and its batching, are those of the rewritten program.
      donate_argnums: as in ``jax.jit``, and those of the ``jax.jit`` around: positional arguments of which results may
        take the memory. The update of parameters is fused with the product that makes their gradient only where it is
        known that they may be overwritten: said here, or as what a loop carries on.
      policy: "auto", or "always": wherever a kernel can have what is around a product, whatever it costs, and on
        operands of any floating dtype. That is for tests.
      fp8: a recipe of ``cutjax.fp8_dot_general``, or what that returns: dense products without batch axes, of 16-bit
        operands, are computed so where that is predicted to be faster; those of a backward pass with a gradient for
        their first operand. Asked for in a higher precision than the default, as logits by ``precision="highest"``,
        they stay. Or a function of both operands, which have ``shape`` and ``dtype``, that returns one of these, or
        None for a product that stays.

    Returns:
      A function of the same arguments. ``cutjax.explain(fuse(fn))(*args)`` lists what became of each product.

    Raises:
      TypeError: if ``fn`` is not callable, ``donate_argnums`` are no integers, or ``fp8`` is none of these. When
        called, if an argument is neither an array nor hashable.
      ValueError: if the policy is unknown. When called, if a donated argument did not come; and whatever tracing
        ``fn`` raises, with a note that names it.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> layer = lambda x, w, b: jax.nn.gelu(x @ w + b)
      >>> x, w, b = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 32), jnp.bfloat16), jnp.ones(32, jnp.bfloat16)
      >>> cutjax.fuse(layer)(x, w, b).shape
      (8, 32)
    """
    if policy not in POLICIES:
        raise ValueError(f"fuse: unknown policy {policy!r}, expected one of {POLICIES}")
    if not callable(fn):
        raise TypeError(f"fuse: expected a function, got {type(fn).__name__}")
    if not callable(fp8):
        fp8 = recipe_of(fp8, None, None)
    name, called = getattr(fn, "__name__", type(fn).__name__), cast("Callable[..., R]", fn)

    argnums = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    if not all(isinstance(i, int) for i in argnums):
        raise TypeError(f"fuse: donate_argnums are positions of arguments, got {donate_argnums!r}")

    def flat(static: tuple[_Static | bool, ...], tree: Any, *arrays: Any) -> R:
        leaves = iter(arrays)
        args, kwargs = jax.tree.unflatten(tree, [x.value if isinstance(x, _Static) else next(leaves) for x in static])
        return called(*args, **kwargs)

    flat.__name__ = name
    original = jax.jit(flat, static_argnums=(0, 1))

    def run(donated: list[Any], kept: list[Any], static: tuple[_Static | bool, ...], tree: Any) -> Any:
        mine, flags = (iter(kept), iter(donated)), [x for x in static if isinstance(x, bool)]
        arrays = [next(mine[x]) for x in flags]
        if _looks_for_nan():
            return flat(static, tree, *arrays)
        traced = jax.make_jaxpr(original, static_argnums=(0, 1), return_shape=True)
        with _naming(name):
            closed, out = traced(static, tree, *arrays)
        env = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, *arrays), strict=True))
        own = {x for x, flag in zip(closed.jaxpr.invars, flags, strict=True) if flag}
        for eqn in closed.eqns:  # the call of flat, and nothing else
            rewriter = Rewriter(policy, fp8)
            program = rewriter.rewrite(without_idle(eqn.params["jaxpr"], {}), tuple(x in own for x in eqn.invars))
            walk.annotate(program, tuple(rewriter.reports))
            ahead.compile_kernels(program)
            tell(rewriter.reports)
            eqn = eqn.replace(params={**eqn.params, "jaxpr": program})
            env.update(zip(eqn.outvars, bind_equation(eqn, [env[x] for x in eqn.invars]), strict=True))
        found = [x.val if is_literal(x) else env[x] for x in closed.jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(out), found)

    jitted = jax.jit(run, static_argnums=(2, 3), donate_argnums=0, inline=True)

    @functools.wraps(fn)
    def fused(*args: P.args, **kwargs: P.kwargs) -> R:
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return fn(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        own, (positional, _) = _donated(args, argnums, name), tree.children()
        flags = [i in own for i, arg in enumerate(positional.children()) for _ in range(arg.num_leaves)]
        flags += [False] * (len(leaves) - len(flags))
        static = tuple(flags[i] if _is_array(x) else _static(x, i, args, kwargs, name) for i, x in enumerate(leaves))
        donated = [x for x, flag in zip(leaves, static, strict=True) if flag is True]
        kept = [x for x, flag in zip(leaves, static, strict=True) if flag is False]
        if any(isinstance(x, Tracer) for x in leaves) and not _looks_for_nan():
            # Found again by `run`, with less on the stack here: JAX keeps that of each operation, which takes longest.
            with _naming(name):
                original.trace(static, tree, *(x for x, y in zip(leaves, static, strict=True) if isinstance(y, bool)))
        with ahead.called_with(leaves):
            return jitted(donated, kept, static, tree)

    return fused

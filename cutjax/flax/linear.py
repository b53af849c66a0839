"""The product of inputs and a kernel, bias and activation in its epilogue: what the layers of both APIs compute."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.export
import jax.numpy as jnp
from jax import lax

from cutjax import dot_precision
from cutjax.binding.rules import sharded, with_rank
from cutjax.dtypes import promoted
from cutjax.ops.contraction import Contraction, contraction
from cutjax.ops.dot_general import permuted, quantized
from cutjax.ops.einsum import Axes, Dimensions, letters_of, product_of
from cutjax.ops.einsum import einsum as our_einsum
from cutjax.ops.mlp import mlp
from cutjax.ops.quantized import Quantized, as_quantized
from cutjax.primitives.dense import Dense
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import call
from cutjax.runtime import backends

Activation = Callable[[jax.Array], jax.Array]
Class = TypeVar("Class", bound=type)


def named_arguments(cls: Class) -> Class:
    """Makes an unknown argument of the constructor a TypeError that lists those there are.

    A constructor that takes ``**kwargs`` hands them to that of its base, whose arguments are then its own too.
    """
    init = cls.__init__
    own = inspect.signature(init).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    hands_on = any(p.kind in variadic for p in own.values())
    inherited = inspect.signature(cls.__base__.__init__).parameters if hands_on else {}
    parameters = {**inherited, **{name: p for name, p in own.items() if p.kind not in variadic}}

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in parameters]
        if unknown:
            known = ", ".join(name for name in parameters if name != "self")
            raise TypeError(f"{cls.__name__}: no argument is called {', '.join(unknown)}; there are {known}")
        init(self, *args, **kwargs)

    __init__.__signature__ = inspect.Signature(list(parameters.values()))  # pyright: ignore[reportAttributeAccessIssue]
    cls.__init__ = __init__
    return cls


def check_activation(where: str, activation: Any) -> None:
    """Raises if it is neither a function nor None."""
    if activation is not None and not callable(activation):
        raise TypeError(f"{where}: activation must be a function, such as jax.nn.gelu, or None; got {activation!r}")


def linear(
    where: str,
    x: jax.Array,
    kernel: Any,
    bias: jax.Array | None,
    dimensions: Dimensions,
    *,
    activation: Activation | None,
    permutation: Axes | None = None,
    dot_general: Callable[..., jax.Array] | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes ``activation(dot_general(x, kernel) + bias)`` in one kernel, the result's axes permuted if asked for.

    The bias has the rank of the result and broadcasts against it. It is what Flax computes, three steps, with a
    dot_general of the user's and where ``cutjax.dot_general`` leaves the product to lax.
    """
    check_activation(where, activation)
    _check_shapes(where, x, kernel, dimensions)
    dot_general = None if dot_general is lax.dot_general else dot_general
    if dot_general is None and isinstance(kernel, Quantized):
        return _quantized(x, kernel, bias, dimensions, activation, precision, preferred_element_type, permutation)
    arrays: list[Any] = [x, kernel] if bias is None else [x, kernel, bias]
    sizes = (*x.shape, *kernel.shape)
    known = not any(jax.export.is_symbolic_dim(n) or n == 0 for n in sizes)
    whole = out_sharding is None and not any(sharded(array) for array in arrays)
    known = known and whole and dot_general is None and x.dtype == kernel.dtype
    if not known or (bias is None and activation is None):
        asked = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        asked = {name: value for name, value in asked.items() if value is not None}
        if dot_general is None:
            y = permuted(x, kernel, dimensions, precision, permutation=permutation, **asked)
        else:
            y = dot_general(x, kernel, dimensions, precision=precision, **asked)
        y = y if bias is None else y + bias
        return y if activation is None else activation(y)

    dtype = x.dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)
    plan = contraction(
        x.shape, kernel.shape, dimensions, permutation, itemsizes=(x.dtype.itemsize, x.dtype.itemsize, dtype.itemsize)
    )
    a, b = plan.operands(x, kernel)
    shape = _result(x.shape, kernel.shape, dimensions)
    found = dot_precision.canonical(precision, where)
    return plan.result(
        call(
            Dense(plan.layout, plan.orders),
            functools.partial(finished, activation),
            Factors(a, [b]),
            () if bias is None else (_merged(bias, shape, permutation, plan.axes),),
            out_dtype=dtype if bias is None else promoted(dtype, bias.dtype),
            save="default",
            precision=dot_precision.swapped(found) if plan.swapped else found,
            backend=backends.resolve(None, where),
            config=None,
        )
    )


def _quantized(
    x: jax.Array,
    kernel: Quantized,
    bias: jax.Array | None,
    dimensions: Dimensions,
    activation: Activation | None,
    precision: Any,
    dtype: Any,
    permutation: Axes | None,
) -> jax.Array:
    """Computes ``linear`` of a quantized kernel."""
    shape = _result(x.shape, kernel.shape, dimensions)

    def epilogue(plan: Contraction) -> dict[str, Any]:
        if bias is None and activation is None:
            return {}
        operands = () if bias is None else (_merged(bias, shape, permutation, plan.axes),)
        return {"epilogue": functools.partial(finished, activation), "operands": operands}

    dtype = dtype if dtype is not None or bias is None else promoted(x.dtype, bias.dtype)
    return quantized(x, kernel, dimensions, precision, dtype, permutation, epilogue)


def without_quantized(promote: Callable[[list[Any]], Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """Returns arrays as a layer promotes them, and quantized kernels, duck-typed ones too, as they are."""
    found = [as_quantized(x) for x in arrays]
    rest = iter(promote([x for x in found if not isinstance(x, Quantized)]))
    return [x if isinstance(x, Quantized) else next(rest) for x in found]


def einsum(
    where: str,
    equation: str,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Activation | None,
    einsum_op: Callable[..., jax.Array] = jnp.einsum,
    precision: Any = None,
    **options: Any,
) -> jax.Array:
    """Computes ``activation(einsum(equation, x, kernel) + bias)``, in one kernel where the equation is one product.

    The bias broadcasts against the result. Where an index is repeated, broadcast or summed over in one operand alone,
    and with an einsum_op of the user's, it is what Flax computes.
    """
    check_activation(where, activation)
    ours = einsum_op is jnp.einsum
    found = product_of(equation, x, kernel) if ours else None
    if found is not None:
        dimensions, permutation = found
        options |= {"activation": activation, "permutation": permutation, "precision": precision}
        return linear(where, x, kernel, bias, dimensions, **options)
    asked = {name: value for name, value in options.items() if value is not None}
    y = (our_einsum if ours else einsum_op)(equation, x, kernel, precision=precision, **asked)
    y = y if bias is None else y + bias
    return y if activation is None else activation(y)


def einsum_bias_shapes(equation: str, x: jax.Array, kernel: jax.Array) -> tuple[Axes, Axes]:
    """Returns the shape of a bias, the kernel's axes in the order of the result, and its shape against the result."""
    _, of_kernel, result = letters_of(equation, x, kernel)
    sizes = dict(zip(of_kernel, kernel.shape, strict=True))
    return tuple(sizes[c] for c in result if c in sizes), tuple(sizes.get(c, 1) for c in result)


def is_product(equation: str) -> bool:
    """True if an equation without spaces is explicit, and of two operands."""
    return "->" in equation and equation.count(",") == 1


def feed_forward(
    where: str, x: jax.Array, kernels: Sequence[jax.Array], biases: Sequence[jax.Array | None], **options: Any
) -> jax.Array:
    """Computes ``cutjax.mlp`` with the kernels and biases of ``[gate], up, down``."""
    *gate, up, down = kernels
    *gate_bias, b1, b2 = biases
    if not x.ndim or x.shape[-1] != up.shape[0]:
        raise ValueError(f"{where}: inputs must be [..., {up.shape[0]}], got {x.shape}")
    if gate and gate_bias[0] is not None:
        options["activation"] = functools.partial(_biased, options["activation"], gate_bias[0])
    y = mlp(x if x.ndim > 1 else x[None], up, down, b1=b1, b2=b2, gate=gate[0] if gate else None, **options)
    return y if x.ndim > 1 else y[0]


def _biased(activation: Activation, bias: jax.Array, z: jax.Array) -> jax.Array:
    return activation(z + with_rank(bias.astype(z.dtype), z.ndim))


def places(where: str, axes: Iterable[int], shape: Axes) -> Axes:
    """Returns axes counted from the front, in order; raises where the inputs have no such axis."""
    for i in axes:
        if not -len(shape) <= i < len(shape):
            raise ValueError(f"{where}: inputs are {shape}: they have no axis {i}")
    return tuple(sorted(i % len(shape) for i in axes))


def _check_shapes(where: str, x: jax.Array, kernel: jax.Array, dimensions: Dimensions) -> None:
    for x_axes, kernel_axes in dimensions:
        for i, j in zip(x_axes, kernel_axes, strict=True):
            if x.shape[i] != kernel.shape[j]:
                got = f"inputs are {x.shape}, the kernel is {kernel.shape}"
                raise ValueError(f"{where}: {got}: axis {i} of the inputs must be {kernel.shape[j]}")


def _result(x: Axes, kernel: Axes, dimensions: Dimensions) -> Axes:
    """Returns the shape of dot_general's result."""
    (x_contracted, kernel_contracted), (x_batch, kernel_batch) = dimensions
    rows = [n for i, n in enumerate(x) if i not in (*x_contracted, *x_batch)]
    columns = [n for i, n in enumerate(kernel) if i not in (*kernel_contracted, *kernel_batch)]
    return (*(x[i] for i in x_batch), *rows, *columns)


def _merged(bias: jax.Array, shape: Axes, permutation: Axes | None, groups: tuple[Axes, ...]) -> jax.Array:
    """Returns the bias as the product sees it, an axis for each group of axes of dot_general's result."""
    if permutation is not None:
        bias = lax.transpose(bias, [permutation.index(i) for i in range(len(shape))])
    for group in groups:
        sizes = {bias.shape[i] for i in group}
        if 1 in sizes and len(sizes) > 1:  # an axis of the inputs and one of the kernel, merged
            bias = jnp.broadcast_to(bias, [shape[i] if i in group else n for i, n in enumerate(bias.shape)])
    order = [i for group in groups for i in group]
    bias = lax.transpose(bias, [*(i for i in range(len(shape)) if i not in order), *order])
    sizes = iter(bias.shape[len(shape) - len(order) :])
    found = [math.prod(itertools.islice(sizes, len(group))) for group in groups]
    leading = next((i for i, n in enumerate(found) if n != 1), len(found) - 1)
    return lax.reshape(bias, found[leading:])


def finished(activation: Activation | None, acc: jax.Array, *bias: jax.Array) -> jax.Array:
    """The epilogue: on accumulators, before they are rounded."""
    y = acc + with_rank(bias[0].astype(acc.dtype), acc.ndim) if bias else acc
    return y if activation is None else activation(y)

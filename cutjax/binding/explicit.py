"""Operations on arrays that are divided over explicit mesh axes, for which they have no rules of their own.

What is inside is divided as on automatic axes, and the types of results say how they lie: as the operands do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import AxisType, NamedSharding

from cutjax.binding.rules import any_divided, names_of, refuse_reduced

_FUNCTIONS = {"epilogue", "activation", "output_activation", "prologue"}  # arguments that may capture arrays

Axes = Any  # of one axis of an array: the mesh axes it is divided over, a name, several or None


def automatic(
    lies: Callable[..., Callable[[Any], list[Axes]]], captured: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Decorates an operation so that it takes arrays divided over explicit mesh axes, or an aval that is to be.

    Args:
      lies: of the operation's arguments, by name: returns a function of a result, abstract, which says over which mesh
        axes each of its axes is divided. Of mesh axes named twice the first counts.
      captured: ``epilogue.captured.on_automatic_axes`` of an operation with an epilogue or an activation: makes of that
        function one of arrays on automatic axes, whatever it captures.
    """

    def decorate(operation: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(operation)

        @functools.wraps(operation)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree.flatten((args, kwargs))
            places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
            arrays = [leaves[i] for i in places]
            wanted = [x for x in leaves if isinstance(x, ShapedArray)]  # results, of whole operands too
            avals = [*map(jax.typeof, arrays), *wanted]
            refuse_reduced(operation.__name__.lstrip("_"), avals)
            mesh = next((x.sharding.mesh for x in avals if any(x.sharding.spec)), None)
            if mesh is None:
                return operation(*args, **kwargs)

            def run(*arrays: jax.Array) -> Any:
                found = list(leaves)
                for i, x in zip(places, arrays, strict=True):
                    found[i] = x
                args, kwargs = jax.tree.unflatten(tree, found)
                for name in _FUNCTIONS & kwargs.keys():
                    if captured and callable(kwargs[name]):
                        kwargs[name] = captured(kwargs[name], mesh, lambda x: once(of_result(x)))
                return operation(*args, **kwargs)

            avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type) for x in arrays]
            of_result = lies(**signature.bind(*args, **kwargs).arguments)
            with jax.sharding.use_abstract_mesh(mesh):
                out = jax.tree.map(lambda x: NamedSharding(mesh, once(of_result(x))), jax.eval_shape(run, *avals))
                kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
                names = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
                return jax.sharding.auto_axes(run, axes=names, out_sharding=out)(*arrays)

        return call

    return decorate


def as_matmul(x: jax.Array, ws: Sequence[jax.Array], layout: str, out_sharding: Any, where: str) -> jax.P | None:
    """Returns the sharding of ``jnp.matmul``'s result on explicit mesh axes; None where no operand is divided.

    Raises as that does. Of several matrices w those that are divided say how.
    """
    if out_sharding is None and not any_divided(x, *ws):
        return None
    refuse_reduced(where, [jax.typeof(y) for y in (x, *ws)])
    found: list[Any] = []
    for w in ws:
        given = [jax.ShapeDtypeStruct(y.shape, np.float32, sharding=jax.typeof(y).sharding) for y in (x, w)]
        try:
            matmul = functools.partial(_matmul, layout=layout, out_sharding=out_sharding)
            (out,) = jax.make_jaxpr(matmul)(*given).out_avals
        except Exception as error:
            error.add_note(f"{where}: of {', '.join(jax.typeof(y).str_short() for y in (x, w))}, layout {layout!r}")
            raise
        refuse_reduced(where, [out], "results")
        found.append(out.sharding.spec)
    return once([next((over for over in axis if over), None) for axis in zip(*found, strict=True)])


def _matmul(x: jax.Array, w: jax.Array, layout: str, out_sharding: Any) -> jax.Array:
    return jnp.matmul(x if layout[0] == "n" else x.mT, w if layout[1] == "n" else w.mT, out_sharding=out_sharding)


def axes(x: Any, i: int) -> Axes:
    """Returns the explicit mesh axes over which an axis, counted from the last, of an argument is divided."""
    spec = _spec(x) if isinstance(x, jax.Array) else ()
    return spec[i] if -i <= len(spec) else None


def rows_by_columns(x: Any, w: Any, layout: str) -> Callable[[Any], list[Axes]]:
    """Returns the sharding of ``[..., m, n]``: rows and batch axes as x ``[..., m, k]``, columns as a matrix of w.

    Results of any other shape, an epilogue's reductions, are whole everywhere.
    """
    x, w = (jax.tree.leaves(operand)[0] for operand in (x, w))  # the values of quantized ones
    at = -1 if layout[-1] == "n" else -2

    def lies(out: Any) -> list[Axes]:
        if out.ndim < 2 or out.shape[-2:] != (x.shape[-2], w.shape[at]):
            return [None] * out.ndim
        return [*(axes(x, i) for i in range(-out.ndim, -1)), axes(w, at)]

    return lies


def batched(rank: int, *batches: Sequence[Axes]) -> jax.P:
    """Returns the sharding of a result that has batch axes before others: those as the operands', and the others whole.

    An axis over which ``jax.vmap`` maps stays divided so.

    Args:
      rank: of the other axes.
      batches: what divides the batch axes of each operand.
    """
    found: list[Axes] = [None] * max(map(len, batches))
    for batch in batches:
        for i, over in enumerate(batch, len(found) - len(batch)):
            found[i] = found[i] or over
    return once([*found, *[None] * rank])


def once(found: list[Axes]) -> jax.P:
    """Returns a spec in which each mesh axis is named once."""
    seen: set[str] = set()
    spec = []
    for each in found:
        names = names_of(each)
        spec.append(tuple(name for name in names if name not in seen) or None)
        seen |= {*names}
    return jax.P(*spec)


def _spec(x: jax.Array) -> tuple[Axes, ...]:
    return tuple(jax.typeof(x).sharding.spec)

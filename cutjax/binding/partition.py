"""The division of an operation over the devices of a mesh, in a program that jit divides.

A `Rule` names the axes of an operation's arrays; axes of one name are divided alike. Shardy propagates shardings by it.
When the program is compiled, XLA says how each array lies, `place` says how the operation is divided, and the shard is
lowered, for its own shapes: there a kernel is chosen. It is done inside the lowering rule, so that vmap and grad see
the primitive alone.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jaxlib.mlir import ir

from cutjax.binding.placement import Arrays, Labels, Placement, Rule, place
from cutjax.binding.rules import explicit_axes, on_mesh
from cutjax.runtime.backends import partial_sums


@custom_partitioning
def _nothing(x: Any) -> Any:
    return x


_nothing.def_partition(partition=lambda *args: args, sharding_rule="->")

# A parameter of every primitive that is divided so. JAX hands a lowering rule the devices only if it finds a primitive
# that asks for them, and looks for such in parameters that are jaxprs. One object for each choice of the dtype of
# partial sums, which its own dtype says, so that it hashes alike for all.
_MARKS = {
    name: jax.make_jaxpr(_nothing)(jax.ShapeDtypeStruct((), dtype))
    for name, dtype in (("float32", jnp.float32), ("result", jnp.bfloat16))
}


def mark_of(backend: str) -> Any:
    """Returns the mark of a primitive with a backend: None where XLA runs whatever the devices."""
    return None if backend == "xla" else _MARKS[partial_sums()]


def narrow_sums(mark: Any) -> bool:
    """True if a primitive with that mark adds up partial sums in the result's dtype."""
    return mark is not None and mark.in_avals[0].dtype == jnp.bfloat16


class Rules(NamedTuple):
    """The rules by which a primitive is divided.

    Attributes:
      rule: ``(*avals, **params) -> Rule``.
      shard: ``(placement, *shards, avals, **params) -> results``, what one device computes; the avals are whole.
      later: ``(**params) -> bool``, True if a shard may have a kernel where the whole has none.
    """

    rule: Callable[..., Rule]
    shard: Callable[..., Sequence[jax.Array]]
    later: Callable[..., bool] = lambda **_: False


class Shard(NamedTuple):
    """One device's part of an operation, as XLA divided it.

    Attributes:
      primitive, avals, params: of the operation.
      jaxpr: what the device computes.
      gathers: a sentence for each operand that is gathered before.
    """

    primitive: core.Primitive
    avals: tuple[Any, ...]
    params: Mapping[str, Any]
    jaxpr: core.ClosedJaxpr
    gathers: tuple[str, ...]


_NO_MESH = jax.sharding.AbstractMesh((), ())


class Devices(NamedTuple):
    """The devices over which an operation is divided.

    Attributes:
      context: them, as custom partitioning is to take them, with the mesh of the axes over which XLA divides.
      mesh: all axes, where a shard_map has some of them; else None.
    """

    context: Any
    mesh: jax.sharding.Mesh | None = None


def devices_of(ctx: mlir.LoweringRuleContext) -> Devices | None:
    """Returns the devices over which an operation is divided when the program is compiled; None where it cannot be."""
    context: Any = ctx.module_context.axis_context
    # An exported program has no callbacks. One for several platforms is only ever exported.
    if ctx.module_context.lowering_parameters.for_export or len(ctx.platforms or ctx.module_context.platforms) != 1:
        return None
    if isinstance(context, mlir.SPMDAxisContext):
        return _left(context)
    if context.device_assignment is None:
        return None
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    meshes = [x.sharding.mesh for x in avals]
    found = (context.abstract_mesh, *meshes, jax.sharding.get_abstract_mesh())
    mesh = next((mesh for mesh in found if mesh is not None and mesh.size == context.num_devices), None)
    # The mesh is not in the context of what has only GSPMD's shardings.
    return None if mesh is None else Devices(dataclasses.replace(context, abstract_mesh=mesh))


def _left(context: Any) -> Devices | None:
    """Returns the devices of the axis that a shard_map leaves to XLA; None of several.

    XLA tells custom partitioning of the devices that such axes join, numbered in an order that it may choose for each
    operation: of one axis there is one order alone. The collectives of a shard are of the whole mesh's groups.
    """
    mesh = context.mesh
    left = [axis for axis in mesh.axis_names if axis not in context.manual_axes and mesh.shape[axis] > 1]
    if len(left) != 1 or isinstance(mesh, jax.sharding.AbstractMesh):
        return None
    at = mesh.axis_names.index(left[0])
    some = tuple(mesh.devices[tuple(slice(None) if i == at else 0 for i in range(mesh.devices.ndim))])
    axis = jax.sharding.AbstractMesh((len(some),), (left[0],))
    return Devices(mlir.ShardingContext(len(some), some, axis), mesh)


def lower(
    ctx: mlir.LoweringRuleContext,
    args: Sequence[Any],
    primitive: core.Primitive,
    rules: Rules,
    params: dict[str, Any],
    devices: Devices,
    seen: list[Shard] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Sequence[Any]:
    """Lowers an operation to one that is divided when the program is compiled.

    Where ``seen`` is given, it gets what each device computes, and the program computes zeros. All operations of a
    device's part have the metadata.
    """
    avals: tuple[Any, ...] = tuple(ctx.avals_in)
    whole = rules.rule(*avals, **params)
    lost = [_ones(x.shape, labels) for x, labels in zip(avals, whole.operands, strict=True)]
    rule, (text, kinds) = whole.without(lost), whole.shardy(lost)

    def given(xs: Sequence[jax.Array]) -> list[jax.Array]:
        return [lax.expand_dims(x, range(n)) for x, n in zip(xs, lost, strict=True)]

    def placed(mesh: Any, operands: Any, results: Any) -> Placement:
        shapes = [x.shape for x in (*operands, *ctx.avals_out)]
        found = [[_axes(x, i) for i in range(len(x.shape))] for x in (*operands, *results)]
        n = len(operands)
        return place(Arrays(rule, dict(mesh.shape), shapes, found[:n], found[n:], avals[0].dtype.itemsize))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        operands, results = ([_named(x, mesh) for x in xs] for xs in (operands, results))
        placement = placed(mesh, operands, results)
        specs = [placement.spec(_without(rule.gathered, labels)) for labels in rule.operands[: rule.factors]]
        early = rule.early(placement)  # what is computed of sums is computed of those that this device keeps
        gone = rule.summed if early else ()
        specs += [placement.spec(_without(gone, labels), scattered=early) for labels in rule.operands[rule.factors :]]
        outs = [NamedSharding(mesh, placement.spec(labels, scattered=True)) for labels in rule.results]

        def shard(*shards: jax.Array) -> list[jax.Array]:
            run = functools.partial(rules.shard, placement, avals=avals, **params)
            with jax.sharding.use_abstract_mesh(_NO_MESH):  # a shard lies on no mesh, whatever is in scope here
                if seen is None:
                    return list(run(*given(shards)))
                jaxpr = jax.make_jaxpr(run)(*given(shards))
                seen.append(Shard(primitive, avals, params, jaxpr, tuple(_gathers(operands, specs))))
                return [jnp.zeros(x.shape, x.dtype) for x in jaxpr.out_avals]

        return devices.mesh or mesh, shard, outs, tuple(NamedSharding(mesh, spec) for spec in specs)

    def infer(mesh: Any, operands: Any, _: Any) -> list[NamedSharding]:
        placement = placed(mesh, [_named(x, mesh) for x in operands], ())
        return [NamedSharding(mesh, placement.spec(labels)) for labels in rule.results]

    divided = custom_partitioning(lambda *xs: primitive.bind(*given(xs), **params))
    divided.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        decode_shardings=False,
        sharding_rule=text,
        **{name: value for name, value in kinds.items() if value},
    )

    # Weights without the axis of size 1 before them are what plain products in the program read, so XLA gathers them
    # once for all.
    def without(*xs: jax.Array) -> Any:
        return divided(*(lax.squeeze(x, range(n)) for x, n in zip(xs, lost, strict=True)))

    ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=devices.context))
    outs = mlir.lower_fun(without, multiple_results=True)(ctx, *args)
    # Jax's cache of compiled programs may leave the callback out of its key, so that says what it does.
    what = primitive.name, sorted(params.items(), key=str), avals, seen and id(seen)
    name = hashlib.sha256(repr(what).encode()).hexdigest()
    tell(outs[0], {"cutjax": name, **(metadata or {})})
    return _where_types_say(ctx, outs) if explicit_axes(on_mesh(*avals, *ctx.avals_out).mesh) else outs


def tell(result: Any, attributes: Mapping[str, str]) -> None:
    """Gives the operation of a result attributes that XLA keeps."""
    if attributes:
        found: dict[str, ir.Attribute] = {key: ir.StringAttr.get(value) for key, value in attributes.items()}
        result.owner.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(found)


def _where_types_say(ctx: mlir.LoweringRuleContext, outs: Sequence[Any]) -> Sequence[Any]:
    """Lowers what makes results lie on explicit mesh axes as their types say, and on others where they may."""
    given = on_mesh(*ctx.avals_in, *ctx.avals_out).mesh
    there = [NamedSharding(given, x.sharding.spec) for x in ctx.avals_out]

    def lying(*xs: jax.Array) -> list[jax.Array]:
        with jax.sharding.use_abstract_mesh(given):
            return list(map(jax.reshard, xs, there))

    nowhere = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_out]
    return mlir.lower_fun(lying, multiple_results=True)(ctx.replace(avals_in=nowhere, tokens_out=None), *outs)


def _without(gone: Sequence[str], labels: Labels) -> Labels:
    return tuple(None if label in gone else label for label in labels)


def _gathers(operands: Sequence[Any], specs: Sequence[jax.P]) -> Iterator[str]:
    """Yields a sentence for each operand that is gathered, since its sharding is not the one that is needed."""
    for i, (x, spec) in enumerate(zip(operands, specs, strict=True)):
        have = {axis for j in range(len(x.shape)) for axis in _axes(x, j)}
        kept = {axis for axes in spec for axis in ((axes,) if isinstance(axes, str) else axes or ())}
        if gone := sorted(have - kept):
            yield f"operand {i} is gathered over {', '.join(gone)}"


def _ones(shape: Sequence[int], labels: Labels) -> int:
    """Returns the number of axes of size 1 before all others that have no name."""
    ones = itertools.takewhile(lambda x: x == (1, None), zip(shape, labels, strict=True))
    return sum(1 for _ in ones)


def _axes(x: Any, i: int) -> tuple[str, ...]:
    """Returns the mesh axes over which an axis of an array is divided."""
    spec = x.sharding.spec
    axes = spec[i] if i < len(spec) else None
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _named(x: Any, mesh: Any) -> jax.ShapeDtypeStruct:
    """Returns an abstract array with its sharding by names of mesh axes; axes that a part of one divides are whole.

    A reshape may leave a part of a mesh axis on an axis, which jax's own decoding of shardings fails at.
    """
    found = x.sharding.devices_indices_map((mesh.size,) * len(x.shape))  # sizes that any sharding divides
    spec: list[tuple[str, ...] | None] = []
    for i in range(len(x.shape)):
        starts = np.array([found[device][i].start or 0 for device in mesh.devices.flat]).reshape(mesh.devices.shape)
        steps = {name: np.abs(np.diff(starts, axis=k)) for k, name in enumerate(mesh.axis_names)}
        steps = {name: step.min() for name, step in steps.items() if step.any()}
        whole = len(np.unique(starts)) == math.prod(mesh.shape[name] for name in steps)
        spec.append(tuple(sorted(steps, key=lambda name: -steps[name])) or None if whole else None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, jax.P(*spec)))

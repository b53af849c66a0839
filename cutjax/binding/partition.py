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
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jaxlib.mlir import ir

from cutjax.runtime.backends import partial_sums

Labels = tuple[str | None, ...]  # of each axis of an array; None of one that is whole on every device


@dataclasses.dataclass(frozen=True)
class Rule:
    """The names of the axes of an operation's arrays.

    Attributes:
      operands, results: of each array.
      factors: how many of the first operands say how the operation is divided; the others follow.
      summed: names of axes over which the operation sums. They are divided where all the factors that have them are
        divided alike.
      late: those of them over which finished results are added, not the partial sums.
      gathered: names of axes that are whole in every shard of an operand, and may be divided in the results.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    factors: int
    summed: tuple[str, ...]
    late: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()

    def early(self, placement: Placement) -> bool:
        """True if partial sums are added over devices, before anything else is computed of them."""
        return any(placement.axes.get(label) for label in self.summed if label not in self.late)

    def shardy(self) -> tuple[str, dict[str, tuple[str, ...]]]:
        """Returns the rule as Shardy reads it: axes that are whole have names of their own."""
        whole: list[str] = []

        def names(labels: Labels) -> str:
            found = []
            for label in labels:
                if label is None:
                    whole.append(f"whole{len(whole)}")
                found.append(label or whole[-1])
            return " ".join(found)

        operands, results = (", ".join(map(names, arrays)) for arrays in (self.operands, self.results))
        order = dict.fromkeys(label for labels in self.operands for label in labels)  # Shardy's order of names
        summed = tuple(label for label in order if label in self.summed)
        return f"{operands} -> {results}", {"need_replication_factors": tuple(whole), "reduction_factors": summed}


@dataclasses.dataclass(frozen=True)
class Placement:
    """The division of an operation.

    Attributes:
      mesh: the sizes of the mesh axes by name.
      axes: by name of an axis of the factors, the mesh axes it is divided over.
      scattered: by name of an axis of the results, the further mesh axes over which sums are divided there. Each is
        one that an axis in ``Rule.summed`` is divided over.
    """

    mesh: Mapping[str, int]
    axes: Mapping[str, tuple[str, ...]]
    scattered: Mapping[str, tuple[str, ...]]

    def over(self, label: str | None) -> tuple[str, ...]:
        """Returns the mesh axes over which an axis of the results is divided."""
        return self.axes.get(label or "", ()) + self.scattered.get(label or "", ())

    def count(self, axes: Sequence[str]) -> int:
        """Returns over how many devices mesh axes divide."""
        return math.prod(self.mesh[axis] for axis in axes)

    def index(self, axes: Sequence[str]) -> jax.Array:
        """Returns which of the parts this device has."""
        return lax.axis_index(tuple(axes)) if axes else jnp.zeros((), jnp.int32)

    def spec(self, labels: Labels, scattered: bool = False) -> jax.P:
        """Returns how an array lies."""
        of = self.over if scattered else lambda label: self.axes.get(label or "", ())
        return jax.P(*(of(label) or None for label in labels))


def place(
    rule: Rule,
    mesh: Mapping[str, int],
    shapes: Sequence[Sequence[int]],
    operands: Sequence[Any],
    results: Sequence[Any],
    itemsize: int = 4,
) -> Placement:
    """Returns how an operation is divided whose arrays lie as XLA says, so that little of them must move.

    Args:
      rule: the names of the axes.
      mesh: the sizes of the mesh axes by name.
      shapes: of the operands and the results.
      operands, results: the mesh axes of each axis of each array, tuples; no results where nothing is known of them.
      itemsize: bytes of an element of an operand.
    """
    sizes: dict[str, int] = {}
    asked: dict[str, list[tuple[str, ...]]] = {}
    for labels, shape in zip((*rule.operands, *rule.results), shapes, strict=True):
        sizes |= {label: size for label, size in zip(labels, shape, strict=True) if label}
    for labels, spec in zip(rule.operands[: rule.factors], operands, strict=False):
        for label, over in zip(labels, spec, strict=True):
            if label:
                asked.setdefault(label, []).append(over)
    wanted: dict[str, tuple[str, ...]] = {}
    for labels, spec in zip(rule.results, results, strict=False):
        for label, over in zip(labels, spec, strict=True):
            if label and over:
                wanted.setdefault(label, over)
    axes: dict[str, tuple[str, ...]] = {}
    scattered: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()

    def extend(label: str, more: Sequence[str]) -> None:
        """Divides by further mesh axes, as far as they are free and divide evenly: no shard is padded."""
        for axis in more:
            size = mesh[axis] * math.prod(mesh[x] for x in axes.get(label, ()))
            if axis in taken or sizes.get(label, 0) % size:
                return
            axes[label] = (*axes.get(label, ()), axis)
            taken.add(axis)

    for label in rule.summed:
        found = functools.reduce(_common, asked.get(label, [()]))
        extend(label, found or _one_side(rule, label, mesh, sizes, asked, wanted, itemsize))
    summed = set(taken)
    proposed = {label: next(filter(None, found), ()) for label, found in asked.items() if label not in rule.summed}
    for label, found in proposed.items():  # what operands and results agree on goes first
        extend(label, _common(found, wanted.get(label, ())))
    for label, found in proposed.items():
        if found[: len(axes.get(label, ()))] == axes.get(label, ()):
            extend(label, found[len(axes.get(label, ())) :])
    for label, found in wanted.items():
        have = axes.get(label, ())
        if found[: len(have)] != have or label in rule.summed:
            continue
        free = next((i for i in range(len(have), len(found)) if found[i] in taken), len(found))
        extend(label, found[len(have) : free])
        if axes.get(label, ()) == found[:free]:
            more: list[str] = []
            for axis in found[free:]:
                size = math.prod(mesh[x] for x in (*found[:free], *more, axis))
                if axis not in summed or sizes.get(label, 0) % size:
                    break
                more.append(axis)
                summed.remove(axis)
            if more:
                scattered[label] = tuple(more)
    return Placement(dict(mesh), axes, scattered)


def _one_side(
    rule: Rule,
    label: str,
    mesh: Mapping[str, int],
    sizes: Mapping[str, int],
    asked: Mapping[str, list[tuple[str, ...]]],
    wanted: Mapping[str, tuple[str, ...]],
    itemsize: int,
) -> tuple[str, ...]:
    """Returns the mesh axes over which one operand alone divides a summed axis, if sums move less than the operand.

    The others are whole there, so that each device has its part of them; or another axis of theirs is divided alike,
    and an all-to-all moves them.
    """
    found = [axes for axes in asked.get(label, ()) if axes]
    if len(found) != 1:
        return ()
    (summed,) = found

    def elements(labels: Labels, gone: Sequence[str] = ()) -> int:
        """Returns how many elements a device has of an array whose summed axis is whole, as others over axes gone."""
        over = {x for name in labels if name and name != label for x in next(filter(None, asked.get(name, ())), ())}
        over |= {x for name in labels if name not in asked for x in wanted.get(name or "", ())}
        whole = math.prod(sizes[name] for name in labels if name)
        return whole // math.prod(mesh[x] for x in over - {*gone})

    holders = [labels for labels in rule.operands[: rule.factors] if label in labels]
    operand = holders.pop(asked[label].index(summed))
    elsewhere = {
        name: specs for name, specs in asked.items() if name != label and {*summed} & {x for y in specs for x in y}
    }
    if any({*specs} - {(), summed} for specs in elsewhere.values()):
        return ()  # what moves between such divisions is more than an all-to-all
    moving = [labels for labels in holders if elsewhere.keys() & {*labels}]
    # What adds up in f32 passes twice over each link, once where the result keeps its part; what gathers passes once.
    passes = 1 if any({*summed} <= {*wanted.get(name or "", ())} for name in rule.results[0]) else 2
    sums = passes * 4 * elements(rule.results[0], summed) + sum(itemsize * elements(x) for x in moving)
    return summed if sums <= itemsize * elements(operand, summed) else ()


def _common(p: tuple[str, ...], q: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the mesh axes with which both begin."""
    n = next((i for i, (x, y) in enumerate(zip(p, q, strict=False)) if x != y), min(len(p), len(q)))
    return p[:n]


def batch_labels(shape: Sequence[int], full: Sequence[int]) -> Labels:
    """Returns the names of batch axes, which count them from the last; one that broadcasts is whole."""
    last = len(shape) - 1
    return tuple(f"b{last - i}" if size != 1 or full[i] == 1 else None for i, size in enumerate(shape))


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
    """Returns over which devices an operation is divided when the program is compiled, None where it cannot be."""
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
) -> Sequence[Any]:
    """Lowers an operation to one that is divided when the program is compiled.

    Where ``seen`` is given, it gets what each device computes, and the program computes zeros.
    """
    avals: tuple[Any, ...] = tuple(ctx.avals_in)
    rule = rules.rule(*avals, **params)

    def placed(mesh: Any, operands: Any, results: Any) -> Placement:
        shapes = [x.shape for x in (*operands, *ctx.avals_out)]
        found = [[_axes(x, i) for i in range(len(x.shape))] for x in (*operands, *results)]
        n = len(operands)
        return place(rule, dict(mesh.shape), shapes, found[:n], found[n:], avals[0].dtype.itemsize)

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
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
                    return list(run(*shards))
                jaxpr = jax.make_jaxpr(run)(*shards)
                seen.append(Shard(primitive, avals, params, jaxpr, tuple(_gathers(operands, specs))))
                return [jnp.zeros(x.shape, x.dtype) for x in jaxpr.out_avals]

        return devices.mesh or mesh, shard, outs, tuple(NamedSharding(mesh, spec) for spec in specs)

    def infer(mesh: Any, operands: Any, _: Any) -> list[NamedSharding]:
        placement = placed(mesh, operands, ())
        return [NamedSharding(mesh, placement.spec(labels)) for labels in rule.results]

    divided = custom_partitioning(lambda *xs: primitive.bind(*xs, **params))
    text, kinds = rule.shardy()
    divided.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=text, **_given(kinds))
    ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=devices.context))
    outs = mlir.lower_fun(divided, multiple_results=True)(ctx, *args)
    # Jax's cache of compiled programs may leave the callback out of its key, so that says what it does.
    what = primitive.name, sorted(params.items(), key=str), avals, seen and id(seen)
    name = hashlib.sha256(repr(what).encode()).hexdigest()
    owner = outs[0].owner
    owner.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get({"cutjax": ir.StringAttr.get(name)})
    return outs


def _without(gone: Sequence[str], labels: Labels) -> Labels:
    return tuple(None if label in gone else label for label in labels)


def _gathers(operands: Sequence[Any], specs: Sequence[jax.P]) -> Iterator[str]:
    """Says which operands are gathered, of those that lie otherwise than they must."""
    for i, (x, spec) in enumerate(zip(operands, specs, strict=True)):
        have = {axis for j in range(len(x.shape)) for axis in _axes(x, j)}
        kept = {axis for axes in spec for axis in ((axes,) if isinstance(axes, str) else axes or ())}
        if gone := sorted(have - kept):
            yield f"operand {i} is gathered over {', '.join(gone)}"


def _given(kinds: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    return {name: value for name, value in kinds.items() if value}


def _axes(x: Any, i: int) -> tuple[str, ...]:
    """Returns the mesh axes over which an axis of an array is divided."""
    spec = x.sharding.spec
    axes = spec[i] if i < len(spec) else None
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)

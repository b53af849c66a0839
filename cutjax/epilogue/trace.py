"""From a JAX function of accumulators and operands to an Epilogue.

A value's axes are known by the result's axis they end up on, which the outputs decide and a walk from them to the
inputs finds: a function that adds ``bias[None, :]`` and one that adds ``scale[:, None]`` differ even where m equals n.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util

from cutjax.dtypes import DTYPES
from cutjax.epilogue import expression
from cutjax.epilogue.expression import Epilogue, Node, OperandSpec, Output
from cutjax.epilogue.flatten import (
    INLINABLE,
    OUTSIDE,
    POST,
    REDUCTIONS,
    TILE,
    Flat,
    Step,
    aval_of,
    refuse_effects,
    where,
)
from cutjax.epilogue.rules import UNIT_MOVES, any_reverse_only, bind, evaluate

source_info_util.register_exclusion(
    os.path.dirname(os.path.dirname(__file__)) + os.sep
)  # no line of this package is the user's

Labels = tuple[int | None, ...]  # of each axis of a value: the result's axis it lies on, None where it has size 1


class Traced(NamedTuple):
    """A traced function.

    Attributes:
      epilogue: the expression.
      operands: its operands, one array for each ``epilogue.operands``, of the result's rank, each axis of full size
        where its spec varies and 1 elsewhere; one of groups is ``[..., groups, 1, n or 1]``. The caller's, and what the
        function captured or computed of these alone, ready to be differentiated. What the function does not use is not
        among them.
      finish: from what ``epilogue.apply`` (or a kernel) returns to what the function returns.
      outside: the function as JAX has it, where its derivative cannot be the epilogue's; else None.
    """

    epilogue: Epilogue
    operands: tuple[jax.Array, ...]
    finish: Callable[[Sequence[jax.Array]], Any]
    outside: Outside | None = None


class Outside(NamedTuple):
    """A function some of whose parts have derivatives of their own that are no elementwise functions.

    Attributes:
      function: ``(accs, leaves)``, what the traced function returns; the leaves are ``leaves``, or what replaces them.
      leaves: the leaves of its operands, and what it captured.
      groups: of each leaf, whether it is an operand of groups, of which ``function`` takes what the rows have.
      reverse_only: whether the derivative exists in reverse mode alone, as with custom_vjp.
      why: what is not elementwise, and where.
    """

    function: Callable[[Sequence[Any], Sequence[Any]], Any]
    leaves: tuple[Any, ...]
    groups: tuple[bool, ...]
    reverse_only: bool
    why: str


def trace(
    fn: Callable[..., Any],
    accs: Sequence[Any],
    operands: Sequence[Any] = (),
    groups: int | None = None,
    refusing: bool = False,
) -> Traced:
    """Traces ``fn(*accs, *operands)`` once.

    Args:
      fn: the function.
      accs: abstract accumulators (``jax.ShapeDtypeStruct`` or arrays), ``[..., m, n]``, all of one shape and dtype.
      operands: arrays, or pytrees of them.
      groups: of a grouped GEMM, the number of groups. An operand with one axis more than the result is then one of
        groups, ``[..., groups, 1, n or 1]``, and the function sees what each row has of it: ``[..., m, n or 1]``.
      refusing: whether a derivative that is no elementwise function is refused when it is taken, not taken outside.

    Raises:
      TypeError: if the function takes another number of arguments, or computes in a dtype that no kernel has.
      ValueError: if a result is neither ``[..., m, n]`` nor made of reductions.
      NotImplementedError: if it does to an accumulator what is not elementwise, or has side effects.
    """
    try:
        inspect.signature(fn).bind(*accs, *operands)
    except TypeError as error:
        raise TypeError(
            f"epilogue: {_name(fn)} is called with {len(accs)} accumulator(s) and {len(operands)} operand(s): {error}"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    shape = tuple(accs[0].shape)
    leaves, structure = jax.tree.flatten(tuple(operands))
    grouped = [groups is not None and np.ndim(x) == len(shape) + 1 for x in leaves]
    seen = [_rows(x, shape, groups) if each else x for x, each in zip(leaves, grouped, strict=True)]
    operands = jax.tree.unflatten(structure, seen)
    try:
        # A new function each time: jax caches traces by function, but what a function captures may change.
        closed, shapes = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*accs, *operands)
    except Exception as error:
        types = ", ".join(f"{x.dtype}{list(x.shape)}" for x in map(aval_of, jax.tree.leaves((accs, operands))))
        error.add_note(
            f"while tracing the epilogue {_name(fn)} with {len(accs)} accumulator(s), then operands: {types}"
        )
        raise
    refuse_effects(closed.jaxpr)
    flat = Flat(shape, refusing)
    accumulators = [flat.value(x.shape, x.dtype, TILE) for x in accs]
    inputs = [flat.outside(x, aval_of(y), bake=False) for x, y in zip(leaves, seen, strict=True)]
    consts = [flat.outside(c, aval_of(c)) for c in closed.consts]
    of_groups = frozenset(i for i, each in zip(inputs, grouped, strict=True) if each)
    flat.of_groups.update(of_groups)
    outs = flat.inline(closed.jaxpr, consts, [*accumulators, *inputs])
    tree = jax.tree.structure(shapes)
    traced = _Builder(flat, len(accs), outs, tree, _name(fn), of_groups).traced()
    if not flat.irregular:
        return traced

    def function(accs: Sequence[Any], leaves: Sequence[Any]) -> Any:
        given, captured = leaves[: len(seen)], leaves[len(seen) :]
        return tree.unflatten(evaluate(closed.jaxpr, captured, (*accs, *given), bind))

    captured = tuple(closed.consts)
    by_group = (*grouped, *(False for _ in captured))
    why = "; ".join(dict.fromkeys(flat.irregular))
    return traced._replace(
        outside=Outside(function, (*leaves, *captured), by_group, any_reverse_only(closed.jaxpr), why)
    )


def _rows(x: Any, shape: tuple[int, ...], groups: int | None) -> jax.ShapeDtypeStruct:
    """What the rows of the result have of an operand of groups."""
    aval = jax.typeof(jnp.asarray(x))
    *batch, g, one, n = aval.shape
    fits = all(size in (1, full) for size, full in zip((*batch, n), (*shape[:-2], shape[-1]), strict=True))
    if (g, one) != (groups, 1) or not fits:
        raise ValueError(
            f"epilogue: an operand is {aval.str_short()}, one axis more than the product {shape}, so it is one of "
            f"groups: expected {(*shape[:-2], groups, 1, shape[-1])}, where all but the {groups} groups may be 1"
        )
    spec = [*aval.sharding.spec[:-3], None, aval.sharding.spec[-1]]
    aval = aval.update(shape=(*batch, shape[-2], n), sharding=aval.sharding.update(spec=jax.P(*spec)))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.mat)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


class _Builder:
    """Finds what the results need, from the last step to the first, and builds nodes from the first to the last."""

    def __init__(self, flat: Flat, products: int, outs: list[int], tree: Any, name: str, grouped: frozenset[int]):
        self.flat, self.products, self.outs, self.tree = flat, products, outs, tree
        self.grouped = grouped  # operands of groups
        self.rank = len(flat.shape)
        self.standard: Labels = tuple(i if size != 1 else None for i, size in enumerate(flat.shape))
        self.demands: dict[int, set[Labels]] = {}
        self.leaves: set[tuple[int, Labels, int]] = set()  # operands; the last is a word of a key, or -1
        self.nodes: list[Node] = []
        self.index: dict[tuple[int, Labels], int] = {}
        self.post: set[int] = set()  # values that finish needs
        if not outs:
            raise ValueError(f"epilogue: {name} returns no array")
        for i in outs:
            if flat.kinds[i] == POST:
                self.post.add(i)
            elif flat.shapes[i] == flat.shape:
                self._demand(i, self.standard)
            else:
                raise ValueError(
                    f"epilogue: {name} returns shape {flat.shapes[i]}, expected the product's {flat.shape} or a sum, "
                    "max or min over rows, columns or both; operands must broadcast against the product"
                )

    def traced(self) -> Traced:
        flat = self.flat
        reductions: dict[int, tuple[int, Labels, Output]] = {}
        post_steps = []
        for step in reversed(flat.steps):
            if step.kind == POST and self.post.intersection(step.outs):
                if flat.kinds[step.ins[0]] == TILE:
                    reductions[step.outs[0]] = self._reduction(step)
                else:
                    self._refuse_groups(step)
                    post_steps.append(step)
                    self.post.update(step.ins)
            elif step.kind != POST:
                self._backward(step)
        order = self._leaf_order()
        for leaf in order:
            self._leaf(leaf, order.index(leaf))
        for k in range(self.products):
            self.index[k, self.standard] = self._node("acc", dtype=self.flat.dtypes[k].name, params=(k,))
        for i, value in flat.literals.items():
            for labels in self.demands.get(i, ()):
                self.index[i, labels] = self._number(value, flat.dtypes[i])
        for step in flat.steps:
            for i in step.outs:
                for labels in sorted(self.demands.get(i, ()), key=repr):
                    if (i, labels) not in self.index:
                        self.index[i, labels] = self._build(step, labels)

        outputs, place = [], {}
        for i in self.outs:
            if flat.kinds[i] != POST:
                place.setdefault(i, len(outputs))
                if place[i] == len(outputs):
                    outputs.append(Output(self.index[i, self.standard], flat.dtypes[i].name))
        for i in sorted(reductions):
            source, labels, out = reductions[i]
            place[i] = len(outputs)
            outputs.append(dataclasses.replace(out, node=self.index[source, labels]))
        epilogue, used = self._epilogue(outputs, order)

        needed = {order[k][0] for k in used} | {i for i in self.post if flat.kinds[i] == OUTSIDE}
        values = self._outside(needed)
        arrays = tuple(self._arranged(values[order[k][0]], *order[k]) for k in used)

        def finish(results: Sequence[jax.Array]) -> Any:
            env = dict(values)
            for i, k in place.items():
                env[i] = lax.reshape(results[k], flat.shapes[i]) if i in reductions else results[k]
            for step in reversed(post_steps):
                env.update(zip(step.outs, step.run([env[i] for i in step.ins]), strict=True))
            return jax.tree.unflatten(self.tree, [env[i] for i in self.outs])

        return Traced(epilogue, arrays, finish)

    def _demand(self, i: int, labels: Labels) -> None:
        flat = self.flat
        if i < self.products and labels != self.standard:
            moved = [where(step.site) for step in flat.steps if step.name == "transpose" and step.kind == TILE]
            raise NotImplementedError(
                f"epilogue: an accumulator is used with its axes exchanged{', see ' + moved[0] if moved else ''}; "
                "transpose the result, or swap the operands of the product"
            )
        if i in self.grouped and labels != tuple(k if size != 1 else None for k, size in enumerate(flat.shapes[i])):
            raise NotImplementedError("epilogue: an operand of groups is used with its axes exchanged")
        if i in flat.known and i not in flat.literals:
            self._add_leaf(i, labels)
        self.demands.setdefault(i, set()).add(labels)

    def _refuse_groups(self, step: Step) -> None:
        if self.grouped.intersection(step.ins):
            raise NotImplementedError(
                f"epilogue: {step.name} at {where(step.site)} needs an operand of groups outside of the kernel; apply "
                "it to the operand before the product, or to the result after it"
            )

    def _add_leaf(self, i: int, labels: Labels, word: int = -1) -> None:
        self.leaves.add((i, labels, word))

    def _reduction(self, step: Step) -> tuple[int, Labels, Output]:
        flat, (source,) = self.flat, step.ins
        shape = flat.shapes[source]
        if shape == flat.shape:
            labels, reduced = self.standard, set(step.params["axes"])
        else:
            moved = _moved(flat.shape, shape, self.standard)
            labels = moved if moved is not None else ()
            reduced = {labels[axis] for axis in step.params["axes"] if labels[axis] is not None} if labels else set()
        axes = tuple(name for name, at in (("row", self.rank - 2), ("col", self.rank - 1)) if at in reduced)
        if not axes or len(axes) != len(reduced):
            raise NotImplementedError(
                f"epilogue: {step.name} at {where(step.site)} reduces {shape} over axes "
                f"{tuple(step.params['axes'])}, of which one is a batch axis; reduce over rows and columns only"
            )
        self._demand(source, labels)
        return source, labels, Output(-1, flat.dtypes[step.outs[0]].name, REDUCTIONS[step.name], axes)

    def _backward(self, step: Step) -> None:
        for i in step.outs:
            for labels in sorted(self.demands.get(i, ()), key=repr):
                args = self._arg_labels(step, labels)
                if args is not None:
                    for j, wanted in zip(step.ins, args, strict=True):
                        if step.name == "random_bits":
                            self._add_leaf(j, wanted, 0)
                            self._add_leaf(j, wanted, 1)
                        else:
                            self._demand(j, wanted)
                elif step.kind == OUTSIDE:
                    self._add_leaf(i, labels)
                else:
                    raise NotImplementedError(
                        f"epilogue: {step.name} at {where(step.site)} turns {self.flat.shapes[step.ins[0]]} into "
                        f"{self.flat.shapes[i]}, but an accumulator may only gain and lose axes of size 1"
                    )

    def _arg_labels(self, step: Step, labels: Labels) -> list[Labels] | None:
        """The axes of a step's arguments from those of its result; None if the kernel cannot compute the step."""
        flat, name, params = self.flat, step.name, step.params
        out = flat.shapes[step.outs[0]]
        shapes = [flat.shapes[i] for i in step.ins]
        dtypes = [flat.dtypes[i].name for i in (*step.ins, *step.outs)]
        if name == "random_bits":
            threefry = flat.dtypes[step.ins[0]].name == "key<fry>"
            small = math.prod(params["shape"]) <= 2**32 and params["bit_width"] <= 32
            return [labels[: len(shapes[0])]] if threefry and small and _partitionable(step.eqn) else None
        if step.kind == OUTSIDE and (name not in INLINABLE | {"rule"} or not DTYPES.keys() >= set(dtypes)):
            return None
        if name == "broadcast_in_dim":
            at = params["broadcast_dimensions"]
            return [tuple(labels[at[d]] if size != 1 else None for d, size in enumerate(shapes[0]))]
        if name in UNIT_MOVES:
            moved = _moved(out, shapes[0], labels)
            return None if moved is None else [moved]
        if name == "transpose":
            back = params["permutation"]
            return [tuple(labels[back.index(d)] for d in range(len(back)))]
        if name == "bitcast_convert_type" and shapes[0] != out:
            return None
        args = []
        for shape in shapes:  # elementwise: of the result's shape, or a scalar; the inputs of a custom rule broadcast
            skip = len(out) - len(shape)
            if skip < 0 or any(size not in (1, out[skip + d]) for d, size in enumerate(shape)):
                return None
            args.append(tuple(labels[skip + d] if size != 1 else None for d, size in enumerate(shape)))
        return args

    def _push(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _number(self, value: Any, dtype: Any) -> int:
        return self._push(expression.const(value, dtype))

    def _node(self, op: str, *args: int, dtype: str, params: tuple[Any, ...] = ()) -> int:
        return self._push(Node(op, args, dtype, params))

    def _leaf_order(self) -> list[tuple[int, Labels, int]]:
        return sorted(self.leaves, key=lambda leaf: (leaf[0], leaf[2], repr(leaf[1])))

    def _leaf(self, leaf: tuple[int, Labels, int], place: int) -> None:
        i, labels, word = leaf
        dtype = "uint32" if word >= 0 else self.flat.dtypes[i].name
        if dtype not in DTYPES:
            raise TypeError(
                f"epilogue: an operand or captured value is {dtype}, which no epilogue computes with; cast it"
            )
        self.index[(i, labels) if word < 0 else (~i, (*labels, word))] = self._node(
            "operand", dtype=dtype, params=(place,)
        )

    def _build(self, step: Step, labels: Labels) -> int:
        flat, params = self.flat, step.params
        dtype = flat.dtypes[step.outs[0]].name
        if dtype not in DTYPES:
            raise TypeError(
                f"epilogue: {step.name} at {where(step.site)} computes in {dtype}, which no epilogue does; cast it"
            )
        if step.name == "iota":
            return self._iota(labels[params["dimension"]], dtype)
        wanted = self._arg_labels(step, labels)
        assert wanted is not None  # _backward made a leaf or raised
        if step.name == "random_bits":
            return self._random_bits(step, labels, wanted[0], dtype)
        args = [self.index[i, x] for i, x in zip(step.ins, wanted, strict=True)]
        match step.name:
            case "broadcast_in_dim" | "reshape" | "squeeze" | "expand_dims" | "transpose" | "reduce_sum":
                return args[0]
            case "reduce_max" | "reduce_min":
                return args[0]
            case "rule":
                return self._node("rule", *args, dtype=dtype, params=params["rule"])
            case "convert_element_type" if self.nodes[args[0]].dtype == dtype:
                return args[0]
            case "cutjax_random_bits":
                return self._node("random_bits", *args, dtype=dtype)
            case "add_any":
                return self._node("add", *args, dtype=dtype)
            case "log2":
                log = self._node("log", *args, dtype=dtype)
                return self._node("div", log, self._number(math.log(2), dtype), dtype=dtype)
            case "one_minus_square":
                one = self._number(1, dtype)
                factors = [self._node(op, one, *args, dtype=dtype) for op in ("add", "sub")]
                return self._node("mul", *factors, dtype=dtype)
            case "polynomial":
                x, *coefficients = args
                value = coefficients.pop()
                for c in reversed(coefficients):
                    value = self._node("add", self._node("mul", value, x, dtype=dtype), c, dtype=dtype)
                return value
            case "integer_pow":
                return self._node("integer_pow", *args, dtype=dtype, params=(params["y"],))
            case "round":
                return self._node("round", *args, dtype=dtype, params=(int(params["rounding_method"]),))
            case "reduce_precision":
                bits = (params["exponent_bits"], params["mantissa_bits"])
                return self._node("reduce_precision", *args, dtype=dtype, params=bits)
            case op:
                return self._node(op, *args, dtype=dtype)

    def _iota(self, axis: int | None, dtype: str) -> int:
        if axis is None:
            return self._number(0, dtype)
        row = self.rank - 2
        return self._place(("row",) if axis == row else ("col",) if axis > row else ("batch", row - 1 - axis), dtype)

    def _place(self, at: tuple[Any, ...], dtype: str) -> int:
        node = self._node("iota", dtype="int32", params=at)
        return node if dtype == "int32" else self._node("convert_element_type", node, dtype=dtype)

    def _random_bits(self, step: Step, labels: Labels, key: Labels, dtype: str) -> int:
        """The bits jax.random gives: threefry2x32 of each element's index in the array, whose high word is 0 here."""

        shape = step.params["shape"]
        places = [self._iota(axis, "uint32") for axis in labels[len(key) :]]
        if labels[len(key) :] == self.standard and self.rank > 2:
            # Rows of all matrices are counted as one, so that batch axes may become rows (_fused.fold).
            places = [self._place(("row", self.rank - 2), "uint32"), places[-1]]
            shape = (math.prod(shape[:-1]), shape[-1])
        index, stride = self._number(0, "uint32"), 1
        for size, place in zip(shape[::-1], places[::-1], strict=True):
            if size != 1:
                by = self._number(stride & 0xFFFFFFFF, "uint32")
                term = place if stride == 1 else self._node("mul", place, by, dtype="uint32")
                index = term if stride == 1 else self._node("add", index, term, dtype="uint32")
            stride *= size
        k0, k1 = (self.index[~step.ins[0], (*key, j)] for j in (0, 1))
        bits = self._node("random_bits", k0, k1, index, dtype="uint32")
        return bits if dtype == "uint32" else self._node("convert_element_type", bits, dtype=dtype)

    def _epilogue(self, outputs: list[Output], order: list[tuple[int, Labels, int]]) -> tuple[Epilogue, list[int]]:
        """The epilogue with the operands it uses, and which those are."""
        specs = []
        for i, labels, word in order:
            dtype = "uint32" if word >= 0 else self.flat.dtypes[i].name
            *batch, row, col = (axis in labels for axis in range(self.rank))
            group = i in self.grouped
            specs.append(OperandSpec(dtype, row and not group, col, tuple(batch), group))
        epilogue = expression.normal(self.products, specs, self.nodes, outputs)
        used = sorted(node.params[0] for node in epilogue.nodes if node.op == "operand")
        nodes = [
            dataclasses.replace(node, params=(used.index(node.params[0]),)) if node.op == "operand" else node
            for node in epilogue.nodes
        ]
        return expression.normal(self.products, [specs[k] for k in used], nodes, epilogue.outputs), used

    def _outside(self, needed: set[int]) -> dict[int, Any]:
        """Values that depend on no accumulator."""
        flat, run = self.flat, []
        for step in reversed(flat.steps):
            if step.kind == OUTSIDE and needed.intersection(step.outs):
                needed = needed.union(step.ins)
                run.append(step)
                self._refuse_groups(step)
        values = {i: flat.known[i] for i in needed if i in flat.known}
        for step in reversed(run):
            values.update(zip(step.outs, step.run([values[i] for i in step.ins]), strict=True))
        return values

    def _arranged(self, x: Any, i: int, labels: Labels, word: int) -> jax.Array:
        """An operand with the result's axes; one of groups has them, and its own."""
        if word >= 0:
            x = jax.random.key_data(x)[..., word]
        x = jnp.asarray(x)
        if i in self.grouped:
            return x
        axes = sorted((axis, d) for d, axis in enumerate(labels) if axis is not None)
        x = lax.transpose(x, [*(d for d, axis in enumerate(labels) if axis is None), *(d for _, d in axes)])
        return lax.reshape(x, [n if i in labels else 1 for i, n in enumerate(self.flat.shape)])


def _moved(out: tuple[int, ...], shape: tuple[int, ...], labels: Labels) -> Labels | None:
    """The labels of ``shape`` if it differs from ``out``, which has these, in axes of size 1 alone."""
    if [n for n in out if n != 1] != [n for n in shape if n != 1]:
        return None
    rest: Iterator[int | None] = iter([label for n, label in zip(out, labels, strict=True) if n != 1])
    return tuple(next(rest) if n != 1 else None for n in shape)


def _partitionable(eqn: Any) -> bool:
    return bool(getattr(getattr(eqn, "ctx", None), "threefry_partitionable", False))

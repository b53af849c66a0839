"""The second half of tracing an epilogue: from the steps of flatten.py to the nodes of an Epilogue, and its operands.

A value's axes are known by the result's axis they end up on, which the outputs decide and a walk from them to the
inputs finds: a function that adds ``bias[None, :]`` and one that adds ``scale[:, None]`` differ even where m equals n.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cutjax.dtypes import DTYPES
from cutjax.epilogue import expression
from cutjax.epilogue.expression import Epilogue, Node, OperandSpec, Output
from cutjax.epilogue.flatten import INLINABLE, OUTSIDE, POST, REDUCTIONS, TILE, Flat, Step, line_of
from cutjax.epilogue.jaxpr import UNIT_MOVES
from cutjax.epilogue.merge import names

Labels = tuple[int | None, ...]  # of each axis of a value: the result's axis it lies on, None where it has size 1


class Builder:
    """Finds what the results need, from the last step to the first, and builds nodes from the first to the last."""

    def __init__(
        self,
        flat: Flat,
        products: int,
        outs: list[int],
        tree: Any,
        name: str,
        grouped: frozenset[int],
        rows: int = 1,
    ):
        self.flat, self.products, self.outs, self.tree = flat, products, outs, tree
        self.grouped = grouped  # operands of groups
        self.rows = rows  # axes of the rows
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

    def build(self) -> tuple[Epilogue, tuple[jax.Array, ...], Callable[[Sequence[jax.Array]], Any]]:
        """Returns the epilogue, its operands and ``finish``, as `trace.Traced` has them."""
        flat = self.flat
        reductions: dict[int, tuple[int, Labels, Output]] = {}
        post_steps = []
        for step in reversed(flat.steps):
            if step.kind == POST and self.post.intersection(step.outs):
                if flat.kinds[step.ins[0]] == TILE:
                    reductions[step.outs[0]] = self._demand_reduction(step)
                else:
                    self._refuse_groups(step)
                    post_steps.append(step)
                    self.post.update(step.ins)
            elif step.kind != POST:
                self._demand_arguments(step)
        order = self._ordered_leaves()
        for leaf in order:
            self._build_operand(leaf, order.index(leaf))
        for k in range(self.products):
            self.index[k, self.standard] = self._append_op("acc", dtype=self.flat.dtypes[k].name, params=(k,))
        for i, value in flat.literals.items():
            for labels in self.demands.get(i, ()):
                self.index[i, labels] = self._append_const(value, flat.dtypes[i])
        for step in flat.steps:
            for i in step.outs:
                for labels in sorted(self.demands.get(i, ()), key=repr):
                    if (i, labels) not in self.index:
                        self.index[i, labels] = self._build_step(step, labels)

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
        epilogue, used = self._used_epilogue(outputs, order)

        needed = {order[k][0] for k in used} | {i for i in self.post if flat.kinds[i] == OUTSIDE}
        values = self._compute_outside(needed)
        arrays = tuple(self._arranged_operand(values[order[k][0]], *order[k]) for k in used)

        def finish(results: Sequence[jax.Array]) -> Any:
            env = dict(values)
            for i, k in place.items():
                env[i] = lax.reshape(results[k], flat.shapes[i]) if i in reductions else results[k]
            for step in reversed(post_steps):
                env.update(zip(step.outs, step.run([env[i] for i in step.ins]), strict=True))
            return jax.tree.unflatten(self.tree, [env[i] for i in self.outs])

        return epilogue, arrays, finish

    def _demand(self, i: int, labels: Labels) -> None:
        """Notes that a value is needed along some axes; raises if it cannot be had along them."""
        flat = self.flat
        if i < self.products and labels != self.standard:
            moved = [line_of(step.site) for step in flat.steps if step.name == "transpose" and step.kind == TILE]
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
                f"epilogue: {step.name} at {line_of(step.site)} needs an operand of groups outside of the kernel; "
                "apply it to the operand before the product, or to the result after it"
            )

    def _add_leaf(self, i: int, labels: Labels, word: int = -1) -> None:
        self.leaves.add((i, labels, word))

    def _demand_reduction(self, step: Step) -> tuple[int, Labels, Output]:
        """Demands what a step reduces; returns it, its axes, and the output but for its node."""
        flat, (source,) = self.flat, step.ins
        shape = flat.shapes[source]
        if shape == flat.shape:
            labels, reduced = self.standard, set(step.params["axes"])
        else:
            moved = _labels_across_unit_axes(flat.shape, shape, self.standard)
            labels = moved if moved is not None else ()
            reduced = {labels[axis] for axis in step.params["axes"] if labels[axis] is not None} if labels else set()
        axes = (*names({self.rank - 2 - at for at in reduced if 0 <= self.rank - 2 - at < self.rows}),)
        axes += ("col",) * (self.rank - 1 in reduced)
        if not axes or len(axes) != len(reduced):
            raise NotImplementedError(
                f"epilogue: {step.name} at {line_of(step.site)} reduces {shape} over axes "
                f"{tuple(step.params['axes'])}, of which one is a batch axis; reduce over rows and columns only"
            )
        self._demand(source, labels)
        return source, labels, Output(-1, flat.dtypes[step.outs[0]].name, REDUCTIONS[step.name], axes)

    def _demand_arguments(self, step: Step) -> None:
        """Demands a step's arguments along the axes that its results are needed along, or makes these operands."""
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
                        f"epilogue: {step.name} at {line_of(step.site)} turns {self.flat.shapes[step.ins[0]]} into "
                        f"{self.flat.shapes[i]}, but an accumulator may only gain and lose axes of size 1"
                    )

    def _arg_labels(self, step: Step, labels: Labels) -> list[Labels] | None:
        """Returns the axes of a step's arguments from those of its result; None if no kernel can compute the step."""
        flat, name, params = self.flat, step.name, step.params
        out = flat.shapes[step.outs[0]]
        shapes = [flat.shapes[i] for i in step.ins]
        dtypes = [flat.dtypes[i].name for i in (*step.ins, *step.outs)]
        if name == "random_bits":
            threefry = flat.dtypes[step.ins[0]].name == "key<fry>"
            small = math.prod(params["shape"]) <= 2**32 and params["bit_width"] <= 32
            return [labels[: len(shapes[0])]] if threefry and small and _is_threefry_partitionable(step.eqn) else None
        if step.kind == OUTSIDE and (name not in INLINABLE | {"rule"} or not DTYPES.keys() >= set(dtypes)):
            return None
        if name == "broadcast_in_dim":
            at = params["broadcast_dimensions"]
            return [tuple(labels[at[d]] if size != 1 else None for d, size in enumerate(shapes[0]))]
        if name in UNIT_MOVES:
            moved = _labels_across_unit_axes(out, shapes[0], labels)
            reorders = name == "reshape" and params["dimensions"] is not None
            return None if moved is None or reorders else [moved]
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

    def _append(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _append_const(self, value: Any, dtype: Any) -> int:
        return self._append(expression.const(value, dtype))

    def _append_op(self, op: str, *args: int, dtype: str, params: tuple[Any, ...] = ()) -> int:
        return self._append(Node(op, args, dtype, params))

    def _ordered_leaves(self) -> list[tuple[int, Labels, int]]:
        return sorted(self.leaves, key=lambda leaf: (leaf[0], leaf[2], repr(leaf[1])))

    def _build_operand(self, leaf: tuple[int, Labels, int], place: int) -> None:
        """Appends the node of an operand."""
        i, labels, word = leaf
        dtype = "uint32" if word >= 0 else self.flat.dtypes[i].name
        if dtype not in DTYPES:
            raise TypeError(
                f"epilogue: an operand or captured value is {dtype}, which no epilogue computes with; cast it"
            )
        self.index[(i, labels) if word < 0 else (~i, (*labels, word))] = self._append_op(
            "operand", dtype=dtype, params=(place,)
        )

    def _build_step(self, step: Step, labels: Labels) -> int:
        """Appends the nodes of a step whose result lies along some axes; returns the last."""
        flat, params = self.flat, step.params
        dtype = flat.dtypes[step.outs[0]].name
        if dtype not in DTYPES:
            raise TypeError(
                f"epilogue: {step.name} at {line_of(step.site)} computes in {dtype}, which no epilogue does; cast it"
            )
        if step.name == "iota":
            return self._append_index(labels[params["dimension"]], dtype)
        wanted = self._arg_labels(step, labels)
        assert wanted is not None  # _demand_arguments made a leaf or raised
        if step.name == "random_bits":
            return self._append_random_bits(step, labels, wanted[0], dtype)
        args = [self.index[i, x] for i, x in zip(step.ins, wanted, strict=True)]
        match step.name:
            case "broadcast_in_dim" | "reshape" | "squeeze" | "expand_dims" | "transpose" | "reduce_sum":
                return args[0]
            case "reduce_max" | "reduce_min":
                return args[0]
            case "rule":
                return self._append_op("rule", *args, dtype=dtype, params=params["rule"])
            case "convert_element_type" if self.nodes[args[0]].dtype == dtype:
                return args[0]
            case "cutjax_random_bits":
                return self._append_op("random_bits", *args, dtype=dtype)
            case "add_any":
                return self._append_op("add", *args, dtype=dtype)
            case "log2":
                log = self._append_op("log", *args, dtype=dtype)
                return self._append_op("div", log, self._append_const(math.log(2), dtype), dtype=dtype)
            case "one_minus_square":
                one = self._append_const(1, dtype)
                factors = [self._append_op(op, one, *args, dtype=dtype) for op in ("add", "sub")]
                return self._append_op("mul", *factors, dtype=dtype)
            case "polynomial":
                x, *coefficients = args
                value = coefficients.pop()
                for c in reversed(coefficients):
                    value = self._append_op("add", self._append_op("mul", value, x, dtype=dtype), c, dtype=dtype)
                return value
            case "integer_pow":
                return self._append_op("integer_pow", *args, dtype=dtype, params=(params["y"],))
            case "round":
                return self._append_op("round", *args, dtype=dtype, params=(int(params["rounding_method"]),))
            case "reduce_precision":
                bits = (params["exponent_bits"], params["mantissa_bits"])
                return self._append_op("reduce_precision", *args, dtype=dtype, params=bits)
            case op:
                return self._append_op(op, *args, dtype=dtype)

    def _append_index(self, axis: int | None, dtype: str) -> int:
        if axis is None:
            return self._append_const(0, dtype)
        row = self.rank - 2
        return self._append_position(
            ("row",) if axis == row else ("col",) if axis > row else ("batch", row - 1 - axis), dtype
        )

    def _append_position(self, at: tuple[Any, ...], dtype: str) -> int:
        node = self._append_op("iota", dtype="int32", params=at)
        return node if dtype == "int32" else self._append_op("convert_element_type", node, dtype=dtype)

    def _append_random_bits(self, step: Step, labels: Labels, key: Labels, dtype: str) -> int:
        """Appends the bits jax.random gives: threefry2x32 of each element's index, whose high word is 0 here."""
        shape = step.params["shape"]
        places = [self._append_index(axis, "uint32") for axis in labels[len(key) :]]
        if labels[len(key) :] == self.standard and self.rank > 2:
            # Rows of all matrices are counted as one, so that batch axes may become rows (primitives.dense).
            places = [self._append_position(("row", self.rank - 2), "uint32"), places[-1]]
            shape = (math.prod(shape[:-1]), shape[-1])
        index, stride = self._append_const(0, "uint32"), 1
        for size, place in zip(shape[::-1], places[::-1], strict=True):
            if size != 1:
                by = self._append_const(stride & 0xFFFFFFFF, "uint32")
                term = place if stride == 1 else self._append_op("mul", place, by, dtype="uint32")
                index = term if stride == 1 else self._append_op("add", index, term, dtype="uint32")
            stride *= size
        k0, k1 = (self.index[~step.ins[0], (*key, j)] for j in (0, 1))
        bits = self._append_op("random_bits", k0, k1, index, dtype="uint32")
        return bits if dtype == "uint32" else self._append_op("convert_element_type", bits, dtype=dtype)

    def _used_epilogue(self, outputs: list[Output], order: list[tuple[int, Labels, int]]) -> tuple[Epilogue, list[int]]:
        """Returns the epilogue with the operands it uses, and which those are."""
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

    def _compute_outside(self, needed: set[int]) -> dict[int, Any]:
        """Computes values that depend on no accumulator."""
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

    def _arranged_operand(self, x: Any, i: int, labels: Labels, word: int) -> jax.Array:
        """Returns an operand with the result's axes; one of groups has them, and its own."""
        if word >= 0:
            x = jax.random.key_data(x)[..., word]
        x = jnp.asarray(x)
        x = lax.convert_element_type(x, x.dtype)  # not weakly typed; the transposition makes its cotangent so again
        if i in self.grouped:
            return x
        axes = sorted((axis, d) for d, axis in enumerate(labels) if axis is not None)
        x = lax.transpose(x, [*(d for d, axis in enumerate(labels) if axis is None), *(d for _, d in axes)])
        return lax.reshape(x, [n if i in labels else 1 for i, n in enumerate(self.flat.shape)])


def _labels_across_unit_axes(out: tuple[int, ...], shape: tuple[int, ...], labels: Labels) -> Labels | None:
    """Returns the labels of ``shape`` if it differs from ``out``, which has these, in axes of size 1 alone."""
    if [n for n in out if n != 1] != [n for n in shape if n != 1]:
        return None
    rest: Iterator[int | None] = iter([label for n, label in zip(out, labels, strict=True) if n != 1])
    return tuple(next(rest) if n != 1 else None for n in shape)


def _is_threefry_partitionable(eqn: Any) -> bool:
    """True if each element's bits are those of its index, as an equation was traced."""
    return bool(getattr(getattr(eqn, "ctx", None), "threefry_partitionable", False))

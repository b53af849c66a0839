"""The operation moe: a mixture-of-experts layer, from the router's logits to the sum over each token's experts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic, axes
from cutjax.binding.rules import match_varying
from cutjax.dtypes import are_narrow
from cutjax.epilogue.captured import on_automatic_axes
from cutjax.ops.arguments import check_accumulate, check_save, contracted, integer
from cutjax.ops.chained import check_activation
from cutjax.ops.fp8 import Float8Recipe
from cutjax.ops.mlp import experts as experts_of
from cutjax.ops.quantized import Weights, as_quantized, is_quantized, values_of
from cutjax.ops.routing import broadcastable, routed
from cutjax.parallel.exchange import FORMS, ROOM, ROWS, Sizes, everywhere, exchanged
from cutjax.parallel.ring import ROUTES, ring_of
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.routing import Routing
from cutjax.runtime import backends

GATHERS = ("auto", "copy", "loads")


@automatic(lambda x, **_: lambda out: [axes(x, i - out.ndim) for i in range(out.ndim)], on_automatic_axes)
def moe(
    x: ArrayLike,
    router_logits: ArrayLike,
    w_gate: Weights,
    w_up: Weights,
    w_down: Weights,
    k: int = 2,
    *,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    scoring: str = "softmax",
    renormalize: bool = True,
    selection_bias: ArrayLike | None = None,
    layout: str = "nn",
    precision: lax.PrecisionLike = None,
    accumulate: str = "f32",
    fp8: Float8Recipe = None,
    group_offset: ArrayLike | None = None,
    expert_axis: str | None = None,
    form: str = "auto",
    parts: int = 2,
    room: float = ROOM,
    gather: str = "auto",
    backend: str | None = None,
    save: str = "default",
) -> jax.Array:
    """A layer of experts: for each token ``sum_j (s_j * activation(x @ w_gate[e_j]) * (x @ w_up[e_j])) @ w_down[e_j]``.

    e_j are the k experts ``cutjax.route`` chooses for the token, and s_j their weights. No token is dropped, and there
    is no capacity: every expert gets the tokens that chose it. Deterministic, the backward pass too: rows are
    gathered and added in a fixed order, never scattered. Differentiable in both modes and any number of times, and
    batchable.

    Args:
      x: ``[..., tokens, d]``.
      router_logits: ``[..., tokens, experts]``, such as ``x @ w_router``.
      w_gate: ``[experts, d, h]``, or ``[experts, h, d]`` in the layout "nt". Weights may be narrow, or
        `cutjax.Quantized`, as in ``cutjax.gemm``.
      w_up: like w_gate.
      w_down: ``[experts, h, n]``, or ``[experts, n, h]`` in the layout "nt".
      k: how many experts a token is sent to.
      activation: any elementwise function written in JAX.
      scoring: what an expert's score is, "softmax" or "sigmoid", see ``cutjax.route``.
      renormalize: whether a token's weights are divided by their sum, see ``cutjax.route``.
      selection_bias: what is added to the scores to choose the experts, see ``cutjax.route``.
      layout: "nn" or "nt", of the weights; see ``cutjax.gemm``.
      precision: of the products with the weights, as in ``cutjax.gemm``.
      accumulate: as in ``cutjax.gemm``.
      fp8: of the products with the weights, as in ``cutjax.grouped_gemm``.
      group_offset: an integer, for expert parallelism: the weights are those of the experts from this one on, and the
        result is their part of the sum, zero for a token that chose none of them. In ``jax.shard_map``, with the
        experts divided over a mesh axis: ``jax.lax.axis_index(axis) * w_gate.shape[0]``, and then a
        ``jax.lax.psum`` of the result over the axis.
      expert_axis: in ``jax.shard_map``, the mesh axis over which both tokens and experts are divided: x and the logits
        are of this device's tokens, the logits for all experts, the weights of this device's experts.
      form: with an expert_axis, "exchange": rows travel to their experts' devices and their results back, in boxes of
        equal sizes; "ragged": the same by ``jax.lax.ragged_all_to_all`` on CUDA, which sends no more than there is but
        took ten times as long on 4 H200s; "gather": every device has all tokens and computes its part of their sums;
        "auto" is the one of "exchange" and "gather" that is predicted to be faster.
      parts: in how many parts tokens are exchanged, so that one's rows travel beside another's products. The parts of
        the weights' gradients are added up.
      room: how many rows a device receives at once when they are exchanged, in multiples of those it sends, and from
        each device an even share of so many. More come
        in further rounds, where any device has them to receive; the backward pass then computes the layer again.
      gather: "copy": the rows of x are copied, sorted by expert, and kept for the backward pass; "loads": products with
        w_gate and w_up, and in the layout "nn" their gradients, read each row where x has it, where a kernel can, and
        nothing is kept but x. Rows that travel to other devices are copied. "auto" is "copy", which was
        the faster one of nearly all that was measured.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      save: what is kept for the backward pass, besides the copied rows, named "cutjax_rows" for ``jax.checkpoint``
        policies: see ``cutjax.mlp``.

    Returns:
      ``[..., tokens, n]``, in the dtype of x and the weights.

    Raises:
      TypeError, ValueError, NotImplementedError: as ``cutjax.route`` and ``cutjax.grouped_mlp`` do.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, router = jax.random.normal(jax.random.key(0), (2, 5, 16)), jnp.eye(16, 4)
      >>> w_in, w_out = jnp.ones((4, 16, 32)), jnp.ones((4, 32, 16))
      >>> cutjax.moe(x, x @ router, w_in, w_in, w_out, k=2).shape
      (2, 5, 16)
    """
    if layout not in ("nn", "nt"):
        raise ValueError(f"moe: unknown layout {layout!r}, expected 'nn' or 'nt'")
    check_save(save, "moe")
    check_activation("moe", activation)
    check_accumulate(accumulate, "moe")
    backend = backends.resolve(backend, "moe")
    precision = dot_precision.canonical(precision, "moe")
    x, logits = matrix(x, "x", "moe"), matrix(router_logits, "router_logits", "moe")
    if x.shape[:-1] != logits.shape[:-1]:
        raise ValueError(f"moe: x is {x.shape}, router_logits is {logits.shape}: all axes but the last must be equal")
    given = tuple(unwrapped(as_quantized(w)) for w in (w_gate, w_up, w_down))
    names = "w_gate", "w_up", "w_down"
    gate, up, down = (_weights(values_of(w), name) for w, name in zip(given, names, strict=True))
    count, experts = math.prod(x.shape[:-1]), logits.shape[-1]
    devices = _devices(expert_axis, group_offset, form, parts, room)
    _check_shapes(x, experts, gate, up, down, layout, group_offset is None, devices)
    narrow = is_quantized(given) or are_narrow(x.dtype, gate.dtype) or are_narrow(x.dtype, down.dtype)
    if gate.dtype != down.dtype and not narrow:
        raise TypeError(f"moe: w_gate is {gate.dtype}, but w_down is {down.dtype}: cast one of them")
    loads = _gathers_in_loads(gather, fp8 is not None or is_quantized(given))
    if selection_bias is not None:
        bias = broadcastable(selection_bias, logits.shape, "moe")
        alike = expert_axis is None and all(size == 1 for size in bias.shape[:-1])  # for all tokens
        bias = bias if alike else jnp.broadcast_to(bias, logits.shape)
        selection_bias = bias.reshape(1 if alike else count, bias.shape[-1])

    # Each token is routed for itself, so the batch axes are more tokens.
    x, logits, shape = x.reshape(count, x.shape[-1]), logits.reshape(count, experts), x.shape[:-1]
    route = functools.partial(routed, k=k, scoring=scoring, renormalize=renormalize, where="moe")
    params = {"activation": activation, "layout": layout, "precision": precision, "backend": backend, "save": save}
    params |= {"accumulate": accumulate, "fp8": fp8}

    def local(
        rows: jax.Array, routing: Routing, group_offset: Any = None, given: Any = given, gathers: Routing | None = None
    ) -> jax.Array:
        """Applies the experts of this device to rows sorted by expert, or those that ``gathers`` says of tokens."""
        scale = routing.row_weights()
        sizes = routing.group_sizes
        gate, up, down = given
        return experts_of(rows, up, down, sizes, gate, scale, routing=gathers, group_offset=group_offset, **params)

    def layer(x: jax.Array, logits: jax.Array, bias: Any, group_offset: Any = group_offset) -> jax.Array:
        routing = route(logits, bias=bias)
        # Before the rows are gathered: what shard_map adds up over devices is then the gradient of x, not of each row.
        tokens, weights, *_ = match_varying(x, routing.weights, gate, up, down)
        routing = routing._replace(weights=weights)
        if loads:
            return routing.combine(local(tokens, routing, group_offset, gathers=routing))
        rows = checkpoint_name(routing.dispatch(tokens), ROWS)
        return routing.combine(local(rows, routing, group_offset))

    with backends.use_backend(backend):  # the gathers of rows have no argument of their own
        if expert_axis is None:
            out = layer(x, logits, selection_bias)
        else:
            tokens, logits, bias = match_varying(x, logits, selection_bias)
            widths = x.shape[-1], contracted(down, layout[1] == "t"), out_width(down, layout)
            form = Sizes(count, k, devices, *widths, room, tokens.dtype.itemsize).form() if form == "auto" else form
            if form == "gather":
                offset = lax.axis_index(expert_axis) * gate.shape[0]
                run = functools.partial(layer, group_offset=offset)
                out = everywhere(tokens, logits, bias, run, expert_axis)
            else:
                # Before they are exchanged: gradients of weights are then added over devices once, for all parts, and
                # not in a branch that some devices do not take.
                tokens, logits, bias, given = match_varying(tokens, logits, bias, given)
                found = []
                for part in _slices(count, parts):
                    found.append((tokens[part], route(logits[part], bias=None if bias is None else bias[part])))
                run = functools.partial(local, given=given)
                outs = exchanged(found, run, expert_axis, room, form == "ragged")
                out = jnp.concatenate(outs)
    return out.reshape(*shape, out.shape[-1])


def out_width(down: jax.Array, layout: str) -> int:
    return contracted(down, layout[1] == "n")


def _gathers_in_loads(gather: str, scaled: bool) -> bool:
    """True if products read the rows of x where it has them; raises an error if they cannot."""
    if gather not in GATHERS:
        raise ValueError(f"moe: unknown gather {gather!r}, expected one of {GATHERS}")
    if scaled and gather == "loads":
        raise ValueError("moe: gather='loads' with fp8 or cutjax.Quantized: their kernels read rows in their order")
    # By themselves never: that paid forward at a hidden width of 256, and neither at 1024 nor in weight gradients
    # (benchmarks/results/experiments/gathered-h200.json).
    return gather == "loads"


def _slices(count: int, parts: int) -> list[slice]:
    """Returns the parts of the tokens, of nearly equal sizes, none empty."""
    edges = [count * i // min(parts, max(1, count)) for i in range(min(parts, max(1, count)) + 1)]
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def _devices(expert_axis: Any, group_offset: Any, form: str, parts: Any, room: float) -> int:
    """Returns the number of devices that the experts are divided over; raises an error if arguments do not fit."""
    if form not in FORMS:
        raise ValueError(f"moe: unknown form {form!r}, expected one of {FORMS}")
    if (parts := integer(parts, "parts", "moe")) < 1:
        raise ValueError(f"moe: parts must be at least 1, got {parts}")
    if not room > 0:
        raise ValueError(f"moe: room must be positive, got {room}")
    if expert_axis is None:
        return 1
    if group_offset is not None:
        raise ValueError("moe: group_offset and expert_axis: the axis says which experts are here, leave group_offset")
    return ring_of(expert_axis, ROUTES[0], "moe", "expert_axis").size


def _weights(w: Any, name: str) -> jax.Array:
    w = matrix(w, name, "moe")
    if w.ndim != 3:
        raise ValueError(f"moe: {name} must have rank 3, a matrix for each expert, got shape {w.shape}")
    return w


def _check_shapes(x: Any, experts: int, gate: Any, up: Any, down: Any, layout: str, whole: bool, devices: int) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"moe: w_gate is {jax.typeof(gate).str_short()}, but w_up is {jax.typeof(up).str_short()}")
    if contracted(x, True) != contracted(gate, layout[1] == "t"):
        raise ValueError(f"moe: x is {x.shape}, w_gate is {gate.shape}, layout {layout!r}: d differs")
    if contracted(gate, layout[1] == "n") != contracted(down, layout[1] == "t"):
        raise ValueError(f"moe: w_gate is {gate.shape}, w_down is {down.shape}, layout {layout!r}: h differs")
    if gate.shape[0] != down.shape[0]:
        raise ValueError(f"moe: w_gate has {gate.shape[0]} experts, w_down has {down.shape[0]}")
    if devices > 1 and gate.shape[0] * devices != experts:
        raise ValueError(
            f"moe: router_logits are for {experts} experts, but {devices} devices have {gate.shape[0]} each"
        )
    if whole and devices == 1 and gate.shape[0] != experts:
        raise ValueError(
            f"moe: router_logits are for {experts} experts, but the weights are those of {gate.shape[0]}; "
            "where they are some of the experts, group_offset says which"
        )

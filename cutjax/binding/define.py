"""Binds every rule of a primitive in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import jet
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval

from cutjax.binding import lowering, partition, rules
from cutjax.runtime.choice import Choice


def define(
    name: str,
    *,
    abstract: Callable[..., Any],
    reference: Callable[..., Any],
    batch: Callable[..., Any],
    choose: Callable[..., Choice[Any, Any]] | None = None,
    required: bool = True,
    apart: Callable[..., bool] | None = None,
    jvp: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    dce: Callable[..., Any] | None = None,
    divided: partition.Rules | None = None,
    evaluated: Callable[[dict[str, Any]], dict[str, Any]] = lambda params: params,
    multiple_results: bool = False,
) -> core.Primitive:
    """Returns a new primitive. Its parameters are hashable and include ``backend``, where it has kernels.

    One that is divided, or is others that are, has ``mark`` among its parameters, which no rule is told:
    ``partition.mark_of``, or None where XLA is to run.

    Args:
      name: the primitive's name, "cutjax_" and the operation.
      abstract: ``(*avals, **params) -> aval(s)``.
      reference: ``(*arrays, on_cuda, **params) -> array(s)``, the operation in plain JAX; runs wherever no kernel does.
      batch: ``(args, dims, **params) -> (result(s), dim(s))``.
      choose: ``(*avals, target, **params) -> Choice``, the kernel for CUDA, or why there is none. An operation
        without is its reference on every platform: a composition of others.
      apart: ``(*avals, **params) -> bool``, whether the reference is a composition of others, so that no kernel is
        required.
      required: whether it is an error that no kernel serves under the backend "cuda"; else XLA runs then.
      jvp: ``(primals, tangents, **params) -> (result(s), tangent(s))``.
      transpose: ``(cotangent(s), *args, **params) -> cotangents`` of an operation that is linear in some operands:
        those of which only the aval is known.
      dce: ``(used, **params) -> (operands, params)``, what computes the results in use alone: which operands it reads
        (a bool for each), and its parameters. jit calls it where nothing uses the others.
      divided: how it is divided over devices, where XLA cannot: of an operation with ``choose``.
      evaluated: ``params -> params`` of an eager call, which is compiled once for all that are equal then: without what
        only differentiation reads.
      multiple_results: whether the results are a sequence.
    """
    abstract, reference, batch = map(_unmarked, (abstract, reference, batch))
    choose, jvp, transpose = map(_unmarked, (choose, jvp, transpose))
    primitive = core.Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_abstract_eval(abstract)

    def bind(*args: Any, **params: Any) -> Any:
        return primitive.bind(*args, **params)

    bind.__name__ = bind.__qualname__ = name  # what the profiler shows of an eager call, and an error of a NaN's
    # By this jax knows that there is nothing smaller to run one by one, in search of a NaN (jax_debug_nans).
    bind._apply_primitive = True  # pyright: ignore[reportFunctionMemberAccess]

    @functools.cache
    def compiled(names: tuple[str, ...]) -> Callable[..., Any]:
        return jax.jit(bind, static_argnames=names)

    @primitive.def_impl
    def _(*args: Any, **params: Any) -> Any:
        params = evaluated(params)
        with jax.disable_jit(False):  # or the jit below would bind, hence come back here, without end
            return compiled(tuple(params))(*args, **params)

    def batched(args: Any, dims: Any, **params: Any) -> Any:
        # What spmd_axis_name maps in a shard_map varies over that mesh axis, the other arguments do not yet.
        return batch(rules.match_varying(*args), dims, **params)

    batching.primitive_batchers[primitive] = batched
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    if dce is not None:
        partial_eval.dce_rules[primitive] = functools.partial(rules.dce, dce)

    def taylor(primals: Any, series: Any, **params: Any) -> Any:
        """Returns the terms of a Taylor series, those of the operation in plain JAX."""
        where = {} if choose is None else {"on_cuda": lowering.on_cuda()}
        try:
            return jet.jet(lambda *args: reference(*args, **params, **where), primals, series, factorial_scaled=False)
        except (KeyError, TypeError) as error:  # what jet has no rule for, or not for integers
            raise NotImplementedError(f"{name}: jax.experimental.jet of it: {error!r}; use jax.jvp") from error

    jet.jet_rules[primitive] = taylor

    if choose is None:
        mlir.register_lowering(primitive, mlir.lower_fun(reference, multiple_results=multiple_results))
        lowering.compositions[primitive] = reference
        return primitive
    lower = lowering.rule(primitive, reference)
    mlir.register_lowering(primitive, lower)
    mlir.register_lowering(primitive, lower, platform="cuda")
    lowering.choosers[primitive] = choose
    if not required:
        lowering.optional.add(primitive)
    if apart is not None:
        lowering.apart[primitive] = apart
        lowering.compositions[primitive] = functools.partial(reference, on_cuda=True)
    if divided is not None:
        lowering.partitions[primitive] = divided
    return primitive


def _unmarked(rule: Any) -> Any:
    """Returns a rule that is not told the mark."""
    return rule and functools.wraps(rule)(lambda *args, mark=None, **params: rule(*args, **params))

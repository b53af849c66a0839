"""Binds every rule of a primitive in one call: the only file that touches jax.interpreters."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AxisType

from cutjax.runtime import compiler
from cutjax.runtime.launch import TARGET, Call
from cutjax.runtime.settings import settings

if TYPE_CHECKING:
    from cutjax.kernels.choose import Choice

PARTITIONED = "the program is divided over devices and XLA cannot divide a kernel: call it inside jax.shard_map"

# The kernel CUDA has, or why none, for each primitive: (*avals, arch, **params) -> Choice.
choosers: dict[core.Primitive, Callable[..., Choice]] = {}
# The primitives that are others in disguise: (*arrays, **params) -> result(s).
compositions: dict[core.Primitive, Callable[..., Any]] = {}
# Whether lowering is only to say for how many devices it is. A user context, so that jit keeps no such program.
_counting_devices = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a product is lowered to.

    Attributes:
      runs: a kernel's name, "XLA", or "error".
      why: the reasons.
      choice: the kernel that CUDA has for the problem, or why it has none; None where nobody asked.
      warns: whether the reason is one to warn of.
    """

    runs: str
    why: str
    choice: Choice | None = None
    warns: bool = False


def decide(
    primitive: core.Primitive, avals: Sequence[Any], params: dict[str, Any], *, platform: str, divided: bool
) -> Decision:
    """What runs for a product: the lowering rules do what it says, and ``cutjax.explain`` shows it.

    Args:
      primitive: one of ``choosers``.
      avals: of its operands.
      params: its parameters.
      platform: what the program is lowered for, "cuda", "cpu", or several in one string.
      divided: whether XLA's partitioner divides the program at this place over several devices.
    """
    backend, config = params["backend"], params["config"]
    if platform != "cuda":
        if backend != "cuda":
            return Decision("XLA", f"platform {platform}")
        why = f"backend 'cuda' needs an NVIDIA GPU, but the program is compiled for {platform}"
        return Decision("error", f"{why}; 'auto' and 'xla' run on any platform")
    if backend == "xla":
        return Decision("XLA", "backend 'xla'")
    strict = backend == "cuda" or config is not None  # who pins a kernel wants that one
    if divided and not strict:
        return Decision("XLA", PARTITIONED)
    choice = choosers[primitive](*avals, arch=target_arch(), **params)
    why = "; ".join(choice.reasons)
    if choice.problem.flops == 0:
        return Decision("XLA", why, choice)  # an empty result, or zeros: nothing to launch, under "cuda" neither
    if choice.config is None:
        pinned = "" if config is None else f" with {config}"
        error = Decision("error", f"no kernel for {choice.problem}{pinned}: {why}", choice)
        return error if strict else Decision("XLA", why, choice)
    if missing := compiler.compiler_missing():
        return Decision("error" if strict else "XLA", f"cannot compile a kernel: {missing}", choice, warns=not strict)
    return Decision(choice.kernel, why, choice)


def define(
    name: str,
    *,
    abstract: Callable[..., Any],
    reference: Callable[..., Any],
    batch: Callable[..., Any],
    choose: Callable[..., Choice] | None = None,
    launch: Callable[..., Call] | None = None,
    bilinear: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    jvp: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    drop: Callable[..., Any] | None = None,
    multiple_results: bool = False,
) -> core.Primitive:
    """Makes a primitive. Its parameters are hashable and include ``backend`` and ``config``.

    Args:
      name: the primitive's name, "cutjax_" and the operation.
      abstract: ``(*avals, **params) -> aval(s)``.
      reference: ``(*arrays, on_cuda, **params) -> array(s)``, the operation in plain JAX; runs wherever no kernel does.
      batch: ``(args, dims, **params) -> (result(s), dim(s))``.
      choose: ``(*avals, arch, **params) -> Choice``, the kernel for CUDA, or why there is none. An
        operation without is its reference on every platform: a composition of others.
      launch: ``(problem, config) -> Call``, the compiled kernel and the plan of its launch.
      bilinear: the transposes ``(cotangent, a, b, **params) -> cotangent`` of a bilinear operation in its two operands.
      jvp: ``(primals, tangents, **params) -> (result(s), tangent(s))`` of any other operation.
      transpose: ``(cotangent(s), *args, **params) -> cotangents`` of an operation that is linear in some operands:
        those of which only the aval is known.
      drop: ``(used, **params) -> (primitive, operands, params)``, what computes the results in use alone, and of which
        operands (a bool for each): jit calls it where nothing uses the others.
      multiple_results: whether the results are a sequence.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_abstract_eval(abstract)

    def bind(*args: Any, **params: Any) -> Any:
        return primitive.bind(*args, **params)

    bind.__name__ = name  # what the profiler shows of an eager call
    # By this jax knows that there is nothing smaller to run one by one, in search of a NaN (jax_debug_nans).
    bind._apply_primitive = True  # pyright: ignore[reportFunctionMemberAccess]

    @functools.cache
    def compiled(names: tuple[str, ...]) -> Callable[..., Any]:
        return jax.jit(bind, static_argnames=names)

    @primitive.def_impl
    def _(*args: Any, **params: Any) -> Any:
        if "epilogue" in params:  # nothing is differentiated any more, and without rules equal functions are equal
            params["epilogue"] = params["epilogue"].primal
        with jax.disable_jit(False):  # or the jit below would bind, hence come back here, without end
            return compiled(tuple(params))(*args, **params)

    batching.primitive_batchers[primitive] = batch
    if bilinear is not None:
        ad.defbilinear(primitive, *bilinear)
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    if drop is not None:
        partial_eval.dce_rules[primitive] = functools.partial(_drop, drop)

    if choose is None or launch is None:
        mlir.register_lowering(primitive, mlir.lower_fun(reference, multiple_results=multiple_results))
        compositions[primitive] = reference
        return primitive

    on_cuda = mlir.lower_fun(functools.partial(reference, on_cuda=True), multiple_results=multiple_results)
    elsewhere = mlir.lower_fun(functools.partial(reference, on_cuda=False), multiple_results=multiple_results)

    def lower(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        if _counting_devices.value:
            zeros = [functools.partial(jnp.zeros, x.shape, x.dtype) for x in ctx.avals_out]
            return mlir.lower_fun(lambda *_: [zero() for zero in zeros])(ctx, *args)
        platform = ", ".join(ctx.platforms or ctx.module_context.platforms)
        divided = _partitioned(ctx.module_context.axis_context)
        decision = decide(primitive, ctx.avals_in, params, platform=platform, divided=divided)
        if decision.runs == "error":
            raise NotImplementedError(f"{name}: {decision.why}")
        if decision.runs == "XLA":
            if decision.warns:
                _warn_once(f"{name}: XLA runs, not a kernel: {decision.why}")
            return (on_cuda if platform == "cuda" else elsewhere)(ctx, *args, **params)
        assert decision.choice is not None
        called = launch(decision.choice.problem, decision.choice.config)
        if called.finish is None:
            call = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=dict(called.aliases))
            return call(ctx, *args, **called.attributes())
        finish, call = called.finish, jax.ffi.ffi_call(TARGET, called.results)
        return mlir.lower_fun(lambda *xs: finish(call(*xs, **called.attributes())))(ctx, *args)

    mlir.register_lowering(primitive, lower)
    mlir.register_lowering(primitive, lower, platform="cuda")
    choosers[primitive] = choose
    return primitive


def _partitioned(context: Any) -> bool:
    """Whether XLA's partitioner divides the program at this place over several devices.

    To the partitioner a custom call is a box it can only replicate: right, but every device would do all the work.
    """
    if isinstance(context, mlir.SPMDAxisContext):  # inside shard_map: its manual axes are divided already
        return leaves_axes(context.mesh, context.manual_axes)
    return getattr(context, "num_devices", 1) > 1


def leaves_axes(mesh: Any, manual: Any) -> bool:
    """Whether a shard_map over axes of a mesh leaves some to XLA; those of one around it are the mesh's manual ones."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(mesh.shape[x] > 1 and x not in manual for x, kind in kinds if kind != AxisType.Manual)


def live(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The equations that jit lowers: those whose results something uses."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def device_count(traced: Any, platforms: Sequence[str]) -> int:
    """For how many devices jax lowers what ``jax.jit(f).trace(...)`` returned.

    Where the program is sharded is written in its arguments, in jit's shardings, in meshes and constraints anywhere in
    it, and in the scope. Jax adds that up when it lowers, so it does that here, with zeros for the products. Some
    programs can be lowered on some platforms alone, so several are tried; the number is the same on each.
    """
    errors = []
    for platform in dict.fromkeys(platforms):
        try:
            with _counting_devices(True):
                module = traced.lower(lowering_platforms=(platform,)).compiler_ir()
        except Exception as error:
            errors.append(error)
        else:
            return module.operation.attributes["mhlo.num_partitions"].value
    raise errors[0]


@functools.lru_cache(maxsize=1)
def _device_arch() -> str | None:
    """The architecture of this process's CUDA device, None where there is none."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
    capability = str(device.compute_capability)
    major, minor = capability.split(".")
    return f"sm_{major}{minor}" + ("a" if int(major) >= 9 else "")  # "a": with the features of that chip alone


def on_cuda() -> bool:
    """Whether this process computes on a CUDA device by default."""
    return jax.default_backend() == "gpu" and _device_arch() is not None


def target_arch() -> str:
    """The architecture to compile for: the device's, or what the settings say when lowering without one."""
    return _device_arch() or settings().target_arch


def _drop(drop: Callable[..., Any], used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    """The rule for an equation some of whose results nothing uses: the operands it reads, and what remains of it."""
    eqn = rest[-1]  # after jax 0.10 an argument about references came before it
    if not any(used):
        return [False] * len(eqn.invars), None
    if all(used):
        return [True] * len(eqn.invars), eqn
    primitive, reading, params = drop(used, **eqn.params)
    outvars = [x for x, use in zip(eqn.outvars, used, strict=True) if use]
    invars = [x for x, read in zip(eqn.invars, reading, strict=True) if read]
    return reading, eqn.replace(primitive=primitive, invars=invars, outvars=outvars, params=params)


def reads(fn: Callable[..., Any], *args: Any) -> list[bool]:
    """Which leaves of the arguments the results of a function depend on."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return list(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


def is_zero(tangent: Any) -> bool:
    """Whether a tangent is zero, known as such while tracing."""
    return isinstance(tangent, ad.Zero)


def is_linear(operand: Any) -> bool:
    """Whether an operand, in a transpose, is one of which a cotangent is wanted."""
    return ad.is_undefined_primal(operand)


def zero_tangent(primal: Any) -> Any:
    """The tangent that is zero, of a primal of any dtype."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


@functools.cache
def _warn_once(message: str) -> None:
    """Warns of one thing once in a process, whatever the warning filters say."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes of an enclosing shard_map over which a value varies."""
    return aval.mat.varying


def match_varying(*args: jax.Array) -> list[jax.Array]:
    """The arrays, each varying over the mesh axes any of them varies over: what shard_map(check_vma=True) asks for."""
    varying = [varying_axes(jax.typeof(x)) for x in args]
    missing = [tuple(frozenset().union(*varying) - axes) for axes in varying]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(args, missing, strict=True)]

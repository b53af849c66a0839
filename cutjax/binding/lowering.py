"""The lowering of a product: one decision, which the lowering rules carry out and ``cutjax.explain`` shows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.interpreters import mlir

from cutjax.binding import partition
from cutjax.binding.rules import leaves_axes, symbolic
from cutjax.runtime import architectures, compiler
from cutjax.runtime.choice import Choice
from cutjax.runtime.launch import TARGET, Call
from cutjax.runtime.settings import settings

PARTITIONED = (
    "the program is divided over devices, and XLA cannot divide a kernel here: jax.shard_map over all mesh axes can"
)

# The kernel CUDA has, or why none, for each primitive: (*avals, target, **params) -> Choice.
choosers: dict[core.Primitive, Callable[..., Choice[Any, Any]]] = {}
# The primitives that XLA runs where no kernel does, under the backend "cuda" too: what multiplies nothing.
optional: set[core.Primitive] = set()
# Of some primitives, (*avals, **params) -> bool: whether they are others in disguise where no kernel serves them.
apart: dict[core.Primitive, Callable[..., bool]] = {}
# Called with a primitive, avals and params before a product's kernel is chosen, in programs of one device.
before_choice: list[Callable[[core.Primitive, Sequence[Any], dict[str, Any]], None]] = []
# How a primitive is divided over devices, where it can be.
partitions: dict[core.Primitive, partition.Rules] = {}
# The primitives that are others in disguise, or may be: (*arrays, **params) -> result(s).
compositions: dict[core.Primitive, Callable[..., Any]] = {}
# Another device than this process's, for ``explain``. A user context too: what is traced may depend on it.
_asked_target = jax.make_user_context(None)
# What lowering is to find out, where it is not for a program that runs: a number in `_questions`. A user context, so
# that jit keeps no such program.
_asking = jax.make_user_context(0)
_questions: dict[int, list[partition.Shard] | None] = {}  # the shards asked for; None where only devices are counted
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Decision:
    """The lowering of a product: a kernel, XLA, or an error.

    Attributes:
      runs: a kernel's name, "XLA", or "error".
      why: the reasons.
      choice: the kernel that CUDA has for the problem, or why it has none; None where nobody asked.
      warns: True if the reason is one to warn of.
    """

    runs: str
    why: str
    choice: Choice[Any, Any] | None = None
    warns: bool = False


def decide(
    primitive: core.Primitive,
    avals: Sequence[Any],
    params: dict[str, Any],
    *,
    platform: str,
    divided: bool,
    several: bool = False,
) -> Decision:
    """Chooses a kernel or XLA for a product, or an error.

    Args:
      primitive: one of ``choosers``.
      avals: of its operands.
      params: its parameters.
      platform: what the program is lowered for, "cuda", "cpu", or several in one string.
      divided: whether XLA's partitioner divides the program at this place over several devices.
      several: whether a kernel here is one device's part of a program over several.
    """
    settings()  # what is wrong in the environment is so on each platform
    backend, config = params["backend"], params.get("config")
    insists = backend == "cuda" and primitive not in optional and not is_apart(primitive, avals, params)
    if platform != "cuda":
        if not insists:
            return Decision("XLA", f"platform {platform}")
        why = f"backend 'cuda' needs an NVIDIA GPU, but the program is compiled for {platform}"
        return Decision("error", f"{why}; 'auto' and 'xla' run on any platform")
    if backend == "xla":
        return Decision("XLA", "backend 'xla'")
    strict = insists or config is not None  # who pins a kernel wants that one
    if divided and not strict:
        return Decision("XLA", PARTITIONED)
    if unknown := ", ".join(str(x.shape) for x in avals if symbolic(x)):
        return Decision("error" if strict else "XLA", f"kernels are compiled for known sizes, not {unknown}")
    choice = choosers[primitive](*avals, target=dataclasses.replace(target(), several=several), **params)
    why = "; ".join(choice.reasons)
    if choice.problem.flops == 0:
        return Decision("XLA", why, choice)  # an empty result, or zeros: nothing to launch, under "cuda" neither
    if not choice.served:
        pinned = "" if config is None else f" with {config}"
        error = Decision("error", f"no kernel for {choice.problem}{pinned}: {why}", choice)
        return error if strict else Decision("XLA", why, choice)
    if missing := compiler.compiler_missing():
        return Decision("error" if strict else "XLA", f"cannot compile a kernel: {missing}", choice, warns=not strict)
    return Decision(choice.kernel, why, choice)


def is_apart(primitive: core.Primitive, avals: Sequence[Any], params: dict[str, Any]) -> bool:
    """True if a primitive of such arrays and parameters is others in disguise where no kernel serves it."""
    return primitive in apart and apart[primitive](*avals, **params)


def rule(primitive: core.Primitive, reference: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering rule of a primitive of ``choosers``; ``reference`` also takes ``on_cuda``."""
    several = primitive.multiple_results
    on_cuda = mlir.lower_fun(functools.partial(reference, on_cuda=True), multiple_results=several)
    elsewhere = mlir.lower_fun(functools.partial(reference, on_cuda=False), multiple_results=several)

    def lower(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        asked = _questions.get(_asking.value)
        rules = partitions.get(primitive)
        divided = _partitioned(ctx.module_context.axis_context)
        devices = partition.devices_of(ctx) if divided and rules and params["backend"] != "xla" else None
        if _asking.value:
            if rules and devices and asked is not None:
                return partition.lower(ctx, args, primitive, rules, params, devices, asked)
            zeros = [functools.partial(jnp.zeros, x.shape, x.dtype) for x in ctx.avals_out]
            return mlir.lower_fun(lambda *_: [zero() for zero in zeros])(ctx, *args)
        platform = ", ".join(ctx.platforms or ctx.module_context.platforms)
        # Shards are lowered while XLA compiles, in the context of a shard_map.
        several = not divided and isinstance(ctx.module_context.axis_context, mlir.SPMDAxisContext)
        if platform == "cuda" and not divided and not several:
            for look in before_choice:
                look(primitive, ctx.avals_in, params)
        decision = decide(primitive, ctx.avals_in, params, platform=platform, divided=divided, several=several)
        later = rules and devices and platform == "cuda" and rules.later(**params)
        if decision.runs == "error" and not later:
            raise NotImplementedError(f"{primitive.name}: {decision.why}")
        if rules and devices:
            takes = _metadata(_of_part(primitive, ctx.avals_in, params, devices.context)) if platform == "cuda" else {}
            return partition.lower(ctx, args, primitive, rules, params, devices, metadata=takes)
        if decision.runs == "XLA":
            if decision.warns:
                _warn_once(f"{primitive.name}: XLA runs, not a kernel: {decision.why}")
            return (on_cuda if platform == "cuda" else elsewhere)(ctx, *args, **params)
        assert decision.choice is not None
        called, takes = decision.choice.call(), _metadata(decision.choice.time_us)
        results = called.results or [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_out]
        if called.prepare is None and called.finish is None:
            result_orders = _orders(called.result_orders, results)
            lowering = jax.ffi.ffi_lowering(
                TARGET,
                operand_layouts=[order[::-1] for order in _orders(called.operand_orders, ctx.avals_in)],
                result_layouts=[order[::-1] for order in result_orders],
                operand_output_aliases=dict(called.aliases),
            )
            outs = lowering(ctx, *args, **called.attributes())
            partition.tell(outs[0], takes)
            return outs

        def launched(*xs: jax.Array) -> list[jax.Array]:
            found = launch(called, results, takes, *xs)
            return [lax.reshape(x, aval.shape) for x, aval in zip(found, ctx.avals_out, strict=True)]

        return mlir.lower_fun(launched)(ctx, *args)

    return lower


def _metadata(us: float | None) -> dict[str, str]:
    """Returns the attributes by which XLA's scheduler knows the time of a kernel; none where it is not known.

    XLA takes a custom call for a short one, and then sends nothing beside it: transfers of a program over several
    devices wait for each other instead.
    """
    return {} if us is None else {"latency_metadata": str(round(1e3 * us))}


OPERATIONS = 4  # of a device's part, about: XLA gives each the attributes of the whole


def _of_part(primitive: core.Primitive, avals: Sequence[Any], params: dict[str, Any], devices: Any) -> float | None:
    """Returns the microseconds of each operation of a device's part, where a kernel would run the whole."""
    if any(map(symbolic, avals)):
        return None
    choice = choosers[primitive](*avals, target=target(), **params)
    return choice.time_us / devices.num_devices / OPERATIONS if choice.served and choice.time_us else None


def launch(called: Call, results: Sequence[jax.ShapeDtypeStruct], metadata: dict[str, str], *xs: jax.Array) -> Any:
    """Computes a call of the arguments it is prepared from, on CUDA; ``results`` are what its kernels write."""
    taken = called.prepare(xs) if called.prepare else xs
    call = jax.ffi.ffi_call(
        TARGET,
        results,
        input_layouts=_orders(called.operand_orders, taken),
        output_layouts=_orders(called.result_orders, results),
        input_output_aliases=dict(called.aliases),
    )
    with set_xla_metadata(**metadata):
        written = call(*taken, **called.attributes())
    return called.finish(written, xs) if called.finish else written


def _orders(orders: Sequence[tuple[int, ...]], arrays: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns the axes of each array as they lie in memory, the slowest first."""
    given = [*orders, *[()] * (len(arrays) - len(orders))]
    return [order or tuple(range(len(x.shape))) for order, x in zip(given, arrays, strict=True)]


@functools.cache
def _warn_once(message: str) -> None:
    """Warns of one thing once in a process, whatever the warning filters say."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _partitioned(context: Any) -> bool:
    """True if XLA's partitioner divides the program at this place over several devices.

    To the partitioner a custom call is a box it can only replicate: right, but every device would do all the work.
    """
    if isinstance(context, mlir.SPMDAxisContext):  # inside shard_map: its manual axes are divided already
        return leaves_axes(context.mesh, context.manual_axes)
    return getattr(context, "num_devices", 1) > 1


def device_count(traced: Any, platforms: Sequence[str]) -> int:
    """Returns the number of devices for which jax lowers a traced program, the result of ``jax.jit(f).trace(...)``.

    Where the program is sharded is written in its arguments, in jit's shardings, in meshes and constraints anywhere in
    it, and in the scope. Jax adds that up when it lowers, so it does that here, with zeros for the products. Some
    programs can be lowered on some platforms alone, so several are tried; the number is the same on each.
    """
    errors = []
    for platform in dict.fromkeys(platforms):
        try:
            with _asked(None):
                module = traced.lower(lowering_platforms=(platform,)).compiler_ir()
        except Exception as error:
            errors.append(error)
        else:
            return module.operation.attributes["mhlo.num_partitions"].value
    raise errors[0]


def shards(traced: Any) -> list[partition.Shard]:
    """Compiles a program and returns each divided operation's shard: the part of it that one device computes.

    It is compiled for this process's devices, with zeros for the products.
    """
    with _asked([]) as found:
        traced.lower().compile()
    return found


@contextlib.contextmanager
def _asked(found: list[partition.Shard] | None) -> Iterator[Any]:
    number = next(_numbers)
    _questions[number] = found
    try:
        with _asking(number):
            yield found
    finally:
        del _questions[number]


@dataclasses.dataclass(frozen=True)
class Target:
    """The CUDA device that programs are lowered for.

    Attributes:
      arch: the architecture to compile for, e.g. "sm_90a".
      kind: JAX's ``device_kind``; "" when lowering without a device.
      sms: streaming multiprocessors; None where nobody says.
      several: whether they are one device's part of programs over several.
    """

    arch: str
    kind: str = ""
    sms: int | None = None
    several: bool = False


@functools.lru_cache(maxsize=1)
def _device() -> Target | None:
    """Returns this process's CUDA device, None where there is none.

    The first one: where GPUs of several kinds are in one machine, programs are lowered for that (and a program for GPUs
    of several architectures cannot be: its kernels are in it). CUDA_VISIBLE_DEVICES chooses.
    """
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
    arch = architectures.of_capability(*map(int, str(device.compute_capability).split(".")))
    return Target(arch, device.device_kind, getattr(device, "core_count", None))


def on_cuda() -> bool:
    """True if this process computes on a CUDA device by default."""
    return jax.default_backend() == "gpu" and _device() is not None


def for_cuda() -> bool:
    """True if what is traced now is for a CUDA device: this process's, or one that was asked for (`on_target`)."""
    return _asked_target.value is not None or on_cuda()


def target() -> Target:
    """Returns the device to compile for: this process's, or what the settings say when lowering without one."""
    return _asked_target.value or _device() or Target(settings().target_arch)


def on_target(asked: Target | None) -> contextlib.AbstractContextManager[Any]:
    """Lowers for another device than this process's inside a ``with`` block; for this one's where it is None."""
    return _asked_target(asked) if asked else contextlib.nullcontext()

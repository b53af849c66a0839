"""cutjax.explain: what runs for every product in a function, and why."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from cutjax.binding import lowering, walk
from cutjax.dtypes import short
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.device import named, reference
from cutjax.primitives import derivative
from cutjax.runtime import architectures
from cutjax.runtime.choice import Choice


@dataclasses.dataclass(frozen=True)
class Row:
    """One product of a function.

    Attributes:
      runs: what runs on the platform asked for: a kernel's name, "XLA", or "error" where ``backend="cuda"`` finds none.
      why: the reasons.
      kernel: what runs on CUDA; the same where that is the platform.
      choice: the problem, the config, and the predicted time and share of the roofline of one launch.
      count: how often it runs in one call.
      exact: False inside a while_loop or a cond, where ``count`` is of one iteration or of every branch.
      backend: what the caller asked for.
      epilogue: what runs on the accumulators; None for a plain product.
      operands: dtypes and shapes of its operands, x0, x1, ...
      outputs: dtypes and shapes of its results.
      saves: the accumulators that its derivative needs and how it comes by them, were it asked for.
    """

    runs: str
    why: str
    kernel: str
    choice: Choice[Any, Any]
    count: int
    exact: bool
    backend: str
    epilogue: Epilogue | None = None
    operands: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    saves: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The kernel, or XLA, for each product of a function; prints as a table.

    Attributes:
      rows: one for each distinct product, in the order of the program.
      platform: what it was explained for, e.g. "cuda" or "cpu".
      arch: the CUDA architecture the kernels are for.
      fusion: what ``cutjax.fuse`` did with each product that it found; a product in a loop is there once.
      device: the GPU that it was explained for; "" where there is none.
    """

    rows: tuple[Row, ...]
    platform: str
    arch: str
    fusion: tuple[Any, ...] = ()
    device: str = ""

    def __str__(self) -> str:
        return "\n".join([self._table(), *self._fusion_lines()])

    def _fusion_lines(self) -> list[str]:
        if not self.fusion:
            return []
        fused = sum(report.runs == "fused" for report in self.fusion)
        head = f"cutjax.fuse: {fused} of {len(self.fusion)} products fused with what is around them"
        counts = collections.Counter(map(str, self.fusion))
        return [head, *(f"  {f'{count} x ' if count > 1 else ''}{line}" for line, count in counts.items())]

    def _table(self) -> str:
        if not self.rows:
            return f"platform {self.platform}: no cutjax operation"
        elsewhere = self.platform != "cuda"
        head = ["count", "problem", "runs", *(["on cuda"] if elsewhere else []), "us", "roofline", "why"]
        lines = [head]
        for row in self.rows:
            time_us, share = row.choice.time_us, row.choice.roofline
            served = row.kernel not in ("XLA", "error")
            lines.append(
                [
                    f"{row.count}{'' if row.exact else '*'}",
                    str(row.choice.problem),
                    row.runs,
                    *([row.kernel] if elsewhere else []),
                    f"{time_us:.1f}" if served and time_us is not None else "-",
                    f"{share:.0%}" if served and share is not None else "-",
                    row.why,
                ]
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                cell.rjust(w) if head[i] in ("count", "us", "roofline") else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        for i, row in reversed(list(enumerate(self.rows))):
            text[i + 2 : i + 2] = [" " * (widths[0] + 2) + line for line in _fused_lines(row)]
        text.insert(1, "  ".join("-" * w for w in widths))
        where = f"{self.arch} ({self.device})" if self.device else self.arch
        notes = [f"platform {self.platform}; us and roofline are predicted for one launch on cuda, {where}"]
        if not all(row.exact for row in self.rows):
            notes.append("* of one iteration, or of every branch: the number is known only at run time")
        return "\n".join(text + notes)


def _fused_lines(row: Row) -> list[str]:
    if row.epilogue is None:
        return []
    operands = ", ".join(f"x{i} {x}" for i, x in enumerate(row.operands))
    return [
        f"epilogue    {row.epilogue}",
        *([f"operands    {operands}"] if operands else []),
        f"outputs     {', '.join(row.outputs)}",
        f"derivative  {row.saves}",
    ]


_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")  # that jax lowers for


def explain(
    fn: Callable[..., Any], *, platform: str | None = None, arch: str | None = None, device: str | None = None
) -> Callable[..., Explanation]:
    """Returns a function that reports, for every product in ``fn``, what runs, why, and its predicted time.

    Gathers of rows (``cutjax.Routing.dispatch``) are there too, and kernels of the user's own.

    It is what ``jax.jit`` would lower: the same function decides, what nothing uses is left out, and the program is for
    as many devices. The function is not run, and is compiled only where jit divides it over devices, with zeros for the
    products: each row is then of what one device computes, and says what moves between devices. To see the products of
    a backward pass, explain the gradient.

    Args:
      fn: any function that ``jax.jit`` takes, jitted or not.
      platform: "cuda", "cpu", ...; by default the one this process computes on, or "cuda" with ``arch`` or ``device``.
      arch: a CUDA architecture, e.g. "sm_80", to explain for a GPU of it that this machine need not have: its best
        known one. By default this machine's, or ``CUTJAX_TARGET_ARCH``.
      device: the same for one GPU, as the driver calls it: "NVIDIA A100-SXM4-80GB".

    Returns:
      A function of ``fn``'s arguments (arrays, or ``jax.ShapeDtypeStruct``; as keywords also what is static, such as
      ``layout="nt"``) that returns an explanation, which printed is a table. ``.platform``, ``.arch`` and
      ``.device`` say what it is for, and ``.fusion`` holds a line for each product that ``cutjax.fuse`` found.
      ``.rows`` has one for each distinct product: what ``runs`` there, a kernel's name, "XLA", or "error" where
      ``backend="cuda"`` finds none, and ``why``, in words; the ``kernel`` that would on CUDA; the ``choice``, with its
      ``problem``, ``config``, predicted ``time_us`` in microseconds and share of the ``roofline``; the ``count`` in one
      call (of one iteration or of every branch where ``exact`` is False); the ``backend`` that was asked for; and of a
      product with an ``epilogue`` this, its ``operands``, its ``outputs`` and what a derivative ``saves``.

    Raises:
      ValueError: if the platform, the architecture or the device is unknown, or if the latter two differ.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
      >>> len(cutjax.explain(cutjax.gemm)(x, x).rows)
      1
    """
    if platform is not None and platform not in _PLATFORMS:
        raise ValueError(f"explain: platform must be one of {', '.join(_PLATFORMS)}, got {platform!r}")
    asked = _target(arch, device)
    where = "cuda" if platform == "gpu" or (asked and platform is None) else platform or ""

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        notes: list[Any] = []
        # Some operations ask as they are traced what it is for, so this process's own device is asked for, too.
        with lowering.on_target(asked or (lowering.target() if where == "cuda" else None)):
            found, runs_on = walk.products(fn, args, kwargs, where, notes)
            counts: dict[Row, int] = {}
            for product in found:
                row = _row(product, runs_on)
                counts[row] = counts.get(row, 0) + product.count
            rows = tuple(dataclasses.replace(row, count=count) for row, count in counts.items())
            target = lowering.target()
        return Explanation(rows, runs_on, target.arch, tuple(notes), target.kind)

    return explained


def _target(arch: str | None, device: str | None) -> lowering.Target | None:
    """Returns the GPU that was asked for; None where nobody asked."""
    if arch is None and device is None:
        return None
    try:
        arch = arch and architectures.canonical(arch)
        found = reference(arch) if device is None else named(device)
        if arch and found.arch != arch:
            raise ValueError(f"arch={arch!r}, but {found.name} is {found.arch}")
    except ValueError as error:
        raise ValueError(f"explain: {error}") from None
    return lowering.Target(found.arch, found.name)


def _row(product: walk.Found, platform: str) -> Row:
    eqn, avals, params = product.eqn, product.avals, product.eqn.params
    decide = functools.partial(lowering.decide, eqn.primitive, avals, params, divided=product.divided)
    cuda, here = decide(platform="cuda"), decide(platform=platform)
    choice = cuda.choice or lowering.choosers[eqn.primitive](*avals, target=lowering.target(), **params)
    why = here.why if platform == "cuda" else f"{here.why}; on cuda: {cuda.why}"
    why = f"{product.shard}; {why}" if product.shard else why
    row = Row(here.runs, why, cuda.runs, choice, 0, product.exact, params["backend"])
    epilogue = params.get("epilogue")
    if epilogue is None or epilogue.plain:
        return row
    first = len(avals) - len(epilogue.operands)
    return dataclasses.replace(
        row,
        epilogue=epilogue.primal,  # without rules: equal functions are equal
        operands=tuple(_array(x) for x in avals[first:]),
        outputs=tuple(_array(x.aval) for x in eqn.outvars),
        saves=_saves(epilogue, params["product"].multiplied(avals[0].dtype), eqn.params["save"]),
    )


def _array(aval: Any) -> str:
    return f"{short(aval.dtype.name)}[{','.join(map(str, aval.shape))}]"


def _saves(epilogue: Epilogue, dtype: Any, save: str) -> str:
    """Describes the accumulators that the derivative reads, and whether they are saved or computed again."""
    differentiable = tuple(jnp.issubdtype(spec.dtype, jnp.inexact) for spec in epilogue.operands)
    moving = (jnp.issubdtype(epilogue.accumulator, jnp.inexact),) * epilogue.products
    try:
        needed = derivative.accumulators_needed(epilogue, moving, differentiable)
    except NotImplementedError as error:  # as jax raises of nextafter, where a derivative is asked for
        return f"has no derivative: {error}"
    names = [f"acc{i if epilogue.products > 1 else ''}" for i, need in enumerate(needed) if need]
    if not names:
        return "needs no accumulator"
    if save == "recompute":
        return f"multiplies {', '.join(names)} again"
    return f"saves {', '.join(names)} as {short(derivative.saved_dtype(epilogue, dtype).name)}"

"""Choices in a scope: kernels or XLA, the dtype in which devices add partial sums, and what "highest" means."""

from __future__ import annotations

import contextlib

import jax

BACKENDS = ("auto", "cuda", "xla")
PARTIAL_SUMS = ("result", "float32")
HIGHEST = ("ieee", "bf16x9", "bf16x6")

# A JAX user context is thread-local and part of jit's cache key: a function compiled under one choice is not reused
# under another. Creating one is not thread-safe, so there is one, made at import.
_context = jax.make_user_context("auto")
_sums = jax.make_user_context("result")
_highest = jax.make_user_context("ieee")


def check(name: object, where: str) -> str:
    """Returns the name of a backend; raises a ValueError that lists the valid ones."""
    if name not in BACKENDS:
        raise ValueError(f"{where}: unknown backend {name!r}, expected one of {BACKENDS}")
    return str(name)


def use_backend(name: str) -> contextlib.AbstractContextManager[None]:
    """Chooses in a ``with`` block who runs the operations that do not say so themselves.

    The choice holds for the current thread, may be nested, and is part of ``jax.jit``'s cache key.

    Args:
      name: "auto" (a kernel where one applies, else XLA), "cuda" (a kernel, or an error with every reason why there is
        none) or "xla" (the reference).

    Returns:
      A context manager.

    Raises:
      ValueError: if the name is none of these.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> with cutjax.use_backend("xla"):
      ...     cutjax.gemm(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
      (2, 4)
    """
    return _context(check(name, "use_backend"))


def resolve(backend: str | None, where: str) -> str:
    """Returns the backend of a call: its own argument, else the scope's."""
    return _context.value if backend is None else check(backend, where)


def use_partial_sums(dtype: str) -> contextlib.AbstractContextManager[None]:
    """Chooses in a ``with`` block the dtype in which partial sums of a product are added over devices, under jit.

    That of products traced in the block; take their gradients in it too. The choice holds for the current thread, may
    be nested, and is part of ``jax.jit``'s cache key. It changes nothing where no contraction is divided, inside
    ``jax.shard_map``, or for results of 32 bits and more.

    Args:
      dtype: "result" (the default, what XLA does for ``jnp``: partial sums travel in the dtype of the result, or in
        that of 16-bit operands where an epilogue follows), or "float32" (those of 16 bits and less travel in float32,
        or int32, and the result is rounded once: up to twice the bytes of 16 bits, four times those of 8).

    Returns:
      A context manager.

    Raises:
      ValueError: if it is neither.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> with cutjax.use_partial_sums("float32"):
      ...     jax.jit(cutjax.gemm)(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
      (2, 4)
    """
    if dtype not in PARTIAL_SUMS:
        raise ValueError(f"use_partial_sums: unknown dtype {dtype!r}, expected one of {PARTIAL_SUMS}")
    return _sums(dtype)


def partial_sums() -> str:
    """Returns the scope's choice."""
    return _sums.value


def use_highest(way: str) -> contextlib.AbstractContextManager[None]:
    """Chooses in a ``with`` block how kernels may multiply float32 by float32 at the precision "highest".

    Tensor cores multiply parts of bfloat16 faster than a GPU multiplies float32, and add up with smaller errors than
    IEEE sums in float32 have. Programs that are lowered in the block take such a kernel where it is predicted to be
    faster than XLA's product and than every IEEE kernel; a program that XLA runs is IEEE's. The choice holds for the
    current thread, may be nested, and is part of ``jax.jit``'s cache key. Products of presets, such as
    ``F32_F32_F32``, are what their names say.

    Args:
      way: "ieee" (the default), "bf16x9" (a number is a sum of three bfloat16: exact, and all nine products of the
        parts are added) or "bf16x6" (the six largest of them). Below 2**-110 a number's smallest part is not normal:
        what such numbers lose is at most 2**-126 each.

    Returns:
      A context manager.

    Raises:
      ValueError: if it is none of these.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> with cutjax.use_highest("bf16x9"), jax.default_matmul_precision("highest"):
      ...     jax.jit(cutjax.gemm)(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
      (2, 4)
    """
    if way not in HIGHEST:
        raise ValueError(f"use_highest: unknown way {way!r}, expected one of {HIGHEST}")
    return _highest(way)


def highest() -> str:
    """Returns the scope's way to multiply float32 at the precision "highest"."""
    return _highest.value

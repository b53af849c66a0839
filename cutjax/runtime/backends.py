"""The backend of an operation: the scoped choice between cutjax's kernels and XLA."""

from __future__ import annotations

import contextlib

import jax

BACKENDS = ("auto", "cuda", "xla")

# A JAX user context is thread-local and part of jit's cache key: a function compiled under one choice is not reused
# under another. Creating one is not thread-safe, so there is one, made at import.
_context = jax.make_user_context("auto")


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

    Example:
      >>> import cutjax, jax.numpy as jnp
      >>> with cutjax.use_backend("xla"):
      ...     cutjax.gemm(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
      (2, 4)
    """
    return _context(check(name, "use_backend"))


def resolve(backend: str | None, where: str) -> str:
    """Returns the backend of a call: its own argument, else the scope's."""
    return _context.value if backend is None else check(backend, where)

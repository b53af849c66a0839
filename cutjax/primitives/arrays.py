"""Arrays among the arguments of a call: what stands for one, and what is none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def unwrapped(x: Any) -> Any:
    """Returns the array of an object that stands for one, such as a parameter of a library; all else as it is."""
    return x.__jax_array__() if hasattr(x, "__jax_array__") and not isinstance(x, jax.Array) else x


def is_array_like(x: Any) -> bool:
    """True if jax.lax takes an object for an array."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def matrix(x: Any, name: str, where: str = "gemm") -> jax.Array:
    """Returns the operand as a JAX array of rank 2 or more; raises an error that says what came."""
    x = unwrapped(x)
    if isinstance(x, bool | int | float | complex | np.generic):
        raise ValueError(f"{where}: {name} must have rank 2 or more, got the scalar {x!r}")
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{where}: {name} must be an array, got {type(x).__name__}")
    if x.ndim < 2:
        raise ValueError(f"{where}: {name} must have rank 2 or more, got shape {x.shape}; add an axis to a vector")
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        raise TypeError(f"{where}: {name} must be an array of numbers, got dtype {x.dtype}")
    return jnp.asarray(x)

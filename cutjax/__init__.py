"""GEMM kernels for JAX, compiled for the problem at hand when ``jax.jit`` lowers it."""

from __future__ import annotations

from cutjax._backend import use_backend
from cutjax._config import Config
from cutjax._problem import Problem
from cutjax._select import candidates, supports
from cutjax.explain import explain
from cutjax.gemm import gemm
from cutjax.mlp import mlp

__version__ = "0.1.0"
__all__ = ["Config", "Problem", "candidates", "explain", "gemm", "mlp", "supports", "use_backend"]

"""GEMM kernels for JAX, compiled for the problem at hand when ``jax.jit`` lowers it."""

from __future__ import annotations

from cutjax._backend import use_backend
from cutjax._config import Config
from cutjax._problem import Problem
from cutjax._select import candidates, supports
from cutjax.explain import explain
from cutjax.gemm import gemm
from cutjax.mlp import mlp
from cutjax.routing import Routing, load_balance_loss, route, router_z_loss

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Problem",
    "Routing",
    "candidates",
    "explain",
    "gemm",
    "load_balance_loss",
    "mlp",
    "route",
    "router_z_loss",
    "supports",
    "use_backend",
]

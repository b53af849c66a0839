"""GEMM kernels for JAX, compiled for the problem at hand when ``jax.jit`` lowers it."""

from __future__ import annotations

from cutjax import checkpoint_policies
from cutjax._backend import use_backend
from cutjax._config import Config
from cutjax._problem import Problem
from cutjax._select import candidates, supports
from cutjax.explain import explain
from cutjax.gemm import gemm
from cutjax.grouped import grouped_gemm, grouped_outer
from cutjax.mlp import grouped_mlp, mlp
from cutjax.moe import moe
from cutjax.ragged_dot import ragged_dot, ragged_dot_general
from cutjax.routing import Routing, load_balance_loss, route, router_z_loss

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Problem",
    "Routing",
    "candidates",
    "checkpoint_policies",
    "explain",
    "gemm",
    "grouped_gemm",
    "grouped_mlp",
    "grouped_outer",
    "load_balance_loss",
    "mlp",
    "moe",
    "ragged_dot",
    "ragged_dot_general",
    "route",
    "router_z_loss",
    "supports",
    "use_backend",
]

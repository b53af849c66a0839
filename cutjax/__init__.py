"""GEMM kernels for JAX, compiled for the problem at hand when ``jax.jit`` lowers it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cutjax.binding import lowering as _lowering  # brings the handler of custom calls, which exported programs need

if TYPE_CHECKING:
    from cutjax import checkpoint_policies, formats
    from cutjax.explanation import explain
    from cutjax.fusion.fuse import fuse
    from cutjax.fusion.patch import patch
    from cutjax.kernels.choose import candidates, reasons
    from cutjax.kernels.direct.config import Config as DirectConfig
    from cutjax.kernels.halo.config import Config as HaloConfig
    from cutjax.kernels.mma.config import Config as MmaConfig
    from cutjax.kernels.problem import Problem
    from cutjax.kernels.sm90.config import Config
    from cutjax.kernels.tuned import use_tuning
    from cutjax.ops.causal_conv1d import causal_conv1d, causal_conv1d_update
    from cutjax.ops.collective import all_gather_gemm, gemm_reduce_scatter
    from cutjax.ops.conv import conv
    from cutjax.ops.conv_general_dilated import conv_general_dilated, conv_transpose
    from cutjax.ops.cuda_kernel import cuda_kernel
    from cutjax.ops.cuda_launch import CudaLaunch
    from cutjax.ops.dot_general import dot_general
    from cutjax.ops.einsum import dot, einsum, matmul, tensordot
    from cutjax.ops.fp8 import fp8_dot_general
    from cutjax.ops.fused_mlp import fused_mlp
    from cutjax.ops.gemm import gemm
    from cutjax.ops.grouped import grouped_gemm, grouped_outer
    from cutjax.ops.linear_cross_entropy import linear_cross_entropy
    from cutjax.ops.mlp import grouped_mlp, mlp
    from cutjax.ops.moe import moe
    from cutjax.ops.quantized import Quantized, quantize
    from cutjax.ops.ragged_dot import ragged_dot, ragged_dot_general
    from cutjax.ops.routing import load_balance_loss, route, router_z_loss
    from cutjax.ops.syrk import syrk
    from cutjax.primitives.routing import Routing
    from cutjax.runtime.backends import use_backend, use_highest, use_partial_sums
    from cutjax.tuning.autotune import autotune

__version__ = "0.1.0"
__all__ = [
    "Config",
    "CudaLaunch",
    "DirectConfig",
    "HaloConfig",
    "MmaConfig",
    "Problem",
    "Quantized",
    "Routing",
    "all_gather_gemm",
    "autotune",
    "candidates",
    "causal_conv1d",
    "causal_conv1d_update",
    "checkpoint_policies",
    "conv",
    "conv_general_dilated",
    "conv_transpose",
    "cuda_kernel",
    "dot",
    "dot_general",
    "einsum",
    "explain",
    "formats",
    "fp8_dot_general",
    "fuse",
    "fused_mlp",
    "gemm",
    "gemm_reduce_scatter",
    "grouped_gemm",
    "grouped_mlp",
    "grouped_outer",
    "linear_cross_entropy",
    "load_balance_loss",
    "matmul",
    "mlp",
    "moe",
    "patch",
    "quantize",
    "ragged_dot",
    "ragged_dot_general",
    "reasons",
    "route",
    "router_z_loss",
    "syrk",
    "tensordot",
    "use_backend",
    "use_highest",
    "use_partial_sums",
    "use_tuning",
]


# The modules that the public names come from, which are imported when one of these is asked for: importing all takes
# longer than many a script that uses one.
_HOMES = {
    "": "checkpoint_policies formats",
    "explanation": "explain",
    "fusion.fuse": "fuse",
    "fusion.patch": "patch",
    "kernels.choose": "candidates reasons",
    "kernels.direct.config": "DirectConfig",
    "kernels.halo.config": "HaloConfig",
    "kernels.mma.config": "MmaConfig",
    "kernels.problem": "Problem",
    "kernels.sm90.config": "Config",
    "kernels.tuned": "use_tuning",
    "ops.causal_conv1d": "causal_conv1d causal_conv1d_update",
    "ops.collective": "all_gather_gemm gemm_reduce_scatter",
    "ops.conv": "conv",
    "ops.conv_general_dilated": "conv_general_dilated conv_transpose",
    "ops.cuda_kernel": "cuda_kernel",
    "ops.cuda_launch": "CudaLaunch",
    "ops.dot_general": "dot_general",
    "ops.einsum": "dot einsum matmul tensordot",
    "ops.fp8": "fp8_dot_general",
    "ops.fused_mlp": "fused_mlp",
    "ops.gemm": "gemm",
    "ops.grouped": "grouped_gemm grouped_outer",
    "ops.linear_cross_entropy": "linear_cross_entropy",
    "ops.mlp": "grouped_mlp mlp",
    "ops.moe": "moe",
    "ops.quantized": "Quantized quantize",
    "ops.ragged_dot": "ragged_dot ragged_dot_general",
    "ops.routing": "load_balance_loss route router_z_loss",
    "ops.syrk": "syrk",
    "primitives.routing": "Routing",
    "runtime.backends": "use_backend use_highest use_partial_sums",
    "tuning.autotune": "autotune",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cutjax' has no attribute {name!r}")
    home = f"cutjax.{_HOME[name]}" if _HOME[name] else f"cutjax.{name}"
    found = importlib.import_module(home)
    if _HOME[name]:
        found = getattr(found, "Config" if name.endswith("Config") else name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _look(*product: Any) -> None:
    """Times what is new, where that is asked for."""
    from cutjax.kernels import tuned

    if tuned.measured():
        from cutjax.tuning import first_sight

        first_sight.look(*product)


_lowering.before_choice.append(_look)

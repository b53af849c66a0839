"""GEMM kernels for JAX, compiled for the problem at hand when ``jax.jit`` lowers it."""

from __future__ import annotations

from cutjax import checkpoint_policies, formats
from cutjax.binding import lowering as _lowering
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
from cutjax.tuning import first_sight as _first_sight
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


_lowering.before_choice.append(_first_sight.look)  # times what is new, where that is asked for


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

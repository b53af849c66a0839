"""Layers of Flax NNX on cutjax's kernels: Flax's own with a fused activation, and MLP, GatedMLP and MoE."""

from cutjax.flax.nnx.blocks import MLP, GatedMLP, MoE, SelectionBias
from cutjax.flax.nnx.convolution import Conv, ConvTranspose
from cutjax.flax.nnx.head import Head
from cutjax.flax.nnx.linear import Einsum, Linear, LinearGeneral

__all__ = [
    "MLP",
    "Conv",
    "ConvTranspose",
    "Einsum",
    "GatedMLP",
    "Head",
    "Linear",
    "LinearGeneral",
    "MoE",
    "SelectionBias",
]

"""Layers of Flax Linen on cutjax's kernels: Flax's own with a fused activation, and MLP, GatedMLP and MoE."""

from cutjax.flax.linen.blocks import MLP, GatedMLP, MoE
from cutjax.flax.linen.convolution import Conv, ConvTranspose
from cutjax.flax.linen.head import Head
from cutjax.flax.linen.linear import Dense, DenseGeneral, Einsum

__all__ = ["MLP", "Conv", "ConvTranspose", "Dense", "DenseGeneral", "Einsum", "GatedMLP", "Head", "MoE"]

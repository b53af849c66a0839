"""Kernels of networks of small layers. They are no family: one computes a whole network, not a product."""

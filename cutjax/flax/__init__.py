"""Layers for Flax: ``import cutjax.flax.nnx`` or ``import cutjax.flax.linen``. Neither is imported with cutjax."""

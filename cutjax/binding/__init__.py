"""JAX primitives, each with every rule in one call, and their lowering: nothing else touches ``jax.interpreters``."""

"""Models that benchmarks/ops/programs.py times: written once, in flax.linen, for each of the ways of ways.py."""

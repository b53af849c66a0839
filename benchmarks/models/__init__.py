"""Models that benchmarks/ops/programs.py times: written once, in Flax, for each of the ways of ways.py."""

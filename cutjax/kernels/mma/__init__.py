"""The mma family, for every architecture from sm_75 on: products of every dtype."""

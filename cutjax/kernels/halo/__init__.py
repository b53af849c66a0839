"""The halo family, for sm_90a: convolutions of few channels, whose images are loaded once for all taps."""

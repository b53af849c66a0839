"""Kernels timed on the device, of which the fastest are kept, and the commands of ``python -m cutjax``."""

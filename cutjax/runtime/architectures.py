"""The architectures of NVIDIA's GPUs: their names for NVRTC, and what an SM of each holds."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple


class Architecture(NamedTuple):
    """One architecture, by its compute capability. Sizes are those of the CUDA programming guide's tables.

    Attributes:
      generation: NVIDIA's name.
      shared_bytes: shared memory one block may opt in to.
      shared_bytes_per_sm: shared memory of an SM, of which each resident block reserves 1 KiB (none on sm_75).
      max_threads_per_sm: threads that are resident on an SM.
      max_blocks_per_sm: blocks that are resident on an SM.
    """

    generation: str
    shared_bytes: int
    shared_bytes_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int


# From 9.0 on with an "a", the features of that chip alone: without it there is no wgmma and no tcgen05.
ARCHITECTURES = {
    "sm_75": Architecture("Turing", 64 << 10, 64 << 10, 1024, 16),
    "sm_80": Architecture("Ampere", 163 << 10, 164 << 10, 2048, 32),
    "sm_86": Architecture("Ampere", 99 << 10, 100 << 10, 1536, 16),
    "sm_89": Architecture("Ada", 99 << 10, 100 << 10, 1536, 24),
    "sm_90a": Architecture("Hopper", 227 << 10, 228 << 10, 2048, 32),
    "sm_100a": Architecture("Blackwell", 227 << 10, 228 << 10, 2048, 32),
    "sm_103a": Architecture("Blackwell", 227 << 10, 228 << 10, 2048, 32),
    "sm_120a": Architecture("Blackwell", 99 << 10, 100 << 10, 1536, 24),
    "sm_121a": Architecture("Blackwell", 99 << 10, 100 << 10, 1536, 24),
}
DEFAULT = "sm_90a"


def of_capability(major: int, minor: int) -> str:
    """Returns the architecture of a compute capability, whether or not it is listed."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def number(arch: str) -> int:
    """Returns 80 for "sm_80", 90 for "sm_90a", 0 where there is none."""
    return int("".join(filter(str.isdigit, arch)) or 0)


def too_old(arch: str, least: int) -> list[str]:
    """Returns the reason against kernels of an architecture that is older than the least, 80 for "sm_80"."""
    return [f"architecture {arch}: the kernels are for sm_{least} and later"] * (number(arch) < least)


def canonical(text: str) -> str:
    """Returns the architecture that a person named: "sm_90" and "sm_90a" are one; an "f", of a family of chips, stays.

    Raises:
      ValueError: if it is none of ``ARCHITECTURES``.
    """
    match = re.fullmatch(r"(sm_\d+)([af]?)", text)
    found = match and next((arch for arch in ARCHITECTURES if arch.removesuffix("a") == match[1]), None)
    if not match or not found or (match[2] and not found.endswith("a")):
        raise ValueError(f"expected an architecture such as sm_90a, one of {', '.join(ARCHITECTURES)}, got {text!r}")
    return text if match[2] == "f" else found

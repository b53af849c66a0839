"""Rates of the links between GPUs of one host, as measured, and what they say of ways to divide products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cutjax.binding import lowering
from cutjax.kernels.choose import choose
from cutjax.kernels.device import device_of
from cutjax.primitives.product import Product

# GB/s that one of 4 H200s sends, by what 134 MB take more than 8 MB, and that its memory copies. Measured:
# benchmarks/results/collective-h200x4.json.
PERMUTE, ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER, MEMORY = 163, 139, 286, 235, 4300
# What products beside it hid of a piece's time, of rows that are gathered and of parts of sums, on 2 H200s (for the out
# projection of Llama 70B; benchmarks/results/collective-h200x2.json), and microseconds that a piece more takes.
PIECES_HIDDEN, PIECE_US = (0.0, 0.6), 8.0
# How much faster than as a whole pieces must be predicted to be. Measured there, in float32 the parts of the out
# projection were 11% faster and of an MLP 4% slower; in 16 bits those of the projection were 6% slower.
PIECES_LEAD = 1.04
# The share of the time of permutes that products beside them hid there, in the forward pass of Llama 70B's MLP.
HIDDEN: Mapping[str, float] = {"direct": 0.0, "ring": 0.05}


def product_us(product: Product, *avals: Any, dtype: np.dtype) -> float:
    """Returns the time predicted for a product on the GPU that programs are lowered for, 0 where none is."""
    target = lowering.target()
    device = device_of(target)
    return choose(product.problem(*avals, out_dtype=dtype, device=device), backend="cuda").time_us or 0.0


def pieces_us(gathered: float, scattered: float, products: float, pieces: int) -> float:
    """Returns the time predicted for rows that are gathered, and parts of sums added up, in pieces, with their lead.

    Args:
      gathered, scattered: as in ``route_us``.
      products: us that all products take beside collectives.
      pieces: their number. The first is gathered before any product, or the last added up after all.
    """
    sends = gathered / ALL_GATHER / 1e3, scattered / REDUCE_SCATTER / 1e3
    hidden = sum(share * us for share, us in zip(PIECES_HIDDEN, sends, strict=True)) * (pieces - 1) / pieces
    return (products + sum(sends) - min(hidden, products) + PIECE_US * pieces) * PIECES_LEAD


def route_us(gathered: float, scattered: float, whole: float, parts: float) -> dict[str, float]:
    """Returns the times predicted for each route.

    Args:
      gathered, scattered: bytes that a device sends: of rows, and of parts of sums.
      whole, parts: us that products take as one, and as one for each device's rows.
    """
    parts = max(parts, whole)  # as what was hidden was measured: against the time of whole products
    sends = (gathered + scattered) / PERMUTE / 1e3
    found = {"whole": whole + gathered / ALL_GATHER / 1e3 + scattered / REDUCE_SCATTER / 1e3}
    return found | {route: parts + sends - min(share * sends, parts) for route, share in HIDDEN.items()}

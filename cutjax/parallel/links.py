"""Rates of the links between GPUs of one host, as measured, and what they say of ways to divide products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cutjax.binding import lowering
from cutjax.kernels.choose import choose
from cutjax.kernels.device import device_of
from cutjax.primitives.hints import Hints
from cutjax.primitives.product import Product

# GB/s that one of 4 H200s sends, by what 134 MB take more than 8 MB, and that its memory copies. Measured:
# benchmarks/results/collective-h200x4.json. A permute beside products sends less than alone: 33.5 MB took 210 to 280 us
# there, and 67 and 134 MB 310 to 400 and 620 to 720 on 2 (experiments/overlap-h200x4.json and -h200x2.json).
PERMUTE, ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER, MEMORY = 140, 139, 286, 235, 4300
# What products beside it hid of a piece's time, of rows that are gathered and of parts of sums, on 2 H200s (for the out
# projection of Llama 70B; benchmarks/results/collective-h200x2.json), and microseconds that a piece more takes.
PIECES_HIDDEN, PIECE_US = (0.0, 0.6), 8.0
# How much faster than as a whole pieces must be predicted to be. Measured there, in float32 the parts of the out
# projection were 11% faster and of an MLP 4% slower; in 16 bits those of the projection were 6% slower.
PIECES_LEAD = 1.04


def product_us(product: Product, hints: Hints, *avals: Any, dtype: np.dtype) -> float:
    """Returns the time predicted for a product on the GPU that programs are lowered for, 0 where none is."""
    target = lowering.target()
    device = hints.device(device_of(target))
    return choose(product.problem(*avals, out_dtype=dtype, device=device), backend="cuda").time_us or 0.0


def pieces_us(gathered: float, scattered: float, products: float, pieces: int) -> float:
    """Returns the time predicted for rows that are gathered, and parts of sums added up, in pieces, with their lead.

    Args:
      gathered, scattered: bytes that a device sends: of rows, and of parts of sums.
      products: us that all products take beside collectives.
      pieces: their number. The first is gathered before any product, or the last added up after all.
    """
    sends = gathered / ALL_GATHER / 1e3, scattered / REDUCE_SCATTER / 1e3
    hidden = sum(share * us for share, us in zip(PIECES_HIDDEN, sends, strict=True)) * (pieces - 1) / pieces
    return (products + sum(sends) - min(hidden, products) + PIECE_US * pieces) * PIECES_LEAD


def whole_us(gathered: float, scattered: float, products: float) -> float:
    """Returns the time predicted where nothing runs beside: of bytes that a device sends, and us of products."""
    return products + gathered / ALL_GATHER / 1e3 + scattered / REDUCE_SCATTER / 1e3


def direct_us(stages: Sequence[Sequence[float]], sends: Sequence[float], devices: int, passes: float) -> float:
    """Returns the time predicted where each share goes straight to its device, beside a product of another's.

    Args:
      stages: us of a product of one device's rows, beside transfers and alone, for each that has transfers.
      sends: bytes that a device sends in each.
      devices: their number, of which all but one send while a product runs.
      passes: bytes that are read and written beside all that.
    """
    total = passes / MEMORY / 1e3
    for (beside, alone), sent in zip(stages, sends, strict=True):
        transfer = sent / (devices - 1) / PERMUTE / 1e3
        product = alone + max(0.0, beside - alone) * min(1.0, transfer / max(beside, 1e-3))
        total += alone + (devices - 1) * max(product, transfer)
    return total

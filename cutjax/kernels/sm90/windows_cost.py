"""The time of kernels of convolutions over the model of dense products, which was fitted to none of them."""

from __future__ import annotations

from typing import Any

from cutjax.kernels.columns import ceil, exp, log2, maximum, minimum, where
from cutjax.kernels.device import Device
from cutjax.kernels.sm90 import dense_cost, windows
from cutjax.kernels.sm90.resolved import Resolved

# The logarithm of measured over predicted times, as a sum over what is true of a kernel. Fitted to 321 kernels of 81
# convolutions and gradients of images, and to 221 of 58 gradients of weights, on an H200 (benchmarks/results,
# conv-tune-1 and conv-tune-2): 80% of the ratios left are 0.89 to 1.12, and 0.87 to 1.19.
IMAGES = {
    "always": 0.035,
    "narrow": 0.24,
    "short": 0.17,
    "wasted": 0.2,
    "pairs": 0.06,  # of CTAs that share weights, ping-pong: 50 of the same tiles alone took 6% less
    "packed": 0.14,  # rows of windows as channels: with what follows, 15 kernels of 8 convolutions
    "packed_pairs": 0.29,
    "packed_large": 0.45,  # one of 1133 us beside 0.17 for the others
}
WEIGHTS = {
    "always": 0.02,
    "narrow": 0.27,
    "short": -0.1,  # 22 kernels, most of one network, took 0.21 less
    "wasted": 0.05,
    "tall": 0.18,  # 256 rows of windows, each loaded for few columns: 256 x 64 lost to 128 x 64 by up to 1.6
    "clusters": 0.22,  # 8 CTAs along k, whose sums meet in shared memory, of few columns
    "line": -0.1,
    "stream": -0.11,
    "grouped": 0.16,
    "few_pairs": 0.22,
    "one_column": 0.26,  # of such tiles, in images: 3 kernels
    "packed": 0.14,  # as above, 8 kernels of 4 convolutions
    "packed_large": 0.28,
}
# Of phases, threads store each row to a place of its own: microseconds an SM takes for 128 bytes of one, and for less,
# beside all else. Of 13 gradients and transposed convolutions on an H200, at 2 configs each.
ROW_US, SHORT_ROW_US = 0.0032, 0.0021


def over(kernel: Resolved) -> Any:
    """The factor by which a convolution takes longer than a dense product."""
    p, c, n = kernel.asked, kernel.config, kernel.multiplied.n
    view = windows.view_of(p)
    assert view is not None
    weights, packed = p.a.contiguous == "mn", windows.packed(p) is not None
    true = {
        "always": 1,
        "narrow": c.bn <= 32,
        "short": (c.bm == 64) & (c.bn <= 64),
        "wasted": log2(ceil(n / c.bn) * c.bn / n),
        "tall": (c.bm == 256) & (c.bn <= 96),
        "clusters": (c.cluster_k == 8) & (c.bn <= 64),
        "line": len(view.window) == 1,
        "stream": c.stream_k,
        "grouped": view.groups > 1,
        "pairs": (c.cluster_m > 1) & (c.coop == 0) & (c.bn >= 64) & (windows.chunk(p) >= 64),
        "few_pairs": (c.cluster_m > 1) & (c.bn <= 64),
        "one_column": (c.bm == 256) & (c.bn == 128) & (n == 128 and len(view.window) > 1),
        "packed": packed,
        "packed_pairs": (c.cluster_m > 1) & (c.coop == 0) & packed,
        "packed_large": packed and p.bytes > p.device.l2_bytes,
    }
    found = sum(weight * true[name] for name, weight in (WEIGHTS if weights else IMAGES).items())
    return exp(found)


def reread_us(kernel: Resolved, device: Device) -> Any:
    """Returns the microseconds of memory where each tap reads its pixels anew, or 0 where L2 still has them.

    Between two taps of a window all SMs read all channels of a tile. Of 192000 windows of 3 pixels of 768 channels,
    each 80 columns, 256 x 96 took 208 us: those of 885 MB. Of less than 0.4 of L2 it never was so.
    """
    p, view = kernel.asked, windows.view_of(kernel.asked)
    assert view is not None
    if p.a.contiguous == "mn" or p.a.bytes(view.elements) <= device.l2_bytes:
        return 0.0
    between = device.sms * kernel.config.bm * p.a.bytes(view.channels)
    return where(between > 0.4 * device.l2_bytes, 1e6 * p.a.bytes(p.m * p.k) / device.bytes_per_second, 0.0)


def of_phases(kernel: Resolved, us: Any, device: Device) -> Any:
    """Returns the microseconds of a kernel of phases, given those it would take were all alike and their rows in order.

    A tile of the deepest phase takes its time, however little the others do beside it.
    """
    assert kernel.phases is not None
    of, p = dense_cost.features(kernel, device), kernel.multiplied
    taps = kernel.phases.taps
    deepest = of._replace(
        k_blocks=ceil(of.k_blocks * max(taps) * len(taps) / max(1, sum(taps))),
        items=minimum(of.in_flight, ceil(of.items / len(taps))),
    )
    us = maximum(us, dense_cost.time_us(deepest))
    whole, rest = divmod(p.n * p.out_dtype.itemsize // kernel.phases.runs, 128)
    row_us = kernel.phases.runs * (whole * ROW_US + (ROW_US if rest > 64 else SHORT_ROW_US if rest else 0.0))
    return us + kernel.matrices * p.m * row_us / device.sms

"""A small network beside the formula of dense products: its part of their times, by which their kernels are ranked.

It reads what a kernel is and what the formula adds up, and was trained on the sweeps that the constants were fitted to
(``python -m benchmarks residual``). Its numbers are whole, as all sums of them are, below 2^53: so they are exact, and
the ranking is the same in any order of additions, on any machine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from cutjax.kernels.columns import ceil
from cutjax.kernels.device import Device
from cutjax.kernels.sm90.dense_cost import FITTED_ON, Costs, Features
from cutjax.kernels.sm90.resolved import Resolved
from cutjax.kernels.sums import summands

FILE = pathlib.Path(__file__).with_name("residual.json")
UNIT = 256  # of the network's numbers: 1 is so many
SPREAD = 4  # an input is at most so many standard deviations from its mean
MOST = 0.1  # of the formula's time
LOGARITHMS = 24  # inputs that are logarithms
AT_ONCE = 192  # kernels: libraries divide larger products among threads, and wait for those longer than they multiply


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """Layers of a network, each followed by max(x, 0) but the last.

    Attributes:
      mean: of each input where it was trained, [inputs, 1].
      scale: units of a standard deviation of each.
      layers: weights [outputs, inputs] and biases [outputs, 1]: whole numbers in float64.
    """

    mean: np.ndarray
    scale: np.ndarray
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Returns the share of its time that each kernel takes more, or less, told a column of inputs for each."""
        return np.concatenate([self._some(x[:, i : i + AT_ONCE]) for i in range(0, x.shape[1], AT_ONCE)])

    def _some(self, x: np.ndarray) -> np.ndarray:
        x = (x - self.mean) * self.scale
        np.maximum(x, -SPREAD * UNIT, out=x)
        np.rint(np.minimum(x, SPREAD * UNIT, out=x), out=x)
        *hidden, (weights, bias) = self.layers
        for w, b in hidden:
            x = w @ x
            x += b
            x *= 1 / UNIT  # a power of two: exact
            np.floor(np.maximum(x, 0, out=x), out=x)
        return np.clip((weights @ x + bias)[0] / UNIT**2, -MOST, MOST)


@functools.cache
def network() -> Network:
    """Returns the network that ships."""
    return decoded(json.loads(FILE.read_text()))


def decoded(content: dict[str, Any]) -> Network:
    """Returns the network of a file's content."""
    mean, deviation = (np.array(content[name], float)[:, None] for name in ("mean", "deviation"))
    layers = ((np.array(x["weights"], float), np.array(x["bias"], float)[:, None]) for x in content["layers"])
    return Network(mean, UNIT / deviation, tuple(layers))


def serves(kernel: Resolved, device: Device) -> bool:
    """True of products as those it was trained on: dense, of 16 bits, on SMs as many and as fast as an H200's.

    Streams of weights have constants of their own, which were fitted after it was trained.
    """
    p = kernel.asked
    plain = all(x.bits == 16 and x.view is None and x.scale is None for of in summands(p) for x in (of.a, *of.bs))
    like = device.sms == FITTED_ON.sms and device.peak(p.a.dtype) == FITTED_ON.peak(p.a.dtype)
    return plain and like and not (p.groups or p.symmetric or p.streams)


class Product(NamedTuple):
    """The numbers that the network reads of a product, as it is multiplied.

    Attributes:
      m, n, k, batch: its sizes.
      asked: its accumulators, of which whole tiles have more.
      a_along_k, b_along_k: whether its operands lie along the contraction.
    """

    m: Any
    n: Any
    k: Any
    batch: Any
    asked: Any
    a_along_k: Any
    b_along_k: Any


def product(kernel: Resolved) -> Product:
    """Returns the numbers of a kernel's product."""
    p = kernel.multiplied
    asked = p.m * p.n * p.batch_size * p.products
    return Product(p.m, p.n, p.k, p.batch_size, asked, p.a.contiguous == "k", p.bs[0].contiguous == "k")


def inputs(p: Product, f: Features, t: Costs) -> np.ndarray:
    """Returns the network's inputs, [inputs, kernels], of one kernel or of columns of those of many."""
    return _logged(values(p, f, t))


def _logged(x: np.ndarray) -> np.ndarray:
    np.log2(x[:LOGARITHMS], out=x[:LOGARITHMS])
    return x


def values(p: Product, f: Features, t: Costs) -> np.ndarray:
    """Returns the inputs before logarithms are taken, of the first so many."""
    us = t.whole
    logarithms = (
        us,
        t.compute / us,
        t.memory / us,
        t.l2 / us,
        1 + f.splits * f.result / us,
        f.ideal / us,
        t.load / t.multiply,
        t.refill / t.multiply,
        t.epilogue / t.mainloop,
        t.mainloop / f.k_blocks,
        t.waves,
        f.k_blocks,
        f.stages,
        f.bm,
        f.bn,
        f.cluster_k,
        f.splits,
        f.stages * f.stage_bytes * f.resident,
        p.m,
        p.n,
        p.k,
        p.batch,
        1 + f.fused,
        f.items * f.cluster * f.bm * f.bn / (f.splits * f.cluster_k * p.asked),
    )
    others = (
        ceil(t.waves) - t.waves,
        t.exchange / us,
        t.sum / us,
        f.pingpong,
        f.halves,
        f.cluster_m,
        f.cluster_n,
        f.resident,
        f.stream,
        f.swap,
        f.bn % 64 > 0,
        f.ragged,
        f.a_off,
        f.b_off,
        p.a_along_k,
        p.b_along_k,
    )
    assert len(logarithms) == LOGARITHMS
    x = np.empty((len(logarithms) + len(others), np.size(us)))
    for row, column in zip(x, (*logarithms, *others), strict=True):
        row[:] = column
    return x


def factor(p: Product, f: Features, t: Costs) -> Any:
    """Returns the factor of the formula's time, or a column of factors."""
    found = factors(values(p, f, t))
    return found if isinstance(t.whole, np.ndarray) else float(found[0])


def factors(x: np.ndarray) -> np.ndarray:
    """Returns the factors of kernels by their `values`, which become logarithms."""
    return 1 + network()(_logged(x))

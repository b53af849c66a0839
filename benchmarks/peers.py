"""Grouped products of other libraries, for the same inputs: Pallas's kernels and torch's."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cases, timing

# Of the configs their own sweeps go through, those that were fastest somewhere (block_m, block_n, steps).
_FORWARD = ((128, 128, 4), (128, 128, 6), (128, 192, 4), (192, 128, 4), (64, 128, 6), (64, 192, 5))
_DW = ((128, 128, 64, 4), (128, 128, 64, 6), (128, 128, 128, 2), (64, 128, 64, 6))  # with block_k


def pallas_configs(case: cases.Grouped, product: str) -> list[dict[str, int]]:
    """Configs that divide the problem; tiles of 64 rows where groups are small, the large ones where they are not."""
    if product == "dw":
        found = [(bm, bn, bk, steps) for bm, bn, bk, steps in _DW if not (case.k % bm or case.n % bn)]
        columns = case.n
    else:
        columns, contracted = (case.n, case.k) if product == "forward" else (case.k, case.n)
        small = case.m < 64 * case.groups
        found = [(bm, bn, 64, steps) for bm, bn, steps in _FORWARD if not (columns % bn or contracted % 64)]
        found = [config for config in found if config[0] == 64 or not small]
    names = ("block_m", "block_n", "block_k", "max_concurrent_steps")
    return [dict(zip(names, config, strict=True)) | {"grid_block_n": _band(columns // config[1])} for config in found]


def _band(blocks: int) -> int:
    return next(width for width in (8, 4, 2, 1) if blocks % width == 0)


def pallas(product: str, config: Mapping[str, Any]) -> Callable[[Mapping[str, jax.Array]], jax.Array]:
    """Pallas's example kernel with one config."""

    def fn(i):
        # Experimental modules, which import what an installation may lack.
        if product == "dw":
            from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

            return transposed_ragged_dot_mgpu.transposed_ragged_dot(i["x"], i["dy"], group_sizes=i["sizes"], **config)
        from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

        a = i["x"] if product == "forward" else i["dy"]
        return ragged_dot_mgpu.ragged_dot(a, i["w"], group_sizes=i["sizes"], transpose_rhs=product == "dx", **config)

    return fn


@functools.cache
def torch_module() -> Any:
    """torch where it is installed and sees a GPU, else why not."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a torch of other CUDA libraries fails in many ways
        return f"no torch: {type(error).__name__}: {error}"
    return torch if torch.cuda.is_available() else "torch sees no GPU"


class Torch:
    """torch's grouped_mm of one case, on the memory of the same inputs; timed by events."""

    def __init__(self, case: cases.Grouped, sets: Sequence[tuple[Mapping[str, jax.Array]]]):
        found: Any = torch_module()
        self._failure = found if isinstance(found, str) else ""
        self.torch: Any = found
        self._calls: dict[str, list[Callable[[], Any]]] = {}
        if not self._failure:
            try:
                torch = self.torch
                offsets = torch.tensor(np.cumsum(case.sizes), dtype=torch.int32, device="cuda")
                for (i,) in sets:
                    x, w, dy = (torch.from_dlpack(i[name]) for name in ("x", "w", "dy"))
                    for product, pair in {"forward": (x, w), "dx": (dy, w.mT), "dw": (x.mT, dy)}.items():
                        call = functools.partial(self._grouped_mm(), *pair, offs=offsets)
                        self._calls.setdefault(product, []).append(call)
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"[:300]

    def _grouped_mm(self) -> Callable[..., Any]:
        return getattr(self.torch.nn.functional, "grouped_mm", None) or self.torch._grouped_mm

    def result(self, product: str) -> jax.Array:
        """The product of the last set.

        Raises:
          RuntimeError: there is no torch here, or it does not take these arrays.
        """
        if self._failure:
            raise RuntimeError(self._failure)
        out = self._calls[product][-1]().contiguous()
        self.torch.cuda.synchronize()
        return jnp.from_dlpack(out)

    def measure(self, product: str, reps: int) -> timing.Timing:
        """Times of ``reps`` calls, each on the next set."""
        calls = self._calls[product]
        calls[0]()
        self.torch.cuda.synchronize()
        for rep in range(2 * reps):  # a card that rested runs at a higher clock than those have that are timed in turns
            calls[rep % len(calls)]()
        pairs = []
        for rep in range(reps):
            begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[rep % len(calls)]()
            end.record()
            pairs.append((begin, end))
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()
        return timing.Timing(tuple(1e3 * begin.elapsed_time(end) for begin, end in pairs), (), "events")

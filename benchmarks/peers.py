"""Grouped products of other libraries, for the same inputs: Pallas's kernels and torch's."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import cases

Inputs = Mapping[str, jax.Array]

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


def pallas(product: str, config: Mapping[str, Any]) -> Callable[[Inputs], jax.Array]:
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


def torch(case: cases.Grouped, sets: Sequence[tuple[Inputs]]) -> dict[str, Callable[[Inputs], Any]]:
    """torch's grouped_mm by product, for those sets only, on their memory; a call returns when its kernels have run.

    Raises:
      RuntimeError: there is no torch here.
    """
    found: Any = torch_module()
    if isinstance(found, str):
        raise RuntimeError(found)
    grouped_mm = getattr(found.nn.functional, "grouped_mm", None) or found._grouped_mm
    offsets = found.tensor(np.cumsum(case.sizes), dtype=found.int32, device="cuda")
    operands = {}
    for (i,) in sets:
        x, w, dy = (found.from_dlpack(i[name]) for name in ("x", "w", "dy"))
        operands[id(i)] = {"forward": (x, w), "dx": (dy, w.mT), "dw": (x.mT, dy)}

    def call(product: str, i: Inputs) -> Any:
        out = grouped_mm(*operands[id(i)][product], offs=offsets)
        found.cuda.synchronize()
        return out

    return {product: functools.partial(call, product) for product in cases.PRODUCTS}


def release() -> None:
    """Gives the memory back that torch keeps."""
    if not isinstance(found := torch_module(), str):
        found.cuda.empty_cache()

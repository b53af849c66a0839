"""Grouped products of other libraries, for the same inputs: Pallas's kernels, tokamax's and torch's."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.cases import Grouped

Inputs = Mapping[str, jax.Array]

# Of the configs their own sweeps go through, those that were fastest somewhere (block_m, block_n, steps).
_FORWARD = ((128, 128, 4), (128, 128, 6), (128, 192, 4), (192, 128, 4), (64, 128, 6), (64, 192, 5))
_DW = ((128, 128, 64, 4), (128, 128, 64, 6), (128, 128, 128, 2), (64, 128, 64, 6))  # with block_k


def pallas_configs(case: Grouped, product: str) -> list[dict[str, int]]:
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
    """The example kernel of Pallas with one config."""

    def fn(i):
        # Experimental modules, which import what an installation may lack.
        if product == "dw":
            from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

            return transposed_ragged_dot_mgpu.transposed_ragged_dot(i["x"], i["dy"], group_sizes=i["sizes"], **config)
        from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

        a = i["x"] if product == "forward" else i["dy"]
        return ragged_dot_mgpu.ragged_dot(a, i["w"], group_sizes=i["sizes"], transpose_rhs=product == "dx", **config)

    return fn


# Those that tokamax's own tuning on an H100 found fastest most often. Of dw, Mosaic's kernel is 3 times slower there.
_TRITON = ((128, 128, 32, 4, 4), (128, 256, 32, 8, 5), (64, 128, 32, 4, 3))  # block_m, block_n, block_k, warps, stages
_TRITON_DW = ((128, 256, 32, 8, 5), (128, 128, 32, 4, 4), (256, 128, 32, 8, 6))
_MOSAIC = ((128, 64, 128, 4, 4), (128, 64, 128, 4, 8), (64, 64, 128, 4, 8))  # block_m, block_n, block_k, stages, width


def tokamax_configs(case: Grouped, product: str) -> list[dict[str, Any]]:
    """Configs of tokamax's implementations; of products of rows, tiles of 64 where groups are small, 128 elsewhere."""

    def named(implementation, last, configs):
        names = ("block_m", "block_n", "block_k", *last, "implementation", "split_k")
        return [dict(zip(names, (*config, implementation, 1), strict=True)) for config in configs]

    warps, width = ("num_warps", "num_stages"), ("num_stages", "grid_tile_width")
    if product == "dw":
        return named("triton", warps, _TRITON_DW)
    small = case.m < 64 * case.groups
    found = named("triton", warps, _TRITON) + named("mosaic_gpu", width, _MOSAIC)
    return [config for config in found if (config["block_m"] == 64) == small]


# Which axes are contracted, and which are the groups': of x and w, dy and w, x and dy.
_DIMENSIONS = {"forward": (([1], [1]), [0]), "dx": (([1], [2]), [0]), "dw": (([0], [0]), [])}


def tokamax(product: str, config: Mapping[str, Any]) -> Callable[[Inputs], jax.Array]:
    """The ragged dot of tokamax with one config, as version 0.0.17 has it."""
    contracted, groups = _DIMENSIONS[product]
    dimensions = jax.lax.RaggedDotDimensionNumbers((contracted, ([], [])), [0], groups)
    names = {"forward": ("x", "w"), "dx": ("dy", "w"), "dw": ("x", "dy")}[product]

    def fn(i):
        # Its public functions take no config.
        implementations = importlib.import_module("tokamax._src.ops.ragged_dot.api").IMPLEMENTATIONS
        # It reads its options from the command line, and ours is not for it.
        importlib.import_module("absl.flags").FLAGS.mark_as_parsed()
        fields = dict(config)
        op = implementations[fields.pop("implementation")]
        op = op.replace(config=op.config_cls(**fields))
        a, b = (i[name] for name in names)
        return op(a, b, group_sizes=i["sizes"], ragged_dot_dimension_numbers=dimensions)

    return fn


# Peers swept over configs: the configs of a product of a case, and the product with one of them.
SWEPT: dict[str, tuple[Callable[..., list[dict[str, Any]]], Callable[..., Callable[[Inputs], jax.Array]]]]
SWEPT = {"pallas": (pallas_configs, pallas), "tokamax": (tokamax_configs, tokamax)}


@functools.cache
def torch_module() -> Any:
    """torch where it is installed and sees a GPU, else why not."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a torch of other CUDA libraries fails in many ways
        return f"no torch: {type(error).__name__}: {error}"
    return torch if torch.cuda.is_available() else "torch sees no GPU"


def torch(case: Grouped, sets: Sequence[tuple[Inputs]]) -> dict[str, Callable[[Inputs], Any]]:
    """The grouped_mm of torch by product, for those sets only, on their memory; a call returns when its kernels ran.

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

    return {product: functools.partial(call, product) for product in ("forward", "dx", "dw")}


def release() -> None:
    """Gives the memory back that torch keeps."""
    if not isinstance(found := torch_module(), str):
        found.cuda.empty_cache()

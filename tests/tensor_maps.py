"""Tensor maps of every kind, and what the stand-in driver (tests/native/fake_cuda.cc) is given for each."""

from __future__ import annotations

import dataclasses

import numpy as np

from cutjax.runtime.launch import TensorMap
from cutjax.runtime.tensor_map import Im2col

PLAIN = TensorMap(0, np.dtype("f4"), (64, 32), (256,), (32, 16))
TILED = TensorMap(0, np.dtype("f2"), (8, 4, 4, 4), (16, 64, 256), (8, 4, 2, 1), 0, 32)
_PLAIN = {"mode": "tiled", "dtype": 7, "interleave": 0, "swizzle": 3, "l2": 2, "fill": 0, "dims": [64, 32]}
_PLAIN |= {"strides": [256], "element_strides": [1, 1], "box": [32, 16]}
_TILED = {"mode": "tiled", "dtype": 6, "interleave": 0, "swizzle": 0, "l2": 2, "fill": 0, "dims": [8, 4, 4, 4]}
_TILED |= {"strides": [16, 64, 256], "element_strides": [1, 1, 1, 1], "box": [8, 4, 2, 1]}
_PIXELS = {name: x for name, x in _TILED.items() if name != "box"} | {"channels": 8, "pixels": 64}


def _changed(**changes) -> TensorMap:
    return dataclasses.replace(TILED, **changes)


ENCODED = {
    "plain": (PLAIN, _PLAIN),
    "vector": (
        TensorMap(0, np.dtype("i4"), (64,), (), (16,), 64, 0, 0),
        _PLAIN | {"dtype": 3, "swizzle": 2, "l2": 0, "dims": [64], "strides": [], "element_strides": [1], "box": [16]},
    ),
    "tiled": (_changed(element_strides=(1, 2, 1, 3)), _TILED | {"element_strides": [1, 2, 1, 3]}),
    "interleaved": (_changed(interleave=16, fill="nan"), _TILED | {"interleave": 1, "fill": 1}),
    "atoms": (_changed(swizzle="128_atom_64"), _TILED | {"swizzle": 6}),
    "packed": (
        TensorMap(0, np.dtype("u1"), (128, 2), (96,), (128, 2), byte_offset=32, element="16u6_align16b"),
        _PLAIN | {"dtype": 15, "dims": [128, 2], "strides": [96], "box": [128, 2]},
    ),
    "im2col": (
        _changed(box=Im2col((-1, -2), (1, -3), 8, 64), element_strides=(1, 2, 1, 1)),
        _PIXELS | {"mode": "im2col", "element_strides": [1, 2, 1, 1], "lower": [-1, -2], "upper": [1, -3]},
    ),
    "im2colwide": (
        _changed(box=Im2col((3,), (0,), 8, 64, "w"), swizzle=64),
        _PIXELS | {"mode": "im2col_w", "swizzle": 2, "lower": [3], "upper": [0]},
    ),
    "im2colwide of 128": (
        _changed(box=Im2col((3,), (2,), 8, 64, "w128"), swizzle="128_atom_32"),
        _PIXELS | {"mode": "im2col_w128", "swizzle": 4, "lower": [3], "upper": [2]},
    ),
}

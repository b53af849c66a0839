"""Tensor maps: how TMA walks a buffer, by the rules of the driver's functions that encode it."""

from __future__ import annotations

import dataclasses

import numpy as np

from cutjax.dtypes import DTYPES

# The same bounds as ffi/launcher/plan.h.
MAX_BUFFERS = 32
MAX_RANK = 5

# CUtensorMapDataType, in its order: what TMA knows, and the bits of each. The last are 16 elements of 4 or 6 bits, side
# by side in memory; those of "align16b" take 16 bytes in shared memory, with a gap behind them.
ELEMENTS = {
    "uint8": 8,
    "uint16": 16,
    "uint32": 32,
    "int32": 32,
    "uint64": 64,
    "int64": 64,
    "float16": 16,
    "float32": 32,
    "float64": 64,
    "bfloat16": 16,
    "float32_ftz": 32,
    "tfloat32": 32,
    "tfloat32_ftz": 32,
    "16u4_align8b": 4,
    "16u4_align16b": 4,
    "16u6_align16b": 6,
}
_TYPES = tuple(ELEMENTS)
_PACKED = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}  # dtypes of several elements to a byte

# CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapInterleave, CUtensorMapFloatOOBfill in their orders.
_SWIZZLES = (0, 32, 64, 128, "128_atom_32", "128_atom_32_flip_8", "128_atom_64")
_L2_PROMOTIONS = (0, 64, 128, 256)
_INTERLEAVES = (0, 16, 32)
_FILLS = ("zeros", "nan")
_WIDE = ("", "w", "w128")  # in a plan they are modes 1 to 3; 0 is a box
_CORNERS = {1: 2**15, 2: 2**7, 3: 2**4}  # a corner's range either way, by its number of axes


def require(condition: bool, message: str) -> None:
    """Raises a ValueError about the launch unless the condition holds."""
    if not condition:
        raise ValueError(f"launch: {message}")


def bits_of(dtype: np.dtype) -> int:
    """Returns the bits that an element of an array takes in memory."""
    return _PACKED.get(dtype.name, 8 * dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class Im2col:
    """The walk of a convolution, in place of a box: columns of pixels along the bounding box of images.

    The tensor's dimensions are channels, the image's one to three, and images. A copy begins at a pixel and takes the
    next ones of the bounding box, row after row and image after image, each moved by the offsets that the instruction
    gives: one element of a convolution's window. With padding ``low`` and ``high`` the corners of the bounding box are
    ``-low`` and ``high - (window - 1) * dilation``; the convolution's strides are ``TensorMap.element_strides``.

    Attributes:
      lower: from an image's first pixel to the bounding box's, along each axis of the image, innermost first.
      upper: from an image's last pixel to the bounding box's.
      channels: elements of each pixel that one copy moves, 1 to 256.
      pixels: in a column, 1 to 1024.
      wide: "" or, from sm_100 on, "w" or "w128": columns and corners are along the innermost axis alone. Those
        of "w128" have 128 pixels, whatever ``pixels`` says.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    channels: int
    pixels: int
    wide: str = ""


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tensor map passed by value: how TMA walks one buffer.

    Attributes:
      buffer: index of the buffer; arguments of the custom call first, then results.
      dtype: numpy dtype of the buffer's elements.
      dims: sizes in elements of TMA's, innermost first, 1 to 5 of them.
      strides: bytes between neighbours along ``dims[1:]``.
      box: elements one copy walks along each dimension; or an ``Im2col``.
      swizzle: 0, 32, 64 or 128 bytes, in chunks of 16; or 128 in larger ones, "128_atom_32", "128_atom_32_flip_8" or
        "128_atom_64".
      byte_offset: where in the buffer the tensor starts.
      l2_bytes: how much of a line L2 fetches: 0, 64, 128 or 256 bytes.
      element: the type of TMA's elements, one of ``ELEMENTS``; "" is the dtype's, or the unsigned integer of its size.
        "tfloat32" rounds float32 on its way, "float32_ftz" makes its subnormal numbers zero.
      element_strides: one of so many elements along a dimension is moved, 1 to 8; () is each one. A box of 64 with a
        stride of 2 moves 32. That of the innermost is ignored but for interleaving.
      interleave: 0, or 16 or 32: channels lie in slices of so many bytes.
      fill: what lies outside ``dims`` reads as: "zeros" or, of floats, "nan".
    """

    buffer: int
    dtype: np.dtype
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...] | Im2col
    swizzle: int | str = 128
    byte_offset: int = 0
    l2_bytes: int = 128
    element: str = ""
    element_strides: tuple[int, ...] = ()
    interleave: int = 0
    fill: str = "zeros"

    def __post_init__(self):
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        rank = len(self.dims)
        require(0 <= self.buffer < MAX_BUFFERS, f"buffer {self.buffer} is not in 0..{MAX_BUFFERS - 1}")
        self._check_element()
        for name, known in (
            ("swizzle", _SWIZZLES),
            ("l2_bytes", _L2_PROMOTIONS),
            ("interleave", _INTERLEAVES),
            ("fill", _FILLS),
        ):
            require(getattr(self, name) in known, f"{name} {getattr(self, name)} is none of {known}")
        require(1 <= rank <= MAX_RANK, f"a tensor map has rank 1 to {MAX_RANK}, not {rank}")
        require(rank >= 3 or not self.interleave, f"interleaving needs rank 3 to {MAX_RANK}, not {rank}")
        require(len(self.strides) == rank - 1, f"rank {rank} needs {rank - 1} strides, got {self.strides}")
        require(all(1 <= d <= 2**32 for d in self.dims), f"dims {self.dims} are not all in 1..2^32")
        steps = self.element_strides
        require(len(steps) in (0, rank), f"rank {rank} needs {rank} element strides or none, got {steps}")
        require(all(1 <= s <= 8 for s in steps), f"element_strides {steps} are not all in 1..8")
        alignment = 32 if self.interleave == 32 or self.element.endswith("align16b") else 16
        require(
            all(0 <= s < 2**40 and s % alignment == 0 for s in self.strides),
            f"strides {self.strides} are not all multiples of {alignment} bytes below 2^40",
        )
        require(
            self.byte_offset >= 0 and self.byte_offset % alignment == 0,
            f"byte_offset {self.byte_offset} is not a multiple of {alignment}",
        )
        if isinstance(self.box, Im2col):
            self._check_im2col(self.box)
            self._check_row(self.box.channels)
        else:
            require(len(self.box) == rank, f"rank {rank} needs {rank} box sizes, got {self.box}")
            require(all(1 <= b <= 256 for b in self.box), f"box {self.box} is not all in 1..256")
            self._check_row(self.box[0])

    def _check_element(self) -> None:
        require(self.element in ("", *ELEMENTS), f"element {self.element!r} is none of {', '.join(ELEMENTS)}")
        if not self.element:
            require(self.tma_dtype is not None, f"TMA has no type for {self.dtype}: see element=")
        else:
            bits, own = ELEMENTS[self.element], bits_of(self.dtype)
            fits = bits == own or bits < own == 8
            require(fits, f"element {self.element} has {bits} bits, those of {self.dtype} have {own}")
        floats = "float" in _TYPES[self.tma_dtype or 0]
        require(self.fill != "nan" or floats, f"fill 'nan' is for floats, not {self.element or self.dtype}")

    def _check_im2col(self, walk: Im2col) -> None:
        rank = len(self.dims)
        require(rank >= 3, f"im2col needs rank 3 to {MAX_RANK}, not {rank}")
        require(walk.wide in _WIDE, f"wide {walk.wide!r} is none of {_WIDE}")
        require(not (walk.wide and self.interleave), f"wide im2col has no interleaving, got {self.interleave}")
        axes = 1 if walk.wide else rank - 2
        high = _CORNERS[axes]
        for name, corner in (("lower", walk.lower), ("upper", walk.upper)):
            require(len(corner) == axes, f"im2col of rank {rank} needs {axes} offsets for {name}, got {corner}")
            require(
                all(-high <= x < high for x in corner),
                f"im2col of rank {rank}: {name} {corner} is not all in {-high}..{high - 1}",
            )
        for i, (low, up) in enumerate(zip(walk.lower, walk.upper, strict=True)):
            size = self.dims[i + 1] + up - low
            require(
                size > 0,
                f"im2col: the bounding box has {size} pixels along dims[{i + 1}] = {self.dims[i + 1]}: "
                f"lower {low}, upper {up}",
            )
        require(1 <= walk.channels <= 256, f"im2col: channels {walk.channels} is not in 1..256")
        require(1 <= walk.pixels <= 1024, f"im2col: pixels {walk.pixels} is not in 1..1024")

    def _check_row(self, length: int) -> None:
        """Checks the rules about the row of a copy and its swizzle; those of packed elements are about both."""
        if self.element == "16u4_align8b":
            require(self.dims[0] % 2 == 0, f"{self.element}: dims[0] = {self.dims[0]} is not even")
        if self.element.endswith("align16b"):
            require(self.dims[0] % 128 == 0, f"{self.element}: dims[0] = {self.dims[0]} is not a multiple of 128")
            require(length == 128, f"{self.element}: a copy has 128 elements of a row, not {length}")
            require(not (self.interleave and "u6" in self.element), f"{self.element} cannot be interleaved")
        allowed = self._swizzles()
        require(
            self.swizzle in allowed,
            f"swizzle {self.swizzle} does not go with this element, im2col or interleaving: {allowed} do",
        )
        if not self.interleave:
            row, span = length * ELEMENTS[_TYPES[self.tma_dtype or 0]] / 8, int(str(self.swizzle).split("_")[0])
            require(row % 16 == 0, f"a box row of {row:g} bytes is not a multiple of 16")
            require(not span or row <= span, f"a box row of {row:g} bytes exceeds swizzle {span}")

    def _swizzles(self) -> tuple[int | str, ...]:
        """Returns the swizzles that go with the other attributes."""
        if self.interleave == 32:
            return (32,)
        if isinstance(self.box, Im2col) and self.box.wide:
            few = (64, 128, "128_atom_32")
            return few[1:] if self.element == "16u4_align16b" else few
        if self.element == "16u4_align16b":
            return (0, 128, "128_atom_32")
        return (0, 128, "128_atom_32", "128_atom_64") if self.element == "16u6_align16b" else _SWIZZLES

    @property
    def tma_dtype(self) -> int | None:
        """The element type as a ``CUtensorMapDataType``; None where the dtype has none."""
        if self.element:
            return _TYPES.index(self.element)
        if self.dtype.name in _PACKED:
            return None
        known = DTYPES.get(self.dtype.name)
        return 0 if self.dtype.itemsize == 1 else known and known.tma

    @property
    def words(self) -> tuple[int, ...]:
        """The record in the attribute ``plan``."""
        walk, mode = self.box, 0
        if isinstance(walk, Im2col):
            walk, mode = (*walk.lower, *walk.upper, walk.channels, walk.pixels), 1 + _WIDE.index(walk.wide)
        head = (0, self.buffer, self.byte_offset, self.tma_dtype or 0, len(self.dims), _SWIZZLES.index(self.swizzle))
        kinds = (mode, _INTERLEAVES.index(self.interleave), _FILLS.index(self.fill))
        steps = self.element_strides or (1,) * len(self.dims)
        return (*head, _L2_PROMOTIONS.index(self.l2_bytes), *kinds, *self.dims, *self.strides, *steps, *walk)

"""The config of a convolution by halos: what a block has, and how pixels lie beside each other."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

ALONG = {1: ("row",), 2: ("row", "images"), 3: ("grid",)}  # by the axes of an image
# Of sums in a thread's registers, by the warpgroups that multiply, and of columns where operands vary along rows and
# columns. Calibrated on the compiler's report: no spill below (tests/kernels/test_halo.py).
MOST_SUMS = {2: 144, 3: 96, 4: 48}
MOST_COLUMNS = {2: 64, 3: 48, 4: 48}


@dataclasses.dataclass(frozen=True)
class Config:
    """One kernel of the halo family.

    Attributes:
      bn: columns of a block.
      consumers: warpgroups of a block that multiply: each for itself, or, of a gradient of weights, each some taps.
      stages: boxes of pixels in shared memory, for each of them or for all.
      along: the axis along which the 8 groups of 8 pixels lie that a warpgroup multiplies: "row" the innermost, "grid"
        the next one, "images" that of images.
      steps: of a run along the outermost axis, at most.
      taps: of a gradient of weights, those along the innermost axis that are columns of one wgmma; 0 for none such.
      splits: of its pixels, which XLA adds up.

    Raises:
      ValueError: a field is outside its range; lists every reason.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> x, w = jnp.ones((1, 64, 64, 16), jnp.bfloat16), jnp.ones((3, 3, 16, 32), jnp.bfloat16)
      >>> cutjax.conv(x, w, config=cutjax.HaloConfig(bn=32, stages=6)).shape
      (1, 64, 64, 32)
    """

    bn: int = 32
    consumers: int = 2
    stages: int = 4
    along: str = "row"
    steps: int = 64
    taps: int = 0
    splits: int = 1

    swap: ClassVar[bool] = False  # what kernels of other families may have

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not type(field.default):
                expected = type(field.default).__name__
                raise ValueError(f"HaloConfig: {field.name}={value!r}, expected {expected}")
        found = []
        if self.bn not in range(8, 257, 8):
            found.append(f"bn={self.bn}: wgmma takes multiples of 8 columns, at most 256")
        if not 1 <= self.consumers <= 4:
            found.append(f"consumers={self.consumers}, expected 1 to 4")
        if not 2 <= self.stages <= 16:
            found.append(f"stages={self.stages}: loading one box while another is read takes 2, at most 16")
        if self.along not in (known := {how for hows in ALONG.values() for how in hows}):
            found.append(f"along={self.along!r}, expected one of {sorted(known)}")
        for name, least in {"steps": 1, "taps": 0, "splits": 1}.items():
            if getattr(self, name) < least:
                found.append(f"{name}={getattr(self, name)}, expected at least {least}")
        if found:
            raise ValueError(f"HaloConfig: {'; '.join(found)}")

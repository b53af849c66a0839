"""Convolutions of real networks, drawn by a salt: what a user's program really convolves.

Each layer gives three: the forward pass, the gradient of its input (dx) and that of its weights (dw). Hashing their
names with the salt draws a sample, so it never changes and no shape is picked by hand. Tuning to one salt and reporting
on another shows whether a choice of kernels generalises.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

FLOPS, BYTES_PER_SECOND = 800e12, 4.3e12  # of the floor: what an H200 reaches in products and in copies
SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution in bf16, channels last: x ``[n, *spatial, cin]``, w ``[*kernel, cin / groups, cout]``.

    Attributes:
      name: unique.
      kind: what is computed: "fwd" of x and w, "dx" of the result's gradient and w, "dw" of x and that gradient.
      n: images.
      spatial: sizes of x.
      cin, cout: channels of x and of the result.
      kernel, strides, dilation: along each axis.
      padding: "SAME", "VALID", or zeros before and after each axis.
      groups: of channels.
      transposed: whether strides spread x (lax's ``lhs_dilation``) instead of windows.
    """

    name: str
    kind: str
    n: int
    spatial: tuple[int, ...]
    cin: int
    cout: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool

    @property
    def network(self) -> str:
        """The network that it is of: the first word of the name."""
        return self.name.partition(" ")[0]

    @property
    def tags(self) -> tuple[str, ...]:
        """Its kind and its network."""
        return self.kind, self.network

    @property
    def out(self) -> tuple[int, ...]:
        """Sizes of the result's images."""
        sizes = []
        for size, stride, reach, (low, high) in zip(self.spatial, self.strides, self._reach, self.pads, strict=True):
            spread, step = (stride, 1) if self.transposed else (1, stride)
            sizes.append((low + (size - 1) * spread + 1 + high - reach) // step + 1)
        return tuple(sizes)

    @property
    def _reach(self) -> list[int]:
        return [(taps - 1) * step + 1 for taps, step in zip(self.kernel, self.dilation, strict=True)]

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """Zeros before and after each axis, of a transposed one those of ``lax.conv_transpose``."""
        if not isinstance(self.padding, str):
            return self.padding
        found = []
        for size, stride, reach in zip(self.spatial, self.strides, self._reach, strict=True):
            if self.transposed and self.padding == "SAME":
                total = reach + stride - 2
                low = reach - 1 if stride > reach - 1 else -(-total // 2)
            elif self.transposed:
                total, low = reach + stride - 2 + max(reach - stride, 0), reach - 1
            elif self.padding == "SAME":
                total = max((-(-size // stride) - 1) * stride + reach - size, 0)
                low = total // 2
            else:
                total = low = 0
            found.append((low, total - low))
        return tuple(found)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of "x", "w", and "y": the result, or its gradient."""
        return {
            "x": (self.n, *self.spatial, self.cin),
            "w": (*self.kernel, self.cin // self.groups, self.cout),
            "y": (self.n, *self.out, self.cout),
        }

    @property
    def operands(self) -> tuple[str, str]:
        """The names of the two arrays that are given; the third is the result."""
        return {"fwd": ("x", "w"), "dx": ("y", "w"), "dw": ("x", "y")}[self.kind]

    @property
    def result(self) -> str:
        """The name of the array that is computed."""
        return {"fwd": "y", "dx": "x", "dw": "w"}[self.kind]

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``lax.conv_general_dilated`` beside its arrays."""
        spatial, ones = SPATIAL[len(self.spatial)], (1,) * len(self.spatial)
        return {
            "window_strides": ones if self.transposed else self.strides,
            "padding": self.pads,
            "lhs_dilation": self.strides if self.transposed else ones,
            "rhs_dilation": self.dilation,
            "dimension_numbers": (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
            "feature_group_count": self.groups,
        }

    @property
    def depth(self) -> int:
        """Products that are added up for an element of the result: the most there are."""
        if self.kind == "dw":
            return self.n * math.prod(self.spatial if self.transposed else self.out)
        return math.prod(self.kernel) * (self.cin if self.kind == "fwd" else self.cout) // self.groups

    @property
    def flops(self) -> int:
        """Floating-point operations, those of the padding too."""
        at = self.spatial if self.transposed else self.out
        return 2 * self.n * math.prod(at) * math.prod(self.kernel) * self.cin // self.groups * self.cout

    @property
    def bytes(self) -> int:
        """Bytes of the three arrays."""
        return 2 * sum(map(math.prod, self.shapes.values()))

    @property
    def floor_us(self) -> float:
        """The least time on an H200: of the arithmetic, or of each array once."""
        return 1e6 * max(self.flops / FLOPS, self.bytes / BYTES_PER_SECOND)


Padding = str | tuple[tuple[int, int], ...]


def _layer(
    name: str,
    batches: Sequence[int],
    spatial: int | tuple[int, ...],
    cin: int,
    cout: int,
    kernel: int | tuple[int, ...],
    strides: int | tuple[int, ...] = 1,
    padding: Padding = "SAME",
    dilation: int = 1,
    groups: int = 1,
    transposed: bool = False,
) -> tuple[str, Sequence[int], dict[str, Any]]:
    """Returns a layer's name, its numbers of images, and the fields of its `Conv`; one size stands for all axes."""
    spatial = (spatial,) if isinstance(spatial, int) else spatial
    fields = {"kernel": kernel, "strides": strides, "dilation": dilation}
    fields = {key: (v,) * len(spatial) if isinstance(v, int) else v for key, v in fields.items()}
    fields |= {"spatial": spatial, "cin": cin, "cout": cout, "padding": padding}
    return name, batches, {**fields, "groups": groups, "transposed": transposed}


def layers() -> Iterator[tuple[str, Sequence[int], dict[str, Any]]]:
    """Yields every layer of every network as ``_layer`` returns it, from the networks' published configs."""
    yield from _of_images()
    yield from _of_video()
    yield from _of_signals()


def _of_images() -> Iterator[tuple[str, Sequence[int], dict[str, Any]]]:
    for stage, (h, w) in enumerate(((56, 64), (28, 128), (14, 256), (7, 512))):
        yield _layer(f"resnet50 s{stage} 3x3", (32, 256), (h, h), w, w, 3)
        yield _layer(f"resnet50 s{stage} 1x1 up", (32, 256), (h, h), w, 4 * w, 1)
        yield _layer(f"resnet50 s{stage} 1x1 down", (32, 256), (h, h), 4 * w, w, 1)
        if stage:
            yield _layer(f"resnet50 s{stage} 3x3 /2", (32, 256), (2 * h, 2 * h), w, w, 3, 2)
            yield _layer(f"resnet50 s{stage} 1x1 /2", (32, 256), (2 * h, 2 * h), 2 * w, 4 * w, 1, 2)
        yield _layer(f"resnext50 s{stage} 3x3 g32", (32, 128), (h, h), 2 * w, 2 * w, 3, groups=32)
    yield _layer("resnet50 stem", (32, 256), (224, 224), 3, 64, 7, 2)
    for stage, (h, w) in enumerate(((56, 96), (28, 192), (14, 384), (7, 768))):
        yield _layer(f"convnext-t s{stage} dw7", (64, 256), (h, h), w, w, 7, groups=w)
        if stage:
            yield _layer(f"convnext-t s{stage} down", (64, 256), (2 * h, 2 * h), w // 2, w, 2, 2, "VALID")
    yield _layer("convnext-t stem", (64, 256), (224, 224), 3, 96, 4, 4, "VALID")
    for h, cin, e, k, s in (
        (112, 16, 6, 3, 2),
        (56, 24, 6, 3, 1),
        (28, 40, 6, 5, 1),
        (14, 112, 6, 5, 1),
        (7, 192, 6, 3, 1),
    ):
        yield _layer(f"efficientnet-b0 {h} dw{k} /{s}", (64, 256), (h, h), cin * e, cin * e, k, s, groups=cin * e)
        yield _layer(f"efficientnet-b0 {h} expand", (64, 256), (h, h), cin, cin * e, 1)
    for h, w in ((64, 320), (32, 640), (16, 1280), (8, 1280)):
        yield _layer(f"sd-unet {h} 3x3", (2, 16), (h, h), w, w, 3)
        yield _layer(f"sd-unet {h} skip", (2, 16), (h, h), 2 * w, w, 3)
        yield _layer(f"sd-unet {h} down", (2, 16), (h, h), w, w, 3, 2)
    yield _layer("sd-unet in", (2, 16), (64, 64), 4, 320, 3)
    yield _layer("sd-unet out", (2, 16), (64, 64), 320, 4, 3)
    for h, w in ((1024, 128), (512, 256), (256, 512), (128, 512)):
        yield _layer(f"vae-decoder {h} 3x3", (1, 4), (h, h), w, w, 3)
    yield _layer("vae-decoder rgb", (1, 4), (1024, 1024), 128, 3, 3)
    for h, cin in ((4, 1024), (8, 512), (16, 256), (32, 128)):
        yield _layer(f"dcgan {h} up", (128,), (h, h), cin, cin // 2, 4, 2, transposed=True)
    for d in (6, 12, 18):
        yield _layer(f"deeplab aspp d{d}", (8,), (65, 65), 2048, 256, 3, dilation=d)
    yield _layer("vit patch 16", (64, 256), (224, 224), 3, 768, 16, 16, "VALID")
    yield _layer("vit patch 14", (64, 256), (224, 224), 3, 1024, 14, 14, "VALID")
    for h, w in ((320, 32), (160, 64), (80, 128), (40, 256), (20, 512)):
        yield _layer(f"yolo {h} 3x3", (1, 16), (h, h), w, w, 3)
        yield _layer(f"yolo {h} down", (1, 16), (2 * h, 2 * h), w // 2, w, 3, 2)


def _of_video() -> Iterator[tuple[str, Sequence[int], dict[str, Any]]]:
    causal, in_time = ((2, 0), (1, 1), (1, 1)), ((2, 0), (0, 0), (0, 0))
    for t, h, w in ((5, 60, 384), (9, 120, 192), (17, 240, 96)):
        yield _layer(f"video-vae {h} 3x3x3 causal", (1,), (t, h, h), w, w, 3, padding=causal)
        yield _layer(f"video-vae {h} time down", (1,), (t, h, h), w, w, (3, 1, 1), (2, 1, 1), in_time)
    for h, w in ((128, 32), (64, 64), (32, 128), (16, 256)):
        yield _layer(f"unet3d {h} 3x3x3", (2,), (h, h, h), w, w, 3)
        yield _layer(f"unet3d {h} up", (2,), (h // 2, h // 2, h // 2), 2 * w, w, 2, 2, transposed=True)
    yield _layer("video patch 2x14x14", (1, 4), (8, 448, 448), 3, 1280, (2, 14, 14), (2, 14, 14), "VALID")


def _of_signals() -> Iterator[tuple[str, Sequence[int], dict[str, Any]]]:
    for n, cin, k, s in ((1024, 512, 16, 8), (8192, 256, 16, 8), (65536, 128, 4, 2), (131072, 64, 4, 2)):
        yield _layer(f"hifigan {n} up", (4, 16), n, cin, cin // 2, k, s, transposed=True)
        for k, d in ((3, 1), (7, 3), (11, 5)):
            yield _layer(f"hifigan {n * s} k{k} d{d}", (4, 16), n * s, cin // 2, cin // 2, k, dilation=d)
    of_encodec = (24000, 32, 64, 4, 2), (12000, 64, 128, 8, 4), (3000, 128, 256, 10, 5), (600, 256, 512, 16, 8)
    for n, cin, cout, k, s in of_encodec:
        yield _layer(f"encodec {n} down", (8, 64), n, cin, cout, k, s)
    yield _layer("whisper conv1", (8, 64), 3000, 80, 768, 3)
    yield _layer("whisper conv2", (8, 64), 3000, 768, 768, 3, 2)
    for n, w in ((2048, 5120), (4096, 4096), (8192, 2560)):
        yield _layer(f"mamba {n}x{w} k4 causal", (2, 8), n, w, w, 4, padding=((3, 0),), groups=w)
    for d in (1, 4, 64, 512):
        yield _layer(f"wavenet d{d}", (8,), 16000, 128, 256, 2, padding=((d, 0),), dilation=d)


def convolutions() -> Iterator[Conv]:
    """Every convolution of every layer."""
    for name, batches, fields in layers():
        for n in batches:
            for kind in ("fwd", "dx", "dw"):
                if kind != "dx" or fields["cin"] > 4:  # nobody asks for the gradient of pixels
                    yield Conv(name=f"{name} n{n} {kind}", kind=kind, n=n, **fields)


def sample(count: int, salt: str) -> tuple[Conv, ...]:
    """So many convolutions, the same ones for the same salt."""
    found = sorted(convolutions(), key=lambda case: hashlib.sha256(f"{salt} {case.name}".encode()).hexdigest())
    return tuple(found[:count])

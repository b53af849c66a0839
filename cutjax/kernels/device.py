"""The GPUs: the rates and sizes of each, which the cost model, the tile order and the limits read."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of GPU.

    Attributes:
      name: as the driver calls it, e.g. "NVIDIA H200".
      arch: the architecture kernels are compiled for, e.g. "sm_90a".
      sms: streaming multiprocessors.
      flops: sustained floating-point operations a second, for each dtype of the operands.
      bytes_per_second: of a copy, bytes read and bytes written together.
      shared_bytes: shared memory one block may opt in to.
      shared_bytes_per_sm: shared memory of an SM, of which each resident block reserves 1 KiB.
      l2_bytes: of the L2 cache.
      clusters: how many clusters of 1, 2, .. 8 blocks run at one time where each block takes an SM. Fewer than the SMs
        would give: a cluster lies within a part of the chip, and parts have 14 to 18 SMs. Empty where unknown.
    """

    name: str
    arch: str
    sms: int
    flops: tuple[tuple[str, float], ...]
    bytes_per_second: float
    shared_bytes: int
    shared_bytes_per_sm: int
    l2_bytes: int
    clusters: tuple[int, ...] = ()

    def clusters_at_once(self, size: int) -> int:
        """Returns how many clusters of so many blocks run at one time where each block takes an SM."""
        most = self.sms // size
        return min(most, self.clusters[size - 1] * self.sms // self.clusters[0]) if self.clusters else most

    @property
    def tf32(self) -> bool:
        """True if tensor cores round float32 to TF32, and so XLA does by default: from sm_80 on."""
        return int("".join(filter(str.isdigit, self.arch)) or 0) >= 80

    def peak(self, dtype: np.dtype) -> float:
        """Returns the floating-point operations a second for operands of a dtype."""
        return dict(self.flops)[dtype.name]


# Measured on an H200 as the numbers of tiles from which a launch takes twice as long (docs/kernel-selection.md).
_CLUSTERS = (132, 66, 39, 30, 22, 16, 14, 14)


def _hopper(name: str, sms: int, flops: float, bytes_per_second: float, l2_bytes: int = 50 << 20) -> Device:
    by_dtype = (("bfloat16", flops), ("float16", flops))
    return Device(name, "sm_90a", sms, by_dtype, bytes_per_second, 232448, 233472, l2_bytes, _CLUSTERS)


# By words of JAX's device_kind. The H200's flops and bytes are measured (docs/results.md). Of the others nothing is:
# theirs are the data sheets' (dense bf16, memory bandwidth), times what the H200 reaches of its own (830 of 989
# TFLOP/s, 4.3 of 4.8 TB/s).
_DEVICES = {
    ("H200",): _hopper("NVIDIA H200", 132, 830e12, 4.3e12),
    ("H100", "HBM3"): _hopper("NVIDIA H100 80GB HBM3", 132, 830e12, 3.0e12),  # SXM: 3.35 TB/s
    ("H100", "PCIe"): _hopper("NVIDIA H100 PCIe", 114, 634e12, 1.8e12),  # 756 TFLOP/s in 350 W, HBM2e of 2.0 TB/s
    ("GH200",): _hopper("NVIDIA GH200 480GB", 132, 830e12, 3.6e12, 60 << 20),  # 96 GB of HBM3 of 4.0 TB/s
}
_REFERENCES = {"sm_90a": _DEVICES["H200",]}  # what the cost model was fitted on, architecture by architecture


@functools.lru_cache(maxsize=64)
def reference(arch: str) -> Device:
    """Returns the device that stands for an architecture where none is known; one that gives nothing, of an unknown."""
    return _REFERENCES.get(arch) or Device(arch, arch, 0, (), 0, 0, 0, 0)


@functools.lru_cache(maxsize=64)
def device_of_kind(kind: str, arch: str, sms: int | None = None) -> Device:
    """Returns the device of JAX's ``device_kind``, with the SMs it really has.

    A kind that is not listed is its architecture's reference, as fast for each SM; so is "", where there is no device.
    """
    if not kind:
        return reference(arch)
    words = set(kind.split())
    found = (device for key, device in _DEVICES.items() if device.arch == arch and words.issuperset(key))
    device = next(found, None) or dataclasses.replace(reference(arch), name=kind)
    if sms is None or sms == device.sms:
        return device
    share = sms / device.sms if device.sms else 0
    flops = tuple((dtype, flops * share) for dtype, flops in device.flops)
    return dataclasses.replace(device, name=kind, sms=sms, flops=flops)

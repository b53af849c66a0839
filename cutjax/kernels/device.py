"""The GPUs: the rates and sizes of each, which the cost model, the tile order and the limits read."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from cutjax.runtime.architectures import ARCHITECTURES, number

# That NCCL's kernels take. On two H200s products of 256 tiles took three rounds beside an all-gather, where two are
# enough for 132 SMs, and those of 512 tiles five beside a reduce-scatter, instead of four: they had 103 to 127.
TRANSFER_SMS = 24
DMMA = (80, 90, 100, 103)  # others multiply float64 by FMA, a 32nd or 64th as fast as float32


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of GPU.

    Attributes:
      name: as the driver calls it, e.g. "NVIDIA H200".
      arch: the architecture kernels are compiled for, e.g. "sm_90a".
      sms: streaming multiprocessors.
      flops: sustained dense operations a second, by name: the dtype of operands that are multiplied as they are and
        added up in 32 bits (float64 in 64); "tf32", and "float16_f16" where float16 is added up in float16. What a GPU
        has no instruction for is not there.
      bytes_per_second: of a copy, bytes read and bytes written together.
      shared_bytes: shared memory one block may opt in to.
      shared_bytes_per_sm: shared memory of an SM, of which each resident block reserves 1 KiB (none on sm_75).
      l2_bytes: of the L2 cache.
      clusters: how many clusters of 1, 2, .. 8 blocks run at one time where each block takes an SM. Fewer than the SMs
        would give: a cluster lies within a part of the chip, and parts have 14 to 18 SMs. Empty where unknown.
      registers_per_sm: 32-bit registers of an SM.
      max_threads_per_sm: threads that are resident on an SM.
      max_blocks_per_sm: blocks that are resident on an SM.
      tensor_memory: whether the rates of tensor cores are those of tcgen05, which mma.sync does not reach.
      measured: names of the rates that were measured, "bytes" for bytes_per_second; the others are published ones,
        times a share. Empty where nobody measured anything.
      shared: whether transfers take some of the SMs while a kernel runs. Its blocks then take one tile each, so that an
        SM joins when it is free: a persistent block that waits for one has all its tiles left to do.
      several: whether programs are divided over several devices, so that NCCL's kernels may take some of the SMs at any
        time. Persistent blocks then take their tiles as they come to them, where the kernel can.
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
    registers_per_sm: int = 65536
    max_threads_per_sm: int = 2048
    max_blocks_per_sm: int = 32
    tensor_memory: bool = False
    measured: tuple[str, ...] = ()
    shared: bool = False
    several: bool = False

    def clusters_at_once(self, size: int) -> int:
        """Returns the number of clusters of so many blocks that run at one time where each block takes an SM."""
        most = self.sms // size
        return min(most, self.clusters[size - 1] * self.sms // self.clusters[0]) if self.clusters else most

    @property
    def tf32(self) -> bool:
        """True if tensor cores round float32 to TF32, and so XLA does by default: from sm_80 on."""
        return number(self.arch) >= 80

    def moving_us(self, size: float, share: float = 1.0) -> float:
        """Returns the microseconds of moving bytes at a share of a copy's rate; infinite where that is unknown."""
        return 1e6 * size / (self.bytes_per_second * share) if self.bytes_per_second else math.inf

    def tensor(self, dtype: np.dtype, math: str = "") -> bool:
        """True if tensor cores multiply a dtype by ``math``, as ``Problem.math`` says: others multiply it by FMA."""
        if dtype.name in ("float64", "complex128"):
            return number(self.arch) in DMMA
        return bool(math) or dtype.name not in ("float32", "complex64")

    def with_sms(self, sms: int) -> Device:
        """Returns the device with another number of SMs, as fast for each."""
        if sms == self.sms:
            return self
        share = sms / self.sms if self.sms else 0
        return dataclasses.replace(self, sms=sms, flops=tuple((dtype, flops * share) for dtype, flops in self.flops))

    def beside_transfers(self) -> Device:
        """Returns the device as kernels have it while NCCL's kernels run: ``shared``, and with fewer SMs."""
        return dataclasses.replace(self.with_sms(max(self.sms - TRANSFER_SMS, self.sms // 2)), shared=True)

    def peak(self, dtype: np.dtype, math: str = "") -> float:
        """Returns the operations a second of products of a dtype, computed by ``math`` as ``Problem.math`` says.

        Where there is no instruction for them they are multiplied as float32.
        """
        rates = dict(self.flops)
        name, parts = _instruction(dtype.name, math)
        return rates.get(name, rates.get("float32", 0.0)) / parts


# Rates are dense ones, without sparsity, at the boost clock. Sources: NVIDIA's white papers (Turing, GA100, GA102, Ada,
# Ada for professionals, Hopper, RTX Blackwell, RTX PRO Blackwell) and data sheets (T4, A10, A30, A40, L4, L40S, H100,
# H200, H20, GH200, HGX B200 and B300, GB200 and GB300 NVL72). What a white paper gives for a card is SMs x clock x
# operations of an SM, so cards are listed by SMs and clock.
_TERA, _GIGA, _MIB = 1e12, 1e9, 1 << 20
# What the H200 reaches of its data sheet, in bf16 and in copies: the best guess for one that nobody measured.
_FLOPS_SHARE, _BYTES_SHARE = 830 / 989, 4.3 / 4.8

# Operations that an SM starts in a cycle, a multiplication and an addition counting as two. float64: DMMA, or FMA.
_TURING = {"float16": 1024, "float32": 128, "float64": 4, "int8": 2048, "int4": 4096}
_A100 = {"bfloat16": 2048, "float16": 2048, "tf32": 1024, "float32": 128, "float64": 128}
_A100 |= {"int8": 4096, "int4": 8192, "int1": 32768}
_GA102 = {"bfloat16": 1024, "float16": 1024, "tf32": 512, "float32": 256, "float64": 4}
_GA102 |= {"int8": 2048, "int4": 4096, "int1": 16384}
_ADA = _GA102 | {"float8_e4m3fn": 2048, "float8_e5m2": 2048}
_BLACKWELL = {name: rate for name, rate in _ADA.items() if name not in ("int4", "int1")}
_PER_SM = {"sm_75": _TURING, "sm_80": _A100, "sm_86": _GA102, "sm_89": _ADA, "sm_120a": _BLACKWELL}
_PER_SM["sm_121a"] = _BLACKWELL

# Measured on an H200 as the numbers of tiles from which a launch takes twice as long (docs/kernel-selection.md).
_CLUSTERS = (132, 66, 39, 30, 22, 16, 14, 14)


def _rounded(x: float, digits: int) -> float:
    """Returns a number with no more digits than are known."""
    return float(f"{x:.{digits - 1}e}")


def _device(
    name: str,
    arch: str,
    sms: int,
    tera: Mapping[str, float],
    gb_per_s: float,
    l2_mib: float,
    clusters: Sequence[int] = (),
    measured: Mapping[str, float] = types.MappingProxyType({}),
) -> Device:
    """Returns a device of published rates, in 10^12 a second, times a share, and of measured ones as they are."""
    rates = {name: _rounded(rate * _TERA * _FLOPS_SHARE, 3) for name, rate in tera.items()}
    rates |= {name: rate for name, rate in measured.items() if name != "bytes"}
    if "float16" in rates:
        rates.setdefault("float16_f16", rates["float16"])
    limits = ARCHITECTURES[arch]
    return Device(
        name,
        arch,
        sms,
        tuple(sorted(rates.items())),
        measured.get("bytes", _rounded(gb_per_s * _GIGA * _BYTES_SHARE, 2)),
        limits.shared_bytes,
        limits.shared_bytes_per_sm,
        round(l2_mib * _MIB),
        tuple(clusters),
        max_threads_per_sm=limits.max_threads_per_sm,
        max_blocks_per_sm=limits.max_blocks_per_sm,
        tensor_memory=arch in ("sm_100a", "sm_103a"),
        measured=tuple(sorted(measured)),
    )


def _card(
    name: str, arch: str, sms: int, mhz: float, gb_per_s: float, l2_mib: float, *, geforce: bool = False
) -> Device:
    """Returns a card by its SMs and boost clock. GeForce cards add up floats in f32 at half the rate of the chip."""
    tera = {dtype: sms * mhz * 1e6 * rate / _TERA for dtype, rate in _PER_SM[arch].items()}
    if geforce:
        tera["float16_f16"] = tera["float16"]
        halved = {"bfloat16", "float16", "tf32", "float8_e4m3fn", "float8_e5m2"}
        tera = {dtype: rate / 2 if dtype in halved else rate for dtype, rate in tera.items()}
    return _device(name, arch, sms, tera, gb_per_s, l2_mib)


def _tensor(bf16: float, float64: float, float32: float, int8: float = math.nan) -> dict[str, float]:
    """Returns the rates of Hopper's and Blackwell's tensor cores, by bf16's: tf32 half of it, 8 bits twice."""
    rates = {"bfloat16": bf16, "float16": bf16, "tf32": bf16 / 2, "float8_e4m3fn": 2 * bf16, "float8_e5m2": 2 * bf16}
    return rates | {"int8": 2 * bf16 if math.isnan(int8) else int8, "float64": float64, "float32": float32}


_SXM = _tensor(989, 67, 67)
# Of the H200, bf16, f16 and copies are measured (docs/results.md).
_H200 = {"bfloat16": 830e12, "float16": 830e12, "bytes": 4.3e12}

# By words of JAX's device_kind, without case; where several entries have all theirs in it, the one of the most words.
# An entry's name is the device_kind where that is known.
DEVICES: dict[tuple[str, ...], Device] = {
    ("t4",): _card("Tesla T4", "sm_75", 40, 1590, 320, 4),
    ("rtx", "2080", "ti"): _card("NVIDIA GeForce RTX 2080 Ti", "sm_75", 68, 1545, 616, 5.5, geforce=True),
    ("a100", "sxm4", "40gb"): _card("NVIDIA A100-SXM4-40GB", "sm_80", 108, 1410, 1555, 40),
    ("a100", "sxm4", "80gb"): _card("NVIDIA A100-SXM4-80GB", "sm_80", 108, 1410, 2039, 40),
    ("a100", "pcie", "40gb"): _card("NVIDIA A100-PCIE-40GB", "sm_80", 108, 1410, 1555, 40),
    ("a100", "pcie", "80gb"): _card("NVIDIA A100 80GB PCIe", "sm_80", 108, 1410, 1935, 40),
    ("a30",): _card("NVIDIA A30", "sm_80", 56, 1440, 933, 24),
    ("a10",): _card("NVIDIA A10", "sm_86", 72, 1695, 600, 6),
    ("a10g",): _card("NVIDIA A10G", "sm_86", 80, 1710, 600, 6, geforce=True),  # 70 TFLOP/s in f16: half of an A10's SM
    ("a40",): _card("NVIDIA A40", "sm_86", 84, 1740, 696, 6),
    ("rtx", "a6000"): _card("NVIDIA RTX A6000", "sm_86", 84, 1800, 768, 6),
    ("rtx", "3080"): _card("NVIDIA GeForce RTX 3080", "sm_86", 68, 1710, 760, 5, geforce=True),
    ("rtx", "3090"): _card("NVIDIA GeForce RTX 3090", "sm_86", 82, 1695, 936, 6, geforce=True),
    ("l4",): _card("NVIDIA L4", "sm_89", 58, 2040, 300, 48),
    ("l40s",): _card("NVIDIA L40S", "sm_89", 142, 2520, 864, 96),
    ("rtx", "6000", "ada"): _card("NVIDIA RTX 6000 Ada Generation", "sm_89", 142, 2505, 960, 96),
    ("rtx", "4070"): _card("NVIDIA GeForce RTX 4070", "sm_89", 46, 2475, 504, 36, geforce=True),
    ("rtx", "4080"): _card("NVIDIA GeForce RTX 4080", "sm_89", 76, 2505, 717, 64, geforce=True),
    ("rtx", "4090"): _card("NVIDIA GeForce RTX 4090", "sm_89", 128, 2520, 1008, 72, geforce=True),
    ("h200",): _device("NVIDIA H200", "sm_90a", 132, _SXM, 4800, 50, _CLUSTERS, _H200),
    ("h100", "hbm3"): _device("NVIDIA H100 80GB HBM3", "sm_90a", 132, _SXM, 3350, 50, _CLUSTERS),
    ("h100", "pcie"): _device("NVIDIA H100 PCIe", "sm_90a", 114, _tensor(756, 51, 51), 2000, 50, _CLUSTERS),  # 350 W
    ("gh200",): _device("NVIDIA GH200 480GB", "sm_90a", 132, _SXM, 4000, 60, _CLUSTERS),  # 96 GB of HBM3
    ("h20",): _device("NVIDIA H20", "sm_90a", 78, _tensor(148, 1, 44), 4000, 60, _CLUSTERS),
    ("b200",): _device("NVIDIA B200", "sm_100a", 148, _tensor(2250, 37, 75), 8000, 126),
    ("gb200",): _device("NVIDIA GB200", "sm_100a", 152, _tensor(2500, 40, 80), 8000, 126),
    ("b300",): _device("NVIDIA B300 SXM6 AC", "sm_103a", 148, _tensor(2250, 1.2, 75, 150), 8000, 126),
    ("gb300",): _device("NVIDIA GB300", "sm_103a", 152, _tensor(2500, 1.3, 80, 165), 8000, 126),
    ("rtx", "5080"): _card("NVIDIA GeForce RTX 5080", "sm_120a", 84, 2617, 960, 64, geforce=True),
    ("rtx", "5090"): _card("NVIDIA GeForce RTX 5090", "sm_120a", 170, 2407, 1792, 96, geforce=True),
    ("rtx", "pro", "6000", "blackwell"): _card(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm_120a", 188, 2617, 1792, 128
    ),
    ("gb10",): _card("NVIDIA GB10", "sm_121a", 48, 2525, 273, 24),  # DGX Spark
}

# What stands for an architecture where nobody says which device: on these it is judged which kernel is the fastest.
REFERENCES = {
    "sm_75": DEVICES["t4",],
    "sm_80": DEVICES["a100", "sxm4", "80gb"],
    "sm_86": DEVICES["rtx", "3090"],
    "sm_89": DEVICES["l40s",],
    "sm_90a": DEVICES["h200",],  # what the cost model was fitted on
    "sm_100a": DEVICES["b200",],
    "sm_103a": DEVICES["b300",],
    "sm_120a": DEVICES["rtx", "5090"],
    "sm_121a": DEVICES["gb10",],
}


@functools.lru_cache(maxsize=256)
def _instruction(dtype: str, math: str) -> tuple[str, int]:
    """Returns the rate that a product goes by, and how many such products make one."""
    if match := re.fullmatch(r"(bf16|tf32)(?:x(\d))?", math):
        return {"bf16": "bfloat16", "tf32": "tf32"}[match[1]], int(match[2] or 1) * (4 if dtype == "complex64" else 1)
    if math == "f16":
        return "float16_f16", 1
    if dtype in ("complex64", "complex128"):
        return {"complex64": "float32", "complex128": "float64"}[dtype], 4
    return "int8" if dtype == "uint8" else dtype, 1


@functools.lru_cache(maxsize=64)
def reference(arch: str) -> Device:
    """Returns the device that stands for an architecture where none is known; one that gives nothing, of an unknown."""
    return REFERENCES.get(arch) or Device(arch, arch, 0, (), 0, 0, 0, 0)


def _listed(kind: str) -> list[Device]:
    """Returns the devices whose words are all in JAX's ``device_kind``, those of the most words first."""
    words = set(re.split(r"[\s-]+", kind.casefold()))
    found = [(key, device) for key, device in DEVICES.items() if words.issuperset(key)]
    return [device for _, device in sorted(found, key=lambda entry: -len(entry[0]))]


def named(kind: str) -> Device:
    """Returns the listed device of a name such as JAX's ``device_kind``.

    Raises:
      ValueError: if none is listed by that name.
    """
    if not (found := _listed(kind)):
        known = ", ".join(device.name for device in DEVICES.values())
        raise ValueError(f"unknown device {kind!r}; known are {known}")
    return found[0]


class _Target(Protocol):
    @property
    def arch(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def sms(self) -> int | None: ...
    @property
    def several(self) -> bool: ...


def device_of(target: _Target) -> Device:
    """Returns the device that programs are lowered for."""
    return device_of_kind(target.kind, target.arch, target.sms, target.several)


@functools.lru_cache(maxsize=64)
def device_of_kind(kind: str, arch: str, sms: int | None = None, several: bool = False) -> Device:
    """Returns the device of JAX's ``device_kind``, with the SMs it really has, one of several or alone.

    A kind that is not listed is its architecture's reference, as fast for each SM; so is "", where there is no device.
    """
    if several:
        return dataclasses.replace(device_of_kind(kind, arch, sms), several=True)
    if not kind:
        return reference(arch)
    found = (device for device in _listed(kind) if device.arch == arch)
    device = next(found, None) or dataclasses.replace(reference(arch), name=kind, measured=())
    if sms is None or sms == device.sms:
        return device
    return dataclasses.replace(device.with_sms(sms), name=kind, measured=())

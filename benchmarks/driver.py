"""The CUDA driver through ctypes: launches of ``cutjax.runtime.launch`` on given addresses, without XLA."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from cutjax.runtime.launch import Float32, Float64, Int32, Int64, Launch, Pointer, TensorMap
from cutjax.runtime.tensor_map import Im2col

PATH = "libcuda.so.1"
_PLACEHOLDER = 1 << 20  # encoded in a tensor map until a launch says where its buffer lies
_CLUSTER_DIMENSION, _MAX_DYNAMIC_SHARED, _SMS = 4, 8, 16  # as cuda.h numbers them

_void_p, _uint, _u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64


class CudaError(RuntimeError):
    """A call of the driver failed."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", _uint), ("_pad", _uint), ("cluster", _uint * 3), ("_rest", _uint * 13)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", _uint * 3),
        ("block", _uint * 3),
        ("shared_bytes", _uint),
        ("stream", _void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", _uint),
    ]


class Driver:
    """The first device, and its primary context, which JAX uses too. Everything runs on the legacy default stream."""

    def __init__(self, path: str | None = None):
        self._library = ctypes.CDLL(path or PATH)
        self._kernels: dict[tuple[bytes, str], _void_p] = {}
        self._limits: dict[int, int] = {}
        self.device = ctypes.c_int(0)
        self.call("cuInit", _uint(0))

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the driver; integers must come as the ctypes of their parameters."""
        if status := getattr(self._library, name)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown').decode()} ({status})")

    def describe(self) -> tuple[str, int]:
        """Returns the device's name and its number of SMs; starts no context."""
        name, sms = ctypes.create_string_buffer(256), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), ctypes.c_int(0))
        self.call("cuDeviceGetName", name, ctypes.c_int(256), self.device)
        self.call("cuDeviceGetAttribute", ctypes.byref(sms), ctypes.c_int(_SMS), self.device)
        return name.value.decode(), sms.value

    def enter(self) -> None:
        """Makes the primary context current in this thread."""
        context = _void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def synchronize(self) -> None:
        """Waits for everything launched here; errors of kernels come out."""
        self.call("cuStreamSynchronize", _void_p())

    def allocate(self, size: int) -> int:
        """Returns the address of new device memory."""
        address = _u64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        """Frees what `allocate` returned."""
        self.call("cuMemFree_v2", _u64(address))

    def fill(self, address: int, word: int, size: int) -> None:
        """Writes a 32-bit word over ``size`` bytes, rounded up to whole words."""
        self.call("cuMemsetD32Async", _u64(address), _uint(word), ctypes.c_size_t(-(-size // 4)), _void_p())

    def read(self, address: int, size: int) -> bytes:
        """Returns device memory once everything launched here is done."""
        self.synchronize()
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, _u64(address), ctypes.c_size_t(size))
        return data.raw

    def kernel(self, launch: Launch) -> ctypes.c_void_p:
        """Returns the loaded kernel of a launch, which may have as much shared memory as it wants."""
        key = launch.cubin, launch.kernel
        if key not in self._kernels:
            library, kernel, nothing, none = _void_p(), _void_p(), _void_p(), _uint(0)
            self.call(
                "cuLibraryLoadData", ctypes.byref(library), launch.cubin, nothing, nothing, none, nothing, nothing, none
            )
            self.call("cuLibraryGetKernel", ctypes.byref(kernel), library, launch.kernel.encode())
            self._kernels[key] = kernel
        kernel = self._kernels[key]
        limit = max(self._limits.get(kernel.value or 0, 0), launch.shared_bytes)
        self._limits[kernel.value or 0] = limit
        self.call("cuKernelSetAttribute", ctypes.c_int(_MAX_DYNAMIC_SHARED), ctypes.c_int(limit), kernel, self.device)
        return kernel


def grid_x(launch: Launch, sms: int) -> int:
    """Returns the blocks along x on a device with this many SMs: whole clusters, at least one."""
    if not launch.blocks_per_sm:
        return launch.grid[0]
    blocks = min(launch.grid[0], launch.blocks_per_sm * sms)
    return max(blocks - blocks % launch.cluster[0], launch.cluster[0])


class Prepared:
    """A launch ready to run on any buffers: loaded, its tensor maps encoded, its parameters packed."""

    def __init__(self, driver: Driver, launch: Launch, sms: int):
        self._driver = driver
        self._kernel = driver.kernel(launch)
        self._maps: list[tuple[int, int, _void_p]] = []  # buffer, byte offset, the map
        self._pointers: list[tuple[int, int, _u64]] = []
        self._kept: list[object] = []  # what the parameters point to
        self._parameters = (_void_p * max(1, len(launch.params)))()
        for i, param in enumerate(launch.params):
            match param:
                case TensorMap():
                    map = self._encode(param)
                    self._maps.append((param.buffer, param.byte_offset, map))
                    self._parameters[i] = map.value
                    continue
                case Pointer():
                    value = _u64()
                    self._pointers.append((param.buffer, param.byte_offset, value))
                case Int32() | Float32():
                    value = _uint(param.words[1] & 0xFFFFFFFF)
                case Int64() | Float64():
                    value = _u64(param.words[1] & 0xFFFFFFFFFFFFFFFF)
            self._kept.append(value)
            self._parameters[i] = ctypes.addressof(value)
        grid = (grid_x(launch, sms), *launch.grid[1:])
        self._attribute = _Attribute(_CLUSTER_DIMENSION, 0, (_uint * 3)(*launch.cluster))
        self._config = _Config(
            (_uint * 3)(*grid),
            (_uint * 3)(*launch.block),
            launch.shared_bytes,
            None,
            ctypes.pointer(self._attribute),
            1 if math.prod(launch.cluster) > 1 else 0,
        )

    def _encode(self, map: TensorMap) -> ctypes.c_void_p:
        dtype, rank, swizzle, l2, mode, interleave, fill = map.words[3:10]
        steps = map.element_strides or (1,) * rank
        walk: list[object]
        if isinstance(map.box, Im2col):
            name, corners = "cuTensorMapEncodeIm2col", len(map.box.lower)
            walk = [(ctypes.c_int * corners)(*corner) for corner in (map.box.lower, map.box.upper)]
            if map.box.wide:
                name, walk = f"{name}Wide", [ctypes.c_int(*corner) for corner in (map.box.lower, map.box.upper)]
            walk += [_uint(map.box.channels), _uint(map.box.pixels)]
        else:
            name, walk = "cuTensorMapEncodeTiled", [(_uint * rank)(*map.box)]
        memory = ctypes.create_string_buffer(128 + 64)
        self._kept.append(memory)
        place = _void_p(-(-ctypes.addressof(memory) // 64) * 64)  # a CUtensorMap is aligned to 64 bytes
        self._driver.call(
            name,
            place,
            ctypes.c_int(dtype),
            _uint(rank),
            _void_p(_PLACEHOLDER),
            (_u64 * rank)(*map.dims),
            (_u64 * max(1, rank - 1))(*map.strides),
            *walk,
            (_uint * rank)(*steps),
            ctypes.c_int(interleave),
            *([ctypes.c_int(mode - 2)] if mode >= 2 else []),
            ctypes.c_int(swizzle),
            ctypes.c_int(l2),
            ctypes.c_int(fill),
        )
        return place

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launches on buffers at these addresses: arguments first, then results."""
        for buffer, offset, map in self._maps:
            self._driver.call("cuTensorMapReplaceAddress", map, _void_p(addresses[buffer] + offset))
        for buffer, offset, value in self._pointers:
            value.value = addresses[buffer] + offset
        self._driver.call("cuLaunchKernelEx", ctypes.byref(self._config), self._kernel, self._parameters, None)

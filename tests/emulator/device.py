"""A device that is none: cutjax's kernels, compiled to PTX, interpreted on the CPU.

    with device.emulated():
        call = kernel.call()              # a launch plan whose code is PTX
    device.execute(call, arrays, memory)  # as tests/gpu/launches.py: on_device

In the same block programs of jax.jit run as well: what backend="cuda" asks for, the rest by XLA on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np

from cutjax.binding import lowering
from cutjax.kernels import base, entry, gather
from cutjax.kernels.network import kernel as network
from cutjax.ops import cuda_launch
from cutjax.runtime import compiler
from cutjax.runtime.compiler import Cubin, Resources
from cutjax.runtime.launch import Call, Float32, Float64, Int32, Int64, Launch, Pointer
from cutjax.runtime.tensor_map import ELEMENTS, Im2col, TensorMap, bits_of
from emulator import ptx
from emulator.storage import Unsupported

_NATIVE = pathlib.Path(__file__).parent / "native"
_FLAGS = ("-std=c++20", "-O2", "-ftree-vectorize", "-march=native", "-fPIC", "-Wall")
_COMPILING = base, gather, entry, network, compiler  # modules that compile kernels
_SPACE = 1 << 40  # buffer i begins at i + 1 of these: native/machine.h
_SWIZZLES = {0: 0, 32: 32, 64: 64, 128: 128}
SMS = 2  # of this device: few, so that blocks take several tiles
LIMIT = 20_000_000_000  # instructions of threads, after which a kernel counts as one that does not end


class Fault(RuntimeError):
    """A kernel did what it may not, or cannot go on; the message says where."""


class _Request(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_void_p),
        ("instructions", ctypes.c_int64),
        ("pool", ctypes.c_void_p),
        ("pooled", ctypes.c_int64),
        ("constants", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("constant_bytes", "register_bytes", "local_bytes", "shared_bytes")),
        ("shape", ctypes.c_void_p),
        ("params", ctypes.c_char_p),
        ("param_bytes", ctypes.c_int64),
        ("maps", ctypes.c_void_p),
        ("map_count", ctypes.c_int64),
        ("buffers", ctypes.c_void_p),
        ("buffer_bytes", ctypes.c_void_p),
        ("buffer_count", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("seed", "eagerness", "unwritten", "limit")),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The interpreter, compiled by g++ once for its text: each file by itself, in a folder of temporary files."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"cutjax-emulator-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    header, objects = (_NATIVE / "machine.h").read_bytes(), []
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers wait for what one of them compiles
        for path in sorted(_NATIVE.glob("*.cc")):
            objects.append(_made(folder, path.stem, ".o", header + path.read_bytes(), ["-c", str(path)]))
        names = "".join(map(str, objects)).encode()
        return ctypes.CDLL(str(_made(folder, "emulator", ".so", names, ["-shared", *map(str, objects)])))


def _made(folder: pathlib.Path, name: str, suffix: str, text: bytes, arguments: Sequence[str]) -> pathlib.Path:
    """Returns the file that g++ makes of arguments; its name has a hash of the text that they stand for."""
    path = folder / f"{name}-{hashlib.sha256(text + ' '.join(_FLAGS).encode()).hexdigest()[:16]}{suffix}"
    if not path.exists():
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        subprocess.run(["g++", *_FLAGS, *arguments, "-o", temporary], check=True, timeout=600)
        temporary.replace(path)
    return path


def compile_ptx(source: str, *, name: str, arch: str) -> Cubin:
    """Device text to PTX, in the place of `cutjax.runtime.compiler.compile_kernel`."""
    return _compiled(source, name, arch)


@functools.lru_cache(maxsize=256)
def _compiled(source: str, name: str, arch: str) -> Cubin:
    nvrtc = compiler._require_compiler().nvrtc
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
    options = (
        f"--gpu-architecture={arch.replace('sm_', 'compute_')}",
        "--std=c++17",
        "--device-as-default-execution-space",
    )
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    if int(status) != 0:
        raise compiler.CompileError(f"{name}: NVRTC cannot compile it", log=log.decode(), source=source)
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return Cubin(bytes(text).rstrip(b"\0"), Resources(0, 0, 0, 0, 0), "", 0.0, cached=False)


@functools.lru_cache(maxsize=64)
def decoded(text: bytes, entry: str, buffers: int) -> ptx.Kernel:
    """A kernel of PTX, whose module's variables are behind so many buffers."""
    opcode = library().emulator_opcode
    return ptx.parse(text.decode(), lambda name: opcode(name.encode()), (buffers + 1) * _SPACE, entry)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device with a seed.

    Attributes:
      seed: of the order of threads and of what is asynchronous.
      eagerness: 0 does what is asynchronous as late as can be; else one in so many is early.
      unwritten: whether reading shared memory that nobody has written is a fault.
      sms: on which a persistent grid's blocks are.
      limit: of instructions of threads.
    """

    seed: int = 0
    eagerness: int = 4
    unwritten: bool = True
    sms: int = SMS
    limit: int = LIMIT

    def launch(self, launch: Launch, buffers: Sequence[np.ndarray]) -> int:
        """Runs one kernel on arrays, which it changes; returns how many instructions of threads it took.

        Raises:
          Fault: where the kernel does what it may not, or does not end.
        """
        kernel = decoded(launch.cubin, launch.kernel, len(buffers))
        grid = launch.grid
        if launch.blocks_per_sm:
            size = launch.cluster[0]
            grid = (max(min(grid[0], launch.blocks_per_sm * self.sms // size * size), size), *grid[1:])
        arrays = [*buffers, np.frombuffer(bytearray(kernel.globals or b"\0"), np.uint8)]
        params, maps = _parameters(kernel, launch, arrays)
        shape = np.array([*grid, *launch.block, *launch.cluster], np.int64)
        pointers = np.array([x.ctypes.data for x in arrays], np.uint64)
        sizes = np.array([_whole(x.nbytes) for x in arrays], np.int64)
        request = _Request(
            kernel.code.ctypes.data,
            len(kernel.code),
            kernel.pool.ctypes.data,
            len(kernel.pool),
            kernel.constants,
            len(kernel.constants),
            kernel.register_bytes,
            kernel.local_bytes,
            kernel.shared_bytes + launch.shared_bytes,
            shape.ctypes.data,
            params,
            len(params),
            maps.ctypes.data,
            len(maps),
            pointers.ctypes.data,
            sizes.ctypes.data,
            len(arrays),
            self.seed,
            self.eagerness,
            int(self.unwritten),
            self.limit,
        )
        message, executed = ctypes.create_string_buffer(1 << 16), ctypes.c_int64()
        if library().emulator_run(ctypes.byref(request), message, ctypes.c_int64(1 << 16), ctypes.byref(executed)):
            raise Fault(f"{launch.kernel}: {_with_lines(message.value.decode(), kernel)}")
        return executed.value

    def execute(self, call: Call, arrays: Sequence[np.ndarray], memory: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results of a call's launches in the memory given for them: `launches.Execute` of tests/gpu."""
        packed = [_packed(x) for x in (*arrays, *memory)]
        words = [np.append(x.reshape(-1).view(np.uint8), _behind(x)) for x in packed]
        given = [raw[: x.nbytes].view(x.dtype).reshape(x.shape) for raw, x in zip(words, packed, strict=True)]
        for argument, result in call.aliases:
            given[argument] = given[len(arrays) + result]
        for launch in call.launches:
            self.launch(launch, given)
        if any((raw[x.nbytes :] != _behind(x)).any() for raw, x in zip(words, packed, strict=True)):
            raise Fault(
                f"{call.launches[-1].kernel}: what is behind an array, in its last word, is no more what it was"
            )
        return given[len(arrays) :]


def execute(call: Call, arrays: Sequence[np.ndarray], memory: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a call's launches, with seed 0."""
    return Machine().execute(call, arrays, memory)


@contextlib.contextmanager
def emulated(machine: Machine | None = None) -> Iterator[None]:
    """Compiles kernels to PTX in a ``with`` block; and programs of jax.jit run those that backend="cuda" asks for."""
    machine = machine or Machine()
    decide = lowering.decide

    def decided(primitive: Any, avals: Any, params: Any, *, platform: str, **how: Any) -> Any:
        platform = "cuda" if params["backend"] == "cuda" else platform
        return decide(primitive, avals, params, platform=platform, **how)

    def launched(called: Call, results: Sequence[jax.ShapeDtypeStruct], _: dict[str, str], *xs: jax.Array) -> Any:
        taken = called.prepare(xs) if called.prepare else xs
        orders = [lowering._orders(called.operand_orders, taken), lowering._orders(called.result_orders, results)]

        def run(*arrays: Any) -> list[np.ndarray]:
            given = [np.asarray(x).transpose(order) for x, order in zip(arrays, orders[0], strict=True)]
            shapes = [tuple(x.shape[i] for i in order) for x, order in zip(results, orders[1], strict=True)]
            memory = [poison(shape, x.dtype) for shape, x in zip(shapes, results, strict=True)]
            for argument, result in called.aliases:
                memory[result] = given[argument]
            got = machine.execute(called, given, memory)
            return [x.transpose(np.argsort(order)) for x, order in zip(got, orders[1], strict=True)]

        def kernel(*arrays: jax.Array) -> Any:
            return jax.pure_callback(run, list(results), *arrays)

        kernel.__name__ = "_".join(launch.kernel for launch in called.launches)  # which programs show
        written = jax.jit(kernel)(*taken)
        return called.finish(written, xs) if called.finish else written

    # Of `cutjax.cuda_kernel`, which looks into the code.
    patches = [mock.patch.object(cuda_launch.cubin, "kernels", _entries)]
    patches += [mock.patch.object(module, "compile_kernel", compile_ptx) for module in _COMPILING]
    patches += [
        mock.patch.object(lowering, "decide", _prepared(decided)),
        mock.patch.object(lowering, "launch", launched),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _entries(image: bytes) -> dict[str, None]:
    """The kernels of PTX, as `cutjax.runtime.cubin.kernels` has those of a cubin."""
    return dict.fromkeys(re.findall(r"\.entry\s+([$\w]+)", image.decode()))


def _prepared(decide: Any) -> Any:
    """A decision whose call goes through `lowering.launch`."""

    def decided(*args: Any, **how: Any) -> Any:
        decision = decide(*args, **how)
        if decision.choice is None or decision.runs in ("XLA", "error"):
            return decision
        return dataclasses.replace(decision, choice=_Choice(decision.choice))

    return decided


class _Choice:
    def __init__(self, choice: Any):
        self._choice = choice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._choice, name)

    def call(self) -> Call:
        call = self._choice.call()
        return call if call.prepare else dataclasses.replace(call, prepare=lambda arrays: list(arrays))


def _packed(x: np.ndarray) -> np.ndarray:
    """A copy of an array as it lies on a device: elements of 4 bits two to a byte, the first in the low half."""
    if x.dtype.itemsize > 1 or bits_of(x.dtype) == 8:
        return np.array(x, order="C", copy=True)
    if bits_of(x.dtype) != 4:
        raise ptx.Unsupported(f"arrays of {x.dtype}")
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8) & 15
    raw = np.append(raw, np.zeros(raw.size % 2, np.uint8))
    return raw[::2] | raw[1::2] << 4


def _whole(size: int) -> int:
    """Bytes of the words of 4 that an array lies in: kernels load those that have a byte of it."""
    return -(-size // 4) * 4


def _behind(x: np.ndarray) -> np.ndarray:
    """The bytes of its last word that are not the array's: of NaN."""
    return np.full(_whole(x.nbytes) - x.nbytes, 0xFF, np.uint8)


def poison(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """NaN; of integers the greatest, whose bytes are all ones but for a sign."""
    found = np.empty(shape, dtype)
    found.reshape(-1).view(np.uint8)[...] = 0xFF
    if np.issubdtype(found.dtype, np.signedinteger):
        found[...] = np.iinfo(dtype).max
    return found


def _parameters(kernel: ptx.Kernel, launch: Launch, arrays: Sequence[np.ndarray]) -> tuple[bytes, np.ndarray]:
    if len(kernel.params) != len(launch.params):
        raise ValueError(f"{kernel.name} has {len(kernel.params)} parameters, the launch {len(launch.params)}")
    size = max((at + size for at, size in kernel.params), default=0)
    data, maps = bytearray(size + 8), []
    for (at, size), param in zip(kernel.params, launch.params, strict=True):
        match param:
            case TensorMap():
                maps.append([at, *_map(param, arrays)])
                value = b"\xff" * 128
            case Pointer(buffer, byte_offset):
                value = ((buffer + 1) * _SPACE + byte_offset).to_bytes(8, "little")
            case Int32(number):
                value = (number & 0xFFFFFFFF).to_bytes(4, "little")
            case Int64(number):
                value = (number & (2**64 - 1)).to_bytes(8, "little")
            case Float32(number):
                value = np.float32(number).tobytes()
            case Float64(number):
                value = np.float64(number).tobytes()
        if len(value) != size:
            raise ValueError(f"{kernel.name}: the parameter at {at} has {size} bytes, the launch's {len(value)}")
        data[at : at + size] = value
    return bytes(data), np.array(maps or [[0]], np.int64)


def _map(param: TensorMap, arrays: Sequence[np.ndarray]) -> list[int]:
    """The fields of native/machine.h: TensorMap."""
    if param.swizzle not in _SWIZZLES:
        raise Unsupported(f"swizzle {param.swizzle}")
    rank, walk = len(param.dims), param.box
    kind = param.tma_dtype or 0
    bits = tuple(ELEMENTS.values())[kind]
    if bits < 8:
        raise Unsupported(f"a tensor map of elements of {bits} bits")
    steps = param.element_strides or (1,) * rank
    box = (walk.channels, walk.pixels) if isinstance(walk, Im2col) else walk
    lower, upper = (walk.lower, walk.upper) if isinstance(walk, Im2col) else ((), ())
    if isinstance(walk, Im2col) and walk.wide:
        raise Unsupported("wide im2col")

    def padded(values: Sequence[int], count: int = 5) -> list[int]:
        return [*values, *[0] * (count - len(values))]

    address = (param.buffer + 1) * _SPACE + param.byte_offset
    head = [address, bits // 8, rank, int(param.swizzle), int(isinstance(walk, Im2col)), param.interleave]
    head += [int(param.fill == "nan"), kind]
    sizes = [*padded(param.dims), *padded((bits // 8, *param.strides)), *padded(box), *padded(steps)]
    return [*head, *sizes, *padded(lower, 3), *padded(upper, 3)]


def _with_lines(message: str, kernel: ptx.Kernel) -> str:
    """The message with the text of the instructions that it names by number."""
    return re.sub(r"@(\d+)", lambda found: f"`{kernel.lines[int(found[1])]}` (instruction {found[1]})", message)

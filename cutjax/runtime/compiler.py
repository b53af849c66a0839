"""Device text to cubin: NVRTC, with a cache in memory and one on disk."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib
import math
import os
import re
import threading
import time
from typing import Any

from cutjax.runtime import disk_cache
from cutjax.runtime.settings import settings

_FORMAT = 1  # of a cache entry's metadata; part of the key
# By default NVRTC, 13.0 at least, takes generic lambdas in device functions for functions of the host.
_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--device-as-default-execution-space")
_MEMORY_ENTRIES = 256  # a cubin is some 50 KB
_INSTALL = 'pip install "cutjax[cuda13]"'


class CompilerMissing(ImportError):
    """NVRTC, or the Python packages that reach it, are not installed; the message says what to install."""


class CompileError(RuntimeError):
    """NVRTC rejected a kernel.

    Attributes:
      log: what the compiler said, with the places in the device text.
      source: the text it was given.
    """

    def __init__(self, message: str, *, log: str, source: str):
        super().__init__(f"{message}\n{log}")
        self._message = message
        self.log = log
        self.source = source

    def __reduce__(self):
        return functools.partial(type(self), log=self.log, source=self.source), (self._message,)


@dataclasses.dataclass(frozen=True)
class Resources:
    """The resources that ptxas says a kernel takes; None where its report does not say."""

    registers: int | None
    spill_store_bytes: int | None
    spill_load_bytes: int | None
    stack_bytes: int | None
    shared_bytes: int | None

    @classmethod
    def parse(cls, log: str) -> Resources:
        """Reads the report of ``ptxas -v``: the largest of its functions, and the sum of their spills."""
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        used = re.findall(r"Used (\d+) registers(.*)", log)
        shared = [sum(map(int, re.findall(r"(\d+)(?:\+\d+)? bytes smem", rest))) for _, rest in used]
        return cls(
            registers=max((int(count) for count, _ in used), default=None),
            spill_store_bytes=sum(int(frame[1]) for frame in frames) if frames else None,
            spill_load_bytes=sum(int(frame[2]) for frame in frames) if frames else None,
            stack_bytes=max((int(frame[0]) for frame in frames), default=None),
            shared_bytes=max(shared, default=None),
        )


@dataclasses.dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Attributes:
      image: the cubin.
      resources: registers, spills and memory.
      log: the compiler's log, warnings included.
      seconds: how long NVRTC took, when it ran.
      cached: whether it came from memory or disk and NVRTC did not run.
    """

    image: bytes = dataclasses.field(repr=False)
    resources: Resources
    log: str = dataclasses.field(repr=False)
    seconds: float
    cached: bool


@dataclasses.dataclass(frozen=True)
class _Compiler:
    nvrtc: Any  # the module cuda.bindings.nvrtc
    version: str


_memory: collections.OrderedDict[str, Cubin] = collections.OrderedDict()
_pending: dict[str, concurrent.futures.Future[Cubin]] = {}
_lock = threading.Lock()


def _begin_child() -> None:
    """A forked process has none of the threads that compiled, nor what they would have told it."""
    global _lock
    _lock = threading.Lock()
    _pending.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


def compile_kernel(source: str, *, name: str, arch: str) -> Cubin:
    """Compiles device text, or finds it compiled: in this process, then on disk.

    Any number of threads may call it; those that ask for the same kernel at once share one compilation.

    Args:
      source: CUDA C++ without ``#include``; ``#line`` directives name the places that errors show.
      name: the kernel's name, for messages and dumps.
      arch: e.g. "sm_90a".

    Raises:
      CompilerMissing: when there is no NVRTC.
      CompileError: when NVRTC rejects the text; carries its log.
    """
    compiler = _require_compiler()
    key = _key(compiler.version, arch, name, source)
    with _lock:
        if cubin := _memory.get(key):
            _memory.move_to_end(key)
            return dataclasses.replace(cubin, cached=True)
        future = _pending.get(key)
        mine = future is None
        if future is None:
            future = _pending[key] = concurrent.futures.Future()
    if not mine:
        return future.result()
    try:
        cubin = _find_or_compile(compiler, key, source, name, arch)
    except BaseException as error:
        with _lock:
            del _pending[key]
        future.set_exception(error)
        raise
    with _lock:
        _memory[key] = cubin
        while len(_memory) > _MEMORY_ENTRIES:
            _memory.popitem(last=False)
        del _pending[key]
    future.set_result(cubin)
    return cubin


def compile_source(source: str, *, name: str, arch: str) -> Cubin:
    """Runs NVRTC whatever the caches hold, and keeps nothing; else as `compile_kernel` (for tests and benchmarks)."""
    return _run_nvrtc(_require_compiler().nvrtc, source, name, arch)


def compiler_missing() -> str | None:
    """Returns the reason why nothing can be compiled here, and what to install, or None. Looks once a process."""
    compiler = _compiler()
    return compiler if isinstance(compiler, str) else None


def clear_memory() -> None:
    """Forgets the kernels in memory and whether NVRTC is installed; what is on disk stays (for tests and tools)."""
    with _lock:
        _memory.clear()
    _compiler.cache_clear()


@functools.cache
def _compiler() -> _Compiler | str:
    """Returns NVRTC, or why there is none.

    Through cuda.bindings, not cuda.core: it imports in 20 ms instead of 260 and has had one API since 12.6.
    """
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        return f"cutjax compiles its kernels with NVRTC, which needs a Python package ({error}): {_INSTALL}"
    try:
        library = pathfinder.load_nvidia_dynamic_lib("nvrtc")
        status, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:  # pathfinder's own errors are RuntimeErrors
        detail = " ".join(str(error).split())[:300]
        return f"cutjax compiles its kernels with NVRTC, and its library cannot be loaded: {_INSTALL} ({detail})"
    if int(status) != 0 or major < 12:
        return f"cutjax needs NVRTC 12 or newer and found {major}.{minor} at {library.abs_path}: {_INSTALL}"
    # nvrtcVersion does not know the update (13.0.48 or 13.0.88), and two of them may generate different code.
    size = os.path.getsize(library.abs_path) if library.abs_path else 0
    return _Compiler(nvrtc, f"{major}.{minor}-{size}")


def _require_compiler() -> _Compiler:
    compiler = _compiler()
    if isinstance(compiler, str):
        raise CompilerMissing(compiler)
    return compiler


def _key(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in (str(_FORMAT), *_OPTIONS, *parts):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _find_or_compile(compiler: _Compiler, key: str, source: str, name: str, arch: str) -> Cubin:
    disk = disk_cache.of_settings()
    cubin: Cubin | None = disk.read(key, _of_entry) if disk else None
    if cubin is None:
        try:
            cubin = _run_nvrtc(compiler.nvrtc, source, name, arch)
        except CompileError as error:
            _dump(name, {"cu": source.encode(), "txt": str(error).encode()})
            raise
        if disk:
            disk.write(key, _metadata(cubin), cubin.image)
    if settings().dump_dir:
        report = [f"{name} for {arch}, NVRTC {compiler.version}, {' '.join(_OPTIONS)}, {cubin.seconds:.3f} s"]
        report += [f"{field}: {value}" for field, value in dataclasses.asdict(cubin.resources).items()]
        report += ["", cubin.log, ""]
        _dump(name, {"cu": source.encode(), "cubin": cubin.image, "txt": "\n".join(report).encode()})
    return cubin


def _metadata(cubin: Cubin) -> dict[str, Any]:
    return {"resources": dataclasses.asdict(cubin.resources), "log": cubin.log, "seconds": cubin.seconds}


def _of_entry(metadata: Any, image: bytes) -> Cubin | None:
    """Returns the cubin whose `_metadata` this is, or None: another version's fields or types count as damage."""
    match metadata:
        case {"resources": dict() as resources, "log": str() as log, "seconds": float() as seconds, **more} if not more:
            pass
        case _:
            return None
    known = {field.name for field in dataclasses.fields(Resources)}
    # Of type int alone: True is an instance of it.
    counts = all(value is None or (type(value) is int and value >= 0) for value in resources.values())
    try:
        log.encode()  # JSON can hold half of a surrogate pair, which no file can
    except UnicodeEncodeError:
        return None
    if resources.keys() != known or not counts or not 0 <= seconds < math.inf or not image.startswith(b"\x7fELF"):
        return None
    return Cubin(image, Resources(**resources), log, seconds, cached=True)


def description() -> str:
    """Returns the compiler and its cache folder, or why there is no compiler, for a person to read."""
    compiler = _compiler()
    if isinstance(compiler, str):
        return compiler
    cache = settings().cache_dir or disk_cache.user_folder() if settings().cache_bytes else "off"
    return f"NVRTC {compiler.version.partition('-')[0]}, kernel cache {cache}"


def _run_nvrtc(nvrtc: Any, source: str, name: str, arch: str, *, extra: tuple[str, ...] = ()) -> Cubin:
    def call(function: Any, *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if int(status) != 0:
            text = nvrtc.nvrtcGetErrorString(status)[1].decode()
            raise CompileError(f"{name}: {function.__name__} failed: {text}", log="", source=source)
        return values[0] if values else None

    def read(get_size: Any, get: Any) -> bytes:
        data = bytearray(call(get_size, program))
        call(get, program, data)
        return bytes(data)

    start = time.perf_counter()
    program = call(nvrtc.nvrtcCreateProgram, source.encode(), f"{name}.cu".encode(), 0, [], [])
    try:
        options = [option.encode() for option in (f"--gpu-architecture={arch}", *_OPTIONS, *extra)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace").rstrip("\0 \n")
        if int(status) != 0:
            if "ptx input, line" in log:  # an error in inline PTX: only line information leads back to the source
                if not extra:
                    return _run_nvrtc(nvrtc, source, name, arch, extra=("--generate-line-info",))
                log = _with_places(log, read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode(errors="replace"))
            text = nvrtc.nvrtcGetErrorString(status)[1].decode()
            raise CompileError(f"{name}: NVRTC cannot compile it for {arch}: {text}", log=log, source=source)
        image = read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(image, Resources.parse(log), log, time.perf_counter() - start, cached=False)


def _with_places(log: str, ptx: str) -> str:
    """Adds to each of the log's lines about PTX the instruction it means and its place in the source."""
    lines = ptx.splitlines()
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "(?:.*/)?([^"]*)"', ptx, re.MULTILINE))

    def place(match: re.Match[str]) -> str:
        above = lines[: int(match[1])]
        locations = re.findall(r"^\s*\.loc\s+(\d+) (\d+)", "\n".join(above), re.MULTILINE)
        if not locations:
            return match[0]
        file, line = locations[-1]
        return f"{files.get(file, '?')}({line}): `{above[-1].strip()}`: {match[0]}"

    return re.sub(r"^ptxas .*ptx input, line (\d+);.*$", place, log, flags=re.MULTILINE)


def _dump(name: str, files: dict[str, bytes]) -> None:
    """Writes a kernel's source, cubin and report to CUTJAX_DUMP_DIR, ready for cuobjdump and nvdisasm."""
    folder = settings().dump_dir
    if folder is None:
        return
    stem = re.sub(r"[^\w.+-]", "_", name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, data in files.items():
            temporary = folder / f"{stem}.{suffix}.{os.getpid()}.{threading.get_ident()}.tmp"
            temporary.write_bytes(data)
            temporary.replace(folder / f"{stem}.{suffix}")
    except OSError as error:
        disk_cache.warn_once(folder, f"cutjax: CUTJAX_DUMP_DIR={folder} cannot be written: {error}")

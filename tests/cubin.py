"""Checks of compiled kernels."""

from __future__ import annotations

import collections
import functools
import itertools
import pathlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import cutjax
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler


def code(image: bytes) -> bytes:
    """The instructions, 16 bytes each: the sections .text* of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    # Of each section: where its name is, ..., where it lies, how long it is.
    sections = [struct.unpack_from("<I20xQQ", image, table + i * size) for i in range(count)]
    at = sections[names][1]
    return b"".join(
        image[first : first + length] for name, first, length in sections if image[at + name :].startswith(b".text")
    )


def code_bytes(image: bytes) -> int:
    """Bytes of instructions."""
    return len(code(image))


@functools.cache
def nvdisasm() -> str | None:
    """The disassembler of nvidia-cuda-nvdisasm; None where that is not installed."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or ()
    except metadata.PackageNotFoundError:
        return None
    return next((str(pathlib.Path(f.locate())) for f in files if f.name == "nvdisasm"), None)


def _disassembled(data: bytes, *flags: str) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        command = [str(nvdisasm()), *flags, "-ndf", file.name]  # no analysis of branches: a quarter of the time
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassembly(image: bytes) -> str:
    """The machine code of a cubin as text."""
    return _disassembled(image, "-c")


def _opcodes(text: str) -> list[str]:
    return re.findall(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)


def instructions(image: bytes) -> collections.Counter[str]:
    """Counts each opcode of a cubin, with its modifiers."""
    return collections.Counter(_opcodes(disassembly(image)))


def instructions_of_all(images: Sequence[bytes], arch: str) -> list[collections.Counter[str]]:
    """Counts those of each cubin of an architecture: nvdisasm takes longer to start than to read one."""
    codes = [code(image) for image in images]
    opcodes = iter(_opcodes(_disassembled(b"".join(codes), "-b", arch.upper().replace("_", "").replace("A", "a"))))
    found = [collections.Counter(itertools.islice(opcodes, len(each) // 16)) for each in codes]
    assert next(opcodes, None) is None
    return found


def multiplies(opcode: str) -> bool:
    """True if an instruction multiplies matrices, or floats of 32 or 64 bits. HFMA2.MMA moves constants."""
    return opcode.split(".")[0].endswith(("MMA", "FFMA", "DFMA"))


def telling(configs: Sequence[cutjax.Config], every: int) -> list[cutjax.Config]:
    """All that are neither swapped nor divide k; of others, which are many, the widest of each kind and some more."""

    def kind(config: cutjax.Config) -> tuple:
        return config.schedule, config.bm, config.swap, config.stream_k, config.cluster_k, config.splits > 1

    alone = [config for config in configs if not (config.swap or config.stream_k or config.parts > 1)]
    others = [config for config in configs if config not in set(alone)]
    widest = {kind(config): config for config in sorted(others, key=lambda config: config.bn)}
    return list(dict.fromkeys([*alone, *widest.values(), *others[::every]]))


def in_turns(configs: Sequence[Any], turn: int, every: int) -> list[Any]:
    """One of so many, others in the next turn, and one with the most accumulators, which is the first to spill.

    `python -m tests.compile_all` compiles all; here half of the tiles are compiled in some plain product, and each
    epilogue and layout has a turn.
    """
    most = max(configs, key=lambda config: config.accumulator_registers)
    return list(dict.fromkeys([most, *configs[turn % every :: every]]))


def check_lean(asked: cutjax.Problem, configs: Sequence[cutjax.Config], most_bytes: int, most_spilled: int = 0) -> None:
    """Asserts that kernels compile without a warning, to no more code than that, and spill no more bytes in a thread.

    Code is what compiling takes time for, 0.1 s for 20 KB and more for very long functions, and it is the same on every
    machine; benchmarks/ops/compile_cost.py measures the seconds.
    """

    def compile_one(config: cutjax.Config) -> tuple[str, compiler.Cubin]:
        kernel = sm90.resolved(asked, config)
        return kernel.name, compiler.compile_kernel(kernel.source, name=kernel.name, arch=asked.arch)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(compile_one, configs))
    for name, cubin in results:
        # ptxas says so where a wgmma must wait for the one before: half the speed.
        assert not re.search("warning|Performance Loss|injected", cubin.log), f"{name}: {cubin.log}"
        resources = cubin.resources
        spilled = [resources.spill_store_bytes, resources.spill_load_bytes]
        assert None not in spilled, cubin.log
        assert max(spilled) <= most_spilled, f"{name}: {resources}"
        assert code_bytes(cubin.image) <= most_bytes, f"{name}: {code_bytes(cubin.image)} bytes of code"

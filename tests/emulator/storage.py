"""The places of registers, constants, variables and parameters of a kernel in PTX."""

from __future__ import annotations

import dataclasses
import re
import struct
from typing import Any

# Registers that a warp begins with, in the order of native/schedule.cc (set_special). The last says where shared memory
# is.
SPECIAL = (
    *(f"{name}.{axis}" for name in ("%tid", "%ntid", "%ctaid", "%nctaid") for axis in "xyz"),
    *("%laneid", "%warpid", "%cluster_ctarank", "%cluster_nctarank"),
    *(f"%cluster_ctaid.{axis}" for axis in "xyz"),
    *(f"%cluster_nctaid.{axis}" for axis in "xyz"),
    *(f"%clusterid.{axis}" for axis in "xyz"),
    *(f"%nclusterid.{axis}" for axis in "xyz"),
    *(f"%lanemask_{name}" for name in ("eq", "lt", "le", "ge", "gt")),
    *("%dynamic_smem_size", "%smid", "%gridid", "shared memory"),
)
LANES = 32
WIDE = 8 * LANES  # bytes of a register of 64 bits in a warp
CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
SPACES = {"": 0, "global": 1, "shared": 2, "shared::cta": 2, "shared::cluster": 3, "local": 4, "param": 5, "const": 1}
BITS = (
    {"pred": 1} | {f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)} | {"f16x2": 32, "bf16x2": 32}
)
BITS |= {"bf16": 16, "tf32": 32, "f16": 16, "e4m3x2": 16, "e5m2x2": 16}
ELEMENTS = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4, "s8": 5, "u8": 6}  # native/wgmma.cc: Kind


class Unsupported(NotImplementedError):
    """PTX that the emulator does not know."""


CALL = re.compile(r"\bcall(?:\.uni)?\s*(?:\(([^)]*)\)\s*,)?\s*([$\w]+)\s*(?:,\s*\(([^)]*)\))?\s*;")
_FUNCTION = re.compile(r"\.func\s*(?:\((.*?)\))?\s*([$\w]+)\s*\(([^)]*)\)\s*\{", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Address:
    """The operand ``[base + displacement]``; of a tensor, with coordinates."""

    base: str
    displacement: int
    coordinates: tuple[str, ...] = ()


class Storage:
    """The places of operands, of a kernel's declarations.

    Args:
      text: PTX.
      found: the kernel's entry in it.
      globals_at: the address of the module's variables.
    """

    def __init__(self, text: str, found: re.Match[str], globals_at: int):
        self.registers: dict[str, tuple[int, int]] = {}  # place, counted from the end of the constants, and bits
        self.locals: set[str] = set()  # variables in local memory
        self._symbols: dict[str, int] = {}  # of variables and parameters: their addresses
        self._of_shared: dict[str, int] = {}  # of variables in shared memory: their places
        self._constants: dict[tuple[int, int], int] = {}
        self._constant_data = bytearray(4 * LANES * len(SPECIAL))
        self._used, self._local, self._shared = 0, 0, 0
        self._dynamic = "", 1  # the name of dynamic shared memory, which begins where static ends, and its alignment
        self._globals = self._variables(text[: found.start()], globals_at)
        self._params = self._parameters(found[2])
        self._functions = {found[2]: found for found in _FUNCTION.finditer(text)}
        for name, function in self._functions.items():
            self._declare_function(name, function)

    def _variables(self, text: str, globals_at: int) -> bytes:
        data = bytearray()
        pattern = r"(?<!\.extern )\.(global|const|shared)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([$\w]+)"
        pattern += r"(?:\[(\d*)\])?\s*(?:=\s*([^;]*))?;"
        for space, align, kind, name, count, values in re.findall(pattern, text):
            size, alignment = BITS[kind] // 8, int(align or 1)
            number = int(count or 1)
            if space == "shared":
                self._place_shared(name, size * number, alignment)
                continue
            data += bytes(-len(data) % alignment)
            self._symbols[name] = globals_at + len(data)
            given = re.findall(r"[^\s,{}]+", values)
            raw = b"".join(_immediate(x, kind).to_bytes(8, "little")[:size] for x in given)
            data += raw.ljust(size * number, b"\0")
        for align, name in re.findall(r"\.extern\s+\.shared\s+\.align\s+(\d+)\s+\.\w+\s+([$\w]+)\[\]", text):
            self._dynamic = name, int(align)
        return bytes(data)

    def _place_shared(self, name: str, size: int, alignment: int) -> None:
        self._shared += -self._shared % alignment
        self._of_shared[name] = self._shared
        self._shared += size

    def _parameters(self, text: str) -> tuple[tuple[int, int], ...]:
        found, at = [], 0
        pattern = r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.(?!align)\w+\s+)?(?:\.align\s+\d+\s+)?)?"
        pattern += r"([$\w]+)(?:\[(\d+)\])?"
        for align, kind, name, count in re.findall(pattern, text):
            size = BITS[kind] // 8 * int(count or 1)
            at += -at % int(align or BITS[kind] // 8)
            self._symbols[name] = at
            found.append((at, size))
            at += size
        return tuple(found)

    def _declare_function(self, name: str, found: re.Match[str]) -> None:
        """Gives arguments and results of a function a place in local memory, one, since none calls itself."""
        self.registers[f"return {name}"] = (self._used, 32)
        self._used += 4 * LANES
        for text in [x for part in (found[1], found[3]) if part for x in part.split(",") if x.strip()]:
            self._declare(text.strip().replace("func_retval0", f"func_retval0 {name}").replace(".param", ".local"), {})

    def _called(self, text: str) -> dict[str, str]:
        """Returns the names in a sequence that calls a function: what its arguments and results are in the function."""
        if not (found := CALL.search(text)):
            return {}
        names = dict.fromkeys(re.findall(r"[$\w]+", found[1] or ""), f"func_retval0 {found[2]}")
        params = re.findall(r"\.param[^,]*?([$\w]+)(?:\[\d+\])?\s*(?:,|$)", self._functions[found[2]][3])
        return names | dict(zip(re.findall(r"[$\w]+", found[3] or ""), params, strict=True))

    def _declare(self, text: str, scope: dict[str, str]) -> None:
        words = text.split(None, 2)
        if words[0] == ".reg":
            bits = 32 if BITS[words[1][1:]] < 64 else 64
            for name in words[2].split(","):
                name = name.strip()
                many = re.fullmatch(r"(.*)<(\d+)>", name)
                for own in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                    unique = own if own not in self.registers else f"{own} {len(self.registers)}"
                    scope[own] = unique
                    self.registers[unique] = (self._used, bits)
                    self._used += bits // 8 * LANES
        elif words[0] in (".local", ".shared"):
            found = re.match(r"\.(local|shared)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([$\w ]+)(?:\[(\d+)\])?", text)
            assert found, text
            size = BITS[found[3]] // 8
            alignment, size = int(found[2] or size), size * int(found[5] or 1)
            if found[1] == "shared":
                self._place_shared(found[4], size, alignment)
            else:
                self._local += -self._local % alignment
                self._symbols[found[4]] = self._local
                self.locals.add(found[4])
                self._local += size
        elif words[0] != ".param":  # of a call: `_called`
            raise Unsupported(text)

    def _temporary(self) -> str:
        name = f"temporary {len(self.registers)}"
        self.registers[name] = (self._used, 32)
        self._used += 4 * LANES
        return name

    def bits(self, name: str) -> int:
        """Returns the bits of a register, 64 of what is none."""
        return self.registers[name][1] if name in self.registers else 64

    def place(self, operand: Any, bits: int) -> Any:
        """Returns the place of a register, or of a constant in a register of so many bits; -1 for none."""
        if operand == "_":
            return -1
        if operand in self.registers:
            if (self.bits(operand) == 64) != (bits == 64):
                raise Unsupported(f"the register {operand} of {self.bits(operand)} bits")
            return ("register", operand)
        if operand in SPECIAL:
            return SPECIAL.index(operand) * 4 * LANES
        if operand == "WARP_SZ":
            return self.constant(32, bits)
        symbol, _, more = operand.partition("+")
        if symbol in self._symbols:
            return self.constant(self._symbols[symbol] + int(more or "0", 0), bits)
        return self.constant(_immediate(operand, "b64"), bits)

    def constant(self, value: int, bits: int) -> int:
        """Returns the place of a constant."""
        size = 8 if bits == 64 else 4
        value &= (1 << 8 * size) - 1
        at = self._constants.get((value, size))
        if at is None:
            at = self._constants[value, size] = len(self._constant_data)
            self._constant_data += value.to_bytes(size, "little") * LANES
        return at

    def shared(self, operand: str) -> Any:
        """Returns a place in shared memory, counted from its begin; None where the name is of none."""
        symbol, _, more = operand.partition("+")
        if symbol == self._dynamic[0]:
            return ("dynamic", int(more or "0", 0))
        return self._of_shared[symbol] + int(more or "0", 0) if symbol in self._of_shared else None


def _immediate(text: str, kind: str) -> int:
    """Returns the bits of a literal."""
    if text[:2] in ("0f", "0F"):
        return int(text[2:], 16)
    if text[:2] in ("0d", "0D"):
        return int(text[2:], 16)
    if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
        return struct.unpack("<I", struct.pack("<f", float(text)))[0]
    try:
        return int(text.rstrip("U"), 0) & (2**64 - 1)
    except ValueError:
        raise Unsupported(f"the operand {text!r}") from None

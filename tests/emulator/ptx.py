"""PTX to the instructions that native/machine.h runs: registers become places, names an opcode and its modifiers."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

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
_WIDE = 8 * LANES  # bytes of a register of 64 bits in a warp
_CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
_SPACES = {"": 0, "global": 1, "shared": 2, "shared::cta": 2, "shared::cluster": 3, "local": 4, "param": 5, "const": 1}
_BITS = (
    {"pred": 1} | {f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)} | {"f16x2": 32, "bf16x2": 32}
)
_BITS |= {"bf16": 16, "tf32": 32, "f16": 16, "e4m3x2": 16, "e5m2x2": 16}
_ELEMENTS = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4, "s8": 5, "u8": 6}  # native/wgmma.cc: Kind


class Unsupported(NotImplementedError):
    """PTX that the emulator does not know."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, decoded.

    Attributes:
      name: its entry.
      code: ``int64[instructions, 10]``: opcode, guard, whether that is negated, begin and count of its operands in
        ``pool``, five modifiers.
      pool: places of registers, in bytes.
      constants: the first bytes of a warp's registers.
      register_bytes, local_bytes: of a warp, and of a thread.
      shared_bytes: of static shared memory.
      params: offset and size of each parameter.
      globals: the initial bytes of the module's variables, which are one buffer behind those of the launch.
      lines: the text of each instruction.
    """

    name: str
    code: np.ndarray
    pool: np.ndarray
    constants: bytes
    register_bytes: int
    local_bytes: int
    shared_bytes: int
    params: tuple[tuple[int, int], ...]
    globals: bytes
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Address:
    """The operand ``[base + displacement]``; of a tensor, with coordinates."""

    base: str
    displacement: int
    coordinates: tuple[str, ...] = ()


_TOKEN = re.compile(r"\s*(?:(\{)|(\})|([$\w]+)\s*:(?!:)|([^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)")
_FUNCTION = re.compile(r"\.func\s*(?:\((.*?)\))?\s*([$\w]+)\s*\(([^)]*)\)\s*\{", re.DOTALL)
_CALL = re.compile(r"\bcall(?:\.uni)?\s*(?:\(([^)]*)\)\s*,)?\s*([$\w]+)\s*(?:,\s*\(([^)]*)\))?\s*;")
_PARTS = re.compile(r"(?:@(!?)([$%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\s*\{[^}]*\}|\s*\[[^\]]*\]|[^,]+")


def parse(text: str, opcode: Callable[[str], int], globals_at: int, entry: str = "") -> Kernel:
    """Decodes a kernel.

    Args:
      text: of PTX with one entry, or several.
      opcode: gives an instruction's number by its name in the emulator's table, or -1.
      globals_at: the address of the module's variables.
      entry: which kernel, where there are several.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*\.(?:loc|file|pragma)[^\n]*", "", text, flags=re.MULTILINE)
    for found in re.finditer(r"\.entry\s+([$\w]+)\s*\((.*?)\)([^{]*)\{", text, re.DOTALL):
        if not entry or found[1] == entry:
            return _Decoder(text, found, opcode, globals_at).kernel()
    raise Unsupported(f"no entry {entry}")


class _Decoder:
    def __init__(self, text: str, found: re.Match[str], opcode: Callable[[str], int], globals_at: int):
        self._name, self._opcode = found[1], opcode
        self._symbols: dict[str, int] = {}  # of variables and parameters: their addresses
        self._of_shared: dict[str, int] = {}  # of variables in shared memory: their places
        self.locals: set[str] = set()  # those in local memory
        self._constants: dict[tuple[int, int], int] = {}
        self._constant_data = bytearray(4 * LANES * len(SPECIAL))
        self.registers: dict[str, tuple[int, int]] = {}  # place, counted from the end of the constants, and bits
        self._before: list[tuple[str, list[Any]]] = []
        self._after: list[tuple[str, list[Any]]] = []
        self._used, self._local, self._shared = 0, 0, 0
        self._dynamic = "", 1  # the name of dynamic shared memory, which begins where static ends, and its alignment
        self._rows: list[tuple[int, Any, bool, list[Any], list[int], str]] = []
        self._labels: dict[str, int] = {}
        self._tables: dict[str, list[str]] = {}
        self._names: dict[str, int] = {}
        self._globals = self._variables(text[: found.start()], globals_at)
        self._params = self._parameters(found[2])
        self.function = ""  # whose body is decoded; "" is the kernel's
        self._functions = {found[2]: found for found in _FUNCTION.finditer(text)}
        for name, function in self._functions.items():
            self._declare_function(name, function)
        self._body(text, found.end(), {})
        for name, function in self._functions.items():
            self.function = name
            self._labels[f"function {name}"] = len(self._rows)
            self._body(text, function.end(), {"func_retval0": f"func_retval0 {name}"})

    # ---- declarations ----

    def _variables(self, text: str, globals_at: int) -> bytes:
        data = bytearray()
        pattern = r"(?<!\.extern )\.(global|const|shared)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([$\w]+)"
        pattern += r"(?:\[(\d*)\])?\s*(?:=\s*([^;]*))?;"
        for space, align, kind, name, count, values in re.findall(pattern, text):
            size, alignment = _BITS[kind] // 8, int(align or 1)
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
        pattern = r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?"
        pattern += r"([$\w]+)(?:\[(\d+)\])?"
        for align, kind, name, count in re.findall(pattern, text):
            size = _BITS[kind] // 8 * int(count or 1)
            at += -at % int(align or _BITS[kind] // 8)
            self._symbols[name] = at
            found.append((at, size))
            at += size
        return tuple(found)

    def _declare_function(self, name: str, found: re.Match[str]) -> None:
        """What a function takes and returns lies in local memory, at one place: none calls itself."""
        self.registers[f"return {name}"] = (self._used, 32)
        self._used += 4 * LANES
        for text in [x for part in (found[1], found[3]) if part for x in part.split(",") if x.strip()]:
            self._declare(text.strip().replace("func_retval0", f"func_retval0 {name}").replace(".param", ".local"), {})

    def _called(self, text: str) -> dict[str, str]:
        """Returns the names in a sequence that calls a function: what its arguments and results are in the function."""
        if not (found := _CALL.search(text)):
            return {}
        names = dict.fromkeys(re.findall(r"[$\w]+", found[1] or ""), f"func_retval0 {found[2]}")
        params = re.findall(r"\.param[^,]*?([$\w]+)(?:\[\d+\])?\s*(?:,|$)", self._functions[found[2]][3])
        return names | dict(zip(re.findall(r"[$\w]+", found[3] or ""), params, strict=True))

    def _declare(self, text: str, scope: dict[str, str]) -> None:
        words = text.split(None, 2)
        if words[0] == ".reg":
            bits = 32 if _BITS[words[1][1:]] < 64 else 64
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
            size = _BITS[found[3]] // 8
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

    # ---- the body ----

    def _body(self, text: str, at: int, names: dict[str, str]) -> None:
        scopes: list[dict[str, str]] = [names]
        labels: list[dict[str, str]] = [{}]
        while True:
            token = _TOKEN.match(text, at)
            assert token, text[at : at + 100]
            at = token.end()
            if token[1]:
                inner = text[at : _end_of_scope(text, at)]
                scopes.append({**scopes[-1], **self._called(inner)})
                own = re.findall(r"(?:^|[;\n{])\s*(\w+)\s*:(?!:)", inner)
                labels.append({**labels[-1], **{name: f"{name} {at}" for name in own}})
            elif token[2]:
                scopes.pop(), labels.pop()
                if not scopes:
                    break
            elif token[3]:
                if text[at:].lstrip().startswith(".branchtargets"):
                    end = text.index(";", at)
                    self._tables[token[3]] = [x.strip() for x in text[at:end].split(".branchtargets")[1].split(",")]
                    at = end + 1
                else:
                    self._labels[labels[-1].get(token[3], token[3])] = len(self._rows)
            elif statement := token[4].strip():
                if statement.startswith("."):
                    self._declare(statement, scopes[-1])
                else:
                    self._statement(statement, scopes[-1], labels[-1])

    def _statement(self, text: str, scope: dict[str, str], labels: dict[str, str]) -> None:
        found = _PARTS.fullmatch(text)
        assert found, text
        negated, guard, name, rest = found[1] == "!", found[2], found[3], found[4]
        call = _CALL.match(text + ";")
        operands = [call[2]] if call else [self._operand(x.strip(), scope) for x in _OPERAND.findall(rest)]
        if name.startswith("bra") and name.split(".")[0] in ("bra", "brx"):
            operands = [labels.get(x, x) if isinstance(x, str) else x for x in operands]
        self._add(name, operands, scope.get(guard, guard) if guard else None, negated, text)

    def _operand(self, text: str, scope: dict[str, str]) -> Any:
        def one(name: str) -> str:
            name = name.strip()
            return scope.get(name, name)

        if text.startswith("{"):
            return [one(x) for x in text[1:-1].split(",")]
        if text.startswith("["):
            inner = text[1:-1]
            coordinates: tuple[str, ...] = ()
            if "{" in inner:
                inner, _, more = inner.partition(",")
                coordinates = tuple(one(x) for x in more.strip()[1:-1].split(","))
            base, _, displacement = inner.partition("+")
            return Address(one(base), int(displacement or "0", 0), coordinates)
        if "|" in text:
            return [one(x) for x in text.split("|")]
        if text.startswith("!"):
            return "!" + one(text[1:])
        return one(text)

    def _add(self, name: str, operands: list[Any], guard: str | None, negated: bool, text: str) -> None:
        from emulator import names

        self._before, self._after = [], []
        try:
            canonical, flat, modifiers = names.canonical(self, name, operands)
        except Unsupported as error:
            raise Unsupported(f"{self._name}: {text!r}: {error}") from None
        before, after = self._before, self._after
        for conversion in before:
            self._add(*conversion, guard, negated, text)
        number = self._names.get(canonical)
        if number is None:
            number = self._names[canonical] = self._opcode(canonical)
            if number < 0:
                raise Unsupported(f"{self._name}: {text!r} ({canonical})")
        self._rows.append((number, guard, negated, flat, modifiers, text))
        for conversion in after:
            self._add(*conversion, guard, negated, text)

    def _temporary(self) -> str:
        name = f"temporary {len(self.registers)}"
        self.registers[name] = (self._used, 32)
        self._used += 4 * LANES
        return name

    def before(self, name: str, source: str) -> str:
        """Converts an operand of an instruction before it; returns the register of 32 bits that has it then."""
        found = self._temporary()
        self._before.append((name, [found, source]))
        return found

    def after(self, name: str, to: str) -> str:
        """Converts the result of an instruction behind it; returns the register of 32 bits that it is to go to."""
        found = self._temporary()
        self._after.append((name, [to, found]))
        return found

    # ---- operands ----

    def bits(self, name: str) -> int:
        """Returns the bits of a register, 64 of what is none."""
        return self.registers[name][1] if name in self.registers else 64

    def place(self, operand: Any, bits: int) -> Any:
        """Returns what stands for a register, or for a constant in a register of so many bits; -1 for none."""
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

    def label(self, name: str) -> Any:
        """Returns what stands for the number of the instruction at a label."""
        return ("label", name)

    def targets(self, name: str) -> list[Any]:
        """Returns those of a table of labels."""
        return [("label", x) for x in self._tables[name]]

    def shared(self, operand: str) -> Any:
        """Returns what stands for a place in shared memory, counted from its begin; None where the name is of none."""
        symbol, _, more = operand.partition("+")
        if symbol == self._dynamic[0]:
            return ("dynamic", int(more or "0", 0))
        return self._of_shared[symbol] + int(more or "0", 0) if symbol in self._of_shared else None

    def kernel(self) -> Kernel:
        self._shared += -self._shared % self._dynamic[1]

        def resolved(x: Any) -> int:
            if not isinstance(x, tuple):
                return x
            if x[0] == "dynamic":
                return self._shared + x[1]
            if x[0] == "constant":
                return self.constant(resolved(x[1]), x[2])
            if x[0] == "label":
                return self._labels[x[1]]
            return -2 - self.registers[x[1]][0]  # a place behind the constants, whose number is not known yet

        pool: list[int] = []
        code = np.zeros((len(self._rows) + 1, 10), np.int64)
        for at, (number, guard, negated, flat, modifiers, _) in enumerate(self._rows):
            begin = len(pool)
            pool += map(resolved, flat)
            row = [number, -1 if guard is None else resolved(("register", guard)), negated, begin, len(flat)]
            code[at, : len(row)] = row
            code[at, 5 : 5 + len(modifiers)] = [resolved(x) for x in modifiers]
        code[-1, 0], code[-1, 1] = self._opcode("ret"), -1
        base = len(self._constant_data)
        places = np.array(pool or [0], np.int32)
        places = np.where(places < -1, base - 2 - places, places).astype(np.int32)
        code[:, 1] = np.where(code[:, 1] < -1, base - 2 - code[:, 1], code[:, 1])
        lines = (*(re.sub(r"\s+", " ", row[5])[:200] for row in self._rows), "ret")
        return Kernel(
            self._name,
            code,
            places,
            bytes(self._constant_data),
            base + self._used + _WIDE,
            self._local,
            self._shared,
            self._params,
            self._globals,
            lines,
        )


def _end_of_scope(text: str, at: int) -> int:
    depth = 1
    for found in re.compile(r"[{}]").finditer(text, at):
        depth += 1 if found[0] == "{" else -1
        if not depth:
            return found.start()
    raise Unsupported("a scope without an end")


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

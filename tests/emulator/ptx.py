"""PTX to the instructions that native/machine.h runs: registers become places, names an opcode and its modifiers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator import names
from emulator.storage import CALL, WIDE, Address, Storage, Unsupported

_TOKEN = re.compile(r"\s*(?:(\{)|(\})|([$\w]+)\s*:(?!:)|([^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)")
_PARTS = re.compile(r"(?:@(!?)([$%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\s*\{[^}]*\}|\s*\[[^\]]*\]|[^,]+")


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


class _Decoder(Storage):
    def __init__(self, text: str, found: re.Match[str], opcode: Callable[[str], int], globals_at: int):
        super().__init__(text, found, globals_at)
        self._name, self._opcode = found[1], opcode
        self._before: list[tuple[str, list[Any]]] = []  # conversions before an instruction, and behind it
        self._after: list[tuple[str, list[Any]]] = []
        self._rows: list[tuple[int, Any, bool, list[Any], list[int], str]] = []
        self._labels: dict[str, int] = {}
        self._tables: dict[str, list[str]] = {}
        self._names: dict[str, int] = {}
        self.function = ""  # whose body is decoded; "" is the kernel's
        self._body(text, found.end(), {})
        for name, function in self._functions.items():
            self.function = name
            self._labels[f"function {name}"] = len(self._rows)
            self._body(text, function.end(), {"func_retval0": f"func_retval0 {name}"})

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
        call = CALL.match(text + ";")
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

    def label(self, name: str) -> Any:
        """Returns a label, which becomes the number of the instruction there."""
        return ("label", name)

    def targets(self, name: str) -> list[Any]:
        """Returns those of a table of labels."""
        return [("label", x) for x in self._tables[name]]

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
            base + self._used + WIDE,
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

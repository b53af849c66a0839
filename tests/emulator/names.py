"""Instructions of PTX by the names of the emulator's table, and what their modifiers say, as numbers."""

from __future__ import annotations

import re
from typing import Any

from emulator import storage

# Fences and hints: what one thread writes all others see at once, and there is no cache.
_NOTHING = re.compile(
    r"membar\b.*|fence\.(?!proxy\.async).*|fence\.proxy\.(?:alias|tensormap).*|prefetch.*|griddepcontrol.*|setmaxnreg.*|nanosleep.*"
    r"|discard.*|applypriority.*|createpolicy.*"
)
_SHUFFLES = ("idx", "up", "down", "bfly")
_TYPE = re.compile(r"[bsuf]\d+|pred|b?f16(?:x2)?|tf32|e\dm\dx2")


def canonical(d: Any, name: str, operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    """Returns the name in the emulator's table, the places of all operands, and modifiers.

    Args:
      d: the decoder, which knows registers and constants.
      name: of the instruction, with all its modifiers.
      operands: strings, lists of strings, and addresses.
    """
    words = name.split(".")
    if _NOTHING.fullmatch(name):
        return "nop", [], []
    for prefix, function in _FORMS.items():
        if name == prefix or name.startswith(prefix + "."):
            return function(d, name, words, operands)
    return _plain(d, name, words, operands)


def _flat(operands: list[Any]) -> list[Any]:
    return [x for operand in operands for x in (operand if isinstance(operand, list) else [operand])]


def _plain(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    """Returns the same of instructions whose operands have the type that stands last."""
    kinds = [word for word in words[1:] if _TYPE.fullmatch(word)]
    bits = storage.BITS[kinds[-1]] if kinds else 32
    each = [64 if bits == 64 else 32] * 8
    if words[0] in ("shl", "shr"):
        each[2] = 32
    if words[0] in ("bfi", "bfe"):
        each[-5:] = [32] * 5
        each = [each[0]] * {"bfi": 3, "bfe": 2}[words[0]] + [32] * 2
    flat = _flat(operands)
    return name, [d.place(x, b) for x, b in zip(flat, each, strict=False)] if flat else [], []


def _typed(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    """Returns the same of instructions that read bits, whatever their type: b of the same size stands for all."""
    bits = storage.BITS[words[-1]]
    return f"{words[0]}.{'pred' if bits == 1 else f'b{bits}'}", [d.place(x, bits) for x in _flat(operands)], []


def _move(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    bits = storage.BITS[words[-1]]
    to, source = operands
    if isinstance(source, list):
        return "pack", [d.place(to, bits), *(d.place(x, bits // len(source)) for x in source)], [bits // len(source)]
    if isinstance(to, list):
        return "unpack", [*(d.place(x, 32) for x in to), d.place(source, bits)], [bits // len(to)]
    if source in storage.CLOCKS:
        return "clock", [d.place(to, bits)], [int(bits == 64)]
    bits = {1: 1, 64: 64}.get(bits, 32)
    if (at := d.shared(source)) is not None:
        base, at = d.place("shared memory", 32), ("constant", at, bits)
        if bits == 64:
            return "mad.wide.u32", [d.place(to, 64), base, d.constant(1, 32), at], []
        return "add.s32", [d.place(to, 32), base, at], []
    if source in storage.SPECIAL and bits == 64:
        return "cvt.u64.u32", [d.place(to, 64), d.place(source, 32)], []
    return f"mov.{'pred' if bits == 1 else f'b{bits}'}", [d.place(to, bits), d.place(source, bits)], []


def _setp(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    if len(words) != 3 or isinstance(operands[0], list):
        words = [word for word in words if word != "ftz"]
        if len(words) != 3 or isinstance(operands[0], list):
            raise storage.Unsupported(name)
    bits = storage.BITS[words[-1]]
    of = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(words[1], words[1])
    return f"setp.{of}.{words[2]}", [d.place(operands[0], 1), *(d.place(x, bits) for x in operands[1:])], []


def _selp(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    bits = storage.BITS[words[-1]]
    return f"selp.b{bits}", [*(d.place(x, bits) for x in operands[:3]), d.place(operands[3], 1)], []


def _wide(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    double = 2 * storage.BITS[words[-1]]
    bits = (double, double // 2, double // 2, double)
    return name, [d.place(x, b) for x, b in zip(operands, bits, strict=False)], []


def _memory(words: list[str]) -> tuple[int, int, str]:
    """Returns the space, the number of elements and their type."""
    space = next((storage.SPACES[word] for word in words if word in storage.SPACES), 0)
    count = next((int(word[1:]) for word in words if re.fullmatch(r"v[248]", word)), 1)
    return space, count, words[-1]


def _based(d: Any, address: storage.Address, bits: int = 64) -> tuple[Any, int, int]:
    """Returns an address's register, its displacement and 1 where it has 64 bits."""
    if (at := d.shared(address.base)) is not None:
        if not isinstance(at, int):
            raise storage.Unsupported("dynamic shared memory by its name")
        return d.place("shared memory", 32), at + address.displacement, 0
    wide = d.bits(address.base) == 64 if address.base in d.registers else bits == 64
    return d.place(address.base, 64 if wide else 32), address.displacement, int(wide)


def _load(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    space, _, kind = _memory(words)
    space = storage.SPACES["local"] if operands[1].base in d.locals else space
    to = operands[0] if isinstance(operands[0], list) else [operands[0]]
    place, displacement, wide = _based(d, operands[1], 32 if space in (2, 3) else 64)
    registers = next((d.bits(x) for x in to if x != "_"), 32)
    size = max(storage.BITS[kind] // 8, 1)
    flags = wide | (2 if registers == 64 else 0)
    return "ld", [*(d.place(x, registers) for x in to), place], [space, size, int(kind[0] == "s"), displacement, flags]


def _store(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    space, _, kind = _memory(words)
    space = storage.SPACES["local"] if operands[0].base in d.locals else space
    source = operands[1] if isinstance(operands[1], list) else [operands[1]]
    place, displacement, wide = _based(d, operands[0], 32 if space in (2, 3) else 64)
    size = max(storage.BITS[kind] // 8, 1)
    bits = next((d.bits(x) for x in source if x in d.registers), 64 if size == 8 else 32)
    flags = wide | (2 if bits == 64 else 0)
    return "st", [place, *(d.place(x, bits) for x in source)], [space, size, 0, displacement, flags]


def _store_async(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    to, value, barrier = operands
    if words[-1] not in ("u32", "b32", "s32") or to.displacement or barrier.displacement:
        raise storage.Unsupported(name)
    return "st.async", [d.place(x, 32) for x in (to.base, value, barrier.base)], []


def _atomic(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    space, _, kind = _memory(words)
    of = next(x for x in words if x in ("add", "exch", "cas", "min", "max", "and", "or", "xor", "inc"))
    operands = operands if words[0] == "atom" else ["_", *operands]
    place, displacement, wide = _based(d, operands[1], 32 if space in (2, 3) else 64)
    bits = storage.BITS[kind]
    values = [d.place(x, bits) for x in operands[2:]]
    return f"atom.{of}.{kind}", [d.place(operands[0], bits), place, *values], [space, 0, 0, displacement, wide]


def _cvta(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    space = next(x for x in words if x in ("global", "shared", "local", "param", "const") or x.startswith("shared"))
    space = {"const": "global"}.get(space, space.split(":")[0])
    to = "to." if words[1] == "to" else ""
    wide = int(words[-1] == "u64")
    flat = [d.place(x, d.bits(x)) for x in operands]
    return f"cvta.{to}{space}", flat, [int(d.bits(operands[1]) == 64), wide]


def _cvt(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    """A register may be wider than what is converted: its low part counts, and is extended."""
    if "pack" in words or "relu" in words:
        raise storage.Unsupported(name)
    words = [word for word in words if word != "ftz"]
    kinds = [word for word in words if _TYPE.fullmatch(word)]
    to, *sources = _flat(operands)
    into, of = (64 if storage.BITS[kind] == 64 else 32 for kind in (kinds[0], kinds[-1]))
    if of == 32 and d.bits(sources[0]) == 64 and sources[0] in d.registers:
        sources = [d.before("cvt.u32.u64", sources[0])]
    if into == 32 and d.bits(to) == 64 and to in d.registers:
        to = d.after("cvt.s64.s32" if kinds[0][0] == "s" else "cvt.u64.u32", to)
    return ".".join(words), [d.place(to, into), *(d.place(x, of) for x in sources)], []


def _shuffle(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    to = operands[0] if isinstance(operands[0], list) else [operands[0], "_"]
    return "shfl.sync", [d.place(x, 32) for x in (*to, *operands[1:])], [_SHUFFLES.index(words[2])]


def _vote(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    negated = operands[1].startswith("!")
    return name, [d.place(x.lstrip("!"), 32) for x in operands], [int(negated)]


def _elect(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    return name, [d.place(x, 32) for x in _flat(operands)], []


def _bar(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    kind = next(word for word in words if word in ("sync", "arrive", "red"))
    if kind != "red":
        return f"bar.{kind}", [d.place(x, 32) for x in operands], []
    of, predicate = next(word for word in words if word in ("or", "and", "popc")), operands[-1]
    flat = [*operands[:-1], predicate.lstrip("!")]
    how = [("or", "and", "popc").index(of), int(len(operands) == 4), int(predicate.startswith("!"))]
    return "bar.red", [d.place(x, 32) for x in flat], how


def _warp_barrier(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    return "bar.warp.sync", [d.place(operands[0], 32)], []


def _cluster(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    return f"barrier.cluster.{words[2]}", [], []


def _mbarrier(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    kind, expects = words[1], "expect_tx" in words
    if kind in ("try_wait", "test_wait"):
        parity = int("parity" in words)
        place, displacement, wide = _based(d, operands[1], 32)
        state = d.place(operands[2], 32 if parity else 64)
        return (
            "mbarrier.wait",
            [d.place(operands[0], 1), place, state],
            [
                parity,
                int(kind == "try_wait"),
                0,
                displacement,
                wide,
            ],
        )
    if kind in ("arrive", "arrive_drop"):
        if isinstance(operands[0], storage.Address):
            operands = ["_", *operands]
        place, displacement, wide = _based(d, operands[1], 32)
        flat = [d.place(operands[0], 64), place, *(d.place(x, 32) for x in operands[2:])]
        return "mbarrier.arrive", flat, [0, int(expects), int(kind == "arrive_drop"), displacement, wide]
    place, displacement, wide = _based(d, operands[0], 32)
    if kind not in ("init", "inval", "expect_tx"):
        raise storage.Unsupported(name)
    return f"mbarrier.{kind}", [place, *(d.place(x, 32) for x in operands[1:])], [0, 0, 0, displacement, wide]


def _copy_arrive(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    place, displacement, wide = _based(d, operands[0], 32)
    return "cp.async.mbarrier.arrive", [place], [int("noinc" in words), 0, 0, displacement, wide]


def _cp_async(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    if words[2] in ("commit_group", "wait_all"):
        return f"cp.async.{words[2]}", [], []
    if words[2] == "wait_group":
        return "cp.async.wait_group", [], [int(operands[0])]
    to, source = operands[:2]
    there = d.place(operands[3], 32) if len(operands) > 3 + ("L2::cache_hint" in words) else -1
    flat = [_based(d, to, 32)[0], _based(d, source)[0], there]
    return "cp.async", flat, [int(operands[2]), to.displacement, source.displacement]


def _bulk(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    if words[3] == "commit_group":
        return "cp.async.bulk.commit_group", [], []
    if words[3] == "wait_group":
        return "cp.async.bulk.wait_group", [], [int(operands[0]), int("read" in words)]
    if words[3] == "prefetch":
        return "nop", [], []
    if "L2::cache_hint" in words:
        operands = operands[:-1]
    multicast = int("multicast::cluster" in words)
    adds = 0
    if words[1] == "reduce":
        if "add" not in words:
            raise storage.Unsupported(name)
        adds = 1
    flat = []
    for operand in operands:
        if isinstance(operand, storage.Address):
            if operand.displacement:
                raise storage.Unsupported(f"{name} with a displacement")
            flat += [d.place(operand.base, d.bits(operand.base)), *(d.place(x, 32) for x in operand.coordinates)]
        else:
            flat += [d.place(x, 32) for x in _flat([operand])]
    load = words.index("global") > next(i for i, word in enumerate(words) if word.startswith("shared"))
    if "tensor" in words:
        rank = int(next(word for word in words if re.fullmatch(r"\dd", word))[0])
        if load:
            return "tma.load", flat, [rank, len(flat) - 3 - rank - multicast, multicast]
        return "tma.store", flat, [rank, 0, 0, adds]
    if load:
        return "bulk.load", flat, [0, 0, multicast]
    element = {"u32": 2, "s32": 3, "u64": 4, "f32": 7, "f64": 8}.get(words[-1], 0)
    return "bulk.store", flat, [0, 0, 0, element + 1 if adds else 0]


def _matrix(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    if words[-1] != "b16" or "m8n8" not in words:
        raise storage.Unsupported(name)
    at = 1 if words[0] == "ldmatrix" else 0
    place, displacement, wide = _based(d, operands[at], 32)
    registers = [d.place(x, 32) for x in _flat([operands[1 - at]])]
    if wide:
        raise storage.Unsupported(f"{name} of a generic address")
    return words[0], [*registers, place] if at else [place, *registers], [int("trans" in words), displacement]


def _mma(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    shape = next(word for word in words if re.fullmatch(r"m\d+n8k\d+", word))
    rows, k = (int(x) for x in re.findall(r"\d+", shape)[::2])
    of_d, of_a, of_b, _ = words[words.index("col") + 1 :][:4]
    bits = 64 if of_a == "f64" else 32
    return f"mma.{of_a}.{of_b}", [d.place(x, bits) for x in _flat(operands)], [rows, k, int(of_d == "f16")]


def _wgmma(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    if words[1] in ("commit_group", "fence"):
        return f"wgmma.{words[1]}", [], []
    if words[1] == "wait_group":
        return "wgmma.wait_group", [], [int(operands[0])]
    n = int(re.findall(r"n(\d+)k", name)[0])
    of_d, of_a, of_b = words[words.index("aligned") + 2 :][:3]
    sums, a, b, scale, *more = operands
    numbers = [int(x) for x in more]
    flags = (1 if isinstance(a, list) else 0) | (2 if of_d == "f16" else 0)
    if numbers:
        flags |= (16 if numbers[0] < 0 else 0) | (32 if numbers[1] < 0 else 0)
        turned = numbers[2:]
        if isinstance(a, list):
            turned = [0, *turned]
        if len(turned) == 2:
            flags |= (4 if turned[0] else 0) | (8 if turned[1] else 0)
    of_a_flat = [d.place(x, 32) for x in a] if isinstance(a, list) else [d.place(a, 64)]
    scale = {"true": "1", "false": "0"}.get(scale, scale)
    flat = [*(d.place(x, 32) for x in sums), *of_a_flat, d.place(b, 64), d.place(scale, 32)]
    return "wgmma", flat, [n, storage.ELEMENTS[of_a] | storage.ELEMENTS[of_b] << 8, flags]


def _branch(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    if words[0] == "brx":
        return "brx.idx", [d.place(operands[0], 32), *d.targets(operands[1])], []
    return "bra", [], [d.label(operands[0])]


def _return(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    return ("return", [d.place(f"return {d.function}", 32)], []) if d.function else ("ret", [], [])


def _call(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    return "call", [d.place(f"return {operands[0]}", 32)], [d.label(f"function {operands[0]}")]


def _fence(d: Any, name: str, words: list[str], operands: list[Any]) -> tuple[str, list[Any], list[Any]]:
    return "fence.proxy.async", [], []


_FORMS = {
    "ld": _load,
    "ldu": _load,
    "st.async": _store_async,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "cvta": _cvta,
    "cvt": _cvt,
    "mov": _move,
    "setp": _setp,
    "selp": _selp,
    **dict.fromkeys(("and", "or", "xor", "not"), _typed),
    "mul.wide": _wide,
    "mad.wide": _wide,
    "shfl.sync": _shuffle,
    "vote.sync": _vote,
    "elect.sync": _elect,
    "bar.warp.sync": _warp_barrier,
    "bar": _bar,
    "barrier.cluster": _cluster,
    "barrier": _bar,
    "mbarrier": _mbarrier,
    "cp.async.mbarrier.arrive": _copy_arrive,
    "cp.async.bulk": _bulk,
    "cp.reduce.async.bulk": _bulk,
    "cp.async": _cp_async,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
    "movmatrix": lambda d, name, words, operands: ("movmatrix", [d.place(x, 32) for x in operands], []),
    "mapa": lambda d, name, words, operands: ("mapa", [d.place(x, 32) for x in operands], []),
    "mma.sync": _mma,
    "wgmma": _wgmma,
    "bra": _branch,
    "brx": _branch,
    "ret": _return,
    "call": _call,
    "exit": lambda d, name, words, operands: ("ret", [], []),
    "fence.proxy.async": _fence,
}

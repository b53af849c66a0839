"""A file of tuned kernels that somebody else wrote chooses among the kernels that there are, and does nothing else."""

from __future__ import annotations

import functools
import json
import random
import re

import pytest

import cutjax
from cutjax.kernels import choose, families, tuned
from cutjax.kernels.keys import key
from cutjax.runtime import settings, tuning_file

PROBLEM = cutjax.Problem.of(256, 512, 512)
DEVICE = "NVIDIA H200"
VALUES = [
    0,
    1,
    -1,
    2,
    3,
    64,
    96,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    128.0,
    1e308,
    True,
    False,
    None,
    "",
    "coop",
    "pingpong",
]
VALUES += [
    "sm90",
    "mma",
    "direct",
    "a b",
    "x\n#include </etc/passwd>",
    "); asm(",
    "../../x",
    "\0",
    "é",
    "x" * 10**5,
    [],
    {},
]
EXAMPLES = 150  # 20,000 are worth it after a change of the configs


@pytest.fixture
def choices(tmp_path, monkeypatch):
    """The choices that a file makes, told its entries, all of one problem."""
    path = tmp_path / "theirs" / "tuned.json"
    path.parent.mkdir()
    table = tuned.table
    shipped = functools.cache(table)  # these are many, and none changes
    monkeypatch.setattr(tuned, "table", lambda of: table(of) if of.parent == path.parent else shipped(of))

    def choices(entries):
        for entry in entries:
            path.write_text(json.dumps({"format": 1, "devices": {DEVICE: {key(PROBLEM): entry}}}))
            tuned.read_again()
            yield entry, choose.choose(PROBLEM)

    with settings.override(tuning_dir=path.parent):
        yield choices
    tuned.read_again()


def entries():
    """Entries of every family, each with something else in some places: of another config, or of none."""
    draw = random.Random(0)
    served = [families.fields_of(x) for x in cutjax.candidates(PROBLEM)]
    configs = [*served[:8], families.fields_of(cutjax.MmaConfig()), families.fields_of(cutjax.DirectConfig())]
    for _ in range(EXAMPLES):
        fields = dict(draw.choice(configs))
        for _ in range(draw.randrange(1, 4)):
            name, other = draw.choice([*fields, "new", "__class__"]), draw.choice(served)
            fields[name] = other[name] if name in other and draw.random() < 0.7 else draw.choice(VALUES)
        entry = {"config": fields, "time_us": 1.0, "xla_us": 100.0, "runs": "kernel"}
        if draw.random() < 0.2:
            entry[draw.choice(list(entry))] = draw.choice(VALUES)
        yield entry


def test_any_entry_is_one_of_our_kernels_or_ignored(choices):
    """Nothing that a file says is in the text of a kernel but sizes that a config allows."""
    found = {"tuned": 0, "ignored": 0}
    plain = next(choices([{}]))[1]
    for entry, choice in choices(entries()):
        if choice == plain:
            found["ignored"] += 1
            continue
        found["tuned"] += 1
        if choice.config is None:
            continue
        assert choose.reasons(choice.config, PROBLEM) == (), entry
        fields = families.fields_of(choice.config)
        assert all(type(x) in (int, str, bool) for x in fields.values()), entry
        assert re.fullmatch(r"\w+", choice.kernel), entry
        assert not re.search(r"passwd|\d\.\d", choice.resolved.source.split("#line", 2)[1]), entry
    assert min(found.values()) > EXAMPLES // 20, found


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        '{"format": 1, "devices": ' + '{"a":' * 50_000,
        '{"format": ' + "1" * 10_000 + "}",
        '{"format": 1, "devices": {"' + DEVICE + '": []}}',
        '{"format": 1, "devices": {"' + DEVICE + '": {"' + "x" * 10**6 + '": {"config": NaN, "time_us": Infinity}}}}',
        "\ufeff{}",
        "\0" * 4096,
    ],
    ids=["deep list", "deep objects", "a long number", "a list of entries", "a long key", "a mark", "zeros"],
)
def test_any_text_is_no_entry(tmp_path, text):
    (tmp_path / "tuned.json").write_text(text)
    found = tuning_file.examine(tmp_path / "tuned.json")
    assert not any(map(tuned.decode, (x for entries in found.devices.values() for x in entries.values())))

"""Every operation with arguments that cannot be: each error names the operation. Special ones are in its own file."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import pytest
from operations import OPERATIONS, operands

import cutjax

# ragged_dot's operands are refused in jax.lax's words.
FUNCTIONS = [name for name, op in OPERATIONS.items() if op.fn is getattr(cutjax, name, None) and name != "ragged_dot"]
INNER = {"ragged_dot": "ragged_dot_general", "moe": "grouped_mlp"}  # what takes the option, and names itself
OPTIONS = {
    "layout": "xy",
    "backend": "gpu",
    "save": "all",
    "scoring": "tanh",
    "config": {"bm": 128},
    "out_dtype": "int32",
    "group_offset": 1.5,
    "k": 2.0,
}
OPERANDS = {
    "a list": lambda x: [[1.0]],
    "nothing": lambda x: None,
    "a scalar": lambda x: 3.0,
    "a vector": lambda x: x.reshape(-1),
    "a shape": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    "a key": lambda x: jax.random.split(jax.random.key(0), x.shape),
}


def refused() -> list[tuple[str, str]]:
    """Each operation and option of which its public function knows, where the entry passes options on."""
    found = []
    for name, op in OPERATIONS.items():
        function = getattr(cutjax, name.split(",")[0], None)
        passes = op.fn is function or any(p.kind is p.VAR_KEYWORD for p in inspect.signature(op.fn).parameters.values())
        if function and passes:
            found += [(name, option) for option in OPTIONS if option in inspect.signature(function).parameters]
    # Layers convert their result, to integers too.
    return [(name, option) for name, option in found if option != "out_dtype" or "mlp" not in name]


@pytest.mark.parametrize(("name", "option"), refused())
def test_options(name, option):
    function = name.split(",")[0]
    expected = rf"(?s)\b({function}|{INNER.get(function)}): .*({option}|no meaning)"
    with pytest.raises((TypeError, ValueError), match=expected):
        OPERATIONS[name].fn(*operands(name), **{option: OPTIONS[option]})


@pytest.mark.parametrize("what", OPERANDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operands(name, what):
    """Each in turn."""
    args = operands(name)
    for i, x in enumerate(args):
        if what == "a vector" and x.ndim == 1:
            continue
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: "):
            OPERATIONS[name].fn(*args[:i], OPERANDS[what](x), *args[i + 1 :])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_options_and_too_many_operands(name):
    with pytest.raises(TypeError, match="tile_m"):
        OPERATIONS[name].fn(*operands(name), tile_m=128)
    with pytest.raises(TypeError, match="takes"):
        OPERATIONS[name].fn(*operands(name), *[jnp.ones(2)] * 20)

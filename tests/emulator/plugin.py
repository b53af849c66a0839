"""Runs tests/gpu without a GPU, in so far as their sizes allow: python -m pytest -p emulator.plugin -m gpu tests/gpu/..."""

from __future__ import annotations

import contextlib
import faulthandler
from unittest import mock

import jax
import launches
import pytest
from emulator import device

_patches = contextlib.ExitStack()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of the order of threads")
    parser.addoption("--eagerness", type=int, default=4, help="what is asynchronous: 0 late, n one in n early")


def pytest_configure(config: pytest.Config) -> None:
    machine = device.Machine(config.getoption("--seed"), config.getoption("--eagerness"))
    devices = jax.devices
    _patches.enter_context(device.emulated(machine))
    for module, name, value in (
        (jax, "devices", lambda backend=None: devices("cpu" if backend == "cuda" else backend)),
        (launches.run, "__defaults__", (machine.execute,)),
        (launches, "on_device", machine.execute),
        (faulthandler, "dump_traceback_later", lambda *_, **__: None),
    ):
        _patches.enter_context(mock.patch.object(module, name, value))


def pytest_unconfigure() -> None:
    _patches.close()

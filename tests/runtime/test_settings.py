"""Environment variables: parsed in one place, read once, replaceable for tests."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import cutjax
from cutjax.runtime import settings
from cutjax.runtime.settings import Settings


def test_defaults():
    assert Settings.of({}) == Settings(None, 2**30, None, "sm_90a")


def test_empty_counts_as_unset():
    names = ("CUTJAX_CACHE_DIR", "CUTJAX_CACHE_SIZE", "CUTJAX_DUMP_DIR", "CUTJAX_TARGET_ARCH")
    assert Settings.of(dict.fromkeys(names, "")) == Settings()


def test_folders_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    settings = Settings.of({"CUTJAX_CACHE_DIR": "here", "CUTJAX_DUMP_DIR": "~/dump"})
    assert settings.cache_dir == tmp_path / "here"
    assert settings.dump_dir == pathlib.Path("/home/someone/dump")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("123", 123), ("4k", 4096), ("512M", 2**29), ("1GiB", 2**30), ("2 GB", 2**31), ("1T", 2**40)],
)
def test_cache_size(text, expected):
    assert Settings.of({"CUTJAX_CACHE_SIZE": text}).cache_bytes == expected


@pytest.mark.parametrize("text", ["-1", "1.5G", "lots", "1X", "G"])
def test_bad_cache_size(text):
    with pytest.raises(ValueError, match="CUTJAX_CACHE_SIZE: expected bytes"):
        Settings.of({"CUTJAX_CACHE_SIZE": text})


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_100f", "sm_120a"])
def test_target_arch(arch):
    assert Settings.of({"CUTJAX_TARGET_ARCH": arch}).target_arch == arch


def test_target_arch_without_its_letter():
    assert Settings.of({"CUTJAX_TARGET_ARCH": "sm_120"}).target_arch == "sm_120a"


@pytest.mark.parametrize("arch", ["90a", "compute_90", "sm_90a -v", "hopper", "sm_99", "sm_80a"])
def test_bad_target_arch(arch):
    with pytest.raises(ValueError, match="CUTJAX_TARGET_ARCH: expected an architecture"):
        Settings.of({"CUTJAX_TARGET_ARCH": arch})


def test_the_page_has_each_variable():
    source = pathlib.Path(settings.__file__).read_text()
    page = (pathlib.Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert set(re.findall(r"CUTJAX_[A-Z_]+", source)) == set(re.findall(r"^\| `(CUTJAX_[A-Z_]+)`", page, re.MULTILINE))


def test_read_once(monkeypatch):
    monkeypatch.setattr(settings, "_current", None)
    monkeypatch.setenv("CUTJAX_TARGET_ARCH", "sm_100a")
    assert settings.settings().target_arch == "sm_100a"
    monkeypatch.setenv("CUTJAX_TARGET_ARCH", "sm_120a")
    assert settings.settings().target_arch == "sm_100a"


@pytest.mark.parametrize("name", ["CUTJAX_MEASURE", "CUTJAX_CACHE_SIZE", "CUTJAX_TARGET_ARCH"])
def test_a_bad_variable_is_an_error_without_a_gpu(monkeypatch, name):
    """Also where nothing that a variable says is used."""
    monkeypatch.setattr(settings, "_current", None)
    monkeypatch.setenv(name, "x")
    with pytest.raises(ValueError, match=f"{name}: expected .* got 'x'"):
        jax.jit(lambda x: cutjax.gemm(x, x)).lower(jnp.ones((8, 8)))


def test_override_restores():
    before = settings.settings()
    with settings.override(target_arch="sm_103a") as inside:
        assert settings.settings() is inside
        assert inside.target_arch == "sm_103a"
    assert settings.settings() is before

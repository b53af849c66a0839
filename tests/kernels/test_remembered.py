"""Predictions kept on disk: what a process before chose is chosen again, and what does not fit is predicted anew."""

from __future__ import annotations

import dataclasses
import json

import pytest
from test_prices import KINDS, problems

import cutjax
from cutjax.kernels import choose, families, remembered
from cutjax.runtime import disk_cache, settings


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(remembered, "ON", True)
    with settings.override(cache_dir=tmp_path / "cache", cache_bytes=1 << 20):
        yield tmp_path / "cache"
    forget()


def forget():
    for cached in (families._fastest, families.offers, choose._choose):
        cached.cache_clear()


def told(problem, unmeasured):
    found = families.fastest(problem, unmeasured)
    return found and (found[0].name, found[0].config, [str(x) for x in found[0].converted], *found[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_is_chosen_without_pricing(kind, folder, monkeypatch):
    asked = [(problem, unmeasured) for problem in problems(kind, 2) for unmeasured in (False, True)]
    forget()
    first = [told(*x) for x in asked]
    forget()
    monkeypatch.setattr(families, "_priced", None)  # nothing is priced
    assert [told(*x) for x in asked] == first


def entries(folder):
    return sorted(folder.glob("*.kernel"))


def test_an_entry_that_does_not_fit_is_made_anew(folder):
    problem = cutjax.Problem.of(512, 1024, 2048)
    forget()
    first = told(problem, False)
    (path,) = entries(folder)
    cache = disk_cache.of_settings()
    name = path.stem
    content, _ = cache.read(name)
    for change in (
        lambda entry: entry | {"name": "another kernel"},
        lambda entry: entry | {"config": [["family", "none"]]},
        lambda entry: entry | {"converted": True},
        lambda entry: {"config": []},
        lambda entry: 5,
    ):
        cache.write(name, {"fastest": [change(entry) for entry in content["fastest"]]}, b"")
        forget()
        assert told(problem, False) == first
        assert json.loads(json.dumps(cache.read(name)[0])) == content
    path.write_bytes(b"damaged")
    forget()
    assert told(problem, False) == first


def test_what_predicts_is_a_part_of_the_name(folder, monkeypatch):
    problem = cutjax.Problem.of(512, 1024, 2048)
    device = dataclasses.replace(problem.device, sms=100)
    names = {remembered._name(x) for x in (problem, problem.on(device), cutjax.Problem.of(512, 1024, 2056))}
    monkeypatch.setattr(remembered, "_modules", lambda: "others")
    assert len(names | {remembered._name(problem)}) == 4


def test_nothing_is_kept_where_there_is_no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(remembered, "ON", True)
    with settings.override(cache_dir=tmp_path, cache_bytes=0):
        forget()
        assert families.fastest(cutjax.Problem.of(512, 1024, 2048)) is not None
    assert not list(tmp_path.iterdir())
    forget()

"""The fuzzer and the sanitizer's cases without a GPU: a few run on the host; what is wrong is found, and repeated."""

import fuzz
import kernel_host
import products
import pytest
import sanitize_mma

from cutjax.runtime import compiler

needs_compilers = pytest.mark.skipif(
    compiler.compiler_missing() is not None or not kernel_host.installed(), reason="needs NVRTC and g++"
)


@needs_compilers
@pytest.mark.parametrize(("arch", "indices"), [("sm_75", (0, 24)), ("sm_80", (8,)), ("sm_89", (16,))])
def test_random_problems_on_the_host(arch, indices, tmp_path):
    space = fuzz.Space(seed=1, family="mma", arch=arch, most=60)
    for index in indices:
        case = space.case(index)
        assert fuzz.check(case, case.prepare(), tmp_path) is None, str(case)


@needs_compilers
def test_what_is_wrong_is_found_and_repeated(monkeypatch, capsys):
    def data(self):
        arrays, results = real(self)
        results[0].flat[-1] += 1
        return arrays, results

    real = products.Item.data
    monkeypatch.setattr(products.Item, "data", data)
    assert fuzz.main(["--host", "sm_80", "--seed", "1", "--first", "8", "--count", "1"]) == 1
    out = capsys.readouterr().out
    assert "elements differ" in out
    assert "again: python -m tests.gpu.fuzz --seed 1 --host sm_80 --first 8 --count 1" in out
    assert "FAILED: 1 of 1 problems ran, 1 wrong" in out


def test_problems_are_of_every_kind():
    """Those of a seed are always the same, and 180 of them have every way to multiply, and every kind and epilogue."""
    space = fuzz.Space(seed=2)
    cases = [space.case(index) for index in range(0, 1440, 8)]
    assert [str(fuzz.Space(seed=2).case(index)) for index in (80, 800)] == [str(cases[i]) for i in (10, 100)]
    assert {case.kernel.name.split("_")[0] for case in cases} == {"mma", "sm90"}
    assert {case.label.rsplit(", ", 1)[1] for case in cases} == products.EPILOGUES.keys()
    asked = [case.problem for case in cases]
    ways = {(p.a.dtype.name, p.bs[0].dtype.name, p.math) for p in asked}
    assert ways == set(products.WAYS.values())
    assert {(p.divided, p.symmetric) for p in asked} == {("", False), ("", True), ("m", False), ("k", False)}
    assert any(case.config.swap for case in cases)
    assert any(case.config.splits > 1 for case in cases)
    assert max(max(p.m, p.n, p.k) for p in asked) <= 304


def test_cases_of_the_sanitizer():
    """Every file reads fragments of operands that were loaded in every way; each case has several tiles for a block."""
    cases = list(sanitize_mma.mma_cases())
    found = {tuple(case.label.split(", ")[:2]) for case in cases}
    assert {way for _, way in found} == {f"{file} by {unit}" for file in sanitize_mma.FILES for unit in (1, 4, 8, 16)}
    assert {(kind, way.split()[0]) for kind, way in found} >= {
        (kind, file) for kind in sanitize_mma.KINDS for file in ("tensor", "fma")
    }
    assert all(case.kernel.tiles * case.config.splits >= case.walks > 1 for case in cases)
    of_wgmma = list(sanitize_mma.wide_cases(2))
    assert {(case.problem.a.dtype.name, case.problem.math) for case in of_wgmma} >= {("float32", "tf32"), ("int8", "")}

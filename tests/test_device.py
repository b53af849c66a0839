"""Devices: from what JAX says of one to what the cost model reads, and how choices follow."""

import dataclasses

import pytest

import cutjax
from cutjax.kernels import choose, device

H200 = device.reference("sm_90a")


@pytest.mark.parametrize(
    ("kind", "sms", "bytes_per_second"),
    [
        ("NVIDIA H200", 132, 4.3e12),
        ("NVIDIA H100 80GB HBM3", 132, 3.0e12),
        ("NVIDIA H100 PCIe", 114, 1.8e12),
        ("NVIDIA GH200 480GB", 132, 3.6e12),
    ],
)
def test_known_devices(kind, sms, bytes_per_second):
    found = device.device_of_kind(kind, "sm_90a", sms)
    assert (found.name, found.arch, found.sms, found.bytes_per_second) == (kind, "sm_90a", sms, bytes_per_second)
    assert found == device.device_of_kind(kind, "sm_90a")


def test_an_unknown_device_is_its_architectures_reference_with_its_own_sms():
    found = device.device_of_kind("NVIDIA H20", "sm_90a", 66)
    expected = dataclasses.replace(H200, name="NVIDIA H20", sms=66, flops=found.flops)
    assert found == expected
    assert dict(found.flops) == {"bfloat16": 415e12, "float16": 415e12}
    # Part of one that is known.
    assert device.device_of_kind("NVIDIA H100 PCIe", "sm_90a", 57).bytes_per_second == 1.8e12


def test_a_device_that_no_family_serves_says_why():
    old = device.device_of_kind("NVIDIA A100-SXM4-40GB", "sm_80", 108)
    assert (old.name, old.arch, old.sms) == ("NVIDIA A100-SXM4-40GB", "sm_80", 108)
    problem = cutjax.Problem(512, 512, 512, device=old)
    choice = choose.choose(problem)
    assert choice.kernel == "XLA"
    assert choice.reasons == ("architecture sm_80: the kernels are for sm_90a",)
    assert cutjax.reasons(cutjax.Config(), problem) == choice.reasons
    with pytest.raises(ValueError, match="architecture sm_80"):
        choice.call()


def test_choices_follow_the_device():
    def choice(found, *sizes):
        return choose.choose(cutjax.Problem(*sizes, device=found), backend="cuda")

    slow = device.device_of_kind("NVIDIA H100 PCIe", "sm_90a", 114)
    bound = 64, 14336, 4096  # by memory
    assert choice(slow, *bound).time_us > 1.5 * choice(H200, *bound).time_us
    # 132 SMs take 11 x 12 tiles of 128 x 256 in one wave, 114 in two.
    times = [choice(found, 11 * 128, 12 * 256, 4096).time_us for found in (H200, slow)]
    assert times[1] > 1.2 * times[0]
    assert any(choice(slow, n, n, n).config != choice(H200, n, n, n).config for n in (1024, 1536, 2048, 3072))


def test_a_device_with_less_shared_memory_has_shallower_pipelines():
    small = dataclasses.replace(H200, shared_bytes=163 << 10, shared_bytes_per_sm=164 << 10)
    for config in cutjax.candidates(cutjax.Problem(4096, 4096, 4096, device=small)):
        assert (config.bm + config.bn) * config.bk * 2 * config.stages < 163 << 10
    (reason,) = cutjax.reasons(cutjax.Config(stages=4), cutjax.Problem(4096, 4096, 4096, device=small))
    assert f"at most {163 << 10}" in reason


@dataclasses.dataclass(frozen=True)
class Simple:
    """The config of a family beside the shipped one."""

    width: int = 1


class Simplest:
    """A family whose kernels take as many microseconds as their config says, of problems of 8 rows."""

    name = "simplest"
    Config = Simple

    def reasons(self, problem):
        return () if problem.m == 8 else (f"m={problem.m}: 8 alone",)

    def configs(self, problem):
        return [Simple(1), Simple(10000), Simple(-1)]

    def resolve(self, problem, config):
        if why := self.reasons(problem) or (("a negative width",) if config.width < 0 else ()):
            return why
        return SimpleKernel(config)


@dataclasses.dataclass(frozen=True)
class SimpleKernel:
    """A kernel of that family."""

    config: Simple
    name: str = "simplest_kernel"
    notes: tuple[str, ...] = ()

    def time_us(self, device):
        return float(self.config.width)

    def xla_us(self, device):
        return None

    def unlaunchable(self):
        return ()


def test_families_compete(monkeypatch):
    monkeypatch.setattr(choose, "FAMILIES", (*choose.FAMILIES, Simplest()))
    choose._choose.cache_clear()
    try:
        problem = cutjax.Problem(8, 512, 512)
        assert choose.choose(problem).kernel == "simplest_kernel"
        ranked = cutjax.candidates(problem)
        assert (ranked[0], ranked[-1]) == (Simple(1), Simple(10000))
        assert isinstance(ranked[1], cutjax.Config)
        assert choose.choose(problem, Simple(10000)).config == Simple(10000)
        assert cutjax.reasons(Simple(-1), problem) == ("a negative width",)
        mixed = {"a_dtype": "float16"}
        odd = cutjax.Problem(8, 512, 512, **mixed)  # no kernel of the other family
        assert choose.choose(odd).kernel == "simplest_kernel"
        refused = choose.choose(cutjax.Problem(16, 512, 512, **mixed))
        assert refused.reasons[-1] == "m=16: 8 alone"
        assert len(refused.reasons) == 2  # what both families say
    finally:
        choose._choose.cache_clear()


def test_what_is_no_config_is_refused():
    with pytest.raises(TypeError, match="expected one of Config"):
        cutjax.reasons("fast", cutjax.Problem(8, 8, 8))  # pyright: ignore


def test_supports_is_deprecated():
    with pytest.warns(DeprecationWarning, match=r"cutjax\.reasons"):
        assert cutjax.supports(cutjax.Config(), cutjax.Problem(512, 512, 512)) is None
    with pytest.warns(DeprecationWarning, match=r"cutjax\.reasons"):
        refused = cutjax.supports(cutjax.Config(stages=9), cutjax.Problem(512, 510, 512))
    assert refused == "; ".join(cutjax.reasons(cutjax.Config(stages=9), cutjax.Problem(512, 510, 512)))

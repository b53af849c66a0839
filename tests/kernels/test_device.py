"""Devices: from what JAX says of one to what the cost model reads, and how choices follow."""

import dataclasses

import jax.numpy as jnp
import pytest

import cutjax
from cutjax.kernels import choose, device, families
from cutjax.kernels.prices import one_by_one
from cutjax.runtime import architectures

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
    found = device.device_of_kind("NVIDIA H900", "sm_90a", 66)
    expected = dataclasses.replace(H200, name="NVIDIA H900", sms=66, flops=found.flops, measured=())
    assert found == expected
    assert dict(found.flops) == {name: rate / 2 for name, rate in H200.flops}
    assert dict(found.flops)["bfloat16"] == 415e12
    # Part of one that is known.
    assert device.device_of_kind("NVIDIA H100 PCIe", "sm_90a", 57).bytes_per_second == 1.8e12


# JAX's device_kind, and what the white paper or the data sheet says: architecture, SMs, dense TFLOP/s in f16, GB/s.
PUBLISHED = {
    "Tesla T4": ("sm_75", 40, 65, 320),
    "NVIDIA GeForce RTX 2080 Ti": ("sm_75", 68, 53.8, 616),
    "NVIDIA A100-SXM4-40GB": ("sm_80", 108, 312, 1555),
    "NVIDIA A100-SXM4-80GB": ("sm_80", 108, 312, 2039),
    "NVIDIA A100-PCIE-40GB": ("sm_80", 108, 312, 1555),
    "NVIDIA A100 80GB PCIe": ("sm_80", 108, 312, 1935),
    "NVIDIA A30": ("sm_80", 56, 165, 933),
    "NVIDIA A10": ("sm_86", 72, 125, 600),
    "NVIDIA A10G": ("sm_86", 80, 70, 600),
    "NVIDIA A40": ("sm_86", 84, 149.7, 696),
    "NVIDIA RTX A6000": ("sm_86", 84, 154.8, 768),
    "NVIDIA GeForce RTX 3080": ("sm_86", 68, 59.5, 760),
    "NVIDIA GeForce RTX 3090": ("sm_86", 82, 71, 936),
    "NVIDIA L4": ("sm_89", 58, 121, 300),
    "NVIDIA L40S": ("sm_89", 142, 362, 864),
    "NVIDIA RTX 6000 Ada Generation": ("sm_89", 142, 364, 960),
    "NVIDIA GeForce RTX 4080": ("sm_89", 76, 97.5, 717),
    "NVIDIA GeForce RTX 4090": ("sm_89", 128, 165.2, 1008),
    "NVIDIA H20": ("sm_90a", 78, 148, 4000),
    "NVIDIA H100 PCIe": ("sm_90a", 114, 756, 2000),
    "NVIDIA H100 80GB HBM3": ("sm_90a", 132, 989, 3350),
    "NVIDIA GH200 480GB": ("sm_90a", 132, 989, 4000),
    "NVIDIA B200": ("sm_100a", 148, 2250, 8000),
    "NVIDIA GB200": ("sm_100a", 152, 2500, 8000),
    "NVIDIA B300 SXM6 AC": ("sm_103a", 148, 2250, 8000),
    "NVIDIA GeForce RTX 5080": ("sm_120a", 84, 112.6, 960),
    "NVIDIA GeForce RTX 5090": ("sm_120a", 170, 209.5, 1792),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("sm_120a", 188, 503.8, 1792),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_rates(kind):
    """An entry is what is published, times what the H200 reaches of its own; no share is taken of a wrong number."""
    arch, sms, tera, gb_per_s = PUBLISHED[kind]
    found = device.device_of_kind(kind, arch, sms)
    assert (found.name, found.arch, found.sms, found.measured) == (kind, arch, sms, ())
    assert device.named(kind) == found
    rates = dict(found.flops)
    assert rates["float16"] == pytest.approx(tera * 1e12 * 830 / 989, rel=0.02)  # data sheets round, L40S's down by 1%
    assert found.bytes_per_second == pytest.approx(gb_per_s * 1e9 * 4.3 / 4.8, rel=0.02)
    geforce = "GeForce" in kind or kind.endswith("A10G")
    assert rates["float16_f16"] == pytest.approx(rates["float16"] * (2 if geforce else 1), rel=0.01)
    assert ("bfloat16" in rates, "tf32" in rates) == (arch != "sm_75",) * 2
    assert ("float8_e4m3fn" in rates) == (arch not in ("sm_75", "sm_80", "sm_86"))


def test_the_table_is_whole():
    assert set(device.REFERENCES) == set(architectures.ARCHITECTURES) == {x.arch for x in device.DEVICES.values()}
    for key, found in device.DEVICES.items():
        assert device.named(found.name) == found, key
        assert found.shared_bytes <= found.shared_bytes_per_sm
        assert found.max_threads_per_sm % 512 == 0
        assert found.tensor_memory == found.arch.startswith("sm_10")
    assert [x.name for x in device.DEVICES.values() if x.measured] == ["NVIDIA H200"]
    assert device.named("nvidia geforce rtx 4090 laptop gpu").name == "NVIDIA GeForce RTX 4090"
    with pytest.raises(ValueError, match="unknown device 'Radeon'; known are Tesla T4, "):
        device.named("Radeon")


def test_peaks():
    a100, turing = device.named("NVIDIA A100-SXM4-80GB"), device.named("Tesla T4")
    rates = dict(a100.flops)
    for name in ("bfloat16", "float16", "float32", "float64", "int8"):
        assert a100.peak(jnp.dtype(name)) == rates[name]
    f32 = jnp.dtype(jnp.float32)
    assert a100.peak(f32, "tf32") == rates["tf32"] == pytest.approx(8 * rates["float32"], rel=0.01)
    assert a100.peak(f32, "tf32x3") == rates["tf32"] / 3
    assert a100.peak(f32, "bf16x6") == rates["bfloat16"] / 6
    assert a100.peak(jnp.dtype(jnp.uint8)) == rates["int8"]
    assert a100.peak(jnp.dtype(jnp.complex64)) == rates["float32"] / 4
    gaming = device.named("NVIDIA GeForce RTX 3090")
    assert gaming.peak(jnp.dtype(jnp.float16), "f16") > 1.9 * gaming.peak(jnp.dtype(jnp.float16))
    assert turing.peak(jnp.dtype(jnp.bfloat16)) == dict(turing.flops)["float32"]  # no instruction


def test_architectures_by_name():
    for name in architectures.ARCHITECTURES:
        assert architectures.canonical(name) == architectures.canonical(name.removesuffix("a")) == name
    assert architectures.canonical("sm_100f") == "sm_100f"
    for wrong in ("sm_99", "sm_80a", "hopper", "sm_90b"):
        with pytest.raises(ValueError, match=f"sm_75, sm_80, .*got '{wrong}'"):
            architectures.canonical(wrong)
    capabilities = {(7, 5): "sm_75", (8, 9): "sm_89", (9, 0): "sm_90a", (12, 0): "sm_120a"}
    assert {both: architectures.of_capability(*both) for both in capabilities} == capabilities


def test_a_device_that_no_family_serves_says_why():
    old = device.device_of_kind("Tesla V100-SXM2-16GB", "sm_70", 80)
    assert (old.name, old.arch) == ("Tesla V100-SXM2-16GB", "sm_70")
    problem = cutjax.Problem.of(512, 512, 512, device=old)
    choice = choose.choose(problem)
    assert choice.kernel == "XLA"
    hopper, others = choice.reasons
    assert hopper == "architecture sm_70: the kernels are for sm_90a"
    assert others == "architecture sm_70: the kernels are for sm_75 and later"
    assert cutjax.reasons(cutjax.Config(), problem) == (hopper,)
    with pytest.raises(ValueError, match="architecture sm_70"):
        choice.call()


def test_choices_follow_the_device():
    def choice(found, *sizes):
        return choose.choose(cutjax.Problem.of(*sizes, device=found), backend="cuda")

    slow = device.device_of_kind("NVIDIA H100 PCIe", "sm_90a", 114)
    bound = 64, 14336, 4096  # by memory
    assert choice(slow, *bound).time_us > 1.5 * choice(H200, *bound).time_us
    # 132 SMs take 11 x 12 tiles of 128 x 256 in one wave, 114 in two.
    times = [choice(found, 11 * 128, 12 * 256, 4096).time_us for found in (H200, slow)]
    assert times[1] > 1.2 * times[0]
    assert any(choice(slow, n, n, n).config != choice(H200, n, n, n).config for n in (1024, 1536, 2048, 3072))


def test_a_device_with_less_shared_memory_has_shallower_pipelines():
    small = dataclasses.replace(H200, shared_bytes=163 << 10, shared_bytes_per_sm=164 << 10)
    for config in cutjax.candidates(cutjax.Problem.of(4096, 4096, 4096, device=small)):
        assert (config.bm + config.bn) * config.bk * 2 * config.stages < 163 << 10
    (reason,) = cutjax.reasons(cutjax.Config(stages=4), cutjax.Problem.of(4096, 4096, 4096, device=small))
    assert f"at most {163 << 10}" in reason


@dataclasses.dataclass(frozen=True)
class Simple:
    """The config of a family beside the shipped one."""

    width: int = 1


class Simplest:
    """A family whose kernels take as many microseconds as their config says, of problems of 8 rows."""

    name = "simplest"
    Config = Simple

    def competes(self, problem):
        return True

    def stores_in_order(self, problem):
        return True

    def reasons(self, problem):
        return () if problem.m == 8 else (f"m={problem.m}: 8 alone",)

    def configs(self, problem):
        return [Simple(1), Simple(10000), Simple(-1)]

    def prices(self, problem):
        return one_by_one(problem, self.configs(problem), self.resolve)

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
    family: str = "simplest"
    converted: tuple = ()
    unmeasured: str = ""

    def time_us(self, device):
        return float(self.config.width)

    def unlaunchable(self):
        return ()


def test_families_compete(monkeypatch):
    found = (*families.FAMILIES, Simplest())
    monkeypatch.setattr(families, "FAMILIES", found)
    choose._choose.cache_clear()
    try:
        problem = cutjax.Problem.of(8, 512, 512)
        assert choose.choose(problem).kernel == "simplest_kernel"
        ranked = cutjax.candidates(problem)
        assert (ranked[0], ranked[-1]) == (Simple(1), Simple(10000))
        assert isinstance(ranked[1], cutjax.Config)
        assert choose.choose(problem, Simple(10000)).config == Simple(10000)
        assert cutjax.reasons(Simple(-1), problem) == ("a negative width",)
        mixed = {"a_dtype": "float16"}
        odd = cutjax.Problem.of(8, 512, 512, **mixed)  # no kernel of the other family
        assert choose.choose(odd).kernel == "simplest_kernel"
        refused = choose.choose(cutjax.Problem.of(16, 512, 512, **mixed))
        assert refused.reasons[-1] == "m=16: 8 alone"
        assert len(refused.reasons) == 3  # what both families say
    finally:
        choose._choose.cache_clear()


def test_what_is_no_config_is_refused():
    with pytest.raises(TypeError, match=r"expected a cutjax\.Config"):
        cutjax.reasons("fast", cutjax.Problem.of(8, 8, 8))  # pyright: ignore

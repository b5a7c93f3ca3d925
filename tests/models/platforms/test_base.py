"""Each device has its platform; they agree where nothing differs, and are hashable."""

import types

import jax
import pytest

from models.platforms import CPU, GPU, TPU, base, default_platform, platform_of
from models.platforms.base import Platform


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("cuda", GPU), ("gpu", GPU), ("tpu", TPU), ("cpu", CPU), ("something", Platform)],
)
def test_device_has_the_platform_of_its_kind(name, wanted):
    device = types.SimpleNamespace(platform=name, device_kind="x", compute_capability="9.0")
    platform = platform_of(device)
    assert type(platform) is wanted
    assert platform == platform_of(device) and hash(platform) == hash(platform_of(device))


def test_default_platform_is_that_of_the_default_device():
    assert default_platform() == platform_of(jax.devices()[0])


def test_default_device_may_be_another_than_the_first(monkeypatch):
    here = platform_of(jax.devices()[0])
    first = types.SimpleNamespace(platform="gpu", device_kind="x", compute_capability="9.0")
    with jax.default_device(jax.devices()[0]):
        monkeypatch.setattr(jax, "devices", lambda: [first])
        assert default_platform() == here != platform_of(first)


@pytest.mark.parametrize("platform", [Platform(), GPU(), TPU()])
def test_accelerators_keep_the_dtypes_of_the_model_and_whole_kernels(platform):
    assert platform.weight_dtype("bfloat16") == "bfloat16"
    assert platform.kv_cache_dtypes("bfloat16") == ("bfloat16",)
    assert platform.free_host_bytes() is None and not platform.shares_programs
    for dtype in ("float32", "bfloat16", "float16"):
        assert platform.page_dtype(dtype) == platform.expert_dtype(dtype) == dtype


@pytest.mark.parametrize("platform", [Platform(), GPU(), CPU.of_this_machine()])
def test_pages_are_rows_of_numbers(platform):
    assert platform.page_shape(4096) == (4096,)
    assert platform.head_dim_step == 1


def test_pages_of_a_tpu_are_lines_of_128_numbers_that_heads_fill():
    assert TPU().page_shape(4096) == (32, 128)
    assert TPU().head_dim_step == 128


@pytest.mark.parametrize(
    ("cores", "available_gib", "on_gpu", "on_cpu"),
    [
        (2, 64, 2, 2),
        (6, 64, 6, 6),
        (6, 3.5, 3, 6),
        (6, 0.1, 1, 1),
        (192, 64, 8, 8),
    ],
)
def test_programs_compile_on_all_cores_if_the_memory_allows_it(
    monkeypatch, cores, available_gib, on_gpu, on_cpu
):
    monkeypatch.setattr(base, "num_cores", lambda: cores)
    monkeypatch.setattr(base, "available_memory_bytes", lambda: int(available_gib * 2**30))
    assert GPU().num_compile_threads() == on_gpu
    assert CPU(num_threads=1, instruction_sets=frozenset()).num_compile_threads() == on_cpu

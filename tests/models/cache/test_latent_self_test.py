"""The self-test of latents notices kernels that do not compute what XLA computes."""

import numpy as np
import pytest

import pallas_kernels
from models.cache.latent_format import LatentFormat
from models.cache.latent_self_test import LatentSelfTest
from models.config.latent_config import read_latent_attention

H200 = pallas_kernels.Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
ATTENTION = read_latent_attention(
    {
        "hidden_size": 16,
        "num_attention_heads": 3,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "kv_lora_rank": 32,
    },
    64,
    default_q_latent_dim=8,
)
FORMAT = LatentFormat.unpadded(latent_dim=32, rope_dim=8, dtype="float32").with_width_step(16)
(TEST,) = FORMAT.self_tests(ATTENTION, block_size=16)


@pytest.fixture(scope="module")
def by_xla():
    return TEST._run({"implementation": "xla", "target": H200})


def test_the_test_has_the_sizes_of_the_layer():
    assert (TEST.num_q_heads, TEST.width, TEST.scale) == (3, 48, 0.25)
    assert FORMAT.self_tests(None, block_size=16) == ()


def test_right_kernels_pass():
    assert TEST.why_kernels_differ(H200, implementation="reference") is None


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda out, cache, decodes: (np.roll(out, 1, axis=1), cache, decodes), "any requests"),
        (lambda out, cache, decodes: (out, cache, decodes * 1.05), "decodes alone"),
        (lambda out, cache, decodes: (out * np.nan, cache, decodes), "any requests"),
        (lambda out, cache, decodes: (out, cache + 1, decodes), "were not written"),
    ],
    ids=["wrong head", "scaled decodes", "nan", "cache"],
)
def test_wrong_results_are_noticed(monkeypatch, by_xla, spoil, reason):
    def run(test, chosen):
        return by_xla if chosen["implementation"] == "xla" else spoil(*by_xla)

    monkeypatch.setattr(LatentSelfTest, "_run", run)
    assert reason in TEST.why_kernels_differ(H200, implementation="mosaic_gpu")


def test_decodes_alone_are_a_call_that_promises_single_query_tokens(monkeypatch):
    promised = []
    attend = pallas_kernels.latent_attention

    def noted(*args, **options):
        promised.append(options["max_query_len"])
        return attend(*args, **options)

    monkeypatch.setattr(pallas_kernels, "latent_attention", noted)
    TEST._run({"implementation": "xla", "target": H200})
    assert promised == [None, 1]

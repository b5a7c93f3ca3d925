"""A.X K2: its config.json, its choice of experts, and the parts of its packed matrix."""

import jax
import numpy as np
import pytest

from models.families.axk2 import ZeroedGroupsTopK
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

HF_CONFIG = {
    "architectures": ["AXK2ForCausalLM"],
    "model_type": "axk2",
    "vocab_size": 16,
    "hidden_size": 24,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
        {"n_group": None, "topk_group": None, "num_local_experts": 16},
        {"mlp_layer_types": ["sparse", "dense"] * 2, "gated_norm_rank": 3, "index_n_heads": 2},
    ],
)
def test_fields_mean_what_they_mean_in_transformers(fields):
    hf_config = HF_CONFIG | fields
    assert read_config(hf_config) == read_config(as_transformers_reads_it(hf_config, "AXK2Config"))


def test_sizes_by_hand():
    config = read_config(HF_CONFIG)
    (layer, *_) = config.attention
    assert (layer.q_latent_dim, layer.latent_dim, layer.head_dim) == (384, 128, 96)
    assert (layer.rope_dim, layer.value_head_dim, layer.scale) == (32, 64, 96**-0.5)
    assert (layer.index.num_heads, layer.index_top_k, config.gated_norm_rank) == (16, 2048, 16)
    assert config.has_experts == (False, True, True, True)


def test_experts_of_other_groups_are_chosen_before_negative_ones():
    torch = pytest.importorskip("torch")
    from transformers.models.axk2.configuration_axk2 import AXK2Config
    from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter

    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1}
    router = AXK2TopkRouter(AXK2Config(hidden_size=4, **sizes))
    rng = np.random.RandomState(0)
    scores, bias = rng.randn(64, 4).astype("f"), np.float32([-0.9, -0.5, -0.7, -0.6])
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
        router.e_score_correction_bias.copy_(torch.from_numpy(bias))
        _, weights, ids = router(torch.from_numpy(scores))
    choose = ZeroedGroupsTopK(top_k=3, factor=2.5, num_groups=2, num_kept_groups=1)
    ours = jax.jit(lambda scores, bias: choose(scores, bias))(scores, bias)

    def of_experts(ids, weights):
        found = np.zeros((64, 4), "f")
        np.put_along_axis(found, np.asarray(ids), np.asarray(weights), axis=1)
        return found

    ranked = (1 / (1 + np.exp(-scores)) + bias).reshape(64, 2, 2)
    kept = np.take_along_axis(ranked, ranked.sum(axis=2).argmax(axis=1)[:, None, None], axis=1)
    # Both experts of the other group count as 0. If one of them alone is chosen, it is either.
    is_clear = (kept > 0).sum(axis=(1, 2)) < 2
    assert 16 < is_clear.sum() < 64
    got, wanted = of_experts(*ours), of_experts(ids.numpy(), weights.numpy())
    np.testing.assert_allclose(got[is_clear], wanted[is_clear], rtol=1e-5)

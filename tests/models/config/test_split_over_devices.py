"""Models that cannot be split over devices are refused with the number that does not fit."""

import dataclasses

import pytest

from models.config.split_over_devices import check_context_ranks, check_split, splits_kv_heads
from models.errors import ModelError
from models.registry import read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def test_heads_must_divide() -> None:
    config = read_config(LLAMA)
    for num_devices in (1, 2, 4, 12):  # with 12, three devices have copies of each KV head
        check_split(config, num_devices)
    assert [splits_kv_heads(config, num_devices) for num_devices in (1, 4, 12)] == [1, 1, 0]
    with pytest.raises(ModelError, match=r"LlamaForCausalLM .* 8 devices: .* 12 query heads"):
        check_split(config, 8)
    with pytest.raises(ModelError, match="4 KV heads; expected a multiple or a divisor"):
        check_split(config, 6)


def test_one_layer_with_other_heads_decides() -> None:
    config = read_config(LLAMA)
    first, last = config.attention
    config = dataclasses.replace(
        config, attention=(first, dataclasses.replace(last, num_kv_heads=1))
    )
    check_split(config, 4)
    assert not splits_kv_heads(config, 4)


def test_a_device_computes_its_own_heads() -> None:
    (layer, _) = read_config(LLAMA).attention
    for num_devices, heads in ((4, (3, 1)), (12, (1, 1))):
        own = layer.on_each_of(num_devices)
        assert (own.num_q_heads, own.num_kv_heads) == heads


def test_devices_that_share_positions_have_the_same_kv_head() -> None:
    config = read_config(LLAMA)
    check_context_ranks(config, 4, 1)
    check_context_ranks(config, 12, 3)
    for num_devices in (2, 4):
        with pytest.raises(ModelError, match="4 KV heads, so no two devices .* Leave "):
            check_context_ranks(config, num_devices, 2)
    with pytest.raises(ModelError, match="4 KV heads, so 3 devices .* must divide 3"):
        check_context_ranks(config, 12, 6)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"sliding_window": 8}, "a sliding window"),
        ({"has_sinks": True}, "sinks"),
        ({"alibi_slopes": (0.5,) * 12}, "ALiBi"),
    ],
)
def test_rules_of_attention_that_ranks_do_not_have_are_refused(fields, rule) -> None:
    config = read_config(LLAMA)
    first, last = config.attention
    config = dataclasses.replace(config, attention=(first, dataclasses.replace(last, **fields)))
    with pytest.raises(ModelError, match=f"attends with {rule}, which is not|kind 'window'"):
        check_context_ranks(config, 12, 3)

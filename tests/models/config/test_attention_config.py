"""Attention of one layer, described."""

import pytest

from models.config.attention_config import AttentionConfig
from models.config.rope_config import RopeConfig
from models.errors import ModelConfigError


def config(rotary_dim: int | None = None, **fields: object) -> AttentionConfig:
    return AttentionConfig(
        hidden_size=64,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        scale=0.25,
        rotary_dim=rotary_dim,
        **{"rope": RopeConfig()} | fields,
    )


def test_angles_equal_a_head_of_the_turned_dimensions():
    assert config(4).rotary == (RopeConfig(), 4)
    assert config(None).rotary == (RopeConfig(), 16)
    assert config(None, has_positions=False).rotary == (RopeConfig(), 0)


@pytest.mark.parametrize("rotary_dim", [0, 3, 18])
def test_dimensions_that_are_no_pairs_of_the_head_are_refused(rotary_dim):
    with pytest.raises(ModelConfigError, match=f"rotate {rotary_dim} of 16 dimensions"):
        config(rotary_dim)


@pytest.mark.parametrize(("short", "long"), [(1, 2), (2, 1), (4, 4)])
def test_longrope_needs_a_factor_for_each_pair(short, long):
    factors = {"short_factors": (1.0,) * short, "long_factors": (2.0,) * long}
    with pytest.raises(
        ModelConfigError, match=f"{short} short and {long} long factors; expected 2"
    ):
        config(4, rope=RopeConfig(kind="longrope", attention_factor=1.0, **factors))


def test_values_are_as_wide_as_keys_unless_v_head_dim_is_set():
    assert config().value_head_dim == 16
    assert config(v_head_dim=8).value_head_dim == 8


def test_a_window_and_chunks_at_once_are_refused():
    with pytest.raises(ModelConfigError, match="sliding_window=4 and attention_chunk_size=8"):
        config(sliding_window=4, chunk_size=8)

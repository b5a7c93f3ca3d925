"""Rotary embeddings of every kind equal transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config.rope_config import RopeConfig, parse_rope_config
from models.layers.rotary import (
    apply_rotary,
    apply_rotary_backwards,
    apply_rotary_to_neighbors,
    cos_sin_scale,
    inverse_frequencies,
    rotary_cos_sin,
)
from tests import on_device
from tests.oracles.golden import load_golden_rope
from tests.quick_compile import quick_jit

HEAD_DIM = 64
GOLDEN = load_golden_rope()
DYNAMIC = RopeConfig(kind="dynamic", factor=2.0, original_max_position_embeddings=64)


def cos_sin(positions, rope: RopeConfig):
    """`rotary_cos_sin` of each position, as one program."""
    turn = quick_jit(rotary_cos_sin, rope=rope, head_dim=HEAD_DIM)
    return turn(np.asarray(positions, np.int32))


def parse(hf_config: dict[str, object]) -> RopeConfig:
    return parse_rope_config(hf_config, hf_config["max_position_embeddings"])


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "dynamic"])
def test_frequencies_equal_transformers(name):
    rope = parse(GOLDEN[name]["hf_config"])
    [golden] = GOLDEN[name]["frequencies"]
    got = inverse_frequencies(rope, HEAD_DIM)
    # transformers blends yarn's two frequencies in float32, which costs it up to 2e-6.
    np.testing.assert_allclose(got, golden["inv_freq"], rtol=5e-6)
    assert cos_sin_scale(rope) == pytest.approx(golden["cos_sin_scale"], rel=1e-12)


def test_dynamic_turns_each_token_as_transformers_turns_the_last_token():
    rope = parse(GOLDEN["dynamic"]["hf_config"])
    for golden in GOLDEN["dynamic"]["frequencies"]:
        last = golden["seq_len"] - 1
        cos, sin = cos_sin([last], rope)
        angles = last * np.array(golden["inv_freq"])
        np.testing.assert_allclose(cos[0], np.cos(angles), atol=2e-5)
        np.testing.assert_allclose(sin[0], np.sin(angles), atol=2e-5)


def test_dynamic_token_does_not_depend_on_the_rest_of_the_step():
    alone, among = cos_sin([70], DYNAMIC), cos_sin([3, 70, 500], DYNAMIC)
    for part_alone, part_among in zip(alone, among, strict=True):
        np.testing.assert_array_equal(np.asarray(part_alone)[0], np.asarray(part_among)[1])


def test_dynamic_is_the_plain_embedding_within_its_original_length():
    dynamic, plain = (cos_sin(range(64), rope) for rope in (DYNAMIC, RopeConfig()))
    np.testing.assert_allclose(dynamic, plain, atol=1e-5)


def test_attention_factor_scales_cos_and_sin():
    rope = parse(GOLDEN["yarn_attention_factor"]["hf_config"])
    cos, sin = cos_sin([0], rope)
    assert cos.tolist() == [[1.5] * (HEAD_DIM // 2)]
    assert sin.tolist() == [[0.0] * (HEAD_DIM // 2)]


def test_llama3_with_equal_factors_blends_nothing():
    rope = RopeConfig(
        kind="llama3",
        theta=1e4,
        factor=16.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=1.0,
    )
    # Only the last pair turns less than once over the original length: 0.41 times.
    expected = [1, 0.316228, 0.1, 0.0316228, 0.01, 0.00316228, 0.001, 0.000316228 / 16]
    np.testing.assert_allclose(inverse_frequencies(rope, 16), expected, rtol=1e-5)


@pytest.mark.parametrize("share", [0.25, 0.3])
def test_proportional_turns_the_first_pairs_as_if_all_were_turned(share):
    rope = RopeConfig(kind="proportional", theta=1e4, factor=2.0, turned_share=share)
    got = inverse_frequencies(rope, 16)
    # Two of eight pairs; 10,000 to the power of -2/16.
    np.testing.assert_allclose(got, [1 / 2, 0.316228 / 2, 0, 0, 0, 0, 0, 0], rtol=1e-5)


def test_pairs_are_dimension_i_and_i_plus_half():
    # A quarter turn of pair 0 and none of pair 1: (1, 2, 3, 4) -> (-3, 2, 1, 4).
    x = on_device.array([[[1.0, 2.0, 3.0, 4.0]]])
    turned = apply_rotary(x, cos=on_device.array([[0.0, 1.0]]), sin=on_device.array([[1.0, 0.0]]))
    assert turned.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


def test_dimensions_beyond_the_angles_stay():
    # Of (1, 2, 3, 4), a quarter turn of (1, 2).
    x = on_device.array([[[1.0, 2.0, 3.0, 4.0]]])
    turned = apply_rotary(x, cos=on_device.array([[0.0]]), sin=on_device.array([[1.0]]))
    assert turned.tolist() == [[[-2.0, 1.0, 3.0, 4.0]]]


def test_turning_keeps_dtype():
    x, angles = jax.ShapeDtypeStruct((1, 2, 4), jnp.bfloat16), np.ones((1, 2), np.float32)
    assert jax.eval_shape(apply_rotary, x, angles, angles).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", list(GOLDEN))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_cos_and_sin_equal_live_transformers(name):
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama")
    hf_config = GOLDEN[name]["hf_config"]
    rotary = llama.modeling_llama.LlamaRotaryEmbedding(llama.LlamaConfig(**hf_config))
    # Within dynamic's original length one call gives all positions.
    num_positions = min(hf_config["max_position_embeddings"], 5000)
    positions = np.arange(num_positions)
    wanted = rotary(torch.zeros(1), torch.from_numpy(positions)[None])
    got = cos_sin(positions, parse(hf_config))
    for got_part, wanted_part in zip(got, wanted, strict=True):
        # transformers repeats the half. Angles up to 5000 are rounded to 2.4e-4 in float32.
        np.testing.assert_allclose(
            got_part, wanted_part[0, :, : HEAD_DIM // 2].numpy(), atol=1e-3, rtol=0
        )


def test_neighbors_turn_as_complex_numbers_do():
    rng = np.random.default_rng(0)
    x_np = rng.standard_normal((3, 2, 10)).astype(np.float32)
    angles_np = rng.uniform(-3, 3, (3, 4)).astype(np.float32)
    complex_np = (x_np[..., :8:2] + 1j * x_np[..., 1:8:2]) * np.exp(1j * angles_np)[:, None]
    turn = quick_jit(apply_rotary_to_neighbors)
    got = np.asarray(turn(x_np, np.cos(angles_np), np.sin(angles_np)))
    np.testing.assert_allclose(got[..., :8:2], complex_np.real, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[..., 1:8:2], complex_np.imag, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[..., 8:], x_np[..., 8:])


def test_rotation_backwards_undoes_the_rotation():
    x_np = np.random.default_rng(1).standard_normal((2, 1, 6)).astype(np.float32)

    @quick_jit
    def there_and_back(x, positions):
        cos, sin = rotary_cos_sin(positions, RopeConfig(), 4)
        there = apply_rotary(x, cos, sin)
        return there, apply_rotary_backwards(there, cos, sin)

    there, back = there_and_back(x_np, np.array([3, 70]))
    assert not np.allclose(there, x_np, atol=1e-3)
    np.testing.assert_allclose(back, x_np, atol=1e-5)


def test_heads_without_positions_stay_as_they_are():
    x_np = np.ones((2, 1, 4), np.float32)
    cos, sin = rotary_cos_sin(on_device.array([3, 70]), RopeConfig(kind="linear", factor=2.0), 0)
    assert cos.shape == sin.shape == (2, 0)
    for rotate in (apply_rotary, apply_rotary_to_neighbors, apply_rotary_backwards):
        np.testing.assert_array_equal(rotate(x_np, cos, sin), x_np)

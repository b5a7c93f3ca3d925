"""N-grams reach over steps and back to the last end token; and stored weights are read."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np

from models.config.ngram_config import NUM_DIGITS, NGramConfig
from models.layers.ngram_injection import DilatedConvolution, NGramEmbedding, NGramTable
from tests.models.plain_context import plain_context

END = 7
CONFIG = NGramConfig(
    ngram_size=3,
    head_sizes=(11, 13),
    head_dim=4,
    num_rows=32,
    num_parts=5,
    multipliers=(1, 3, 5),
    end_token_id=END,
    kernel_size=4,
    num_channels=6,
)
# The second id needs three digits.
TEXTS = ([5, 200_000, 9, END, 8, 6, END, END, 4], [3, 2, 1])


def before(text: list[int], position: int) -> list[int]:
    """The token and the two before it, with the end token in place of tokens before an end."""
    found = [text[position]]
    for place in range(position - 1, position - CONFIG.ngram_size, -1):
        is_over = place < 0 or END in text[place:position]
        found.append(END if is_over else text[place])
    return found


def test_tokens_before_each_token_end_at_the_last_end_token():
    embedding = NGramEmbedding(CONFIG, dtype=jnp.dtype("float32"))

    @jax.jit
    def step(token_ids, digits, starts):
        context = plain_context(token_ids.shape[0])
        batch = dataclasses.replace(context.batch, token_ids=token_ids, query_start_loc=starts)
        state = types.SimpleNamespace(query_start_loc=starts, state_ends=None)
        return embedding._last_tokens(digits, state, dataclasses.replace(context, batch=batch))

    digits = jnp.zeros((2, CONFIG.ngram_size - 1, NUM_DIGITS), jnp.float32)
    num_done, got = [0, 0], ([], [])
    # Steps with 4, 1 and 4 tokens of the first text, and with 0, 1 and 2 of the second.
    for counts in ((4, 0), (1, 1), (4, 2)):
        new = [text[n : n + count] for text, n, count in zip(TEXTS, num_done, counts, strict=True)]
        token_ids = np.array([*new[0], *new[1]] + [0] * (8 - sum(counts)), np.int32)
        starts = np.cumsum([0, *counts]).astype(np.int32)
        found, digits = step(token_ids, digits, starts)
        # States of 16 bits round the digits, which must change none.
        digits = digits.astype(jnp.bfloat16).astype(jnp.float32)
        for req in range(2):
            got[req].extend(np.asarray(found)[starts[req] : starts[req + 1]].tolist())
            num_done[req] += counts[req]
    for req, text in enumerate(TEXTS):
        assert got[req] == [before(text, position) for position in range(len(text))]


def test_table_is_read_from_parts_of_equal_size_and_a_smaller_one():
    rule = NGramTable(CONFIG, dtype=jnp.float32).weight_rules("table")["embedding"]
    parts = {source.name: source.shape for source in rule.sources}
    assert parts == {f"table.shard_{idx}.weight": (7 if idx < 4 else 4, 4) for idx in range(5)}
    table_np = np.arange(128.0).reshape(32, 4)
    stored_np = np.split(table_np, np.cumsum([7, 7, 7, 7]))
    np.testing.assert_array_equal(rule.combined(stored_np), table_np)


def test_weights_of_a_dilated_convolution_lie_at_every_third_input():
    conv = DilatedConvolution(2, 3, step=3, dtype=jnp.float32)
    rule = conv.weight_rules("conv1d")["kernel"]
    assert rule.sources[0].shape == (2, 1, 3) and (conv.kernel_size, conv.num_channels) == (7, 2)
    kernel_np = rule.combined([np.array([[[1, 2, 3]], [[4, 5, 6]]])]).reshape(7, 2)
    np.testing.assert_array_equal(kernel_np[::3], [[1, 4], [2, 5], [3, 6]])
    assert np.count_nonzero(kernel_np) == 6

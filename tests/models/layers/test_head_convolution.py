"""A convolution within each head, over requests whose tokens come in several steps."""

import jax
import jax.numpy as jnp
import numpy as np

from models.cache.state_format import StateFormat
from models.forward.layer_context import LayerState
from models.layers.head_convolution import HeadConvolution, last_inputs
from tests import on_device
from tests.models.plain_context import plain_context

NUM_HEADS, HEAD_DIM, KERNEL_SIZE = 2, 3, 4
NUM_CHANNELS = NUM_HEADS * HEAD_DIM


def make_convolution(stored_np: np.ndarray, bias_np: np.ndarray) -> HeadConvolution:
    convolution = HeadConvolution(NUM_HEADS, HEAD_DIM, KERNEL_SIZE, dtype=jnp.dtype("float32"))
    # The loader transposes every matrix, so the test does too.
    combined_np = convolution.weight_rules("conv")["kernel"].combined([stored_np])
    convolution.kernel[...] = on_device.array(combined_np.swapaxes(1, 2))
    convolution.bias[...] = on_device.array(bias_np)
    return convolution


def make_state(counts: list[int]) -> LayerState:
    nothing = on_device.zeros((len(counts), 1), jnp.int32)
    return LayerState(
        format=StateFormat(shapes=((KERNEL_SIZE - 1, NUM_CHANNELS),), num_windows=1),
        row=0,
        read_slots=nothing,
        write_slots=nothing,
        starts_from_zero=on_device.zeros(len(counts), bool),
        is_written=on_device.ones(len(counts), bool),
        query_start_loc=on_device.array(np.cumsum([0, *counts]), jnp.int32),
        has_one_token_each=False,
    )


def test_steps_of_any_size_convolve_as_a_grouped_convolution_of_whole_requests():
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    stored_np, bias_np = draw(NUM_CHANNELS, HEAD_DIM, KERNEL_SIZE), draw(NUM_CHANNELS)
    convolution = make_convolution(stored_np, bias_np)
    texts = [draw(7, NUM_CHANNELS), draw(5, NUM_CHANNELS)]
    window = on_device.zeros((2, KERNEL_SIZE - 1, NUM_CHANNELS), jnp.float32)
    got = [[], []]
    done = [0, 0]
    for counts in ([1, 4], [0, 1], [6, 0]):
        parts = [text[at : at + n] for text, at, n in zip(texts, done, counts, strict=True)]
        context, state = plain_context(sum(counts)), make_state(counts)

        @jax.jit
        def step(tokens, window, context=context, state=state):
            inputs, window = last_inputs(tokens, window, state, context)
            return convolution(inputs, context), window

        out, window = step(np.concatenate(parts), window)
        out = np.asarray(out).reshape(-1, NUM_CHANNELS)
        for req, part in enumerate(np.split(out, [counts[0]])):
            got[req].append(part)
            done[req] += counts[req]
    for text, of_request in zip(texts, got, strict=True):
        padded = np.concatenate([np.zeros((KERNEL_SIZE - 1, NUM_CHANNELS), np.float32), text])
        for position, row in enumerate(np.concatenate(of_request)):
            for channel in range(NUM_CHANNELS):
                head = channel // HEAD_DIM * HEAD_DIM
                seen = padded[position : position + KERNEL_SIZE, head : head + HEAD_DIM]
                wanted = (stored_np[channel] * seen.T).sum() + bias_np[channel]
                np.testing.assert_allclose(row[channel], wanted, rtol=1e-5, atol=1e-5)
